"""Attention residuals: each sub-layer reads from all outputs before it, weighed by a softmax over depth.

Paper: Kimi Team 2026, "Attention Residuals", arXiv:2603.15031, the full variant, in the place of the pre-LN encoder's
sums: h_l = sum_i a_i v_i over the embedding and the outputs v_i of all earlier sub-layers, with a the softmax of
w_l . RMSNorm(v_i). At the start w = 0, so that every sub-layer reads the plain mean.

Departures: attention and MLP each count as a layer; the norm of the keys has no weights of its own; the block variant,
which sums within blocks of layers, is left out.

Shapes: B batch, L length, T real tokens, D width, S earlier outputs; (..., D) is (B, L, D) or packed (T, D).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from reszoo.errors import ReszooError
from reszoo.layers import Packed, Padded
from reszoo.models._encoder import Encoder
from reszoo.models._encoder_blocks import Branch
from reszoo.models._registry import register


class DepthAttention(nn.Module):
    """The mean of the outputs so far, weighed by softmax(w . RMSNorm(v)) with a learned w, zero at first.

    Args:
        dim: Width.
        norm_eps: Epsilon of the norm.
    """

    def __init__(self, dim: int, norm_eps: float = 1e-5) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(dim))
        self.norm_eps = norm_eps

    def forward(self, outputs: Tensor) -> Tensor:
        """(S, ..., D) -> (..., D)."""
        keys = outputs * (outputs.square().mean(-1, keepdim=True) + self.norm_eps).rsqrt()  # RMSNorm
        share = torch.softmax(keys @ self.query, 0)  # (S, ...)
        return (share.unsqueeze(-1) * outputs).sum(0)


class AttentionResidual(nn.Module):
    """One more output behind those so far: v_l = F(LN(h)), with h read from v_0 ... v_{l-1}.

    Args:
        dim: Width.
        branch: The modules of F.
        norm_eps: Epsilon of the norms.
    """

    def __init__(self, dim: int, branch: Sequence[nn.Module], norm_eps: float = 1e-5) -> None:
        super().__init__()
        self.shortcut = DepthAttention(dim, norm_eps)
        self.residual = Branch(nn.LayerNorm(dim, norm_eps), *branch)

    def forward(self, outputs: Tensor, *context: Any) -> Tensor:
        """(S, ..., D) -> (S + 1, ..., D)."""
        y = self.residual(self.shortcut(outputs), *context).expand_as(outputs[0])  # a dropped branch has no shape
        return torch.cat((outputs, y.unsqueeze(0)))


class AttentionResidualEncoder(Encoder):
    """Encoder without sums: sub-layers, and at last the final norm, read from all earlier outputs.

    Args:
        options: Those of `Encoder`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(AttentionResidual, True, **options)
        if self.checkpoint_every:
            raise ReszooError("attention residuals keep every output, so checkpoint_every must be 0")
        self.last = DepthAttention(self.num_features)

    def run_blocks(self, x: Tensor, rows: Padded | Packed) -> Tensor:
        """(..., D) -> (..., D)."""
        return self.last(super().run_blocks(x.unsqueeze(0), rows))


@register
def attention_residual_encoder(**options: Any) -> Encoder:
    """Attention residuals in the place of a pre-LN encoder's sums; 4 blocks of 64, 9 queries of 64 more."""
    return AttentionResidualEncoder(**options)
