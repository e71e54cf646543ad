"""Plain networks: the residual networks with every shortcut deleted, and nothing else changed.

Paper: He et al. 2015, "Deep Residual Learning for Image Recognition", arXiv:1512.03385, Section 3.3 and Fig. 6. Depth,
width, parameters and initialisation equal those of the residual twin with option A.

Shapes: N batch, C channels, H height, W width, K classes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from reszoo.models._registry import register
from reszoo.models._staged import StagedNetwork
from reszoo.models.resnet import basic_branch


class PlainBlock(nn.Module):
    """Two 3x3 convolutions without a shortcut: y = relu(F(x)).

    Args:
        in_channels: Channels of the input.
        width: Channels of both convolutions and of the output.
        stride: Stride of the first convolution.
    """

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.out_channels = width
        self.layers = basic_branch(in_channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C_in, H, W) -> (N, width, H / stride, W / stride)."""
        return torch.relu(self.layers(x))


class PlainNet(StagedNetwork):
    """Plain network of Table 1 (ImageNet, 18 and 34 layers) or Section 4.2 (CIFAR)."""


def cifar_plain(blocks_per_stage: int, **options: Any) -> PlainNet:
    """The plain twin of `cifar_resnet`: 6n + 2 layers."""
    return PlainNet("cifar", (16, 32, 64), (blocks_per_stage,) * 3, PlainBlock, **options)


def imagenet_plain(depths: Sequence[int], **options: Any) -> PlainNet:
    """The plain twin of an ImageNet network of basic blocks."""
    return PlainNet("imagenet", (64, 128, 256, 512), depths, PlainBlock, **options)


@register
def plain8(**options: Any) -> PlainNet:
    """Plain-8: n = 1, the twin of ResNet-8."""
    return cifar_plain(1, **options)


@register
def plain14(**options: Any) -> PlainNet:
    """Plain-14: n = 2, the twin of ResNet-14."""
    return cifar_plain(2, **options)


@register
def plain20(**options: Any) -> PlainNet:
    """Plain-20: n = 3, 0.27M parameters (Fig. 6 left)."""
    return cifar_plain(3, **options)


@register
def plain26(**options: Any) -> PlainNet:
    """Plain-26: n = 4, the twin of ResNet-26."""
    return cifar_plain(4, **options)


@register
def plain32(**options: Any) -> PlainNet:
    """Plain-32: n = 5, 0.46M parameters (Fig. 6 left)."""
    return cifar_plain(5, **options)


@register
def plain44(**options: Any) -> PlainNet:
    """Plain-44: n = 7, 0.66M parameters (Fig. 6 left)."""
    return cifar_plain(7, **options)


@register
def plain56(**options: Any) -> PlainNet:
    """Plain-56: n = 9, 0.85M parameters; worse than plain-20 in training and test error (Fig. 1)."""
    return cifar_plain(9, **options)


@register
def plain110(**options: Any) -> PlainNet:
    """Plain-110: n = 18, 1.7M parameters; its error stayed above 60% (Fig. 6)."""
    return cifar_plain(18, **options)


@register
def plain18(num_classes: int = 1000, **options: Any) -> PlainNet:
    """Plain-18: 27.94% top-1 error on ImageNet, 10-crop (Table 2)."""
    return imagenet_plain((2, 2, 2, 2), num_classes=num_classes, **options)


@register
def plain34(num_classes: int = 1000, **options: Any) -> PlainNet:
    """Plain-34: 28.54% top-1 error on ImageNet, 10-crop (Table 2)."""
    return imagenet_plain((3, 4, 6, 3), num_classes=num_classes, **options)
