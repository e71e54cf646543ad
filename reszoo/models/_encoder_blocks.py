"""What the text encoders and ViT share: residual branches over tokens, blocks of two of them, and their stack.

Paper: Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, Section 3.1 and 5.4.

Shapes: B batch, L length, T real tokens, D width; (..., D) is (B, L, D) or packed (T, D).
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from reszoo.errors import check_at_least, check_choice
from reszoo.layers import Packed, Padded, SelfAttention, StochasticDepth, recompute

Activation = Literal["gelu", "gelu_tanh", "relu"]

MakeSublayer = Callable[..., nn.Module]
"""(dim, branch, norm_eps) -> a residual sub-layer around the modules of `branch`."""

MakeAttention = Callable[[int, int, float], SelfAttention]
"""(dim, num_heads, dropout) -> an attention layer."""


class Branch(StochasticDepth):
    """A residual branch whose attention is told how the batch is laid out; `per="sample"` draws for each sequence."""

    def forward(self, x: Tensor, rows: Padded | Packed | None = None, *context: Any) -> Tensor:
        """(..., D) -> (..., D)."""
        if rows is None:
            return super().forward(x)
        if self.rate == 1:
            return self.nothing(x)
        if self.rate == 0 or not self.training:
            y = self._layers(x, rows, *context)
            return y * (1 - self.rate) if self.rate and self.per == "batch" else y
        if torch.compiler.is_compiling():
            count = 1 if self.per == "batch" else len(x)
            keep = (torch.rand(count, 1, 1, device=x.device) >= self.rate).to(x.dtype)
            return self._layers(x, rows, *context) * keep / (1 if self.per == "batch" else 1 - self.rate)
        if self.per == "batch":
            return self._layers(x, rows, *context) if self.draw(1) else self.nothing(x)
        keep = self.draw(rows.batch_size(x)).to(x.device)
        if not keep.any():
            return self.nothing(x)
        index, kept = rows.select(keep)
        y = self._layers(x[index], kept, *context)
        return y.new_zeros(x.shape).index_add(0, index, y, alpha=1 / (1 - self.rate))

    def _layers(self, x: Tensor, *context: Any) -> Tensor:
        """One layer behind the other."""
        for layer in self:
            x = layer(x, *context) if isinstance(layer, SelfAttention) else layer(x)
        return x


class EncoderBlock(nn.Module):
    """Two residual sub-layers, attention and MLP (Section 3.1).

    Args:
        sublayer: Builds one sub-layer around its branch.
        attention: The modules of the first branch.
        mlp: The modules of the second.
    """

    def __init__(
        self,
        sublayer: Callable[[Sequence[nn.Module]], nn.Module],
        attention: Sequence[nn.Module],
        mlp: Sequence[nn.Module],
    ) -> None:
        super().__init__()
        self.attention = sublayer(attention)
        self.mlp = sublayer(mlp)

    def forward(self, x: Tensor, *context: Any) -> Tensor:
        """(..., D) -> (..., D)."""
        return self.mlp(self.attention(x, *context), *context)


def encoder_blocks(
    sublayer: MakeSublayer,
    dim: int,
    depth: int,
    num_heads: int,
    mlp_dim: int,
    *,
    activation: Activation = "gelu",
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    hidden_dropout: float = 0.0,
    norm_eps: float = 1e-5,
    make_attention: MakeAttention = SelfAttention,
) -> nn.ModuleList:
    """A stack of equal blocks.

    Args:
        sublayer: Builds one residual sub-layer; it decides where the norms stand.
        dim: Width of the tokens.
        depth: Blocks, each of two sub-layers.
        num_heads: Attention heads.
        mlp_dim: Width inside the MLP.
        activation: "gelu", "gelu_tanh" (its approximation in GPT-2) or "relu".
        dropout: On the output of every branch (Section 5.4).
        attention_dropout: On the attention weights.
        hidden_dropout: Behind the MLP's activation.
        norm_eps: Added to the variance in every LayerNorm.
        make_attention: Builds one attention layer from (dim, num_heads, dropout).

    Raises:
        ReszooError: The depth is below 1, the activation is unknown, or the heads do not divide the width.
    """
    check_at_least("depth", depth, 1)
    check_choice("activation", activation, get_args(Activation))
    blocks = nn.ModuleList()
    for _ in range(depth):
        attention = (make_attention(dim, num_heads, attention_dropout), nn.Dropout(dropout))
        mlp = (
            nn.Linear(dim, mlp_dim),
            nn.ReLU() if activation == "relu" else nn.GELU("tanh" if activation == "gelu_tanh" else "none"),
            nn.Dropout(hidden_dropout),
            nn.Linear(mlp_dim, dim),
            nn.Dropout(dropout),
        )
        blocks.append(EncoderBlock(lambda branch: sublayer(dim, branch, norm_eps), attention, mlp))
    return blocks


def run_blocks(blocks: nn.ModuleList, x: Tensor, *context: Any, checkpoint_every: int = 0) -> Tensor:
    """One block behind the other.

    Args:
        blocks: The stack.
        x: (..., D).
        context: What each block gets beside x, the layout first.
        checkpoint_every: Blocks a segment whose inner results are computed again in the backward pass; 0 keeps all.
    """
    if checkpoint_every == 0:
        for block in blocks:
            x = block(x, *context)
        return x
    for start in range(0, len(blocks), checkpoint_every):
        x = recompute(list(blocks)[start : start + checkpoint_every], x, *context)
    return x


@torch.no_grad()
def init_weights(network: nn.Module, std: float | None) -> None:
    """Draw linear layers and embeddings anew, with zero biases.

    Args:
        network: Any module.
        std: Standard deviation of every weight; None draws linear layers by Glorot's uniform rule, query, key and value
            each on its own, and embeddings with 1 / sqrt(D).
    """
    for module in network.modules():
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
            if std is not None:
                nn.init.normal_(module.weight, std=std)
            else:
                nn.init.xavier_uniform_(module.weight)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=std or module.embedding_dim**-0.5)
    if std is None:
        for module in network.modules():
            if isinstance(module, SelfAttention):
                for part in module.qkv.weight.chunk(3):
                    nn.init.xavier_uniform_(part)
