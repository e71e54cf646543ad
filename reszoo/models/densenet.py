"""DenseNet: every layer reads the features of all layers before it, and appends its own.

Paper: Huang et al. 2017, "Densely Connected Convolutional Networks", arXiv:1608.06993, Section 3. The CIFAR networks
are the rows of Table 2, the ImageNet networks the columns of Table 1; table numbers refer to this paper.

Departures, each an option: `stem_width="code"` (the authors' Torch code opens with 2k channels in every variant) and
`memory`, which trains the same function in less memory (see `_dense_memory`). As in the authors' code a transition has
a ReLU between its BatchNorm and its convolution.

Shapes: N batch, C channels, k growth rate, H height, W width, K classes.
"""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reszoo.errors import ReszooError, check_at_least, check_choice
from reszoo.layers import he_init, recompute
from reszoo.models._dense_memory import can_recompute, dense_features, steps_of
from reszoo.models._registry import register
from reszoo.models._staged import Stem, imagenet_stem

Memory = Literal["plain", "shared", "lean"]
StemWidth = Literal["paper", "code"]


class DenseLayer(nn.Module):
    """Features joined by k new ones computed from all of them: y = [x, H(x)], Eq. 2.

    Args:
        in_channels: Channels of the input.
        growth_rate: The paper's k, the channels that the layer adds.
        bottleneck: Reduce the input to 4k channels by a 1x1 convolution first (DenseNet-B).
        dropout: Rate of the dropout after each convolution.
    """

    def __init__(self, in_channels: int, growth_rate: int, bottleneck: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.out_channels = in_channels + growth_rate
        if bottleneck:
            self.residual = nn.Sequential(
                *composite(in_channels, 4 * growth_rate, 1, dropout),
                *composite(4 * growth_rate, growth_rate, 3, dropout),
            )
        else:
            self.residual = nn.Sequential(*composite(in_channels, growth_rate, 3, dropout))
        self.shortcut = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C + k, H, W)."""
        return torch.cat((self.shortcut(x), self.residual(x)), 1)


class DenseBlock(nn.Sequential):
    """Layers that all see the same resolution and each see every earlier feature (Fig. 1).

    Args:
        in_channels: Channels of the input.
        depth: Number of layers.
        growth_rate: Channels that each layer adds.
        bottleneck: See `DenseLayer`.
        dropout: See `DenseLayer`.
        memory: See `DenseNet`.
    """

    def __init__(
        self,
        in_channels: int,
        depth: int,
        growth_rate: int,
        bottleneck: bool,
        dropout: float = 0.0,
        memory: Memory = "plain",
    ) -> None:
        widths = (in_channels + number * growth_rate for number in range(depth))
        super().__init__(*(DenseLayer(width, growth_rate, bottleneck, dropout) for width in widths))
        self.out_channels = in_channels + depth * growth_rate
        self.memory = memory

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C + depth * k, H, W)."""
        if self.memory != "plain" and can_recompute(self, x):
            layers = steps_of([layer.residual for layer in self if type(layer) is DenseLayer], x.shape[1])
            if layers is not None and len(layers) == len(self):
                return dense_features(x, layers, keep_bottleneck=self.memory == "shared")
        return super().forward(x)


class Transition(nn.Sequential):
    """BatchNorm, ReLU, 1x1 convolution and 2x2 average pooling between two blocks (Section 3, pooling layers).

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        dropout: Rate of the dropout after the convolution.
        memory: See `DenseNet`.
    """

    def __init__(self, in_channels: int, out_channels: int, dropout: float = 0.0, memory: Memory = "plain") -> None:
        super().__init__(*composite(in_channels, out_channels, 1, dropout), Halve())
        self.memory = memory

    def forward(self, x: Tensor) -> Tensor:
        """(N, C_in, H, W) -> (N, C_out, H / 2, W / 2)."""
        if self.memory == "lean" and can_recompute(self, x):
            return recompute(list(self), x)
        return super().forward(x)


class Halve(nn.Module):
    """Average pooling over 2x2 pixels; a side of one pixel, found only in images far below 32x32, stays as it is."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C, floor(H / 2), floor(W / 2))."""
        height, width = x.shape[2:]
        return F.avg_pool2d(x, (min(2, height), min(2, width)))


