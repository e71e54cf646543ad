"""ViT: a pre-LN encoder over the patches of an image.

Paper: Dosovitskiy et al. 2020, "An Image is Worth 16x16 Words", arXiv:2010.11929. The tiny and small sizes came later
(Touvron et al. 2020, "DeiT", arXiv:2012.12877).

Departures: the head is always the single linear layer of fine-tuning; weights start as in BERT, N(0, 0.02), with zero
biases.

Shapes: N batch, C channels, H height, W width, P patch size, L = H W / P^2 patches, D width, K classes.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reszoo.errors import ReszooError, check_at_least
from reszoo.layers import DropPer, LayerScale, cait_initial, drop_linearly
from reszoo.models._encoder_blocks import Activation, Branch, encoder_blocks, init_weights, run_blocks
from reszoo.models._registry import register
from reszoo.models.transformer import PreLN


class VisionTransformer(nn.Module):
    """Patches and a class token through pre-LN blocks; the class token is what the head reads.

    Args:
        image_size: Height and width of the images, one number if equal; multiples of `patch_size`.
        patch_size: Height and width P of a patch.
        in_chans: Channels of the images.
        embed_dim: Width D.
        depth: Blocks.
        num_heads: Attention heads.
        mlp_ratio: Width inside the MLP, as a multiple of `embed_dim`.
        activation: "gelu", "gelu_tanh" or "relu".
        dropout: On the embedding and behind every linear layer but the query, key and value.
        attention_dropout: On the attention weights.
        stochastic_depth: Probability of dropping the last branch in training; it grows linearly from the first on.
        drop_per: Whether a whole mini-batch drops a branch, or each image by itself.
        checkpoint_every: Blocks a segment whose inner results are computed again in the backward pass; 0 keeps all.
        layer_scale: Whether every branch ends in a trained factor a channel, small at first (CaiT, arXiv:2103.17239).
        norm_eps: Added to the variance in every LayerNorm.
        num_classes: Outputs of the head; 0 gives the class token's features.

    Attributes:
        num_features: The width D.
        grid: Patches down and across.
    """

    def __init__(
        self,
        *,
        image_size: int | list[int] = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        activation: Activation = "gelu",
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        stochastic_depth: float = 0.0,
        drop_per: DropPer = "sample",
        checkpoint_every: int = 0,
        layer_scale: bool = False,
        norm_eps: float = 1e-6,
        num_classes: int = 1000,
    ) -> None:
        super().__init__()
        check_at_least("in_chans", in_chans, 1)
        check_at_least("num_classes", num_classes, 0)
        check_at_least("checkpoint_every", checkpoint_every, 0)
        self.image_size = _pair(image_size)
        self.grid = _grid(self.image_size, patch_size)
        self.in_chans = in_chans
        self.num_features = embed_dim
        self.checkpoint_every = checkpoint_every
        self.stem = nn.Conv2d(in_chans, embed_dim, patch_size, patch_size)
        self.class_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.positions = nn.Parameter(torch.zeros(1, 1 + math.prod(self.grid), embed_dim))
        self.dropout = nn.Dropout(dropout)
        self.blocks = encoder_blocks(
            PreLN,
            embed_dim,
            depth,
            num_heads,
            round(mlp_ratio * embed_dim),
            activation=activation,
            dropout=dropout,
            attention_dropout=attention_dropout,
            hidden_dropout=dropout,
            norm_eps=norm_eps,
        )
        if layer_scale:
            for branch in [module for module in self.blocks.modules() if isinstance(module, Branch)]:
                branch.append(LayerScale(embed_dim, cait_initial(depth)))
        drop_linearly(self.blocks, stochastic_depth, drop_per)
        self.norm = nn.LayerNorm(embed_dim, norm_eps)
        self.head = nn.Linear(embed_dim, num_classes) if num_classes else nn.Identity()
        init_weights(self, 0.02)
        for weight in (self.class_token, self.positions):
            nn.init.normal_(weight, std=0.02)
        # Unit variance in, unit variance out, as in the authors' code: 0.02 would drown small patches in the positions.
        nn.init.normal_(self.stem.weight, std=self.stem.weight[0].numel() ** -0.5)

    def example_inputs(self, batch_size: int = 2) -> tuple[Tensor, ...]:
        """Random arguments of one forward pass, of the size the network was built for."""
        return (torch.randn(batch_size, self.in_chans, *self.image_size),)

    def feature_maps(self, x: Tensor) -> list[Tensor]:
        """(N, C, H, W) -> [(N, D, H / P, W / P)], the normed patch tokens."""
        return [self.tokens(x)[:, 1:].transpose(1, 2).unflatten(2, self.grid)]

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, K), or the class token's (N, D) without a head."""
        return self.head(self.tokens(x)[:, 0])

    def tokens(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, 1 + L, D), the normed tokens, the class token first."""
        if tuple(x.shape[2:]) != self.image_size:
            raise ReszooError(
                f"this network was built for images of {self.image_size}, got {tuple(x.shape[2:])}; resize them, or "
                f"build it with image_size={list(x.shape[2:])} (loading its state then resizes the position table)"
            )
        x = self.stem(x).flatten(2).transpose(1, 2)  # (N, L, D)
        x = torch.cat((self.class_token.expand(x.shape[0], -1, -1), x), 1)  # (N, 1 + L, D)
        x = self.dropout(x + self.positions)
        return self.norm(run_blocks(self.blocks, x, checkpoint_every=self.checkpoint_every))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Resize a table of another number of positions, whichever way the state came here.

        A table of another size must come from square images, as its own shape says nothing of theirs.
        """
        table = state_dict.get(f"{prefix}positions")
        if table is not None and table.shape[1] != self.positions.shape[1]:
            side = math.isqrt(table.shape[1] - 1)
            state_dict[f"{prefix}positions"] = resize_position_table(table, (side, side), self.grid)
        super()._load_from_state_dict(state_dict, prefix, *args)


