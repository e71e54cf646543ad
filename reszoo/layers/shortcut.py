"""Shortcuts: what a residual block adds to its branch when the branch changes the shape.

Paper: He et al. 2015, "Deep Residual Learning for Image Recognition", arXiv:1512.03385, Section 3.3 and 4.1.

Shapes: N batch, C channels, H height, W width.
"""

from collections.abc import Callable
from typing import Literal, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from reszoo.errors import ReszooError, check_choice

Shortcut = Literal["A", "B", "C"]
ZeroPadding = Literal["append", "split", "pool"]
MakeShortcut = Callable[[int, int, int], nn.Module]
"""(in_channels, out_channels, stride) -> the shortcut module."""


class ZeroPadShortcut(nn.Module):
    """Option A: take every second pixel, then fill the new channels with zeros; no parameters.

    Args:
        extra_channels: Channels to add, at least 0.
        stride: Subsampling factor.
        zero_padding: `append` puts all zeros behind (the paper's identity, and fb.resnet.torch); `split` puts half in
            front and half behind (akamaster's port); `pool` averages 2x2 windows before appending (the code of
            Stochastic Depth). The three share every weight and differ in the function.
    """

    def __init__(self, extra_channels: int, stride: int = 1, zero_padding: ZeroPadding = "append") -> None:
        super().__init__()
        self.extra_channels = extra_channels
        self.stride = stride
        self.zero_padding = zero_padding

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C + extra_channels, ceil(H / stride), ceil(W / stride))."""
        if self.zero_padding == "pool" and self.stride > 1:
            # ceil_mode keeps the odd last row and column, as the branch's padded convolution does.
            x = F.avg_pool2d(x, self.stride, ceil_mode=True)
        else:
            x = x[:, :, :: self.stride, :: self.stride]
        front = self.extra_channels // 2 if self.zero_padding == "split" else 0
        return F.pad(x, (0, 0, 0, 0, front, self.extra_channels - front))

    def extra_repr(self) -> str:
        return f"{self.extra_channels}, stride={self.stride}, zero_padding={self.zero_padding!r}"


class ProjectionShortcut(nn.Sequential):
    """Options B and C: a 1x1 convolution to the new shape.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        stride: Stride of the convolution.
        norm: Whether BatchNorm follows, as in all public code of ResNet v1 and in none of v2.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1, norm: bool = True) -> None:
        super().__init__(nn.Conv2d(in_channels, out_channels, 1, stride, bias=False))
        if norm:
            self.append(nn.BatchNorm2d(out_channels))


def shortcut_maker(option: Shortcut, zero_padding: ZeroPadding = "append", norm: bool = True) -> MakeShortcut:
    """A function (in_channels, out_channels, stride) -> the shortcut of one block (Section 4.1).

    Args:
        option: A, zeros for new channels; B, projection where the shape changes; C, projection everywhere.
        zero_padding: How option A pads; only A takes another than the default.
        norm: Whether BatchNorm follows a projection.

    Raises:
        ReszooError: The option or the padding is unknown, or a padding is given that the option would not use.
    """
    check_choice("shortcut", option, get_args(Shortcut))
    check_choice("zero_padding", zero_padding, get_args(ZeroPadding))
    if option != "A" and zero_padding != "append":
        raise ReszooError(
            f"zero_padding={zero_padding!r} has no meaning with shortcut={option!r}; drop it, or use shortcut='A'"
        )

    def make(in_channels: int, out_channels: int, stride: int) -> nn.Module:
        if option != "C" and in_channels == out_channels and stride == 1:
            return nn.Identity()
        if option == "A":
            return ZeroPadShortcut(out_channels - in_channels, stride, zero_padding)
        return ProjectionShortcut(in_channels, out_channels, stride, norm)

    return make
