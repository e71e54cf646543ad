"""The comparisons behind ResNet v2: what may stand on the shortcut, and where normalisation and activation belong.

Paper: He et al. 2016, "Identity Mappings in Deep Residual Networks", arXiv:1603.05027. `mapping` chooses a row of
Table 1 (Fig. 2), `activation` one of Table 2 (Fig. 4); the two combine freely. Table and figure numbers refer to this
paper.

A unit is y = f(F(x) + h(x)), Eq. 1 and 2. Every unit of a network takes the same h, also the two that change the
shape: there h applies to what the plain shortcut gives, so a gate always maps C channels to C. Table 1's 1x1
convolution on all units is `shortcut="C"`. With the defaults the network is that of `resnet`, with
`activation="full_preact"` that of `preact_resnet`. Where the paper is silent (ReLU-only pre-activation), the last unit
is followed by the activation that the next one would have begun with.

Shapes: N batch, C channels, H height, W width, K classes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, get_args

from torch import Tensor, nn

from reszoo.errors import ReszooError, check_choice
from reszoo.layers import Gate, MakeShortcut, Shortcut, shortcut_maker
from reszoo.models._registry import register
from reszoo.models._staged import StagedNetwork, Stem

Activation = Literal["original", "bn_after_add", "relu_before_add", "relu_only_preact", "full_preact"]
Mapping = Literal["identity", "scaled", "exclusive_gate", "shortcut_gate", "dropout"]

MakeConvs = Callable[[int, int, int], list[nn.Conv2d]]
"""(in_channels, width, stride) -> the convolutions of a branch."""


class IdentityUnit(nn.Module):
    """A branch added to a shortcut: y = f(F(x) + x), Fig. 2(a), with one of the activations of Fig. 4.

    Args:
        in_channels: Channels of the input.
        width: Channels of the inner convolutions.
        stride: Stride of the unit.
        shortcut: Builds the shortcut from (in_channels, out_channels, stride).
        convs: Builds the convolutions of the branch.
        activation: Where BatchNorm and ReLU stand.
        activated: Whether the input comes activated, as the first unit's does.
    """

    def __init__(
        self,
        in_channels: int,
        width: int,
        stride: int,
        shortcut: MakeShortcut,
        convs: MakeConvs,
        activation: Activation,
        activated: bool,
    ) -> None:
        super().__init__()
        layers = convs(in_channels, width, stride)
        self.out_channels = layers[-1].out_channels
        self.shortcut = shortcut(in_channels, self.out_channels, stride)
        first, branch, after = place(layers, activation)
        both = not isinstance(self.shortcut, nn.Identity)  # the activation comes before the paths split
        self.before = nn.Sequential(*first if both and not activated else ())
        self.residual = nn.Sequential(*() if both or activated else first, *branch)
        self.after = nn.Sequential(*after)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C_in, H, W) -> (N, C_out, H / stride, W / stride)."""
        x = self.before(x)
        return self.after(self.residual(x) + self.shortcut(x))


class ScaledUnit(IdentityUnit):
    """Both terms weighed by constants: y = f(b F(x) + a x), Fig. 2(b).

    Args:
        scales: The constants of shortcut and branch, a and b.
        unit: Arguments of `IdentityUnit`.
    """

    def __init__(self, *unit: Any, scales: Sequence[float]) -> None:
        super().__init__(*unit)
        self.shortcut_scale, self.residual_scale = scales

    def forward(self, x: Tensor) -> Tensor:
        """(N, C_in, H, W) -> (N, C_out, H / stride, W / stride)."""
        x = self.before(x)
        return self.after(self.residual_scale * self.residual(x) + self.shortcut_scale * self.shortcut(x))


