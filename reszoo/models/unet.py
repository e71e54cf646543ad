"""U-Net: a contracting path, an expanding path, and skips that concatenate across.

Paper: Ronneberger, Fischer and Brox 2015, "U-Net: Convolutional Networks for Biomedical Image Segmentation",
arXiv:1505.04597. `unet` is the network of Section 2 and Fig. 1: unpadded convolutions, skips cropped at the centre, no
normalisation; `overlap_tile` is Fig. 2, `border_weights` Eq. 2, the initialisation that of Section 3.

`unet_padded` is not the paper's network: it pads every convolution, normalises by batch, and takes any image size.

Departures: the dropout at the end of the contracting path has no rate in the text, so it is an option that starts at 0.
The tiles of `overlap_tile` keep 4 rows and columns less than they could, which puts every tile on one pooling grid.

Shapes: N batch, C channels, H height, W width, K classes, h w height and width after the unpadded convolutions.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reszoo.errors import ReszooError, check_at_least
from reszoo.models._registry import register

MakeConvs = Callable[[int, int], nn.Module]
"""(in_channels, out_channels) -> the two 3x3 convolutions of one level."""


def unpadded_convs(in_channels: int, out_channels: int) -> nn.Sequential:
    """Two unpadded 3x3 convolutions, each followed by a ReLU; they take 4 rows and columns off (Section 2)."""
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3),
        nn.ReLU(),
        nn.Conv2d(out_channels, out_channels, 3),
        nn.ReLU(),
    )


def padded_convs(in_channels: int, out_channels: int) -> nn.Sequential:
    """Two padded 3x3 convolutions, each followed by BatchNorm and a ReLU; not the paper's."""
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
        nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
    )


