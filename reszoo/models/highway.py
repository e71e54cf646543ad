"""Highway networks: blocks that learn, unit by unit, how much to transform and how much to carry.

Papers: Srivastava, Greff and Schmidhuber 2015, "Training Very Deep Networks", arXiv:1507.06228 (NeurIPS), and "Highway
Networks", arXiv:1505.00387 (workshop). Equation, table and figure numbers refer to the first. The fully connected
networks are those of Fig. 1; the convolutional ones follow the authors' Caffe code, whose parameter counts are those
that Tables 1 and 2 round.

Convention: T multiplies the branch and C the input, so a negative gate bias carries.

Departures: the gate's bias is not its linear map's (see `Gate`); `highway19` averages over whatever map is left, which
is the published 8x8 pooling at 32x32 and lets other sizes through.

Shapes: N batch, C channels, H height, W width, K classes, D units.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from math import ceil
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from reszoo.errors import ReszooError, check_at_least, check_choice, check_image_shape
from reszoo.layers import Gate
from reszoo.models._registry import register

Carry = Literal["coupled", "free"]
Activation = Literal["relu", "tanh"]

MakeLayer = Callable[..., nn.Linear | nn.Conv2d]
"""(bias) -> a linear map that keeps the shape."""

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}


class HighwayBlock(nn.Module):
    """A gated sum of a branch and the input: y = H(x) T(x) + x C(x); coupled gates set C = 1 - T.

    Args:
        layer: Builds a linear map that keeps the shape, from `bias`.
        activation: Nonlinearity of the branch H.
        gate_bias: Where the bias of the transform gate T starts; negative carries the input.
        carry: "coupled", C = 1 - T; "free", a gate of its own that starts at 1 - T, its bias at -gate_bias.
    """

    def __init__(self, layer: MakeLayer, activation: nn.Module, gate_bias: float, carry: Carry = "coupled") -> None:
        super().__init__()
        check_choice("carry", carry, get_args(Carry))
        self.residual = nn.Sequential(layer(bias=True), activation)
        self.shortcut = nn.Identity()
        self.gate = Gate(layer(bias=False), gate_bias)
        self.carry_gate = Gate(layer(bias=False), -gate_bias) if carry == "free" else None

    def forward(self, x: Tensor) -> Tensor:
        """(N, D, ...) -> the same shape."""
        transform = self.gate(x)
        carry = 1 - transform if self.carry_gate is None else self.carry_gate(x)
        return self.residual(x) * transform + self.shortcut(x) * carry


def linear_block(width: int, activation: Activation, gate_bias: float, carry: Carry) -> HighwayBlock:
    """A fully connected block: 2 width (width + 1) parameters with coupled gates."""
    return HighwayBlock(partial(nn.Linear, width, width), _activation(activation), gate_bias, carry)


def conv_block(width: int, gate_bias: float, carry: Carry) -> HighwayBlock:
    """A block of two 3x3 convolutions side by side, one for H and one for T."""
    return HighwayBlock(partial(nn.Conv2d, width, width, 3, padding=1), nn.ReLU(), gate_bias, carry)


def plain_layer(in_features: int, width: int, activation: Activation) -> nn.Sequential:
    """A fully connected layer and its nonlinearity."""
    return nn.Sequential(nn.Linear(in_features, width), _activation(activation))


def _activation(name: Activation) -> nn.Module:
    check_choice("activation", name, _ACTIVATIONS)
    return _ACTIVATIONS[name]()


class ThinNetwork(nn.Module):
    """The fully connected network of the optimisation study: a plain layer, depth - 1 equal layers, softmax (Fig. 1).

    Args:
        depth: Hidden layers, the first plain one included; at least 1.
        width: Units of each.
        layer: Builds one of the layers behind the first.
        activation: Nonlinearity of the first layer.
        num_classes: Outputs of the head; 0 gives the last hidden layer.
        in_chans: Channels of the images.
        image_size: Height and width of the images, which are flattened.

    Attributes:
        num_features: Units of the last hidden layer.
    """

    def __init__(
        self,
        depth: int,
        width: int,
        layer: Callable[[], nn.Module],
        activation: Activation,
        *,
        num_classes: int = 10,
        in_chans: int = 1,
        image_size: int = 28,
    ) -> None:
        super().__init__()
        for name, value in (("depth", depth), ("width", width), ("in_chans", in_chans), ("image_size", image_size)):
            check_at_least(name, value, 1)
        check_at_least("num_classes", num_classes, 0)
        self.image_shape = (in_chans, image_size, image_size)
        self.num_features = width
        self.stem = plain_layer(in_chans * image_size**2, width, activation)
        self.layers = nn.Sequential(*(layer() for _ in range(depth - 1)))
        self.head = nn.Linear(width, num_classes) if num_classes else nn.Identity()
        xavier_init(self)

    def example_inputs(self, batch_size: int = 2) -> tuple[Tensor, ...]:
        """Random arguments of one forward pass."""
        return (torch.randn(batch_size, *self.image_shape),)

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_chans, image_size, image_size) -> (N, K), or (N, width) without a head."""
        check_image_shape(x.shape, self.image_shape)
        x = self.stem(x.flatten(1))  # (N, width)
        return self.head(self.layers(x))


