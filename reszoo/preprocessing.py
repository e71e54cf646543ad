"""How a picture becomes a network's input: one way to decode it, and a transform made of plain values.

The values travel with the weights (`config.json` of a bundle), so a loaded network is never fed differently from how it
was trained.

Shapes: N batch, C channels, H height, W width.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from reszoo.errors import ReszooError, check_at_least, check_choice

if TYPE_CHECKING:
    from PIL.Image import Image

BACKGROUND = (255, 255, 255)
"""What shows through transparent pixels: white."""


@dataclass(frozen=True)
class ImageTransform:
    """Resize the shorter side, crop the centre, scale to [0, 1] and standardise: (x / 255 - mean) / std.

    Args:
        size: Height and width of the network's input in pixels.
        mean: Mean of each channel, in [0, 1] units; its length is the number of channels (1 or 3).
        std: Standard deviation of each channel, positive.
        crop: Share of the resized image's side that the centre crop keeps, in (0, 1].
        interpolation: How to resize; always with antialiasing. An image that already has the size is left as it is.
    """

    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: float = 1.0
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"

    def __post_init__(self) -> None:
        for side in self.size:
            check_at_least("transform size", side, 1)
        if len(self.mean) not in (1, 3) or len(self.std) != len(self.mean) or min(self.std) <= 0:
            raise ReszooError(
                f"transform: mean and std need one value for each of 1 or 3 channels, std positive; "
                f"got mean={self.mean}, std={self.std}"
            )
        if not all(map(math.isfinite, (*self.mean, *self.std))):
            raise ReszooError(f"transform: mean and std must be finite, got mean={self.mean}, std={self.std}")
        if not 0 < self.crop <= 1:
            raise ReszooError(f"transform: crop must be in (0, 1], got {self.crop}")
        check_choice("interpolation", self.interpolation, ("bilinear", "bicubic"))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ImageTransform":
        """The transform whose `as_dict` these values are; anything else raises a `ReszooError`."""
        names = {"size", "mean", "std", "crop", "interpolation"}
        if not isinstance(values, dict) or set(values) != names:
            raise ReszooError(f"transform: expected the keys {sorted(names)}, got {values!r}")
        size, mean, std, crop, interpolation = (values[key] for key in ("size", "mean", "std", "crop", "interpolation"))
        for key, numbers, kinds in (("size", size, (int,)), ("mean", mean, (int, float)), ("std", std, (int, float))):
            if not isinstance(numbers, list | tuple) or not all(type(number) in kinds for number in numbers):
                raise ReszooError(f"transform: {key} must be a list of numbers, got {numbers!r}")
        if len(size) != 2 or type(crop) not in (int, float):
            raise ReszooError(f"transform: size must be two integers and crop a number, got {size!r} and {crop!r}")
        return cls((size[0], size[1]), tuple(map(float, mean)), tuple(map(float, std)), float(crop), interpolation)

    def as_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    def __call__(self, image: "Image | Tensor | str | Path") -> Tensor:
        """Prepare one image.

        Args:
            image: A PIL image, a path, or a uint8 tensor (C, H, W).

        Returns:
            float32 (C, size[0], size[1]).
        """
        pixels = image if isinstance(image, Tensor) else decode(image, len(self.mean))
        return self.normalize(self.resize(pixels)[None])[0]

    def resize(self, pixels: Tensor) -> Tensor:
        """uint8 (C, H, W) -> uint8 (C, size[0], size[1])."""
        height, width = self.size
        if tuple(pixels.shape[-2:]) == (height, width):
            return pixels
        scale = max(height / pixels.shape[-2], width / pixels.shape[-1]) / self.crop
        new = [max(round(side * scale), least) for side, least in zip(pixels.shape[-2:], self.size, strict=True)]
        resized = F.interpolate(pixels[None].float(), new, mode=self.interpolation, antialias=True)[0]
        top, left = (new[0] - height) // 2, (new[1] - width) // 2
        return resized.round().clamp(0, 255).to(torch.uint8)[:, top : top + height, left : left + width]

    def normalize(self, pixels: Tensor) -> Tensor:
        """uint8 (N, C, H, W) -> float32 of the same shape, standardised; on the tensor's device."""
        if pixels.shape[1] != len(self.mean):
            raise ReszooError(f"expected images of {len(self.mean)} channels, got {pixels.shape[1]}")
        mean = torch.tensor(self.mean, device=pixels.device)[:, None, None] * 255
        std = torch.tensor(self.std, device=pixels.device)[:, None, None] * 255
        return (pixels.float() - mean) / std


def decode(image: "Image | str | Path", in_chans: int) -> Tensor:
    """Read a picture the one way that holds everywhere: upright, opaque, 8 bits a channel.

    EXIF orientation is applied; 16-bit and floating-point greys are scaled by their full range, never clipped;
    transparent pixels are composited on white; palettes and CMYK become RGB; RGB becomes grey by the ITU-R 601 luma
    where one channel is asked for, and grey is repeated where three are.

    Args:
        image: A PIL image or the path of one.
        in_chans: Channels of the result, 1 or 3.

    Returns:
        uint8 (in_chans, H, W).

    Raises:
        ReszooError: The file is missing, unreadable or truncated, or its mode has no defined range; the path is named.
    """
    import PIL.Image
    from PIL import ImageOps

    check_choice("in_chans of a picture", in_chans, (1, 3))
    if isinstance(image, str | Path):
        if not Path(image).is_file():
            raise ReszooError(f"image {str(image)!r}: no such file")
        try:
            with PIL.Image.open(image) as opened:
                opened.load()
                return decode(opened, in_chans)
        except ReszooError as error:
            raise ReszooError(f"image {str(image)!r}: {error}") from error
        except (OSError, SyntaxError, PIL.Image.DecompressionBombError) as error:
            raise ReszooError(f"image {str(image)!r} cannot be read: {error}") from error
    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith(("I", "F")):
        return _full_range(upright).expand(in_chans, -1, -1).clone()
    if upright.has_transparency_data:
        layer = upright.convert("RGBA")
        upright = PIL.Image.alpha_composite(PIL.Image.new("RGBA", layer.size, (*BACKGROUND, 255)), layer)
    channels = upright.convert("RGB" if upright.mode not in ("1", "L") else "L")
    channels = channels.convert("L" if in_chans == 1 else "RGB")
    height, width = channels.height, channels.width
    pixels = torch.frombuffer(bytearray(channels.tobytes()), dtype=torch.uint8)
    return pixels.view(height, width, in_chans).permute(2, 0, 1).contiguous()  # (C, H, W)


def _full_range(image: "Image") -> Tensor:
    """(1, H, W) uint8 of a picture with more than 8 bits: 16-bit modes by 65,535, floats that lie in [0, 1] by 1."""
    import numpy as np

    values = torch.from_numpy(np.asarray(image).astype("float64"))
    top = 1.0 if image.mode == "F" else 65_535.0
    low, high = values.min().item(), values.max().item()
    if not (math.isfinite(low) and math.isfinite(high)) or low < 0 or high > top:
        raise ReszooError(
            f"a picture of mode {image.mode!r} must hold values from 0 to {top:g}, found {low:g} to {high:g}; "
            "rescale it first"
        )
    return (values / top * 255).round().to(torch.uint8)[None]
