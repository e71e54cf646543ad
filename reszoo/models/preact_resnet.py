"""ResNet v2: residual blocks that normalise and activate before each convolution, so that the shortcut stays clean.

Paper: He et al. 2016, "Identity Mappings in Deep Residual Networks", arXiv:1603.05027. The block is Fig. 1(b) and
Fig. 4(e), the networks those of Tables 3 to 5 and of the appendix; where the text is silent, the authors' released code
decides. Table and figure numbers refer to this paper. Its comparisons, Tables 1 and 2, are in `identity_mappings`.

The activation right after the stem's convolution is the first block's, taken before the paths split. Where a block
changes the shape, both its paths take the activated input. BatchNorm and ReLU close the last stage.

Departures, each an option: `stride_in="3x3"`, `branch_scale`, `stochastic_depth` and the zero paddings other than the
paper's; see `resnet`.

Shapes: N batch, C channels, H height, W width, K classes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args

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
from reszoo.models.resnet import StrideIn


class PreActBasicBlock(nn.Module):
    """Two pre-activated 3x3 convolutions added to a shortcut: y = F(x) + shortcut(x), Fig. 4(e).

    Args:
        in_channels: Channels of the input.
        width: Channels of both convolutions and of the output.
        stride: Stride of the first convolution and of the shortcut.
        shortcut: Builds the shortcut from (in_channels, out_channels, stride).
        activated: Whether the input comes activated, as the first block's does.
    """

    def __init__(
        self, in_channels: int, width: int, stride: int, shortcut: MakeShortcut, activated: bool = False
    ) -> None:
        super().__init__()
        self.out_channels = width
        self.shortcut = shortcut(in_channels, width, stride)
        self.activation, first = split_activation(in_channels, self.shortcut, activated)
        self.residual = StochasticDepth(*first, *preact_basic_branch(in_channels, width, stride))

    def forward(self, x: Tensor) -> Tensor:
        """(N, C_in, H, W) -> (N, width, H / stride, W / stride)."""
        x = self.activation(x)
        return self.residual(x) + self.shortcut(x)


class PreActBottleneck(nn.Module):
    """Pre-activated 1x1, 3x3 and 1x1 convolutions added to a shortcut: y = F(x) + shortcut(x), Fig. 4(e).

    Args:
        in_channels: Channels of the input.
        width: Channels of the 3x3 convolution; the output has four times as many.
        stride: Stride of the block.
        shortcut: Builds the shortcut from (in_channels, out_channels, stride).
        activated: Whether the input comes activated, as the first block's does.
        stride_in: The convolution that carries the stride: "1x1" is that of the released code.
    """

    def __init__(
        self,
        in_channels: int,
        width: int,
        stride: int,
        shortcut: MakeShortcut,
        activated: bool = False,
        stride_in: StrideIn = "1x1",
    ) -> None:
        super().__init__()
        check_choice("stride_in", stride_in, get_args(StrideIn))
        self.out_channels = 4 * width
        self.shortcut = shortcut(in_channels, 4 * width, stride)
        self.activation, first = split_activation(in_channels, self.shortcut, activated)
        self.residual = StochasticDepth(*first, *preact_bottleneck_branch(in_channels, width, stride, stride_in))

    def forward(self, x: Tensor) -> Tensor:
        """(N, C_in, H, W) -> (N, 4 * width, H / stride, W / stride)."""
        x = self.activation(x)
        return self.residual(x) + self.shortcut(x)


def split_activation(channels: int, shortcut: nn.Module, activated: bool) -> tuple[nn.Module, nn.Sequential]:
    """A block's first BatchNorm and ReLU: before the paths split, unless the shortcut is the identity.

    Returns:
        What both paths take, and what the branch alone begins with.
    """
    if activated:
        return nn.Identity(), nn.Sequential()
    if isinstance(shortcut, nn.Identity):
        return nn.Identity(), batch_norm_relu(channels)
    return batch_norm_relu(channels), nn.Sequential()


def batch_norm_relu(channels: int) -> nn.Sequential:
    """The pre-activation."""
    return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU())


def preact_basic_branch(in_channels: int, width: int, stride: int) -> nn.Sequential:
    """The two layers of Fig. 4(e) behind the first activation."""
    return nn.Sequential(
        nn.Conv2d(in_channels, width, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1, bias=False),
    )


def preact_bottleneck_branch(in_channels: int, width: int, stride: int, stride_in: StrideIn) -> nn.Sequential:
    """The three layers of a pre-activated bottleneck behind the first activation."""
    first, second = (stride, 1) if stride_in == "1x1" else (1, stride)
    return nn.Sequential(
        nn.Conv2d(in_channels, width, 1, first, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, second, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 4 * width, 1, bias=False),
    )


class PreActResNet(StagedNetwork):
    """Pre-activation network: a stem, stages of blocks, a last BatchNorm and ReLU, pooling and head.

    Args:
        stem: "cifar" or "imagenet".
        widths: Width of each stage.
        depths: Number of blocks of each stage.
        block: Builds one block from its input channels, width, stride, shortcut and whether its input is activated.
        stem_width: Channels of the stem; None for the first stage's width.
        num_classes: Outputs of the head; 0 gives the pooled features.
        in_chans: Channels of the images.
        shortcut: Option A, zeros for new channels; B, projection where the shape changes; C, projection everywhere. A
            projection carries no BatchNorm here.
        zero_padding: How option A pads; "append" is the paper's. See `ZeroPadShortcut`.
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
        block: Callable[[int, int, int, MakeShortcut, bool], nn.Module],
        stem_width: int | None = None,
        *,
        num_classes: int = 10,
        in_chans: int = 3,
        shortcut: Shortcut = "A",
        zero_padding: ZeroPadding = "append",
        branch_scale: BranchScale = "none",
        stochastic_depth: float = 0.0,
        drop_per: DropPer = "batch",
        checkpoint_every: int = 0,
    ) -> None:
        make_shortcut = shortcut_maker(shortcut, zero_padding, norm=False)
        activated = iter([True])  # the first block's input; every later one activates its own

        def build(in_channels: int, width: int, stride: int) -> nn.Module:
            return block(in_channels, width, stride, make_shortcut, next(activated, False))

        super().__init__(
            stem,
            widths,
            depths,
            build,
            stem_width,
            num_classes=num_classes,
            in_chans=in_chans,
            checkpoint_every=checkpoint_every,
        )
        self.final = batch_norm_relu(self.num_features)
        scale_branches(self, branch_scale)
        drop_linearly(self, stochastic_depth, drop_per)