class HighwayNet(nn.Module):
    """Convolutional highway network: stages of blocks, a neck that ends in a vector, a linear head (Tables 1 and 2).

    Args:
        stages: The stages; each but the first begins by pooling.
        neck: From the last map to (N, num_features).
        num_features: What the neck puts out.
        image_shape: Channels, height and width of the images it was published for.
        fixed_size: Whether the neck takes images of that shape only.
        num_classes: Outputs of the head; 0 gives the neck's output.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        neck: nn.Module,
        num_features: int,
        image_shape: tuple[int, int, int],
        fixed_size: bool,
        num_classes: int,
    ) -> None:
        super().__init__()
        check_at_least("num_classes", num_classes, 0)
        self.image_shape = image_shape
        self.fixed_size = fixed_size
        self.num_features = num_features
        self.stages = nn.Sequential(*stages)
        self.neck = neck
        self.head = nn.Linear(num_features, num_classes) if num_classes else nn.Identity()
        xavier_init(self)

    def example_inputs(self, batch_size: int = 2) -> tuple[Tensor, ...]:
        """Random arguments of one forward pass, of the size the network was built for."""
        return (torch.randn(batch_size, *self.image_shape),)

    def feature_maps(self, x: Tensor) -> list[Tensor]:
        """(N, in_chans, H, W) -> one feature map per stage, the finest first."""
        if self.fixed_size:
            check_image_shape(x.shape, self.image_shape)
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return maps

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_chans, H, W) -> (N, K), or (N, num_features) without a head."""
        x = self.feature_maps(x)[-1]
        return self.head(self.neck(x))


def xavier_init(network: nn.Module) -> None:
    """Draw every weight from Glorot's uniform distribution and zero the biases, but leave those of the gates."""
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


@register
def highway_mlp(
    depth: int = 50,
    width: int = 50,
    gate_bias: float = -2.0,
    carry: Carry = "coupled",
    activation: Activation = "relu",
    num_classes: int = 10,
    in_chans: int = 1,
    image_size: int = 28,
) -> ThinNetwork:
    """Fully connected highway network: 5,100 parameters a layer; depths 10 to 100 trained equally well (Fig. 1).

    At the start the input passes each layer times 1 - sigmoid(gate_bias), 0.88 by default. That share to the power of
    the depth reaches the end, so hundreds of layers want a lower bias: the study searched -1 to -10, and -log(depth) or
    below keeps a third.

    Args:
        depth: Hidden layers: a plain one and depth - 1 highway layers.
        width: Units of each layer.
        gate_bias: Where the transform gates' biases start; negative carries. -2 is that of the
            50-layer network the paper looks into.
        carry: "coupled", C = 1 - T, as published; "free", a carry gate of its own.
        activation: "relu" or "tanh".
        num_classes: Outputs of the head; 0 gives the last hidden layer.
        in_chans: Channels of the images.
        image_size: Height and width of the images, which are flattened.
    """
    layer = partial(linear_block, width, activation, gate_bias, carry)
    return ThinNetwork(
        depth, width, layer, activation, num_classes=num_classes, in_chans=in_chans, image_size=image_size
    )


