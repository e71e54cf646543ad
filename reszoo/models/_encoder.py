"""The frame that the encoders share: embedding, a stack of attention and MLP sub-layers, pooling, head.

Papers: Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, Section 3; Devlin et al. 2018, "BERT",
arXiv:1810.04805, for segments, the embedding's norm, the pooler and tied outputs.

Padding costs nothing: outside compilers and exporters, a batch with padding runs as one row of its real tokens
(`reszoo.layers.Packed`), and every output at a padded position is zero in every mode.

Shapes: B batch, L length, T real tokens, D width, V vocabulary, K classes; (..., D) is (B, L, D) or packed (T, D).
"""

import math
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reszoo.errors import ReszooError, check_at_least, check_choice
from reszoo.layers import DropPer, Packed, Padded, SelfAttention, drop_linearly, lay_out
from reszoo.models._encoder_blocks import (
    Activation,
    MakeAttention,
    MakeSublayer,
    encoder_blocks,
    init_weights,
    run_blocks,
)

Positions = Literal["learned", "sinusoidal"]
Pooling = Literal["mean", "first", "pooler", "none"]


class Encoder(nn.Module):
    """Transformer encoder over token ids.

    Args:
        sublayer: Builds one residual sub-layer around its branch.
        final_norm: Whether a LayerNorm follows the last block, as it must where the sub-layers leave the sum as it is.
        make_attention: Builds one attention layer from (dim, num_heads, dropout).
        vocab_size: Number of token ids V; BERT has 30,522 word pieces.
        embed_dim: Width D.
        depth: Blocks, each of an attention and an MLP sub-layer.
        num_heads: Attention heads; they divide `embed_dim`.
        mlp_ratio: Width inside the MLP, as a multiple of `embed_dim`.
        mlp_dim: The same width as a number; None follows `mlp_ratio`.
        max_length: Longest sequence.
        activation: "gelu", "gelu_tanh" (its approximation in GPT-2) or "relu".
        dropout: On the embedding and on the output of every branch (Section 5.4).
        attention_dropout: On the attention weights.
        stochastic_depth: Probability of dropping the last branch in training; it grows linearly from the first on.
        drop_per: Whether a whole mini-batch drops a branch, or each sequence by itself.
        checkpoint_every: Blocks a segment whose inner results are computed again in the backward pass; 0 keeps all.
        positions: "learned", or "sinusoidal", which also multiplies the token embedding by sqrt(D) (Section 3.4, 3.5).
        num_segments: Kinds of segments (BERT's token types) that get an embedding of their own; 0 for none.
        embed_norm: Whether a LayerNorm follows the embedding, as in BERT.
        norm_eps: Added to the variance in every LayerNorm.
        init_std: Standard deviation of every initial weight (0.02 in BERT and GPT-2); None draws linear layers by
            Glorot's rule and embeddings with 1 / sqrt(D).
        pooling: What the head reads: of a sequence, the "mean" over its real tokens, the "first" one, or BERT's
            "pooler", a linear layer and tanh behind the first; with "none", every token on its own.
        num_classes: Outputs of the head; 0 gives its input.
        tied: Whether a head over tokens, with one output a token id, uses the token embedding as its weight.

    Attributes:
        num_features: The width D.
    """

    def __init__(
        self,
        sublayer: MakeSublayer,
        final_norm: bool,
        make_attention: MakeAttention = SelfAttention,
        *,
        vocab_size: int = 30_522,
        embed_dim: int = 64,
        depth: int = 4,
        num_heads: int = 4,
        mlp_ratio: float = 4.0,
        mlp_dim: int | None = None,
        max_length: int = 512,
        activation: Activation = "gelu",
        dropout: float = 0.1,
        attention_dropout: float = 0.0,
        stochastic_depth: float = 0.0,
        drop_per: DropPer = "batch",
        checkpoint_every: int = 0,
        positions: Positions = "learned",
        num_segments: int = 0,
        embed_norm: bool = False,
        norm_eps: float = 1e-5,
        init_std: float | None = None,
        pooling: Pooling = "mean",
        num_classes: int = 10,
        tied: bool = False,
    ) -> None:
        super().__init__()
        check_choice("pooling", pooling, get_args(Pooling))
        check_at_least("num_classes", num_classes, 0)
        check_at_least("checkpoint_every", checkpoint_every, 0)
        if tied and (pooling != "none" or num_classes != vocab_size):
            raise ReszooError(
                f"tied=True needs pooling='none' and num_classes equal to vocab_size, {vocab_size}; "
                f"got pooling={pooling!r} and num_classes={num_classes}"
            )
        self.num_features = embed_dim
        self.max_length = max_length
        self.checkpoint_every = checkpoint_every
        self.pooling = pooling
        self.tied = tied
        self.embedding = Embedding(
            vocab_size, embed_dim, max_length, positions, num_segments, embed_norm, norm_eps, dropout
        )
        self.blocks = encoder_blocks(
            sublayer,
            embed_dim,
            depth,
            num_heads,
            round(mlp_ratio * embed_dim) if mlp_dim is None else mlp_dim,
            activation=activation,
            dropout=dropout,
            attention_dropout=attention_dropout,
            norm_eps=norm_eps,
            make_attention=make_attention,
        )
        drop_linearly(self.blocks, stochastic_depth, drop_per)
        self.norm = nn.LayerNorm(embed_dim, norm_eps) if final_norm else nn.Identity()
        if pooling == "pooler":
            self.pooler = nn.Sequential(nn.Linear(embed_dim, embed_dim), nn.Tanh())
        self.head: nn.Module = nn.Linear(embed_dim, num_classes) if num_classes else nn.Identity()
        if tied:
            self.head = TiedHead(vocab_size)
        init_weights(self, init_std)

    def example_inputs(self, batch_size: int = 2) -> tuple[Tensor, ...]:
        """Random tokens of up to the greatest length, and their mask."""
        lengths = torch.randint(1, self.max_length + 1, (batch_size, 1))
        tokens = torch.randint(self.embedding.tokens.num_embeddings, (batch_size, self.max_length))
        return tokens, torch.arange(self.max_length) < lengths

    def features(self, tokens: Tensor, mask: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        """(B, L) ids, mask and segments -> (B, L, D), zero at padded positions."""
        rows = self._lay_out(tokens, mask)
        return rows.unpack(self._encode(tokens, rows, segments))

    def forward(self, tokens: Tensor, mask: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        """Encode a batch.

        Args:
            tokens: (B, L), ids below `vocab_size`.
            mask: (B, L), True at real tokens; None where all are.
            segments: (B, L), each token's kind of segment; None puts all into kind 0.

        Returns:
            (B, K), or without pooling (B, L, K) with zeros at padded positions; D in place of K without classes. A
            sequence without a real token is pooled to a zero vector.
        """
        rows = self._lay_out(tokens, mask)
        x = self._encode(tokens, rows, segments)
        if self.pooling != "none":
            return self.head(self._pool(rows.unpack(x), mask))
        x = self.head(x, self.embedding.tokens.weight) if self.tied else self.head(x)
        return rows.unpack(x)

    def _lay_out(self, tokens: Tensor, mask: Tensor | None) -> Padded | Packed:
        """The batch's layout, once its mask has been found to fit."""
        if mask is not None and mask.dtype != torch.bool:
            raise ReszooError(f"mask must be bool, True at real tokens, got {mask.dtype}; pass mask.bool()")
        if mask is not None and mask.shape != tokens.shape:
            raise ReszooError(
                f"mask must have the shape of the tokens, {list(tokens.shape)}, got {list(mask.shape)}; pass one truth "
                f"value for each token"
            )
        return lay_out(mask)

    def _encode(self, tokens: Tensor, rows: Padded | Packed, segments: Tensor | None) -> Tensor:
        """(B, L) ids -> (..., D)."""
        return self.norm(self.run_blocks(self.embedding(tokens, rows, segments), rows))

    def run_blocks(self, x: Tensor, rows: Padded | Packed) -> Tensor:
        """(..., D) -> (..., D), one block behind the other."""
        return run_blocks(self.blocks, x, rows, checkpoint_every=self.checkpoint_every)

    def _pool(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(B, L, D), zero at padded positions -> (B, D)."""
        if self.pooling == "mean":
            return x.mean(1) if mask is None else x.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
        if mask is None:
            first = x[:, 0]
        else:
            # The first real token, wherever the padding stands; of an empty sequence a padded one, which is zero.
            at = mask.to(torch.uint8).argmax(1)[:, None, None].expand(-1, 1, x.shape[2])
            first = x.gather(1, at).squeeze(1)
        return self.pooler(first) if self.pooling == "pooler" else first


class Embedding(nn.Module):
    """Token, position and segment embeddings added up (Section 3.4 and 3.5; BERT, Fig. 2).

    Args:
        vocab_size: Number of token ids.
        dim: Width.
        max_length: Longest sequence.
        positions: "learned" or "sinusoidal".
        num_segments: Kinds of segments; 0 for none.
        norm: Whether a LayerNorm follows.
        norm_eps: Its epsilon.
        dropout: On the result.
    """

    table: Tensor

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        max_length: int,
        positions: Positions,
        num_segments: int,
        norm: bool,
        norm_eps: float,
        dropout: float,
    ) -> None:
        super().__init__()
        check_choice("positions", positions, get_args(Positions))
        check_at_least("vocab_size", vocab_size, 1)
        check_at_least("max_length", max_length, 1)
        self.max_length = max_length
        self.tokens = nn.Embedding(vocab_size, dim)
        self.scale = math.sqrt(dim) if positions == "sinusoidal" else 1.0
        if positions == "learned":
            self.positions: nn.Module = nn.Embedding(max_length, dim)
        else:
            self.positions = SinusoidalPositions(max_length, dim)
        self.segments = nn.Embedding(num_segments, dim) if num_segments else None
        self.norm = nn.LayerNorm(dim, norm_eps) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, rows: Padded | Packed, segments: Tensor | None = None) -> Tensor:
        """(B, L) ids -> (..., D)."""
        if tokens.shape[1] > self.max_length:
            raise ReszooError(
                f"sequences may be up to max_length={self.max_length} long, got {tokens.shape[1]}; "
                f"cut them, or build the network with a greater max_length"
            )
        if segments is not None and self.segments is None:
            raise ReszooError("segments were given to a network without them; build it with num_segments=2")
        columns = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x = self.tokens(rows.pack(tokens)) * self.scale + self.positions(rows.pack(columns))
        if self.segments is not None:
            x = x + (self.segments.weight[0] if segments is None else self.segments(rows.pack(segments)))
        return self.dropout(self.norm(x))


class SinusoidalPositions(nn.Module):
    """Sines at even and cosines at odd features, of wavelengths from 2 pi to 10000 * 2 pi (Section 3.5).

    Args:
        max_length: Number of positions.
        dim: Width, even.
    """

    table: Tensor

    def __init__(self, max_length: int, dim: int) -> None:
        super().__init__()
        if dim % 2:
            raise ReszooError(f"sinusoidal positions need an even embed_dim, got {dim}; or use positions='learned'")
        frequency = torch.exp(torch.arange(0, dim, 2) * (-math.log(10_000.0) / dim))
        angle = torch.arange(max_length)[:, None] * frequency  # (max_length, D / 2)
        # Computed from the sizes alone, so not part of the state.
        self.register_buffer("table", torch.stack((angle.sin(), angle.cos()), -1).flatten(1), persistent=False)

    def forward(self, columns: Tensor) -> Tensor:
        """Positions of any shape (...) -> (..., D)."""
        return self.table[columns]


class TiedHead(nn.Module):
    """Scores of all token ids by their embeddings: x E^T + b; the weight E stays with the embedding."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """(..., D) -> (..., V)."""
        return F.linear(x, weight, self.bias)
