"""Pre-activation ResNet as timm names it, for the `resnetv2_*` with BatchNorm.

timm's `resnetv2_*_bit` have GroupNorm and standardised weights, `resnetv2_*d` and `*t` a deep stem and pooled
shortcuts, `*_evos` another norm: other networks, whose tensors do not fit and are refused.
"""

from collections.abc import Mapping

from torch import Tensor

from reszoo.errors import ReszooError
from reszoo.hub.convert._layout import Layout

INVISIBLE = ("stride_in", "zero_padding")

# The first block of a stage has its first norm before the paths split, every later one in its branch.
TIMM = {
    "stem.0": "stem.conv",
    "stem.1": "stages.0.blocks.0.norm1",
    "stages.{s}.{b}.activation.0": "stages.{s}.blocks.{b}.norm1",
    "stages.{s}.0.residual.0": "stages.{s}.blocks.0.conv1",
    "stages.{s}.0.residual.1": "stages.{s}.blocks.0.norm2",
    "stages.{s}.0.residual.3": "stages.{s}.blocks.0.conv2",
    "stages.{s}.0.residual.4": "stages.{s}.blocks.0.norm3",
    "stages.{s}.0.residual.6": "stages.{s}.blocks.0.conv3",
    "stages.{s}.{b}.residual.0": "stages.{s}.blocks.{b}.norm1",
    "stages.{s}.{b}.residual.2": "stages.{s}.blocks.{b}.conv1",
    "stages.{s}.{b}.residual.3": "stages.{s}.blocks.{b}.norm2",
    "stages.{s}.{b}.residual.5": "stages.{s}.blocks.{b}.conv2",
    "stages.{s}.{b}.residual.6": "stages.{s}.blocks.{b}.norm3",
    "stages.{s}.{b}.residual.8": "stages.{s}.blocks.{b}.conv3",
    "stages.{s}.{b}.shortcut.0": "stages.{s}.blocks.{b}.downsample.conv",
    "final.0": "norm",
    "head": "head.fc",
}


def check_start(state: Mapping[str, Tensor]) -> None:
    """Refuse what timm computes otherwise at the start of the network.

    It pools before the first norm, the paper behind it: a maximum passes through a rising function unchanged, and
    through a falling one becomes the minimum. And its first block adds its input before that norm where no projection
    stands, in the basic networks, the paper behind it.
    """
    if "stages.0.0.residual.0.weight" in state and "stages.0.0.shortcut.0.weight" not in state:
        raise ReszooError(
            "timm's resnetv2 of basic blocks adds the first block's input before its norm and this network behind it, "
            "so the outputs would differ; networks of bottlenecks, from 50 layers on, are the same"
        )
    negative = int((state["stem.1.weight"] < 0).sum()) if "stem.1.weight" in state else 0
    if negative:
        raise ReszooError(
            f"{negative} channels of the first norm have a negative scale; timm pools before that norm and this "
            "network behind it, so the outputs would differ"
        )


LAYOUTS = (
    Layout(
        libraries=("timm",),
        table=TIMM,
        fixed={"stride_in": "3x3", "shortcut": "B"},
        ones={"head.weight": 2},
        check=check_start,
    ),
)
