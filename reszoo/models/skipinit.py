"""SkipInit: pre-activation networks that train without normalisation, behind one trained factor a branch.

Paper: De and Smith 2020, "Batch Normalization Biases Residual Blocks Towards the Identity Function in Deep Networks",
arXiv:2002.10444. BatchNorm is removed, each branch ends with a scalar alpha that starts at 0, and every convolution
gets a bias.

Shapes: N batch, C channels, H height, W width, K classes.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from reszoo.layers import (
    Bias,
    DropPer,
    MakeShortcut,
    ScalarScale,
    Shortcut,
    StochasticDepth,
    drop_linearly,
    shortcut_maker,
)
from reszoo.models._registry import register
from reszoo.models._staged import StagedNetwork


class SkipInitBlock(nn.Module):
    """Two pre-activated 3x3 convolutions times alpha added to a shortcut: y = alpha F(x) + shortcut(x).

    Args:
        in_channels: Channels of the input.
        width: Channels of both convolutions and of the output.
        stride: Stride of the first convolution and of the shortcut.
        shortcut: Builds the shortcut from (in_channels, out_channels, stride).
    """

    def __init__(self, in_channels: int, width: int, stride: int, shortcut: MakeShortcut) -> None:
        super().__init__()
        self.out_channels = width
        self.residual = StochasticDepth(
            nn.ReLU(),
            nn.Conv2d(in_channels, width, 3, stride, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            ScalarScale(0.0),
        )
        self.shortcut = shortcut(in_channels, width, stride)
        # Where the shape changes, both paths take the activated input; in the branch a second ReLU changes nothing.
        self.activation = nn.Identity() if isinstance(self.shortcut, nn.Identity) else nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """(N, C_in, H, W) -> (N, width, H / stride, W / stride)."""
        x = self.activation(x)
        return self.residual(x) + self.shortcut(x)


class SkipInitResNet(StagedNetwork):
    """Pre-activation network without normalisation: a stem, three stages of blocks, a last ReLU, pooling and head.

    Args:
        widths: Width of each stage.
        depths: Number of blocks of each stage.
        stem_width: Channels of the stem.
        num_classes: Outputs of the head; 0 gives the pooled features.
        in_chans: Channels of the images.
        shortcut: Option A, zeros for new channels; B, projection where the shape changes; C, projection everywhere.
        stochastic_depth: Rate at which training drops the last branch; the others follow the linear rule.
        drop_per: What one draw of stochastic depth decides for. See `StochasticDepth`.
        checkpoint_every: Blocks a segment whose inner results are computed again in the backward pass; 0 keeps all.
    """

    def __init__(
        self,
        widths: Sequence[int],
        depths: Sequence[int],
        stem_width: int = 16,
        *,
        num_classes: int = 10,
        in_chans: int = 3,
        shortcut: Shortcut = "A",
        stochastic_depth: float = 0.0,
        drop_per: DropPer = "batch",
        checkpoint_every: int = 0,
    ) -> None:
        super().__init__(
            "cifar",
            widths,
            depths,
            partial(SkipInitBlock, shortcut=shortcut_maker(shortcut, norm=False)),
            stem_width,
            norm=Bias,
            num_classes=num_classes,
            in_chans=in_chans,
            checkpoint_every=checkpoint_every,
        )
        self.final = nn.ReLU()
        drop_linearly(self, stochastic_depth, drop_per)


@register
def skipinit_resnet8(**options: Any) -> SkipInitResNet:
    """SkipInit ResNet-8: n = 1, the sibling of pre-activation ResNet-8."""
    return SkipInitResNet((16, 32, 64), (1, 1, 1), **options)


@register
def skipinit_resnet20(**options: Any) -> SkipInitResNet:
    """SkipInit ResNet-20: n = 3, 0.27M parameters."""
    return SkipInitResNet((16, 32, 64), (3, 3, 3), **options)


@register
def skipinit_resnet110(**options: Any) -> SkipInitResNet:
    """SkipInit ResNet-110: n = 18, 1.7M parameters."""
    return SkipInitResNet((16, 32, 64), (18, 18, 18), **options)


@register
def skipinit_wrn16_4(shortcut: Shortcut = "B", **options: Any) -> SkipInitResNet:
    """SkipInit WRN-16-4: 2.7M parameters."""
    return SkipInitResNet((64, 128, 256), (2, 2, 2), shortcut=shortcut, **options)
