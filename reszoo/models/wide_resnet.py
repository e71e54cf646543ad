"""Wide ResNet: pre-activation networks that are wide instead of very deep.

Paper: Zagoruyko and Komodakis 2016, "Wide Residual Networks", arXiv:1605.07146. WRN-d-k is a 3x3 stem of 16 channels,
then three stages of n = (d - 4) / 6 pre-activated basic blocks of 16k, 32k and 64k channels. WRN-50-2-bottleneck is
ResNet-50 with twice the inner width.

Shapes: N batch, C channels, H height, W width, K classes.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from reszoo.errors import ReszooError, check_between
from reszoo.layers import MakeShortcut, Shortcut, StochasticDepth
from reszoo.models._registry import register
from reszoo.models.preact_resnet import PreActResNet, split_activation
from reszoo.models.resnet import ResNet, StrideIn
from reszoo.models.resnext import ResNeXtBlock


class WideBlock(nn.Module):
    """Two pre-activated 3x3 convolutions with dropout between, added to a shortcut: y = F(x) + shortcut(x).

    Args:
        in_channels: Channels of the input.
        width: Channels of both convolutions and of the output.
        stride: Stride of the first convolution and of the shortcut.
        shortcut: Builds the shortcut from (in_channels, out_channels, stride).
        activated: Whether the input comes activated, as the first block's does.
        dropout: Rate of the dropout in the branch.
    """

    def __init__(
        self,
        in_channels: int,
        width: int,
        stride: int,
        shortcut: MakeShortcut,
        activated: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.out_channels = width
        self.shortcut = shortcut(in_channels, width, stride)
        self.activation, first = split_activation(in_channels, self.shortcut, activated)
        self.residual = StochasticDepth(*first, *wide_branch(in_channels, width, stride, dropout))

    def forward(self, x: Tensor) -> Tensor:
        """(N, C_in, H, W) -> (N, width, H / stride, W / stride)."""
        x = self.activation(x)
        return self.residual(x) + self.shortcut(x)


def wide_branch(in_channels: int, width: int, stride: int, dropout: float) -> nn.Sequential:
    """The two layers of a block behind the first activation."""
    return nn.Sequential(
        nn.Conv2d(in_channels, width, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Conv2d(width, width, 3, padding=1, bias=False),
    )


def wide_resnet(depth: int, widen_factor: int, dropout: float, **options: Any) -> PreActResNet:
    """WRN-d-k: d layers, stages of k times 16, 32 and 64 channels.

    Args:
        depth: The paper's d = 6n + 4.
        widen_factor: The paper's k.
        dropout: Rate of the dropout in each branch; the paper's is 0.3 on CIFAR where it takes one.
        options: Options of `PreActResNet`.

    Raises:
        ReszooError: No n gives this depth, or the dropout is no rate.
    """
    if depth < 10 or (depth - 4) % 6:
        raise ReszooError(f"depth must be 6n + 4 with n at least 1, such as 16, 28 or 40; got {depth}")
    check_between("dropout", dropout, 0, 1)
    widths = [width * widen_factor for width in (16, 32, 64)]
    return PreActResNet(
        "cifar", widths, ((depth - 4) // 6,) * 3, partial(WideBlock, dropout=dropout), stem_width=16, **options
    )


def wide_bottleneck_resnet(depths: Sequence[int], stride_in: StrideIn, **options: Any) -> ResNet:
    """ResNet of bottlenecks whose 3x3 convolutions are twice as wide."""
    block = partial(ResNeXtBlock, cardinality=1, group_width=128, stride_in=stride_in)
    return ResNet("imagenet", (64, 128, 256, 512), depths, block, **options)


@register
def wrn10_1(shortcut: Shortcut = "B", dropout: float = 0.0, **options: Any) -> PreActResNet:
    """WRN-10-1: n = 1, the smallest of the family."""
    return wide_resnet(10, 1, dropout, shortcut=shortcut, **options)


@register
def wrn16_4(shortcut: Shortcut = "B", dropout: float = 0.0, **options: Any) -> PreActResNet:
    """WRN-16-4: 2.7M parameters."""
    return wide_resnet(16, 4, dropout, shortcut=shortcut, **options)


@register
def wrn16_8(shortcut: Shortcut = "B", dropout: float = 0.0, **options: Any) -> PreActResNet:
    """WRN-16-8: 11.0M parameters."""
    return wide_resnet(16, 8, dropout, shortcut=shortcut, **options)


@register
def wrn28_10(shortcut: Shortcut = "B", dropout: float = 0.0, **options: Any) -> PreActResNet:
    """WRN-28-10: 36.5M parameters, 4.00% error on CIFAR-10, 19.25% on CIFAR-100; 3.89 and 18.85% with dropout 0.3."""
    return wide_resnet(28, 10, dropout, shortcut=shortcut, **options)


@register
def wrn40_4(shortcut: Shortcut = "B", dropout: float = 0.0, **options: Any) -> PreActResNet:
    """WRN-40-4: 8.9M parameters."""
    return wide_resnet(40, 4, dropout, shortcut=shortcut, **options)


@register
def wide_resnet50_2(
    num_classes: int = 1000, shortcut: Shortcut = "B", stride_in: StrideIn = "3x3", **options: Any
) -> ResNet:
    """WRN-50-2-bottleneck: 68.9M parameters."""
    return wide_bottleneck_resnet((3, 4, 6, 3), stride_in, num_classes=num_classes, shortcut=shortcut, **options)


@register
def wide_resnet101_2(
    num_classes: int = 1000, shortcut: Shortcut = "B", stride_in: StrideIn = "3x3", **options: Any
) -> ResNet:
    """WRN-101-2-bottleneck, the deeper sibling that torchvision publishes."""
    return wide_bottleneck_resnet((3, 4, 23, 3), stride_in, num_classes=num_classes, shortcut=shortcut, **options)
