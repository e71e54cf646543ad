"""ResNeXt: bottlenecks whose 3x3 convolution is split into groups, the paths of an aggregated transformation.

Paper: Xie et al. 2017, "Aggregated Residual Transformations for Deep Neural Networks", arXiv:1611.05431. The block is
the form with a grouped convolution, the "resnext_C" of the authors' code, with the stride in the 3x3 as there.

Departure: the CIFAR networks of the arXiv paper have pre-activated blocks. Ours have the original ones, which the
README of the authors' code recommends, so the paper's CIFAR errors are not theirs.

Shapes: N batch, C channels, H height, W width, K classes.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn

from reszoo.errors import check_choice
from reszoo.layers import MakeShortcut, Shortcut, StochasticDepth
from reszoo.models._registry import register
from reszoo.models.resnet import ResNet, StrideIn


class ResNeXtBlock(nn.Module):
    """1x1, grouped 3x3 and 1x1 convolutions added to a shortcut: y = relu(F(x) + shortcut(x)).

    Args:
        in_channels: Channels of the input.
        width: Width of the ResNet bottleneck in its place; the output has four times as many channels.
        stride: Stride of the block.
        shortcut: Builds the shortcut from (in_channels, out_channels, stride).
        cardinality: Groups of the 3x3 convolution, the paper's C.
        group_width: Channels of a group in the first stage, the paper's d.
        stride_in: The convolution that carries the stride.
    """

    def __init__(
        self,
        in_channels: int,
        width: int,
        stride: int,
        shortcut: MakeShortcut,
        cardinality: int,
        group_width: int,
        stride_in: StrideIn = "3x3",
    ) -> None:
        super().__init__()
        check_choice("stride_in", stride_in, get_args(StrideIn))
        self.out_channels = 4 * width
        inner = cardinality * (group_width * width // 64)  # a group widens with the stages, whose first is 64 wide
        first, second = (stride, 1) if stride_in == "1x1" else (1, stride)
        self.residual = StochasticDepth(
            nn.Conv2d(in_channels, inner, 1, first, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.Conv2d(inner, inner, 3, second, padding=1, groups=cardinality, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.Conv2d(inner, 4 * width, 1, bias=False),
            nn.BatchNorm2d(4 * width),
        )
        self.shortcut = shortcut(in_channels, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C_in, H, W) -> (N, 4 * width, H / stride, W / stride)."""
        return torch.relu(self.residual(x) + self.shortcut(x))


def imagenet_resnext(depths: Sequence[int], cardinality: int, group_width: int, **options: Any) -> ResNet:
    """Four stages of 256, 512, 1024 and 2048 channels behind the 7x7 stem."""
    block = partial(ResNeXtBlock, cardinality=cardinality, group_width=group_width)
    return ResNet("imagenet", (64, 128, 256, 512), depths, block, **options)


def cifar_resnext(cardinality: int, group_width: int, blocks_per_stage: int = 3, **options: Any) -> ResNet:
    """9n + 2 layers, 29 in the paper: a 3x3 stem of 64 channels and three stages of n blocks."""
    block = partial(ResNeXtBlock, cardinality=cardinality, group_width=group_width)
    return ResNet("cifar", (64, 128, 256), (blocks_per_stage,) * 3, block, **options)


@register
def resnext11_4x16d(shortcut: Shortcut = "B", **options: Any) -> ResNet:
    """ResNeXt-11, 4x16d: n = 1, the smallest of the family, for images of a few pixels."""
    return cifar_resnext(4, 16, 1, shortcut=shortcut, **options)


@register
def resnext29_8x64d(shortcut: Shortcut = "B", **options: Any) -> ResNet:
    """ResNeXt-29, 8x64d: 34.4M parameters."""
    return cifar_resnext(8, 64, shortcut=shortcut, **options)


@register
def resnext29_16x64d(shortcut: Shortcut = "B", **options: Any) -> ResNet:
    """ResNeXt-29, 16x64d: 68.2M parameters."""
    return cifar_resnext(16, 64, shortcut=shortcut, **options)


@register
def resnext50_32x4d(num_classes: int = 1000, shortcut: Shortcut = "B", **options: Any) -> ResNet:
    """ResNeXt-50, 32x4d: 25.0M parameters, 22.2% top-1 error on ImageNet."""
    return imagenet_resnext((3, 4, 6, 3), 32, 4, num_classes=num_classes, shortcut=shortcut, **options)


@register
def resnext101_32x4d(num_classes: int = 1000, shortcut: Shortcut = "B", **options: Any) -> ResNet:
    """ResNeXt-101, 32x4d: 44.2M parameters, 21.2% top-1 error on ImageNet (the authors' repository)."""
    return imagenet_resnext((3, 4, 23, 3), 32, 4, num_classes=num_classes, shortcut=shortcut, **options)