class ExpandingBlock(nn.Module):
    """One step up: a 2x2 up-convolution that halves the channels, the skip concatenated in front, two convolutions.

    Args:
        in_channels: Channels from below; the skip and the output have half as many.
        convs: Builds the two convolutions.
    """

    def __init__(self, in_channels: int, convs: MakeConvs) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(in_channels, in_channels // 2, 2, stride=2)
        self.convs = convs(in_channels, in_channels // 2)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        """(N, C, H, W) and the skip (N, C / 2, >= 2H, >= 2W) -> (N, C / 2, 2H, 2W), less 4 if unpadded."""
        x = self.up(x)  # (N, C / 2, 2H, 2W)
        return self.convs(torch.cat((centre_crop(skip, x), x), dim=1))


def centre_crop(x: Tensor, like: Tensor) -> Tensor:
    """The middle of `x`, as high and wide as `like`."""
    (height, width), (h, w) = x.shape[-2:], like.shape[-2:]
    top, left = (height - h) // 2, (width - w) // 2
    return x[..., top : top + h, left : left + w]


class UShape(nn.Module):
    """The path down, the bottom, the path up and a 1x1 convolution to the classes (Fig. 1).

    Args:
        convs: Builds the two convolutions of a level.
        num_classes: Outputs a pixel; 0 gives the features before the last convolution.
        in_chans: Channels of the images.
        width: Channels of the first level, doubled by each of the next.
        depth: Number of poolings.
        dropout: Rate of the dropout at the end of the contracting path.
        image_size: Height and width of `example_inputs`.

    Attributes:
        num_features: Channels before the last convolution.
    """

    def __init__(
        self,
        convs: MakeConvs,
        image_size: int,
        *,
        num_classes: int = 2,
        in_chans: int = 1,
        width: int = 64,
        depth: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        for name, value, least in (("num_classes", num_classes, 0), ("in_chans", in_chans, 1), ("width", width, 1)):
            check_at_least(name, value, least)
        check_at_least("depth", depth, 1)
        if not 0 <= dropout < 1:
            raise ReszooError(f"dropout must be in [0, 1), got {dropout}")
        widths = [width * 2**level for level in range(depth + 1)]
        self.contracting = nn.ModuleList(
            convs(above, here) for above, here in zip([in_chans, *widths], widths[:-1], strict=False)
        )
        self.pool = nn.MaxPool2d(2)
        self.bottom = convs(widths[-2], widths[-1])
        self.dropout = nn.Dropout(dropout)
        self.expanding = nn.ModuleList(ExpandingBlock(below, convs) for below in reversed(widths[1:]))
        self.head = nn.Conv2d(width, num_classes, 1) if num_classes else nn.Identity()
        self.num_features = width
        self.depth = depth
        self.in_chans = in_chans
        self.image_size = image_size
        gaussian_init(self)

    def example_inputs(self, batch_size: int = 2) -> tuple[Tensor, ...]:
        """Random arguments of one forward pass."""
        return (torch.randn(batch_size, self.in_chans, self.image_size, self.image_size),)

    def feature_maps(self, x: Tensor) -> list[Tensor]:
        """(N, in_chans, H, W) -> the maps that the skips carry and the bottom's, the finest first."""
        maps = []
        for convs in self.contracting:
            x = convs(x)
            maps.append(x)
            x = self.pool(x)
        return [*maps, self.dropout(self.bottom(x))]

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_chans, H, W) -> (N, K, h, w), or (N, num_features, h, w) without a head."""
        *skips, x = self.feature_maps(x)
        for block, skip in zip(self.expanding, reversed(skips), strict=True):
            x = block(x, skip)
        return self.head(x)


class UNet(UShape):
    """The network of 2015: the output is smaller than the input, by 184 pixels at depth 4.

    A size fits if every pooling meets an even one: 12 modulo 16, and 188 at least, at depth 4. Other images go through
    `overlap_tile`.
    """

    @property
    def margin(self) -> int:
        """Pixels that an output lacks on each side: 92 at depth 4."""
        return 6 * 2**self.depth - 4

    def legal_size(self, size: int, direction: Literal["up", "down"] = "up") -> int:
        """The smallest height or width of an input at or above `size`; or the largest at or below it."""
        period = 2**self.depth
        smallest = 2 * self.margin + _residue_at_least(1, 4, period)
        offset = (size - smallest) % period
        nearest = size - offset + (period if direction == "up" and offset else 0)
        return max(nearest, smallest)

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_chans, H, W) -> (N, K, H - 2 * margin, W - 2 * margin).

        Raises:
            ReszooError: The height or the width doesn't fit the poolings.
        """
        for side, size in zip(("height", "width"), x.shape[-2:], strict=True):
            if self.legal_size(size) != size:
                below, above = self.legal_size(size, "down"), self.legal_size(size)
                fits = f"{above}" if above <= below else f"{below} or {above}"
                raise ReszooError(
                    f"{side} {size} does not fit a U-Net of depth {self.depth} with unpadded convolutions; the nearest "
                    f"that fit: {fits}. `overlap_tile` takes any size, and so does `unet_padded`"
                )
        return super().forward(x)

    def overlap_tile(self, x: Tensor, tile_size: int = 572) -> Tensor:
        """Segment images of any size in tiles, with mirrored pixels where the context is missing (Fig. 2).

        Every tile starts a multiple of 2^depth from the image's corner, so its poolings see the pixels that those of
        one pass over the whole image would, and the result is that of one pass: tiles leave no seam.

        Args:
            x: Images, (N, in_chans, H, W).
            tile_size: Largest height and width of the input of one pass. What fits into less takes less.

        Returns:
            Logits, (N, K, H, W).

        Raises:
            ReszooError: `tile_size` doesn't fit the poolings, or it leaves no room for a tile.
        """
        period = 2**self.depth
        extent = self.margin + 4  # 6 * 2^depth, the margin rounded up to the pooling grid
        smallest = self.legal_size(2 * self.margin + 4 + period)
        if tile_size < smallest or self.legal_size(tile_size) != tile_size:
            raise ReszooError(
                f"tile_size must be {smallest} plus a multiple of {period} at depth {self.depth}; got {tile_size}, the "
                f"next that fits is {max(self.legal_size(tile_size), smallest)}"
            )
        height, width = x.shape[-2:]
        _check_has_pixels(height, width)
        largest = tile_size - 2 * self.margin - 4
        step_h, step_w = (min(-(-size // period) * period, largest) for size in (height, width))
        rows, columns = -(-height // step_h), -(-width // step_w)
        x = mirror(x, extent, rows * step_h - height + self.margin, extent, columns * step_w - width + self.margin)
        bands = []
        for top in range(0, rows * step_h, step_h):
            band = x[:, :, top : top + extent + step_h + self.margin]
            tiles = [
                self(band[..., left : left + extent + step_w + self.margin])[..., 4:, 4:]
                for left in range(0, columns * step_w, step_w)
            ]
            bands.append(torch.cat(tiles, dim=3))  # (N, K, step_h, columns * step_w)
        return torch.cat(bands, dim=2)[..., :height, :width]


class PaddedUNet(UShape):
    """A U-Net with padded convolutions and BatchNorm, whose output is as large as its input; not the paper's.

    Zeros are added below and to the right up to the next multiple of 2^depth, and the output is cropped back.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_chans, H, W) -> (N, K, H, W).

        Raises:
            ReszooError: An image without pixels, or in training a batch too small to normalise at the bottom.
        """
        period, (height, width) = 2**self.depth, x.shape[-2:]
        _check_has_pixels(height, width)
        if self.training and x.shape[0] == 1 and height <= period and width <= period:
            raise ReszooError(
                f"one image of {height}x{width} leaves a single pixel at the bottom of a U-Net of depth {self.depth}, "
                "which BatchNorm cannot train on; give more images, larger ones, or a smaller depth"
            )
        x = F.pad(x, (0, -width % period, 0, -height % period))
        return super().forward(x)[..., :height, :width]


def mirror(x: Tensor, top: int, bottom: int, left: int, right: int) -> Tensor:
    """Extend images by reflection at their border pixels, however far; a single row or column repeats.

    Args:
        x: (N, C, H, W).
        top: Rows to add above.
        bottom: Rows to add below.
        left: Columns to add on the left.
        right: Columns to add on the right.

    Returns:
        (N, C, top + H + bottom, left + W + right).
    """
    rows, columns = _reflected(x.shape[-2], top, bottom), _reflected(x.shape[-1], left, right)
    return x[..., rows.to(x.device), :][..., columns.to(x.device)]


def _reflected(length: int, before: int, after: int) -> Tensor:
    """Indices -before .. length + after - 1, folded back into 0 .. length - 1 like a wave that turns at its ends."""
    period = max(2 * (length - 1), 1)
    index = torch.arange(-before, length + after) % period
    return torch.minimum(index, period - index)


def _check_has_pixels(height: int, width: int) -> None:
    """Refuse images without rows or columns."""
    check_at_least("height of the images", height, 1)
    check_at_least("width of the images", width, 1)


def _residue_at_least(least: int, residue: int, period: int) -> int:
    """The smallest number at or above `least` that is `residue` modulo `period`."""
    return least + (residue - least) % period


def gaussian_init(network: nn.Module) -> None:
    """Draw every convolution from N(0, 2 / N), N the nodes that feed one of its outputs; zero bias (Section 3)."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            # Windows of an up-convolution don't overlap, so one pixel below feeds each output.
            taps = 1 if isinstance(module, nn.ConvTranspose2d) else module.kernel_size[0] * module.kernel_size[1]
            nn.init.normal_(module.weight, std=(2 / (module.in_channels * taps)) ** 0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def border_weights(cells: Tensor, w_0: float = 10.0, sigma: float = 5.0) -> Tensor:
    """Weights of the pixels in the loss: w_c(x) + w_0 exp(-(d_1(x) + d_2(x))^2 / (2 sigma^2)), Eq. 2.

    d_1 and d_2 are the distances to the borders of the nearest cell and of the second nearest. A border is made of the
    cell's pixels that have a neighbour, above, below or beside, outside the cell. The text doesn't say how w_c balances
    the classes; here background and cells weigh the same in total, and one on average.

    Args:
        cells: Label of the cell that each pixel belongs to, (H, W), integers; 0 is background.
        w_0: Weight where two borders touch.
        sigma: Reach of the second term in pixels.

    Returns:
        (H, W), float32. With fewer than two cells the second term is 0.

    Raises:
        ReszooError: `cells` is not one map.
    """
    if cells.dim() != 2:
        raise ReszooError(f"cells must be one map of shape (H, W), got {tuple(cells.shape)}")
    foreground = cells > 0
    share = foreground.float().mean()
    balance = torch.where(foreground, 0.5 / share, 0.5 / (1 - share)) if 0 < share < 1 else torch.ones_like(share)
    labels = [label for label in cells.unique() if label > 0]
    if len(labels) < 2:
        return balance.expand(cells.shape).clone()
    distances = torch.stack([_distance_to(_border(cells == label)) for label in labels])  # (cells, H, W)
    nearest_two = distances.topk(2, dim=0, largest=False).values.sum(0)  # (H, W)
    return balance + w_0 * torch.exp(-(nearest_two**2) / (2 * sigma**2))


def _border(cell: Tensor) -> Tensor:
    """The pixels of a mask (H, W) with a neighbour outside it; what lies beyond the image counts as inside."""
    outside = F.pad((~cell).float()[None], (1, 1, 1, 1))[0]
    beside = outside[1:-1, :-2] + outside[1:-1, 2:] + outside[:-2, 1:-1] + outside[2:, 1:-1]
    return cell & (beside > 0)


def _distance_to(mask: Tensor) -> Tensor:
    """The Euclidean distance of every pixel to the nearest pixel of a mask (H, W); infinite for an empty mask."""
    squared = torch.where(mask, 0.0, torch.inf)
    # A squared distance is a sum over the axes, so its least value is found along one axis after the other.
    for _ in range(2):
        steps = torch.arange(squared.shape[1], device=mask.device)
        squared = torch.stack([(squared + (steps - here) ** 2).amin(1) for here in steps])  # transposed each time
    return squared.sqrt()


@register
def unet(**options: Any) -> UNet:
    """U-Net: 31,030,658 parameters, 572 -> 388 pixels (Fig. 1); 0.0382 Rand error on EM segmentation (Table 1)."""
    return UNet(unpadded_convs, 572, **options)


@register
def unet_padded(**options: Any) -> PaddedUNet:
    """U-Net with padded convolutions and BatchNorm, any image size: 31.0M parameters; common, but not the paper's."""
    return PaddedUNet(padded_convs, 64, **options)


@register
def unet_padded16(width: int = 16, **options: Any) -> PaddedUNet:
    """`unet_padded` with a first level of 16 channels, for small images: 1.9M parameters; not the paper's."""
    return PaddedUNet(padded_convs, 32, width=width, **options)
