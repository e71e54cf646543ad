"""Value residual (ResFormer): the first layer's values are added to the values of every later one.

Paper: Zhou et al. 2024, "Value Residual Learning", arXiv:2410.17897. On the pre-LN encoder, which it equals where the
first layer's values have weight 0.

Departure: one learned weight a layer for the first layer's values, `first_value` at the start.

Shapes: B batch, L length, T real tokens, D width, H heads; (..., D) is (B, L, D) or packed (T, D).
"""

from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reszoo.errors import ReszooError
from reszoo.layers import Packed, Padded, SelfAttention
from reszoo.models._encoder import Encoder
from reszoo.models._encoder_blocks import Branch, EncoderBlock, run_blocks
from reszoo.models._registry import register
from reszoo.models.transformer import PreLN


class ValueResidualAttention(SelfAttention):
    """Self-attention over v + s v_1: v_1 are the values of the network's first layer, s is learned.

    Args:
        dim: Width of the tokens.
        num_heads: Heads.
        dropout: Share of the attention weights that training sets to zero.
        first_value: Initial s.
    """

    def __init__(self, dim: int, num_heads: int, dropout: float = 0.0, first_value: float = 1.0) -> None:
        super().__init__(dim, num_heads, dropout)
        self.first_value: nn.Parameter | None = nn.Parameter(torch.tensor(first_value))

    def values(self, x: Tensor) -> Tensor:
        """(..., D) -> this layer's own values, (..., H, D / H)."""
        weight, bias = self.qkv.weight.chunk(3)[2], self.qkv.bias.chunk(3)[2]
        return F.linear(x, weight, bias).unflatten(-1, (self.num_heads, -1))

    def forward(self, x: Tensor, rows: Padded | Packed | None = None, first: Tensor | None = None) -> Tensor:
        """(..., D), with v_1 (..., H, D / H) in `first` -> (..., D)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(-3)  # each (..., H, D / H)
        if self.first_value is not None and first is not None:
            v = v + self.first_value * first
        qkv = torch.stack((q, k, v), -3)  # (..., 3, H, D / H)
        mixed = (rows or Padded()).attend(qkv, self.dropout if self.training else 0.0)  # (..., H, D / H)
        return self.out(mixed.flatten(-2))


class ResFormer(Encoder):
    """Pre-LN encoder whose layers, but for the first, add the first one's values to their own.

    Args:
        first_value: Initial weight of the first layer's values.
        options: Those of `Encoder`.
    """

    def __init__(self, first_value: float, **options: Any) -> None:
        super().__init__(PreLN, True, partial(ValueResidualAttention, first_value=first_value), **options)
        if options.get("stochastic_depth", 0.0) and options.get("drop_per", "batch") == "sample":
            raise ReszooError("the first layer's values are those of the whole batch; use drop_per='batch'")
        self._first_attention()[1].first_value = None  # it has nothing to add to its own values

    def _first_attention(self) -> tuple[nn.LayerNorm, ValueResidualAttention]:
        """The first layer and the norm before it."""
        branch = cast(Branch, cast(EncoderBlock, self.blocks[0]).attention.residual)
        return cast(nn.LayerNorm, branch[0]), cast(ValueResidualAttention, branch[1])

    def run_blocks(self, x: Tensor, rows: Padded | Packed) -> Tensor:
        """(..., D) -> (..., D)."""
        norm, attention = self._first_attention()
        # Computed once more than needed, so that a dropped or checkpointed first layer has its values all the same.
        first = attention.values(norm(x))  # (..., H, D / H)
        return run_blocks(self.blocks, x, rows, first, checkpoint_every=self.checkpoint_every)


@register
def resformer_encoder(first_value: float = 1.0, **options: Any) -> Encoder:
    """ResFormer's value residual in a pre-LN encoder; 4 blocks of 64, one weight a block but the first more."""
    return ResFormer(first_value, **options)