def resize_position_table(table: Tensor, old: Sequence[int], new: Sequence[int], num_prefix: int = 1) -> Tensor:
    """Interpolate learned positions to another grid of patches; those of prefix tokens stay as they are.

    Args:
        table: (1, num_prefix + L, D).
        old: Patches down and across that `table` was learned for.
        new: Patches down and across to make it for.
        num_prefix: Positions of the class token and the like, which stand in front.

    Returns:
        (1, num_prefix + new L, D), by bicubic interpolation with anti-aliasing.

    Raises:
        ReszooError: The old grid does not fit the table.
    """
    prefix, patches = table[:, :num_prefix], table[:, num_prefix:]
    if math.prod(old) != patches.shape[1]:
        raise ReszooError(
            f"a position table of {patches.shape[1]} patches is not of a grid of {old[0]} by {old[1]}; "
            f"call resize_position_table with the grid it was learned for"
        )
    image = patches.transpose(1, 2).unflatten(2, tuple(old)).float()  # (1, D, rows, columns)
    image = F.interpolate(image, tuple(new), mode="bicubic", antialias=True, align_corners=False)
    return torch.cat((prefix, image.flatten(2).transpose(1, 2).to(table.dtype)), 1)


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    """Height and width."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _grid(image_size: tuple[int, int], patch_size: int) -> tuple[int, int]:
    """Patches down and across."""
    check_at_least("patch_size", patch_size, 1)
    if image_size[0] % patch_size or image_size[1] % patch_size or min(image_size) < 1:
        raise ReszooError(f"image_size must be a multiple of patch_size, got {list(image_size)} and {patch_size}")
    return image_size[0] // patch_size, image_size[1] // patch_size


@register
def vit_ti16(embed_dim: int = 192, num_heads: int = 3, **options: Any) -> VisionTransformer:
    """ViT-Ti/16: 12 blocks of 192, 5,717,416 parameters (DeiT)."""
    return VisionTransformer(embed_dim=embed_dim, num_heads=num_heads, **options)


@register
def vit_s16(embed_dim: int = 384, num_heads: int = 6, **options: Any) -> VisionTransformer:
    """ViT-S/16: 12 blocks of 384, 22,050,664 parameters (DeiT)."""
    return VisionTransformer(embed_dim=embed_dim, num_heads=num_heads, **options)


@register
def vit_b16(**options: Any) -> VisionTransformer:
    """ViT-B/16: 12 blocks of 768, 86,567,656 parameters; 77.91% top-1 when trained on ImageNet alone (Table 5)."""
    return VisionTransformer(**options)


@register
def vit_b32(patch_size: int = 32, **options: Any) -> VisionTransformer:
    """ViT-B/32: 12 blocks of 768, 88,224,232 parameters; 73.38% top-1 when trained on ImageNet alone (Table 5)."""
    return VisionTransformer(patch_size=patch_size, **options)


@register
def vit_l16(embed_dim: int = 1024, depth: int = 24, num_heads: int = 16, **options: Any) -> VisionTransformer:
    """ViT-L/16: 24 blocks of 1024, 304,326,632 parameters; 76.53% top-1 when trained on ImageNet alone (Table 5)."""
    return VisionTransformer(embed_dim=embed_dim, depth=depth, num_heads=num_heads, **options)


@register
def vit_h14(
    patch_size: int = 14, embed_dim: int = 1280, depth: int = 32, num_heads: int = 16, **options: Any
) -> VisionTransformer:
    """ViT-H/14: 32 blocks of 1280, 632,045,800 parameters."""
    return VisionTransformer(patch_size=patch_size, embed_dim=embed_dim, depth=depth, num_heads=num_heads, **options)
