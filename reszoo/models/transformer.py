"""Transformer encoders, and where the norm stands: behind the sum (post-LN), in the branch (pre-LN), or both.

Papers: Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, Section 3 (post-LN); Devlin et al. 2018,
"BERT", arXiv:1810.04805 (its encoder at two sizes); Xiong et al. 2020, "On Layer Normalization in the Transformer
Architecture", arXiv:2002.04745 (pre-LN beside post-LN); Radford et al. 2019 (GPT-2), for the initial scale of
pre-LN branches; Wang et al. 2022, "DeepNet", arXiv:2203.00555 (DeepNorm); Ding et al. 2021, "CogView",
arXiv:2105.13290, and Kim et al. 2025, "Peri-LN", arXiv:2502.02732 (norms on both sides of the branch).

Departures: the encoders of Vaswani et al. and Devlin et al. alone, without a decoder; GELU where Vaswani et al. have
ReLU (`activation`), and learned positions where they have sinusoids (`positions`).

Shapes: B batch, L length, T real tokens, D width, K classes; (..., D) is (B, L, D) or packed (T, D).
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from reszoo.layers import SelfAttention
from reszoo.models._encoder import Encoder, Pooling
from reszoo.models._encoder_blocks import Branch
from reszoo.models._registry import register


class PostLN(nn.Module):
    """The norm behind the sum: y = LN(F(x) + x), Vaswani et al., Section 3.1.

    Args:
        dim: Width.
        branch: The modules of F.
        norm_eps: Epsilon of the norm.
    """

    def __init__(self, dim: int, branch: Sequence[nn.Module], norm_eps: float = 1e-5) -> None:
        super().__init__()
        self.residual = Branch(*branch)
        self.shortcut = nn.Identity()
        self.norm = nn.LayerNorm(dim, norm_eps)

    def forward(self, x: Tensor, *context: Any) -> Tensor:
        """(..., D) -> (..., D)."""
        return self.norm(self.residual(x, *context) + self.shortcut(x))


class PreLN(nn.Module):
    """The norm at the head of the branch: y = F(LN(x)) + x, Xiong et al.

    Args:
        dim: Width.
        branch: The modules of F.
        norm_eps: Epsilon of the norm.
    """

    def __init__(self, dim: int, branch: Sequence[nn.Module], norm_eps: float = 1e-5) -> None:
        super().__init__()
        self.residual = Branch(nn.LayerNorm(dim, norm_eps), *branch)
        self.shortcut = nn.Identity()

    def forward(self, x: Tensor, *context: Any) -> Tensor:
        """(..., D) -> (..., D)."""
        return self.residual(x, *context) + self.shortcut(x)


class SandwichLN(nn.Module):
    """A norm at either end of the branch: y = LN(F(LN(x))) + x, CogView (Sandwich-LN) and Peri-LN.

    Args:
        dim: Width.
        branch: The modules of F.
        norm_eps: Epsilon of the norms.
    """

    def __init__(self, dim: int, branch: Sequence[nn.Module], norm_eps: float = 1e-5) -> None:
        super().__init__()
        self.residual = Branch(nn.LayerNorm(dim, norm_eps), *branch, nn.LayerNorm(dim, norm_eps))
        self.shortcut = nn.Identity()

    def forward(self, x: Tensor, *context: Any) -> Tensor:
        """(..., D) -> (..., D)."""
        return self.residual(x, *context) + self.shortcut(x)


class DeepNorm(nn.Module):
    """Post-LN with a stronger shortcut: y = LN(F(x) + alpha x), DeepNet.

    Args:
        dim: Width.
        branch: The modules of F.
        norm_eps: Epsilon of the norm.
        alpha: Factor of the shortcut, (2 depth)^(1/4) in an encoder.
    """

    def __init__(self, dim: int, branch: Sequence[nn.Module], norm_eps: float = 1e-5, alpha: float = 1.0) -> None:
        super().__init__()
        self.residual = Branch(*branch)
        self.shortcut = Scale(alpha)
        self.norm = nn.LayerNorm(dim, norm_eps)

    def forward(self, x: Tensor, *context: Any) -> Tensor:
        """(..., D) -> (..., D)."""
        return self.norm(self.residual(x, *context) + self.shortcut(x))


class Scale(nn.Module):
    """A constant times the input."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        return self.factor * x

    def extra_repr(self) -> str:
        return f"{self.factor:.4g}"


@torch.no_grad()
def scale_residual_outputs(encoder: Encoder) -> None:
    """Multiply the last layer of every branch by 1 / sqrt(N), N the number of branches, 2 to a block (GPT-2)."""
    factor = 1 / math.sqrt(2 * len(encoder.blocks))
    for branch in encoder.modules():
        if isinstance(branch, Branch):
            last = [module for module in branch.modules() if isinstance(module, nn.Linear)][-1]
            last.weight.mul_(factor)