class DenseStem(nn.Sequential):
    """The first convolution; on CIFAR its BatchNorm and ReLU are those of the first layer.

    Args:
        stem: See `DenseNet`.
        in_chans: Channels of the images.
        width: Channels of the output.
        memory: See `DenseNet`.
    """

    def __init__(self, stem: Stem, in_chans: int, width: int, memory: Memory = "plain") -> None:
        if stem == "imagenet":
            super().__init__(*imagenet_stem(in_chans, width, nn.BatchNorm2d(width)))
        else:
            super().__init__(nn.Conv2d(in_chans, width, 3, padding=1, bias=False))
        self.memory = memory

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_chans, H, W) -> (N, width, H, W), or a quarter of the resolution on ImageNet."""
        if self.memory == "lean" and len(self) > 1 and can_recompute(self, x):
            first, *rest = self
            return recompute(rest, first(x))
        return super().forward(x)


def composite(in_channels: int, out_channels: int, kernel_size: int, dropout: float) -> list[nn.Module]:
    """The composite function of Section 3, BatchNorm, ReLU, convolution, with the dropout of Section 4.2 behind it."""
    layers: list[nn.Module] = [
        nn.BatchNorm2d(in_channels),
        nn.ReLU(),
        nn.Conv2d(in_channels, out_channels, kernel_size, padding=kernel_size // 2, bias=False),
    ]
    return [*layers, nn.Dropout(dropout)] if dropout else layers


class DenseNet(nn.Module):
    """Dense blocks joined by transitions, between a stem and a linear head (Section 3 and Table 1).

    Args:
        stem: "cifar", a 3x3 convolution, or "imagenet", 7x7 with stride 2, BatchNorm, ReLU and max pooling.
        growth_rate: The paper's k, at least 1.
        depths: Number of layers of each block, each at least 1.
        bottleneck: DenseNet-B: a 1x1 convolution to 4k channels before each 3x3 one.
        compression: The paper's theta, above 0 and at most 1: a transition keeps floor(theta * C) of C channels; below
            1 it is DenseNet-C.
        num_classes: Outputs of the head; 0 gives the pooled features.
        in_chans: Channels of the images, at least 1.
        stem_width: "paper", 16 channels in the CIFAR networks and 2k in DenseNet-BC; "code", 2k everywhere.
        dropout: Rate of the dropout after every convolution but the first, at least 0 and below 1; the paper takes 0.2
            on data without augmentation.
        memory: How training keeps a block's features. "plain" concatenates and keeps every normalised copy, quadratic
            in depth; "shared" keeps one buffer and the bottlenecks, and recomputes the rest; "lean"
            recomputes bottlenecks, stem and transitions too. Outputs, gradients, running statistics and state are the
            same. Only first derivatives exist outside "plain"; in evaluation, under a hook, a compiler or a changed
            layer, all three are "plain".

    Attributes:
        num_features: Channels that the head reads.
        stage_channels: Channels of each feature map.
    """

    def __init__(
        self,
        stem: Stem,
        growth_rate: int,
        depths: Sequence[int],
        bottleneck: bool,
        compression: float,
        *,
        num_classes: int = 10,
        in_chans: int = 3,
        stem_width: StemWidth = "paper",
        dropout: float = 0.0,
        memory: Memory = "plain",
    ) -> None:
        super().__init__()
        check_choice("stem", stem, get_args(Stem))
        check_choice("stem_width", stem_width, get_args(StemWidth))
        check_choice("memory", memory, get_args(Memory))
        check_at_least("growth_rate", growth_rate, 1)
        check_at_least("in_chans", in_chans, 1)
        check_at_least("num_classes", num_classes, 0)
        if not 0 < compression <= 1:
            raise ReszooError(f"compression must be above 0 and at most 1, got {compression}")
        if not 0 <= dropout < 1:
            raise ReszooError(f"dropout must be at least 0 and below 1, got {dropout}")
        narrow = stem == "cifar" and stem_width == "paper" and not (bottleneck and compression < 1)
        channels = 16 if narrow else 2 * growth_rate
        self.stem = DenseStem(stem, in_chans, channels, memory)
        self.stages = nn.Sequential()
        self.stage_channels: list[int] = []
        for index, depth in enumerate(depths):
            check_at_least("layers per block", depth, 1)
            stage = nn.Sequential()
            if index > 0:
                kept = int(compression * channels)
                stage.append(Transition(channels, kept, dropout, memory))
                channels = kept
            block = DenseBlock(channels, depth, growth_rate, bottleneck, dropout, memory)
            self.stages.append(stage.append(block))
            channels = block.out_channels
            self.stage_channels.append(channels)
        self.norm = nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU())
        self.head = nn.Linear(channels, num_classes) if num_classes else nn.Identity()
        self.num_features = channels
        self.image_size = 32 if stem == "cifar" else 224
        self.in_chans = in_chans
        self.memory = memory
        he_init(self)

    def example_inputs(self, batch_size: int = 2) -> tuple[Tensor, ...]:
        """Random arguments of one forward pass, of the size the network was published for."""
        return (torch.randn(batch_size, self.in_chans, self.image_size, self.image_size),)

    def feature_maps(self, x: Tensor) -> list[Tensor]:
        """(N, in_chans, H, W) -> one feature map per block, the finest first; the last is normalised for the head."""
        maps = []
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return [*maps[:-1], self.norm(x)]

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_chans, H, W) -> (N, K), or the pooled (N, num_features) without a head."""
        x = self.norm(self.stages(self.stem(x)))  # (N, num_features, h, w)
        x = x.mean((2, 3))  # (N, num_features)
        return self.head(x)