@register
def plain_mlp(
    depth: int = 50,
    width: int = 71,
    activation: Activation = "relu",
    num_classes: int = 10,
    in_chans: int = 1,
    image_size: int = 28,
) -> ThinNetwork:
    """The plain twin of `highway_mlp`: 5,112 parameters a layer; it degrades as it gets deeper (Fig. 1).

    Args:
        depth: Hidden layers.
        width: Units of each layer; 71 brings a layer's parameters near those of 50 gated units.
        activation: "relu" or "tanh".
        num_classes: Outputs of the head; 0 gives the last hidden layer.
        in_chans: Channels of the images.
        image_size: Height and width of the images, which are flattened.
    """
    layer = partial(plain_layer, width, width, activation)
    return ThinNetwork(
        depth, width, layer, activation, num_classes=num_classes, in_chans=in_chans, image_size=image_size
    )


@register
def highway10(
    width: int = 32,
    gate_bias: float = -1.0,
    carry: Carry = "coupled",
    num_classes: int = 10,
    in_chans: int = 1,
    image_size: int = 28,
) -> HighwayNet:
    """Highway-10: 151,690 parameters, 99.55% accuracy on MNIST; 38,986 and 99.43% at width 16 (Table 1).

    Args:
        width: Channels of every layer.
        gate_bias: Where the transform gates' biases start; negative carries.
        carry: "coupled", C = 1 - T, as published; "free", a carry gate of its own.
        num_classes: Outputs of the head; 0 gives the flattened last map.
        in_chans: Channels of the images.
        image_size: Height and width of the images, at least 8: below that the poolings leave nothing.
    """
    for name, value, least in (("width", width, 1), ("in_chans", in_chans, 1), ("image_size", image_size, 8)):
        check_at_least(name, value, least)

    def blocks(count: int) -> list[HighwayBlock]:
        return [conv_block(width, gate_bias, carry) for _ in range(count)]

    # Caffe rounds the size of a pooled map up; rounded down, the counts would not be the published ones.
    stages = [
        nn.Sequential(nn.Dropout(0.2), nn.Conv2d(in_chans, width, 5), nn.ReLU(), *blocks(2)),
        nn.Sequential(nn.MaxPool2d(3, 2, ceil_mode=True), nn.Dropout(0.3), *blocks(3)),
        nn.Sequential(nn.MaxPool2d(3, 2, ceil_mode=True), nn.Dropout(0.4), *blocks(3)),
    ]
    neck = nn.Sequential(nn.MaxPool2d(2, 2, ceil_mode=True), nn.Dropout(0.5), nn.Flatten())
    side = image_size - 4  # 24 at 28x28: the first convolution has no padding
    for window in (3, 3, 2):
        side = ceil((side - window) / 2) + 1  # 12, 6, 3
    return HighwayNet(stages, neck, width * side**2, (in_chans, image_size, image_size), True, num_classes)


@register
def highway19(
    widths: Sequence[int] = (32, 80, 128),
    gate_bias: float = -2.0,
    carry: Carry = "coupled",
    num_classes: int = 10,
    in_chans: int = 3,
) -> HighwayNet:
    """Highway-19: 2.3M parameters, 92.46% accuracy on CIFAR-10, the shape of FitNet B (Table 2).

    With augmentation 92.40% on CIFAR-10 and 67.76% on CIFAR-100 (Table 3). Takes images of any size.

    Args:
        widths: Channels of the three stages.
        gate_bias: Where the transform gates' biases start; negative carries.
        carry: "coupled", C = 1 - T, as published; "free", a carry gate of its own.
        num_classes: Outputs of the head; 0 gives the 100 pooled features.
        in_chans: Channels of the images.
    """
    if len(widths) != 3:
        raise ReszooError(f"widths must name the channels of three stages, got {list(widths)}")
    for name, value in (("in_chans", in_chans), ("widths", min(widths))):
        check_at_least(name, value, 1)
    stages: list[nn.Module] = []
    for (before, width), count in zip(pairwise((in_chans, *widths)), (4, 5, 5), strict=True):
        pool = [nn.MaxPool2d(2, 2, ceil_mode=True)] if stages else []
        conv = (nn.Conv2d(before, width, 3, padding=1), nn.ReLU())
        blocks = (conv_block(width, gate_bias, carry) for _ in range(count))
        stages.append(nn.Sequential(*pool, nn.Dropout(0.2), *conv, *blocks))
    neck = nn.Sequential(
        nn.Conv2d(widths[-1], 100, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2)
    )
    return HighwayNet(stages, neck, 100, (in_chans, 32, 32), False, num_classes)
