"""ResNet: residual blocks whose shortcut is the identity wherever shapes allow.

Paper: He et al. 2015, "Deep Residual Learning for Image Recognition", arXiv:1512.03385. The CIFAR networks are the 6n+2
family of Section 4.2, the ImageNet networks the columns of Table 1; equation and table numbers refer to this paper.

Departures, each an option: `stride_in="3x3"` (the "v1.5" of fb.resnet.torch and torchvision), `zero_gamma` (Goyal et
al. 2017, arXiv:1706.02677), `branch_scale`, `stochastic_depth` (Huang et al. 2016, arXiv:1603.09382), and the zero
paddings other than the paper's. The CIFAR bottlenecks are the baselines of He et al. 2016b, arXiv:1603.05027.

Shapes: N batch, C channels, H height, W width, K classes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from reszoo.errors import check_choice
from reszoo.layers import (
    BranchScale,
    DropPer,
    MakeShortcut,
    Shortcut,
    StochasticDepth,
    ZeroPadding,
    drop_linearly,
    scale_branches,
    shortcut_maker,
)
from reszoo.models._registry import register
from reszoo.models._staged import StagedNetwork, Stem

StrideIn = Literal["1x1", "3x3"]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions added to a shortcut: y = relu(F(x) + shortcut(x)), Eq. 1 and Fig. 5 left.

    Args:
        in_channels: Channels of the input.
        width: Channels of both convolutions and of the output.
        stride: Stride of the first convolution and of the shortcut.
        shortcut: Builds the shortcut from (in_channels, out_channels, stride).
    """

    def __init__(self, in_channels: int, width: int, stride: int, shortcut: MakeShortcut) -> None:
        super().__init__()
        self.out_channels = width
        self.residual = StochasticDepth(*basic_branch(in_channels, width, stride))
        self.shortcut = shortcut(in_channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C_in, H, W) -> (N, width, H / stride, W / stride)."""
        return torch.relu(self.residual(x) + self.shortcut(x))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions added to a shortcut: y = relu(F(x) + shortcut(x)), Fig. 5 right.

    Args:
        in_channels: Channels of the input.
        width: Channels of the 3x3 convolution; the output has four times as many.
        stride: Stride of the block.
        shortcut: Builds the shortcut from (in_channels, out_channels, stride).
        stride_in: The convolution that carries the stride: "1x1" is the paper's, "3x3" is "v1.5".
    """

    def __init__(
        self, in_channels: int, width: int, stride: int, shortcut: MakeShortcut, stride_in: StrideIn = "1x1"
    ) -> None:
        super().__init__()
        check_choice("stride_in", stride_in, get_args(StrideIn))
        self.out_channels = 4 * width
        self.residual = StochasticDepth(*bottleneck_branch(in_channels, width, stride, stride_in))
        self.shortcut = shortcut(in_channels, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C_in, H, W) -> (N, 4 * width, H / stride, W / stride)."""
        return torch.relu(self.residual(x) + self.shortcut(x))


def basic_branch(in_channels: int, width: int, stride: int) -> nn.Sequential:
    """The two layers of Fig. 5 left, with BatchNorm after each convolution and before the activation (Section 3.4)."""
    return nn.Sequential(
        nn.Conv2d(in_channels, width, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
    )


def bottleneck_branch(in_channels: int, width: int, stride: int, stride_in: StrideIn) -> nn.Sequential:
    """The three layers of Fig. 5 right; the first carries the stride in the paper, the second in "v1.5"."""
    first, second = (stride, 1) if stride_in == "1x1" else (1, stride)
    return nn.Sequential(
        nn.Conv2d(in_channels, width, 1, first, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, second, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 4 * width, 1, bias=False),
        nn.BatchNorm2d(4 * width),
    )


class ResNet(StagedNetwork):
    """Residual network of Table 1 (ImageNet) or Section 4.2 (CIFAR).

    Args:
        stem: "cifar" or "imagenet".
        widths: Width of each stage.
        depths: Number of blocks of each stage.
        block: Builds one block from its input channels, width, stride and shortcut.
        num_classes: Outputs of the head; 0 gives the pooled features.
        in_chans: Channels of the images.
        shortcut: Option A, zeros for new channels; B, projection where the shape changes; C, projection everywhere
            (Section 4.1).
        zero_padding: How option A pads; "append" is the paper's. See `ZeroPadShortcut`.
        zero_gamma: Start the last BatchNorm scale of each branch at 0, so that every block begins as its shortcut
            (Goyal et al. 2017).
        branch_scale: A trained factor behind each branch: "rezero" one number, "layer_scale" one a channel. See
            `scale_branches`.
        stochastic_depth: Rate at which training drops the last branch; the others follow the linear rule
            (Huang et al. 2016).
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
        zero_padding: ZeroPadding = "append",
        zero_gamma: bool = False,
        branch_scale: BranchScale = "none",
        stochastic_depth: float = 0.0,
        drop_per: DropPer = "batch",
        checkpoint_every: int = 0,
    ) -> None:
        make_shortcut = shortcut_maker(shortcut, zero_padding)

        def build(in_channels: int, width: int, stride: int) -> nn.Module:
            return block(in_channels, width, stride, make_shortcut)

        super().__init__(
            stem, widths, depths, build, num_classes=num_classes, in_chans=in_chans, checkpoint_every=checkpoint_every
        )
        if zero_gamma:
            for module in self.modules():
                if isinstance(module, StochasticDepth):
                    nn.init.zeros_(cast(nn.BatchNorm2d, module[-1]).weight)
        scale_branches(self, branch_scale)
        drop_linearly(self, stochastic_depth, drop_per)