def cifar_densenet(depth: int, growth_rate: int, bottleneck: bool, compression: float, **options: Any) -> DenseNet:
    """Three blocks of (L - 4) / 3 layers for the paper's depth L, half as many with bottlenecks (Section 4.2).

    Raises:
        ReszooError: No number of layers gives this depth.
    """
    convolutions = 6 if bottleneck else 3
    if depth < 4 + convolutions or (depth - 4) % convolutions:
        raise ReszooError(
            f"depth must be 4 plus a multiple of {convolutions} when bottleneck={bottleneck}, got {depth}"
        )
    return DenseNet("cifar", growth_rate, ((depth - 4) // convolutions,) * 3, bottleneck, compression, **options)


def imagenet_densenet(growth_rate: int, depths: Sequence[int], **options: Any) -> DenseNet:
    """Four blocks of DenseNet-BC behind the 7x7 stem (Table 1)."""
    return DenseNet("imagenet", growth_rate, depths, bottleneck=True, compression=0.5, **options)


@register
def densenet40_k12(bottleneck: bool = False, compression: float = 1.0, **options: Any) -> DenseNet:
    """DenseNet-40, k = 12: 1.0M parameters, 7.00% error on CIFAR-10, 5.24% with augmentation (Table 2)."""
    return cifar_densenet(40, 12, bottleneck, compression, **options)


@register
def densenet100_k12(bottleneck: bool = False, compression: float = 1.0, **options: Any) -> DenseNet:
    """DenseNet-100, k = 12: 7.0M parameters, 5.77% error on CIFAR-10, 4.10% with augmentation (Table 2)."""
    return cifar_densenet(100, 12, bottleneck, compression, **options)


@register
def densenet100_k24(bottleneck: bool = False, compression: float = 1.0, **options: Any) -> DenseNet:
    """DenseNet-100, k = 24: 27.2M parameters, 5.83% error on CIFAR-10, 3.74% with augmentation (Table 2)."""
    return cifar_densenet(100, 24, bottleneck, compression, **options)


@register
def densenet_bc22_k12(**options: Any) -> DenseNet:
    """DenseNet-BC-22, k = 12: three layers a block, for images as small as the 8x8 digits."""
    return cifar_densenet(22, 12, bottleneck=True, compression=0.5, **options)


@register
def densenet_bc100_k12(**options: Any) -> DenseNet:
    """DenseNet-BC-100, k = 12: 0.8M parameters, 5.92% error on CIFAR-10, 4.51% with augmentation (Table 2)."""
    return cifar_densenet(100, 12, bottleneck=True, compression=0.5, **options)


@register
def densenet_bc250_k24(**options: Any) -> DenseNet:
    """DenseNet-BC-250, k = 24: 15.3M parameters, 5.19% error on CIFAR-10, 3.62% with augmentation (Table 2)."""
    return cifar_densenet(250, 24, bottleneck=True, compression=0.5, **options)


@register
def densenet_bc190_k40(**options: Any) -> DenseNet:
    """DenseNet-BC-190, k = 40: 25.6M parameters, 3.46% error on CIFAR-10 with augmentation (Table 2)."""
    return cifar_densenet(190, 40, bottleneck=True, compression=0.5, **options)


@register
def densenet121(num_classes: int = 1000, **options: Any) -> DenseNet:
    """DenseNet-121, k = 32: 8.0M parameters, 25.02% top-1 error on ImageNet, 23.61% 10-crop (Table 3)."""
    return imagenet_densenet(32, (6, 12, 24, 16), num_classes=num_classes, **options)


@register
def densenet161(num_classes: int = 1000, **options: Any) -> DenseNet:
    """DenseNet-161, k = 48: 28.7M parameters, 22.2% top-1 error on ImageNet (the authors' repository)."""
    return imagenet_densenet(48, (6, 12, 36, 24), num_classes=num_classes, **options)


@register
def densenet169(num_classes: int = 1000, **options: Any) -> DenseNet:
    """DenseNet-169, k = 32: 14.1M parameters, 23.80% top-1 error on ImageNet, 22.08% 10-crop (Table 3)."""
    return imagenet_densenet(32, (6, 12, 32, 32), num_classes=num_classes, **options)


@register
def densenet201(num_classes: int = 1000, **options: Any) -> DenseNet:
    """DenseNet-201, k = 32: 20.0M parameters, 22.58% top-1 error on ImageNet, 21.46% 10-crop (Table 3)."""
    return imagenet_densenet(32, (6, 12, 48, 32), num_classes=num_classes, **options)


@register
def densenet264(num_classes: int = 1000, **options: Any) -> DenseNet:
    """DenseNet-264, k = 32: 33.3M parameters, 22.15% top-1 error on ImageNet, 20.80% 10-crop (Table 3)."""
    return imagenet_densenet(32, (6, 12, 64, 48), num_classes=num_classes, **options)