def cifar_preact_resnet(blocks_per_stage: int, **options: Any) -> PreActResNet:
    """N basic blocks in each of three stages of 16, 32 and 64 channels: 6n + 2 layers."""
    return PreActResNet("cifar", (16, 32, 64), (blocks_per_stage,) * 3, PreActBasicBlock, **options)


def cifar_preact_bottleneck_resnet(blocks_per_stage: int, **options: Any) -> PreActResNet:
    """Three stages of n bottlenecks with 64, 128 and 256 output channels: 9n + 2 layers."""
    return PreActResNet("cifar", (16, 32, 64), (blocks_per_stage,) * 3, PreActBottleneck, **options)


def imagenet_preact_resnet(block: Callable[..., nn.Module], depths: Sequence[int], **options: Any) -> PreActResNet:
    """Four stages of width 64, 128, 256 and 512 behind the 7x7 stem."""
    return PreActResNet("imagenet", (64, 128, 256, 512), depths, block, **options)


def preact_bottleneck_resnet(depths: Sequence[int], stride_in: StrideIn, **options: Any) -> PreActResNet:
    """The ImageNet networks of 50 layers and more, whose blocks are bottlenecks."""
    return imagenet_preact_resnet(partial(PreActBottleneck, stride_in=stride_in), depths, **options)


@register
def preact_resnet8(**options: Any) -> PreActResNet:
    """Pre-activation ResNet-8: n = 1, the sibling of ResNet-8."""
    return cifar_preact_resnet(1, **options)


@register
def preact_resnet14(**options: Any) -> PreActResNet:
    """Pre-activation ResNet-14: n = 2."""
    return cifar_preact_resnet(2, **options)


@register
def preact_resnet20(**options: Any) -> PreActResNet:
    """Pre-activation ResNet-20: n = 3, 0.27M parameters."""
    return cifar_preact_resnet(3, **options)