@torch.no_grad()
def deepnorm_init(encoder: Encoder, beta: float) -> None:
    """Glorot's normal rule, with gain `beta` for the MLP, value and output weights and 1 for query and key."""
    for block in encoder.blocks:
        for module in block.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_normal_(module.weight, beta)
        for module in block.modules():
            if isinstance(module, SelfAttention):
                for part, gain in zip(module.qkv.weight.chunk(3), (1.0, 1.0, beta), strict=True):
                    nn.init.xavier_normal_(part, gain)


@register
def postln_encoder(**options: Any) -> Encoder:
    """Post-LN encoder of any size; 4 blocks of 64 unless told otherwise."""
    return Encoder(PostLN, False, **options)


@register
def postln_encoder_base(embed_dim: int = 768, depth: int = 12, num_heads: int = 12, **options: Any) -> Encoder:
    """Post-LN encoder of BERT's base size: 12 blocks of 768, 85.1M parameters in the blocks."""
    return Encoder(PostLN, False, embed_dim=embed_dim, depth=depth, num_heads=num_heads, **options)


@register
def postln_encoder_large(embed_dim: int = 1024, depth: int = 24, num_heads: int = 16, **options: Any) -> Encoder:
    """Post-LN encoder of BERT's large size: 24 blocks of 1024, 302.3M parameters in the blocks."""
    return Encoder(PostLN, False, embed_dim=embed_dim, depth=depth, num_heads=num_heads, **options)


@register
def preln_encoder(scale_residual_init: bool = False, **options: Any) -> Encoder:
    """Pre-LN encoder of any size; 4 blocks of 64 unless told otherwise; option GPT-2's scaled initial branches."""
    encoder = Encoder(PreLN, True, **options)
    if scale_residual_init:
        scale_residual_outputs(encoder)
    return encoder


@register
def preln_encoder_base(embed_dim: int = 768, depth: int = 12, num_heads: int = 12, **options: Any) -> Encoder:
    """Pre-LN encoder of BERT's base size: 12 blocks of 768, 85.1M parameters in the blocks and the final norm."""
    return preln_encoder(embed_dim=embed_dim, depth=depth, num_heads=num_heads, **options)


@register
def preln_encoder_large(embed_dim: int = 1024, depth: int = 24, num_heads: int = 16, **options: Any) -> Encoder:
    """Pre-LN encoder of BERT's large size: 24 blocks of 1024, 302.3M parameters in the blocks and the final norm."""
    return preln_encoder(embed_dim=embed_dim, depth=depth, num_heads=num_heads, **options)


@register
def sandwich_encoder(**options: Any) -> Encoder:
    """Encoder with a norm on both sides of every branch, as in CogView and Peri-LN; 4 blocks of 64."""
    return Encoder(SandwichLN, True, **options)


@register
def deepnorm_encoder(depth: int = 4, **options: Any) -> Encoder:
    """DeepNet's encoder: post-LN with alpha = (2 depth)^(1/4) and beta = (8 depth)^(-1/4); 4 blocks of 64."""
    encoder = Encoder(partial(DeepNorm, alpha=(2 * depth) ** 0.25), False, depth=depth, **options)
    deepnorm_init(encoder, (8 * depth) ** -0.25)
    return encoder


@register
def bert_base(
    embed_dim: int = 768,
    depth: int = 12,
    num_heads: int = 12,
    attention_dropout: float = 0.1,
    num_segments: int = 2,
    embed_norm: bool = True,
    norm_eps: float = 1e-12,
    init_std: float | None = 0.02,
    pooling: Pooling = "pooler",
    num_classes: int = 0,
    **options: Any,
) -> Encoder:
    """BERT-Base: 12 blocks of 768, 12 heads, 110M parameters, exactly 109,482,240 with the pooler."""
    return postln_encoder(
        embed_dim=embed_dim,
        depth=depth,
        num_heads=num_heads,
        attention_dropout=attention_dropout,
        num_segments=num_segments,
        embed_norm=embed_norm,
        norm_eps=norm_eps,
        init_std=init_std,
        pooling=pooling,
        num_classes=num_classes,
        **options,
    )


@register
def bert_large(
    embed_dim: int = 1024,
    depth: int = 24,
    num_heads: int = 16,
    attention_dropout: float = 0.1,
    num_segments: int = 2,
    embed_norm: bool = True,
    norm_eps: float = 1e-12,
    init_std: float | None = 0.02,
    pooling: Pooling = "pooler",
    num_classes: int = 0,
    **options: Any,
) -> Encoder:
    """BERT-Large: 24 blocks of 1024, 16 heads, 340M parameters, exactly 335,141,888 with the pooler."""
    return postln_encoder(
        embed_dim=embed_dim,
        depth=depth,
        num_heads=num_heads,
        attention_dropout=attention_dropout,
        num_segments=num_segments,
        embed_norm=embed_norm,
        norm_eps=norm_eps,
        init_std=init_std,
        pooling=pooling,
        num_classes=num_classes,
        **options,
    )
