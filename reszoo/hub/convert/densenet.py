"""DenseNet as torchvision and timm name it, today and before torchvision 0.3."""

from reszoo.hub.convert._layout import Layout

INVISIBLE = ()

# With dropout a branch counts one layer more, so 3 and 4, and 5 and 6, are the same norm and convolution.
TORCHVISION = {
    "stem.0": "features.conv0",
    "stem.1": "features.norm0",
    "stages.{s}.{p}.{l}.residual.0": "features.denseblock{s+1}.denselayer{l+1}.norm1",
    "stages.{s}.{p}.{l}.residual.2": "features.denseblock{s+1}.denselayer{l+1}.conv1",
    "stages.{s}.{p}.{l}.residual.3": "features.denseblock{s+1}.denselayer{l+1}.norm2",
    "stages.{s}.{p}.{l}.residual.4": "features.denseblock{s+1}.denselayer{l+1}.norm2",
    "stages.{s}.{p}.{l}.residual.5": "features.denseblock{s+1}.denselayer{l+1}.conv2",
    "stages.{s}.{p}.{l}.residual.6": "features.denseblock{s+1}.denselayer{l+1}.conv2",
    "stages.{s}.0.0": "features.transition{s}.norm",
    "stages.{s}.0.2": "features.transition{s}.conv",
    "norm.0": "features.norm5",
    "head": "classifier",
}

LAYOUTS = (
    Layout(
        libraries=("torchvision", "timm"),
        table=TORCHVISION,
        legacy=((r"(denselayer\d+\.(?:norm|conv))\.([12])\.", r"\1\2."),),
    ),
)
