"""The frame that the staged convolutional families share: stem, stages, global average pooling, linear head.

Paper: He et al. 2015, "Deep Residual Learning for Image Recognition", arXiv:1512.03385, Table 1 and Section 4.2.

Shapes: N batch, C channels, H height, W width, K classes.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from reszoo.errors import check_at_least, check_choice
from reszoo.layers import he_init, run_in_segments

Stem = Literal["cifar", "imagenet"]

BuildBlock = Callable[[int, int, int], Any]
"""(in_channels, width, stride) -> a block, a module with an `out_channels` attribute."""


class StagedNetwork(nn.Module):
    """Stages of blocks between a stem and a linear head.

    Args:
        stem: "cifar", a 3x3 convolution to the first width, or "imagenet", 7x7 with stride 2 and max pooling.
        widths: Width of each stage; every stage but the first halves the resolution.
        depths: Number of blocks of each stage, each at least 1.
        block: Builds one block.
        stem_width: Channels of the stem; None for the first stage's width.
        norm: Builds what follows the stem's convolution from its channels.
        num_classes: Outputs of the head; 0 gives the pooled features.
        in_chans: Channels of the images, at least 1.
        checkpoint_every: Blocks whose inner results are computed again in the backward pass instead of being kept; 0
            keeps everything. See `run_in_segments` for the number that needs the least memory.

    Attributes:
        final: What follows the last stage, nothing here; pre-activation networks close with BatchNorm and ReLU.
        num_features: Channels of the last stage.
        stage_channels: Channels of each stage's feature map.
    """

    def __init__(
        self,
        stem: Stem,
        widths: Sequence[int],
        depths: Sequence[int],
        block: BuildBlock,
        stem_width: int | None = None,
        norm: Callable[[int], nn.Module] = nn.BatchNorm2d,
        *,
        num_classes: int = 10,
        in_chans: int = 3,
        checkpoint_every: int = 0,
    ) -> None:
        super().__init__()
        check_choice("stem", stem, get_args(Stem))
        check_at_least("in_chans", in_chans, 1)
        check_at_least("num_classes", num_classes, 0)
        check_at_least("checkpoint_every", checkpoint_every, 0)
        channels = widths[0] if stem_width is None else stem_width
        build_stem = cifar_stem if stem == "cifar" else imagenet_stem
        self.stem = build_stem(in_chans, channels, norm(channels))
        self.stages = nn.Sequential()
        self.stage_channels: list[int] = []
        for index, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            check_at_least("blocks per stage", depth, 1)
            stage = nn.Sequential()
            for number in range(depth):
                added = block(channels, width, 2 if index > 0 and number == 0 else 1)
                stage.append(added)
                channels = added.out_channels
            self.stages.append(stage)
            self.stage_channels.append(channels)
        self.final: nn.Module = nn.Identity()
        self.num_features = channels
        self.head = nn.Linear(channels, num_classes) if num_classes else nn.Identity()
        self.image_size = 32 if stem == "cifar" else 224
        self.in_chans = in_chans
        self.checkpoint_every = checkpoint_every
        he_init(self)

    def example_inputs(self, batch_size: int = 2) -> tuple[Tensor, ...]:
        """Random arguments of one forward pass, of the size the network was published for."""
        return (torch.randn(batch_size, self.in_chans, self.image_size, self.image_size),)

    def feature_maps(self, x: Tensor) -> list[Tensor]:
        """(N, in_chans, H, W) -> one feature map per stage, the finest first."""
        maps = []
        x = self.stem(x)
        for stage in self.stages:
            x = run_in_segments(cast(nn.Sequential, stage), x, self.checkpoint_every)
            maps.append(x)
        return [*maps[:-1], self.final(maps[-1])]

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_chans, H, W) -> (N, K), or the pooled (N, num_features) without a head."""
        x = self.stem(x)
        for stage in self.stages:
            x = run_in_segments(cast(nn.Sequential, stage), x, self.checkpoint_every)
        x = self.final(x)  # (N, num_features, h, w)
        x = x.mean((2, 3))  # (N, num_features)
        return self.head(x)


def cifar_stem(in_chans: int, width: int, norm: nn.Module) -> nn.Sequential:
    """A 3x3 convolution at full resolution (Section 4.2)."""
    return nn.Sequential(nn.Conv2d(in_chans, width, 3, padding=1, bias=False), norm, nn.ReLU())


def imagenet_stem(in_chans: int, width: int, norm: nn.Module) -> nn.Sequential:
    """A 7x7 convolution and a max pooling, each of stride 2 (Table 1)."""
    return nn.Sequential(
        nn.Conv2d(in_chans, width, 7, stride=2, padding=3, bias=False),
        norm,
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
    )