class ExclusiveGateUnit(IdentityUnit):
    """Both terms weighed by a gate: y = f(g(x) F(x) + (1 - g(x)) x), Fig. 2(c), as in Highway networks.

    Args:
        gate_bias: Where the gate's bias starts; negative opens the shortcut.
        unit: Arguments of `IdentityUnit`.
    """

    def __init__(self, *unit: Any, gate_bias: float) -> None:
        super().__init__(*unit)
        self.gate = conv_gate(self.out_channels, gate_bias)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C_in, H, W) -> (N, C_out, H / stride, W / stride)."""
        x = self.before(x)
        h = self.shortcut(x)
        g = self.gate(h)
        return self.after(g * self.residual(x) + (1 - g) * h)


class ShortcutGateUnit(IdentityUnit):
    """The shortcut alone weighed by a gate: y = f(F(x) + (1 - g(x)) x), Fig. 2(d).

    Args:
        gate_bias: Where the gate's bias starts; negative opens the shortcut.
        unit: Arguments of `IdentityUnit`.
    """

    def __init__(self, *unit: Any, gate_bias: float) -> None:
        super().__init__(*unit)
        self.gate = conv_gate(self.out_channels, gate_bias)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C_in, H, W) -> (N, C_out, H / stride, W / stride)."""
        x = self.before(x)
        h = self.shortcut(x)
        return self.after(self.residual(x) + (1 - self.gate(h)) * h)


