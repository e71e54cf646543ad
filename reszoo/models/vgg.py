"""VGG-like plain networks for CIFAR: the nets without shortcuts that two studies set beside residual ones.

Papers: Li et al. 2018, "Visualizing the Loss Landscape of Neural Nets", arXiv:1712.09913, whose published code defines
VGG-9; Veit, Wilber and Belongie 2016, "Residual Networks Behave Like Ensembles of Relatively Shallow Networks",
arXiv:1605.06431, which deletes the layers of a 15-layer VGG-like network, of unknown widths to us. Our choice for it is
the net that counts 15 by the scheme of Li's code: the 13 convolutions of VGG-16, one hidden layer and the classifier.

A layer is convolution with bias, BatchNorm, ReLU; stages of equal width end in 2x2 max pooling with sizes rounded up.
The hidden layer reads the whole last map, so its size depends on that of the images.

Shapes: N batch, C channels, H height, W width, K classes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from reszoo.errors import ReszooError, check_at_least, check_image_shape
from reszoo.layers import he_init
from reszoo.models._registry import register


def conv_layer(in_channels: int, width: int) -> nn.Sequential:
    """A 3x3 convolution, BatchNorm and ReLU: what a lesion study removes at once, where widths allow."""
    return nn.Sequential(nn.Conv2d(in_channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())


class VGG(nn.Module):
    """Stages of equal convolutions that each end in pooling, one hidden layer, a linear head.

    Args:
        depths: Convolutions of each stage; with the hidden layer and the head they make the network's depth.
        num_classes: Outputs of the head; 0 gives the hidden layer.
        in_chans: Channels of the images.
        image_size: Height and width of the images.
        widths: Channels of each stage; the hidden layer has as many units as the last.

    Attributes:
        num_features: Units of the hidden layer.
    """

    def __init__(
        self,
        depths: Sequence[int],
        widths: Sequence[int],
        *,
        num_classes: int = 10,
        in_chans: int = 3,
        image_size: int = 32,
    ) -> None:
        super().__init__()
        check_at_least("num_classes", num_classes, 0)
        for name, value in (("in_chans", in_chans), ("image_size", image_size), ("widths", min(widths, default=0))):
            check_at_least(name, value, 1)
        if len(widths) != len(depths):
            raise ReszooError(f"widths must name the channels of {len(depths)} stages, got {list(widths)}")
        self.image_shape = (in_chans, image_size, image_size)
        self.num_features = widths[-1]
        self.stages = nn.Sequential()
        channels, side = in_chans, image_size
        for width, depth in zip(widths, depths, strict=True):
            layers = [conv_layer(width if index else channels, width) for index in range(depth)]
            self.stages.append(nn.Sequential(*layers, nn.MaxPool2d(2, ceil_mode=True)))
            channels, side = width, (side + 1) // 2
        self.hidden = nn.Sequential(
            nn.Flatten(), nn.Linear(channels * side**2, channels), nn.BatchNorm1d(channels), nn.ReLU()
        )
        self.head = nn.Linear(channels, num_classes) if num_classes else nn.Identity()
        he_init(self)

    def example_inputs(self, batch_size: int = 2) -> tuple[Tensor, ...]:
        """Random arguments of one forward pass, of the size the network was built for."""
        return (torch.randn(batch_size, *self.image_shape),)

    def feature_maps(self, x: Tensor) -> list[Tensor]:
        """(N, in_chans, image_size, image_size) -> each stage's pooled map, the finest first."""
        check_image_shape(x.shape, self.image_shape)
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return maps

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_chans, image_size, image_size) -> (N, K), or (N, num_features) without a head."""
        x = self.feature_maps(x)[-1]  # (N, C, h, w)
        return self.head(self.hidden(x))


@register
def vgg9(widths: Sequence[int] = (64, 128, 256), **options: Any) -> VGG:
    """VGG-9 of the loss landscapes: 7 convolutions; 6.0% error on CIFAR-10 with batch 128 and weight decay."""
    return VGG((2, 2, 3), widths, **options)


@register
def vgg15(widths: Sequence[int] = (64, 128, 256, 512, 512), **options: Any) -> VGG:
    """A VGG-like network of 15 layers, the kind whose layers Veit et al. delete one by one: 13 convolutions."""
    return VGG((2, 2, 3, 3, 3), widths, **options)