def cifar_resnet(blocks_per_stage: int, **options: Any) -> ResNet:
    """The paper's n blocks in each of three stages of 16, 32 and 64 channels: 6n + 2 layers."""
    return ResNet("cifar", (16, 32, 64), (blocks_per_stage,) * 3, BasicBlock, **options)


def cifar_bottleneck_resnet(blocks_per_stage: int, **options: Any) -> ResNet:
    """Three stages of n bottlenecks with 64, 128 and 256 output channels: 9n + 2 layers (He et al. 2016b)."""
    return ResNet("cifar", (16, 32, 64), (blocks_per_stage,) * 3, Bottleneck, **options)


def imagenet_resnet(block: Callable[..., nn.Module], depths: Sequence[int], **options: Any) -> ResNet:
    """Four stages of width 64, 128, 256 and 512 behind the 7x7 stem."""
    return ResNet("imagenet", (64, 128, 256, 512), depths, block, **options)


def bottleneck_resnet(depths: Sequence[int], stride_in: StrideIn, **options: Any) -> ResNet:
    """The ImageNet networks of 50 layers and more, whose blocks are bottlenecks."""
    return imagenet_resnet(partial(Bottleneck, stride_in=stride_in), depths, **options)


@register
def resnet8(**options: Any) -> ResNet:
    """ResNet-8: n = 1, the shallow network of the digits experiment."""
    return cifar_resnet(1, **options)


@register
def resnet14(**options: Any) -> ResNet:
    """ResNet-14: n = 2."""
    return cifar_resnet(2, **options)


@register
def resnet20(**options: Any) -> ResNet:
    """ResNet-20: n = 3, 0.27M parameters, 8.75% error on CIFAR-10 (Table 6)."""
    return cifar_resnet(3, **options)


@register
def resnet26(**options: Any) -> ResNet:
    """ResNet-26: n = 4, the deep network of the digits experiment."""
    return cifar_resnet(4, **options)


@register
def resnet32(**options: Any) -> ResNet:
    """ResNet-32: n = 5, 0.46M parameters, 7.51% error on CIFAR-10 (Table 6)."""
    return cifar_resnet(5, **options)


@register
def resnet44(**options: Any) -> ResNet:
    """ResNet-44: n = 7, 0.66M parameters, 7.17% error on CIFAR-10 (Table 6)."""
    return cifar_resnet(7, **options)


@register
def resnet56(**options: Any) -> ResNet:
    """ResNet-56: n = 9, 0.85M parameters, 6.97% error on CIFAR-10 (Table 6)."""
    return cifar_resnet(9, **options)


@register
def resnet110(**options: Any) -> ResNet:
    """ResNet-110: n = 18, 1.7M parameters, 6.61% mean error of five runs on CIFAR-10 (Table 6)."""
    return cifar_resnet(18, **options)


@register
def resnet1202(**options: Any) -> ResNet:
    """ResNet-1202: n = 200, 19.4M parameters, 7.93% error on CIFAR-10 (Table 6)."""
    return cifar_resnet(200, **options)


@register
def resnet164(shortcut: Shortcut = "B", **options: Any) -> ResNet:
    """ResNet-164 of original bottlenecks: n = 18, 1.7M parameters, 5.93% on CIFAR-10 (He et al. 2016b, Table 2)."""
    return cifar_bottleneck_resnet(18, shortcut=shortcut, **options)


@register
def resnet1001(shortcut: Shortcut = "B", **options: Any) -> ResNet:
    """ResNet-1001 of original bottlenecks: n = 111, 10.3M parameters, 7.61% on CIFAR-10 (He et al. 2016b, Table 3)."""
    return cifar_bottleneck_resnet(111, shortcut=shortcut, **options)


@register
def resnet18(num_classes: int = 1000, shortcut: Shortcut = "B", **options: Any) -> ResNet:
    """ResNet-18: 1.8 GMAC (Table 1); 27.88% top-1 error on ImageNet, 10-crop, with option A (Table 2)."""
    return imagenet_resnet(BasicBlock, (2, 2, 2, 2), num_classes=num_classes, shortcut=shortcut, **options)


@register
def resnet34(num_classes: int = 1000, shortcut: Shortcut = "B", **options: Any) -> ResNet:
    """ResNet-34: 3.6 GMAC (Table 1); 25.03, 24.52 and 24.19% top-1 error with options A, B and C (Table 3)."""
    return imagenet_resnet(BasicBlock, (3, 4, 6, 3), num_classes=num_classes, shortcut=shortcut, **options)


@register
def resnet50(num_classes: int = 1000, shortcut: Shortcut = "B", stride_in: StrideIn = "1x1", **options: Any) -> ResNet:
    """ResNet-50: 3.8 GMAC (Table 1); 22.85% top-1 error on ImageNet, 10-crop (Table 3)."""
    return bottleneck_resnet((3, 4, 6, 3), stride_in, num_classes=num_classes, shortcut=shortcut, **options)


@register
def resnet101(num_classes: int = 1000, shortcut: Shortcut = "B", stride_in: StrideIn = "1x1", **options: Any) -> ResNet:
    """ResNet-101: 7.6 GMAC (Table 1); 21.75% top-1 error on ImageNet, 10-crop (Table 3)."""
    return bottleneck_resnet((3, 4, 23, 3), stride_in, num_classes=num_classes, shortcut=shortcut, **options)


@register
def resnet152(num_classes: int = 1000, shortcut: Shortcut = "B", stride_in: StrideIn = "1x1", **options: Any) -> ResNet:
    """ResNet-152: 11.3 GMAC (Table 1); 21.43% top-1 error on ImageNet, 10-crop (Table 3)."""
    return bottleneck_resnet((3, 8, 36, 3), stride_in, num_classes=num_classes, shortcut=shortcut, **options)