class DropoutUnit(IdentityUnit):
    """Dropout with ratio 0.5 on the shortcut: y = f(F(x) + dropout(x)), Fig. 2(f)."""

    def __init__(self, *unit: Any) -> None:
        super().__init__(*unit)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C_in, H, W) -> (N, C_out, H / stride, W / stride)."""
        x = self.before(x)
        return self.after(self.residual(x) + self.dropout(self.shortcut(x)))


def conv_gate(channels: int, bias: float) -> Gate:
    """g(x) = sigmoid(W x + b) with a 1x1 convolution (Section 3.1)."""
    return Gate(nn.Conv2d(channels, channels, 1, bias=False), bias)


def basic_convs(in_channels: int, width: int, stride: int) -> list[nn.Conv2d]:
    """Two 3x3 convolutions."""
    return [
        nn.Conv2d(in_channels, width, 3, stride, padding=1, bias=False),
        nn.Conv2d(width, width, 3, padding=1, bias=False),
    ]


def bottleneck_convs(in_channels: int, width: int, stride: int) -> list[nn.Conv2d]:
    """1x1, 3x3 and 1x1 convolutions, the first with the stride."""
    return [
        nn.Conv2d(in_channels, width, 1, stride, bias=False),
        nn.Conv2d(width, width, 3, padding=1, bias=False),
        nn.Conv2d(width, 4 * width, 1, bias=False),
    ]


def place(
    convs: Sequence[nn.Conv2d], activation: Activation
) -> tuple[list[nn.Module], list[nn.Module], list[nn.Module]]:
    """Put BatchNorm and ReLU around the convolutions of a branch as Fig. 4 shows.

    Returns:
        The layers before the first convolution, those from it on, and those behind the sum.
    """
    layers: list[nn.Module] = []
    for conv in convs:
        if activation == "full_preact":
            layers += [nn.BatchNorm2d(conv.in_channels), nn.ReLU(), conv]
        elif activation == "relu_only_preact":
            layers += [nn.ReLU(), conv, nn.BatchNorm2d(conv.out_channels)]
        else:
            layers += [conv, nn.BatchNorm2d(conv.out_channels), nn.ReLU()]
    first = layers.index(convs[0])
    last = len(layers) - {"original": 1, "bn_after_add": 2}.get(activation, 0)
    return layers[:first], layers[first:last], layers[last:]


class MappingResNet(StagedNetwork):
    """Residual network whose units take one row of Table 1 and one of Table 2.

    Args:
        stem: "cifar" or "imagenet".
        widths: Width of each stage.
        depths: Number of units of each stage.
        convs: Builds the convolutions of a branch.
        num_classes: Outputs of the head; 0 gives the pooled features.
        in_chans: Channels of the images.
        shortcut: Option A, B or C of `resnet`, beneath the mapping. C is row (e) of Table 1.
        activation: Row of Table 2, (a) to (e).
        mapping: Row of Table 1: "identity" (a), "scaled" (b), "exclusive_gate" (c), "shortcut_gate" (d), "dropout" (f).
        scales: Constants of shortcut and branch, for "scaled" only; the paper tries (0.5, 0.5), (0.5, 1) and (0, 1).
        gate_bias: Where the gates' bias starts, for the gates only; the paper finds -6 best.
        checkpoint_every: Units a segment whose inner results are computed again in the backward pass; 0 keeps all.
    """

    def __init__(
        self,
        stem: Stem,
        widths: Sequence[int],
        depths: Sequence[int],
        convs: MakeConvs,
        *,
        num_classes: int = 10,
        in_chans: int = 3,
        shortcut: Shortcut = "A",
        activation: Activation = "original",
        mapping: Mapping = "identity",
        scales: Sequence[float] = (0.5, 0.5),
        gate_bias: float = -6.0,
        checkpoint_every: int = 0,
    ) -> None:
        check_choice("activation", activation, get_args(Activation))
        preact = activation in ("relu_only_preact", "full_preact")
        make_shortcut = shortcut_maker(shortcut, norm=not preact)
        unit = unit_of(mapping, scales, gate_bias)
        activated = iter([True])  # the first unit's input; every later one activates its own

        def build(in_channels: int, width: int, stride: int) -> nn.Module:
            return unit(in_channels, width, stride, make_shortcut, convs, activation, next(activated, False))

        super().__init__(
            stem, widths, depths, build, num_classes=num_classes, in_chans=in_chans, checkpoint_every=checkpoint_every
        )
        last = nn.Conv2d(self.num_features, 1, 1)
        self.final = nn.Sequential(*place([last], activation)[0])


def unit_of(mapping: Mapping, scales: Sequence[float], gate_bias: float) -> Callable[..., nn.Module]:
    """The unit of a row of Table 1; a setting that the row would not use is refused.

    Raises:
        ReszooError: The mapping is unknown, or a setting does not belong to it.
    """
    check_choice("mapping", mapping, get_args(Mapping))
    if mapping != "scaled" and tuple(scales) != (0.5, 0.5):
        raise ReszooError(f"scales have no meaning with mapping={mapping!r}; drop them, or use mapping='scaled'")
    if not mapping.endswith("gate") and gate_bias != -6.0:
        raise ReszooError(f"gate_bias has no meaning with mapping={mapping!r}; drop it, or use a gate")
    if mapping == "scaled" and len(scales) != 2:
        raise ReszooError(f"scales must be two numbers, those of shortcut and branch; got {list(scales)}")
    units: dict[str, Callable[..., nn.Module]] = {
        "identity": IdentityUnit,
        "scaled": partial(ScaledUnit, scales=scales),
        "exclusive_gate": partial(ExclusiveGateUnit, gate_bias=gate_bias),
        "shortcut_gate": partial(ShortcutGateUnit, gate_bias=gate_bias),
        "dropout": DropoutUnit,
    }
    return units[mapping]


@register
def mapping_resnet8(**options: Any) -> MappingResNet:
    """ResNet-8 of the comparisons: n = 1."""
    return MappingResNet("cifar", (16, 32, 64), (1, 1, 1), basic_convs, **options)


@register
def mapping_resnet20(**options: Any) -> MappingResNet:
    """ResNet-20 of the comparisons: n = 3."""
    return MappingResNet("cifar", (16, 32, 64), (3, 3, 3), basic_convs, **options)


@register
def mapping_resnet110(**options: Any) -> MappingResNet:
    """ResNet-110 of Tables 1 and 2: 6.61% error on CIFAR-10 as it is, 8.70% with exclusive gates, 6.91% with (d)."""
    return MappingResNet("cifar", (16, 32, 64), (18, 18, 18), basic_convs, **options)


@register
def mapping_resnet164(shortcut: Shortcut = "B", **options: Any) -> MappingResNet:
    """ResNet-164 of Table 2: 5.93, 6.50, 6.14, 5.91 and 5.46% error on CIFAR-10 with activations (a) to (e)."""
    return MappingResNet("cifar", (16, 32, 64), (18, 18, 18), bottleneck_convs, shortcut=shortcut, **options)


@register
def mapping_resnet101(num_classes: int = 1000, shortcut: Shortcut = "B", **options: Any) -> MappingResNet:
    """ResNet-101 of the comparisons: 23.6% top-1 error on ImageNet, 24.6% with BatchNorm after the sum (Sec. 4.1)."""
    widths, depths = (64, 128, 256, 512), (3, 4, 23, 3)
    return MappingResNet(
        "imagenet", widths, depths, bottleneck_convs, num_classes=num_classes, shortcut=shortcut, **options
    )