@register
def preact_resnet26(**options: Any) -> PreActResNet:
    """Pre-activation ResNet-26: n = 4, the sibling of ResNet-26."""
    return cifar_preact_resnet(4, **options)


@register
def preact_resnet32(**options: Any) -> PreActResNet:
    """Pre-activation ResNet-32: n = 5, 0.46M parameters."""
    return cifar_preact_resnet(5, **options)


@register
def preact_resnet44(**options: Any) -> PreActResNet:
    """Pre-activation ResNet-44: n = 7, 0.66M parameters."""
    return cifar_preact_resnet(7, **options)


@register
def preact_resnet56(**options: Any) -> PreActResNet:
    """Pre-activation ResNet-56: n = 9, 0.85M parameters."""
    return cifar_preact_resnet(9, **options)


@register
def preact_resnet110(**options: Any) -> PreActResNet:
    """Pre-activation ResNet-110: n = 18, 1.7M parameters, 6.37% error on CIFAR-10 (Tables 2 and 3)."""
    return cifar_preact_resnet(18, **options)


@register
def preact_resnet164(shortcut: Shortcut = "B", **options: Any) -> PreActResNet:
    """Pre-activation ResNet-164: n = 18, 1.7M parameters, 5.46% error on CIFAR-10, 24.33% on CIFAR-100 (Table 3)."""
    return cifar_preact_bottleneck_resnet(18, shortcut=shortcut, **options)


@register
def preact_resnet1001(shortcut: Shortcut = "B", **options: Any) -> PreActResNet:
    """Pre-activation ResNet-1001: n = 111, 10.2M parameters, 4.92% error on CIFAR-10, 22.71% on CIFAR-100 (Table 3)."""
    return cifar_preact_bottleneck_resnet(111, shortcut=shortcut, **options)


@register
def preact_resnet18(num_classes: int = 1000, shortcut: Shortcut = "B", **options: Any) -> PreActResNet:
    """Pre-activation ResNet-18, the sibling of ResNet-18."""
    return imagenet_preact_resnet(PreActBasicBlock, (2, 2, 2, 2), num_classes=num_classes, shortcut=shortcut, **options)


@register
def preact_resnet34(num_classes: int = 1000, shortcut: Shortcut = "B", **options: Any) -> PreActResNet:
    """Pre-activation ResNet-34, the sibling of ResNet-34."""
    return imagenet_preact_resnet(PreActBasicBlock, (3, 4, 6, 3), num_classes=num_classes, shortcut=shortcut, **options)


@register
def preact_resnet50(
    num_classes: int = 1000, shortcut: Shortcut = "B", stride_in: StrideIn = "1x1", **options: Any
) -> PreActResNet:
    """Pre-activation ResNet-50, the sibling of ResNet-50."""
    return preact_bottleneck_resnet((3, 4, 6, 3), stride_in, num_classes=num_classes, shortcut=shortcut, **options)


@register
def preact_resnet101(
    num_classes: int = 1000, shortcut: Shortcut = "B", stride_in: StrideIn = "1x1", **options: Any
) -> PreActResNet:
    """Pre-activation ResNet-101, the sibling of ResNet-101."""
    return preact_bottleneck_resnet((3, 4, 23, 3), stride_in, num_classes=num_classes, shortcut=shortcut, **options)


@register
def preact_resnet152(
    num_classes: int = 1000, shortcut: Shortcut = "B", stride_in: StrideIn = "1x1", **options: Any
) -> PreActResNet:
    """Pre-activation ResNet-152: 21.1% top-1 error on ImageNet, tested at 320 pixels (Table 5)."""
    return preact_bottleneck_resnet((3, 8, 36, 3), stride_in, num_classes=num_classes, shortcut=shortcut, **options)


@register
def preact_resnet200(
    num_classes: int = 1000, shortcut: Shortcut = "B", stride_in: StrideIn = "1x1", **options: Any
) -> PreActResNet:
    """Pre-activation ResNet-200: 20.7% top-1 error on ImageNet, tested at 320 pixels (Table 5)."""
    return preact_bottleneck_resnet((3, 24, 36, 3), stride_in, num_classes=num_classes, shortcut=shortcut, **options)
