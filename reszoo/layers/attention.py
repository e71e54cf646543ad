"""Self-attention over sequences of unequal length, and the two ways to lay such a batch out.

Paper: Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, Section 3.2.

Shapes: B batch, L length, T real tokens of the batch, D width, H heads.
"""

from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reszoo.errors import ReszooError


class SelfAttention(nn.Module):
    """Every token reads from every real token of its own sequence: softmax(q k^T / sqrt(D / H)) v, Eq. 1.

    Args:
        dim: Width of the tokens, a multiple of `num_heads`.
        num_heads: Heads.
        dropout: Share of the attention weights that training sets to zero.
    """

    def __init__(self, dim: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        if dim % num_heads:
            raise ReszooError(f"embed_dim must be a multiple of num_heads, got {dim} and {num_heads}")
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, rows: "Padded | Packed | None" = None) -> Tensor:
        """(B, L, D) or packed (T, D) -> the same shape; without `rows` every token is real."""
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # (..., 3, H, D / H)
        mixed = (rows or Padded()).attend(qkv, self.dropout if self.training else 0.0)  # (..., H, D / H)
        return self.out(mixed.flatten(-2))


@dataclass(frozen=True)
class Padded:
    """A batch as it came, (B, L, ...): what compilers and exporters see, and what serves where nothing is padded.

    Args:
        mask: (B, L), True at real tokens; None where all are.
    """

    mask: Tensor | None = None

    def pack(self, x: Tensor) -> Tensor:
        """(B, L, ...) -> (B, L, ...)."""
        return x

    def unpack(self, x: Tensor) -> Tensor:
        """(B, L, D) -> (B, L, D) with zeros at padded positions."""
        return x if self.mask is None else x.masked_fill(~self.mask.unsqueeze(-1), 0.0)

    def batch_size(self, x: Tensor) -> int:
        """Sequences in x, (B, L, D)."""
        return len(x)

    def select(self, keep: Tensor) -> tuple[Tensor, "Padded"]:
        """(B,) truth values -> the rows of x, (B, L, D), that belong to the kept sequences, and their layout."""
        index = keep.nonzero().flatten()
        return index, Padded(None if self.mask is None else self.mask[index])

    def attend(self, qkv: Tensor, dropout: float) -> Tensor:
        """(B, L, 3, H, D / H) -> (B, L, H, D / H)."""
        if self.mask is None:
            return attend(qkv, None, dropout)
        # A row without a real token reads from all of its padding: a softmax over nothing would be NaN.
        visible = self.mask | ~self.mask.any(1, keepdim=True)
        return attend(qkv, visible[:, None, None, :], dropout)


@dataclass(frozen=True)
class Packed:
    """The real tokens of a batch in one row, (T, ...), ordered by the length of their sequence: no work for padding.

    Args:
        index: (T,), where each token stands in the flattened (B * L) batch.
        groups: Number of sequences and their length, for each length from the shortest on.
        mask: (B, L), True at real tokens.
    """

    index: Tensor
    groups: tuple[tuple[int, int], ...]
    mask: Tensor

    def pack(self, x: Tensor) -> Tensor:
        """(B, L, ...) -> (T, ...)."""
        return x.flatten(0, 1)[self.index]

    def unpack(self, x: Tensor) -> Tensor:
        """(T, ...) -> (B, L, ...) with zeros at padded positions."""
        flat = x.new_zeros(self.mask.numel(), *x.shape[1:]).index_copy(0, self.index, x)
        return flat.unflatten(0, self.mask.shape)

    def batch_size(self, x: Tensor) -> int:
        """Sequences in x, (T, D), those without a real token included."""
        return len(self.mask)

    def select(self, keep: Tensor) -> tuple[Tensor, "Packed"]:
        """(B,) truth values -> the rows of x, (T, D), that belong to the kept sequences, and their layout."""
        length = self.mask.shape[1]
        kept = keep[self.index // length]
        number = keep.cumsum(0) - 1  # of each kept sequence in the smaller batch
        mask = self.mask[keep]
        index = number[self.index[kept] // length] * length + self.index[kept] % length
        return kept.nonzero().flatten(), Packed(index, by_length(mask.sum(1)), mask)

    def attend(self, qkv: Tensor, dropout: float) -> Tensor:
        """(T, 3, H, D / H) -> (T, H, D / H)."""
        if not self.groups:
            return qkv[:, 2]
        if qkv.device.type != "cpu":
            # An accelerator would wait for the many small calls below, so attention alone runs on the padded batch.
            return self.pack(Padded(self.mask).attend(self.unpack(qkv), dropout))
        parts = qkv.split([count * length for count, length in self.groups])
        mixed = (
            attend(part.unflatten(0, group), None, dropout).flatten(0, 1)
            for part, group in zip(parts, self.groups, strict=True)
        )
        return torch.cat(list(mixed))


def lay_out(mask: Tensor | None) -> Padded | Packed:
    """The layout of a batch: packed where something is padded, unless a compiler or exporter is watching.

    A packed batch has as many rows as it has real tokens, a number that a graph cannot hold; the padded layout gives
    equal results.
    """
    if mask is None or torch.compiler.is_compiling() or mask.is_meta:
        return Padded(mask)
    if mask.all():
        return Padded()
    lengths = mask.sum(1)
    order = lengths.argsort(stable=True)
    place = torch.arange(mask.numel(), device=mask.device).view_as(mask)
    return Packed(place[order][mask[order]], by_length(lengths), mask)


def by_length(lengths: Tensor) -> tuple[tuple[int, int], ...]:
    """(B,) lengths -> how many sequences have each length above 0, and that length, from the shortest on."""
    return tuple((len(list(equal)), length) for length, equal in groupby(sorted(lengths.tolist())) if length)


def attend(qkv: Tensor, visible: Tensor | None, dropout: float) -> Tensor:
    """(B, L, 3, H, D / H) -> (B, L, H, D / H); `visible` broadcasts to (B, H, L, L), True where a token is read."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()  # each (B, H, L, D / H)
    return F.scaled_dot_product_attention(q, k, v, visible, dropout).transpose(1, 2)
