"""Hyper-connections: several residual streams, mixed by learned weights around every sub-layer.

Papers: Zhu et al. 2024, "Hyper-Connections", arXiv:2409.19606; Xie et al. 2025, "mHC: Manifold-Constrained
Hyper-Connections", arXiv:2512.24880, whose mixing matrix is doubly stochastic. Both on the pre-LN encoder; at the start
the network computes what that encoder computes.

Departures: the streams are averaged before the final norm, whose epsilon then means what it does in the pre-LN encoder.
Of mHC, the constraint on the mixing matrix alone: reading and writing weights stay free, as in hyper-connections.

Shapes: B batch, L length, T real tokens, D width, n streams; (..., n, D) is (B, L, n, D) or packed (T, n, D).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from reszoo.errors import check_at_least
from reszoo.layers import Packed, Padded
from reszoo.models._encoder import Encoder
from reszoo.models._encoder_blocks import Branch
from reszoo.models._registry import register

LOG_START = 8.0  # logarithm of the diagonal over the entries beside it, in a doubly stochastic matrix at first


class HyperConnection(nn.Module):
    """n streams around one branch: h' = M h + b F(LN(a h)), with learned a (reads), b (writes) and M (mixes).

    Args:
        dim: Width.
        branch: The modules of F.
        norm_eps: Epsilon of the norms.
        num_streams: The paper's expansion rate n.
        dynamic: Whether the weights also depend on the streams themselves.
        doubly_stochastic: Whether every row and column of M sums to 1.
    """

    def __init__(
        self,
        dim: int,
        branch: Sequence[nn.Module],
        norm_eps: float = 1e-5,
        num_streams: int = 4,
        dynamic: bool = False,
        doubly_stochastic: bool = False,
    ) -> None:
        super().__init__()
        self.residual = Branch(nn.LayerNorm(dim, norm_eps), *branch)
        self.read = StreamWeights(dim, torch.eye(num_streams)[:1], dynamic, norm_eps)
        self.write = StreamWeights(dim, torch.ones(1, num_streams), dynamic, norm_eps)
        if doubly_stochastic:
            start = LOG_START * torch.eye(num_streams)
            self.shortcut: Mixing = DoublyStochasticMixing(StreamWeights(dim, start, dynamic, norm_eps))
        else:
            self.shortcut = Mixing(StreamWeights(dim, torch.eye(num_streams), dynamic, norm_eps))

    def forward(self, x: Tensor, *context: Any) -> Tensor:
        """(..., n, D) -> (..., n, D)."""
        read = (self.read(x) @ x).squeeze(-2)  # (..., D)
        residual = (
            self.residual(read, *context).expand_as(read).unsqueeze(-2)
        )  # (..., 1, D); a dropped one has no shape
        return self.write(x).transpose(-1, -2) * residual + self.shortcut(x)


class StreamWeights(nn.Module):
    """Learned weights of the streams, (m, n); dynamic ones add a small function of the streams to each token's.

    The dynamic part is s tanh(LN(h) W), with W = 0 at first, so that both kinds start alike.

    Args:
        dim: Width D.
        start: (m, n), the initial weights.
        dynamic: Whether to add the dynamic part.
        norm_eps: Epsilon of its norm.
    """

    def __init__(self, dim: int, start: Tensor, dynamic: bool, norm_eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(start.clone())
        self.dynamic = dynamic
        if dynamic:
            self.norm = nn.LayerNorm(dim, norm_eps)
            self.project = nn.Parameter(torch.zeros(dim, len(start)))
            self.scale = nn.Parameter(torch.tensor(0.01))

    def forward(self, x: Tensor) -> Tensor:
        """(..., n, D) -> (m, n), or one matrix a token, (..., m, n)."""
        if not self.dynamic:
            return self.weight
        return self.weight + self.scale * torch.tanh(self.norm(x) @ self.project).transpose(-1, -2)


class Mixing(nn.Module):
    """Streams exchanged by a learned matrix, the identity at first: M h."""

    def __init__(self, mix: StreamWeights) -> None:
        super().__init__()
        self.mix = mix

    def matrix(self, x: Tensor) -> Tensor:
        """(..., n, D) -> M, (n, n) or (..., n, n)."""
        return self.mix(x)

    def forward(self, x: Tensor) -> Tensor:
        """(..., n, D) -> (..., n, D)."""
        return self.matrix(x) @ x


class DoublyStochasticMixing(Mixing):
    """Mixing by a matrix whose rows and columns sum to 1, so that no depth of it can raise the streams' mean.

    The learned weights are the logarithms of a positive matrix, which Sinkhorn and Knopp's alternating normalisation
    takes to the doubly stochastic one. At first the matrix is near the identity.
    """

    def matrix(self, x: Tensor) -> Tensor:
        """(..., n, D) -> M, (n, n) or (..., n, n)."""
        return sinkhorn(self.mix(x))


def sinkhorn(logits: Tensor, iterations: int = 20) -> Tensor:
    """The doubly stochastic matrix of a positive one: rows and columns divided by their sums in turn.

    Args:
        logits: (..., n, n), logarithms of the positive matrix.
        iterations: Normalisations of the rows and then the columns.

    Returns:
        (..., n, n), whose columns sum to 1 to rounding and whose rows to what the iterations reach.
    """
    for _ in range(iterations):
        logits = logits - logits.logsumexp(-1, keepdim=True)
        logits = logits - logits.logsumexp(-2, keepdim=True)
    return logits.exp()


class HyperConnectionEncoder(Encoder):
    """Encoder whose blocks exchange n streams; each starts as a copy of the embedding, and their mean leaves the stack.

    Args:
        num_streams: Streams n, at least 1.
        dynamic: Whether the weights also depend on the streams themselves.
        doubly_stochastic: Whether the mixing matrices are doubly stochastic (mHC).
        options: Those of `Encoder`.
    """

    def __init__(self, num_streams: int, dynamic: bool, doubly_stochastic: bool, **options: Any) -> None:
        check_at_least("num_streams", num_streams, 1)
        sublayer = partial(
            HyperConnection, num_streams=num_streams, dynamic=dynamic, doubly_stochastic=doubly_stochastic
        )
        super().__init__(sublayer, True, **options)
        self.num_streams = num_streams
        connections = [module for module in self.modules() if isinstance(module, HyperConnection)]
        for number, connection in enumerate(connections):
            # Sub-layer k reads stream k mod n at first.
            with torch.no_grad():
                connection.read.weight.copy_(torch.eye(num_streams)[number % num_streams])

    def run_blocks(self, x: Tensor, rows: Padded | Packed) -> Tensor:
        """(..., D) -> (..., D)."""
        streams = x.unsqueeze(-2).repeat_interleave(self.num_streams, -2)  # (..., n, D)
        return super().run_blocks(streams, rows).mean(-2)


@register
def hyper_connections_encoder(num_streams: int = 4, dynamic: bool = False, **options: Any) -> Encoder:
    """Pre-LN encoder with hyper-connections, static unless `dynamic`; 4 streams, 4 blocks of 64."""
    return HyperConnectionEncoder(num_streams, dynamic, False, **options)


@register
def mhc_encoder(num_streams: int = 4, dynamic: bool = False, **options: Any) -> Encoder:
    """Pre-LN encoder with manifold-constrained hyper-connections; 4 streams, 4 blocks of 64."""
    return HyperConnectionEncoder(num_streams, dynamic, True, **options)
