"""ResNet as torchvision, timm, transformers and akamaster's CIFAR code name it."""

from typing import Any

from reszoo.hub.adopt import Weights
from reszoo.hub.convert._layout import Layout, ending

INVISIBLE = ("stride_in", "zero_padding")
"""Options that change the function and no tensor's name or shape."""

_BRANCH = {
    "stages.{s}.{b}.residual.0": "layer{s+1}.{b}.conv1",
    "stages.{s}.{b}.residual.1": "layer{s+1}.{b}.bn1",
    "stages.{s}.{b}.residual.3": "layer{s+1}.{b}.conv2",
    "stages.{s}.{b}.residual.4": "layer{s+1}.{b}.bn2",
    "stages.{s}.{b}.residual.6": "layer{s+1}.{b}.conv3",
    "stages.{s}.{b}.residual.7": "layer{s+1}.{b}.bn3",
}
TORCHVISION = {
    "stem.0": "conv1",
    "stem.1": "bn1",
    **_BRANCH,
    "stages.{s}.{b}.shortcut.{i}": "layer{s+1}.{b}.downsample.{i}",
    "head": "fc",
}
AKAMASTER = {
    "stem.0": "conv1",
    "stem.1": "bn1",
    **_BRANCH,
    "stages.{s}.{b}.shortcut.{i}": "layer{s+1}.{b}.shortcut.{i}",
    "head": "linear",
}
TRANSFORMERS = {
    "stem.0": "embedder.embedder.convolution",
    "stem.1": "embedder.embedder.normalization",
    "stages.{s}.{b}.residual.0": "encoder.stages.{s}.layers.{b}.layer.0.convolution",
    "stages.{s}.{b}.residual.1": "encoder.stages.{s}.layers.{b}.layer.0.normalization",
    "stages.{s}.{b}.residual.3": "encoder.stages.{s}.layers.{b}.layer.1.convolution",
    "stages.{s}.{b}.residual.4": "encoder.stages.{s}.layers.{b}.layer.1.normalization",
    "stages.{s}.{b}.residual.6": "encoder.stages.{s}.layers.{b}.layer.2.convolution",
    "stages.{s}.{b}.residual.7": "encoder.stages.{s}.layers.{b}.layer.2.normalization",
    "stages.{s}.{b}.shortcut.0": "encoder.stages.{s}.layers.{b}.shortcut.convolution",
    "stages.{s}.{b}.shortcut.1": "encoder.stages.{s}.layers.{b}.shortcut.normalization",
    "head": "classifier.1",
}


_HF_FIRST = "encoder.stages.0.layers.0.shortcut.convolution"


def shortcut_of(weights: Weights) -> dict[str, Any]:
    """The shortcut option that the stored projections show: none, where the shape changes, or everywhere."""
    projected = [n for n in weights.names() if ".downsample." in n or ".shortcut." in n]
    first = ending(weights, *(f"{at}.weight" for at in ("layer1.0.downsample.0", "layer1.0.shortcut.0", _HF_FIRST)))
    same_shape = first is not None and weights.shape(first)[0] == weights.shape(first)[1]
    later = any(part in name for name in projected for part in ("layer1.1.", "stages.0.layers.1."))
    return {"shortcut": "C" if same_shape or later else "B" if projected else "A"}


def akamaster_options(weights: Weights) -> dict[str, Any]:
    """Its option A puts half of the zero channels in front and half behind."""
    found = shortcut_of(weights)
    return {**found, "zero_padding": "split"} if found["shortcut"] == "A" else found


LAYOUTS = (
    Layout(
        libraries=("torchvision", "timm"),
        table=TORCHVISION,
        fixed={"stride_in": "3x3"},
        implied=shortcut_of,
        exports={"shortcut": "B"},
    ),
    Layout(
        libraries=("transformers",),
        table=TRANSFORMERS,
        fixed={"stride_in": "3x3"},
        implied=shortcut_of,
        exports={"shortcut": "B"},
        wrappers=("resnet",),
        base="resnet.",
    ),
    # github.com/akamaster/pytorch_resnet_cifar10
    Layout(
        libraries=("akamaster",),
        table=AKAMASTER,
        implied=akamaster_options,
        exports={"shortcut": "A", "zero_padding": "split"},
    ),
)
