"""Fixup: residual networks that train without normalisation, by initialisation alone.

Paper: Zhang, Dauphin and Ma 2019, "Fixup Initialization: Residual Learning Without Normalization", arXiv:1901.09321.
Its three rules, for L branches of m convolutions each:

1. The classifier and the last convolution of each branch start at 0.
2. Every other layer starts as usual, those in a branch times L ** (-1 / (2m - 2)).
3. A scalar multiplier, 1 at the start, in each branch; a scalar bias, 0 at the start, before each convolution, linear
   layer and activation.

The authors' code trains biases and multipliers at a tenth of the learning rate. Departure: a projection shortcut has a
bias of its own, which in the authors' code is the branch's first.

Shapes: N batch, C channels, H height, W width, K classes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from reszoo.layers import (
    Bias,
    DropPer,
    MakeShortcut,
    ProjectionShortcut,
    ScalarScale,
    Shortcut,
    StochasticDepth,
    drop_linearly,
    shortcut_maker,
)
from reszoo.models._registry import register
from reszoo.models._staged import StagedNetwork, Stem


class FixupBasicBlock(nn.Module):
    """Two 3x3 convolutions without normalisation added to a shortcut: y = relu(F(x) + shortcut(x)).

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
            Bias(),
            nn.Conv2d(in_channels, width, 3, stride, padding=1, bias=False),
            Bias(),
            nn.ReLU(),
            Bias(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            ScalarScale(1.0),
            Bias(),
        )
        self.shortcut = shortcut(in_channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C_in, H, W) -> (N, width, H / stride, W / stride)."""
        return torch.relu(self.residual(x) + self.shortcut(x))


class FixupBottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions without normalisation added to a shortcut: y = relu(F(x) + shortcut(x)).

    Args:
        in_channels: Channels of the input.
        width: Channels of the 3x3 convolution; the output has four times as many.
        stride: Stride of the 3x3 convolution, as in the authors' code, and of the shortcut.
        shortcut: Builds the shortcut from (in_channels, out_channels, stride).
    """

    def __init__(self, in_channels: int, width: int, stride: int, shortcut: MakeShortcut) -> None:
        super().__init__()
        self.out_channels = 4 * width
        self.residual = StochasticDepth(
            Bias(),
            nn.Conv2d(in_channels, width, 1, bias=False),
            Bias(),
            nn.ReLU(),
            Bias(),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
            Bias(),
            nn.ReLU(),
            Bias(),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            ScalarScale(1.0),
            Bias(),
        )
        self.shortcut = shortcut(in_channels, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C_in, H, W) -> (N, 4 * width, H / stride, W / stride)."""
        return torch.relu(self.residual(x) + self.shortcut(x))


class FixupResNet(StagedNetwork):
    """ResNet without normalisation, initialised by Fixup.

    Args:
        stem: "cifar" or "imagenet".
        widths: Width of each stage.
        depths: Number of blocks of each stage.
        block: Builds one block from its input channels, width, stride and shortcut.
        num_classes: Outputs of the head; 0 gives the pooled features.
        in_chans: Channels of the images.
        shortcut: Option A, zeros for new channels; B, projection where the shape changes; C, projection everywhere.
        stochastic_depth: Rate at which training drops the last branch; the others follow the linear rule.
        drop_per: What one draw of stochastic depth decides for. See `StochasticDepth`.
        checkpoint_every: Blocks a segment whose inner results are computed again in the backward pass; 0 keeps all.
    """

    def __init__(
        self,
        stem: Stem,
        widths: Sequence[int],
        depths: Sequence[int],
        block: Callable[[int, int, int, MakeShortcut], nn.Module],
        *,
        num_classes: int = 10,
        in_chans: int = 3,
        shortcut: Shortcut = "A",
        stochastic_depth: float = 0.0,
        drop_per: DropPer = "batch",
        checkpoint_every: int = 0,
    ) -> None:
        make_shortcut = shortcut_maker(shortcut, norm=False)

        def build(in_channels: int, width: int, stride: int) -> nn.Module:
            return block(in_channels, width, stride, partial(_biased, make_shortcut))

        super().__init__(
            stem,
            widths,
            depths,
            build,
            norm=_scalar_bias,
            num_classes=num_classes,
            in_chans=in_chans,
            checkpoint_every=checkpoint_every,
        )
        self.final = Bias()  # a bias before the linear layer; pooling leaves it as it is
        fixup_init(self)
        drop_linearly(self, stochastic_depth, drop_per)


def fixup_init(network: FixupResNet) -> None:
    """Rules 1 and 2, on top of He's initialisation."""
    branches = [module for module in network.modules() if isinstance(module, StochasticDepth)]
    for branch in branches:
        *others, last = (layer for layer in branch if isinstance(layer, nn.Conv2d))
        for conv in others:
            with torch.no_grad():
                conv.weight.mul_(len(branches) ** (-1 / (2 * len(others))))  # m - 1 others, so 2m - 2
        nn.init.zeros_(last.weight)
    if isinstance(network.head, nn.Linear):
        nn.init.zeros_(network.head.weight)
        nn.init.zeros_(network.head.bias)


def _scalar_bias(channels: int) -> Bias:
    """What stands in the place of the stem's normalisation."""
    return Bias()


def _biased(shortcut: MakeShortcut, in_channels: int, out_channels: int, stride: int) -> nn.Module:
    """A shortcut whose projection, a convolution, comes behind a bias (rule 3)."""
    built = shortcut(in_channels, out_channels, stride)
    return nn.Sequential(Bias(), *built) if isinstance(built, ProjectionShortcut) else built


def cifar_fixup(blocks_per_stage: int, **options: Any) -> FixupResNet:
    """N basic blocks in each of three stages of 16, 32 and 64 channels: 6n + 2 layers."""
    return FixupResNet("cifar", (16, 32, 64), (blocks_per_stage,) * 3, FixupBasicBlock, **options)


@register
def fixup_resnet8(**options: Any) -> FixupResNet:
    """Fixup ResNet-8: n = 1, the sibling of ResNet-8."""
    return cifar_fixup(1, **options)


@register
def fixup_resnet20(**options: Any) -> FixupResNet:
    """Fixup ResNet-20: n = 3, 0.27M parameters."""
    return cifar_fixup(3, **options)


@register
def fixup_resnet56(**options: Any) -> FixupResNet:
    """Fixup ResNet-56: n = 9, 0.85M parameters."""
    return cifar_fixup(9, **options)


@register
def fixup_resnet110(**options: Any) -> FixupResNet:
    """Fixup ResNet-110: n = 18, 1.7M parameters."""
    return cifar_fixup(18, **options)


@register
def fixup_resnet50(num_classes: int = 1000, shortcut: Shortcut = "B", **options: Any) -> FixupResNet:
    """Fixup ResNet-50: the ImageNet network of bottlenecks, without a BatchNorm."""
    widths, depths = (64, 128, 256, 512), (3, 4, 6, 3)
    return FixupResNet(
        "imagenet", widths, depths, FixupBottleneck, num_classes=num_classes, shortcut=shortcut, **options
    )
