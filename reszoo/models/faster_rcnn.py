"""Faster R-CNN on residual networks: regions proposed from feature maps, then classified and refined one by one.

Papers: He et al. 2015, "Deep Residual Learning for Image Recognition", arXiv:1512.03385, Section 4.3 and Appendix A,
for the network without a pyramid ("C4": conv1 to conv4_x are shared, conv5_x runs on each region); Ren et al. 2015,
"Faster R-CNN", arXiv:1506.01497; Lin et al. 2017, "Feature Pyramid Networks", arXiv:1612.03144, for the others. The
residual networks are ours; anchors, proposals, pooling and losses are torchvision's.

Departures: the text gives neither the size of a pooled region (here 14x14, which conv5_x halves) nor a bound for the
longer side; the proposal network's hidden layer is as wide as its input; fresh networks train every layer, because the
weights that a fine-tuning would freeze are not there yet.

Labels are those of the data: 0 is the first class. The background is a class of the inside only.

Shapes: N images, C channels, H height, W width, K classes, B boxes of an image, R regions of all images.
Boxes are (x1, y1, x2, y2) in pixels of the image given, x to the right and y down.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reszoo.errors import ReszooError, check_at_least
from reszoo.layers import freeze_batch_norm
from reszoo.models._detection_parts import (
    Parts,
    c4_parts,
    proposal_network,
    pyramid_parts,
    region_heads,
    small_pyramid_parts,
)
from reszoo.models._detection_targets import Targets, check_boxes, check_labels
from reszoo.models._registry import register
from reszoo.models.resnet import ResNet, StrideIn, bottleneck_resnet, cifar_resnet

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class FasterRCNN(nn.Module):
    """A residual network, region proposals on its maps, and sibling layers for the class and the box of each region.

    Args:
        body: Builds the residual network from `num_classes` and `in_chans`.
        parts: Chooses what stands around its stages; it may take stages away.
        num_classes: Classes of objects, at least 1, without the background.
        in_chans: Channels of the images. Three are normalised by the mean and deviation of ImageNet, others not at all.
        min_size: Length in pixels to which the shorter side is scaled; None leaves images as large as they come.
        max_size: Bound on the longer side after scaling; it takes precedence, and has no effect without `min_size`.
        trainable_stages: Number of stages, counted from the last, that train; the others and the stem keep their
            weights and BatchNorm statistics. None trains everything.
        frozen_norm: Use BatchNorm as a constant affine map everywhere (Appendix A). It suits pre-trained weights; a
            network that starts from random ones learns far better with live statistics.

    Attributes:
        num_features: Features of a region, the input of the sibling layers.
        num_clipped_boxes: Boxes of targets that reached beyond their image so far.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        body: Callable[..., ResNet],
        parts: Callable[[ResNet], Parts],
        *,
        num_classes: int = 80,
        in_chans: int = 3,
        min_size: int | None = 800,
        max_size: int = 1333,
        trainable_stages: int | None = None,
        frozen_norm: bool = True,
    ) -> None:
        super().__init__()
        check_at_least("num_classes", num_classes, 1)
        check_at_least("min_size", 1 if min_size is None else min_size, 1)
        check_at_least("max_size", max_size, min_size or 1)
        resnet = body(num_classes=0, in_chans=in_chans)
        own = parts(resnet)
        self.stem = resnet.stem
        self.stages = resnet.stages
        self.neck = own.neck or nn.Identity()
        self.rpn = proposal_network(own)
        self.roi_heads = region_heads(own, num_classes)
        if frozen_norm:
            freeze_batch_norm(self)
        self._freeze_early_stages(trainable_stages)
        # Boxes are decoded in the precision of these outputs, and bfloat16 can't tell pixels 512 and 514 apart.
        self.rpn.head.register_forward_hook(_in_float32)
        self.roi_heads.box_predictor.register_forward_hook(_in_float32)
        mean, std = (IMAGENET_MEAN, IMAGENET_STD) if in_chans == 3 else ((0.0,) * in_chans, (1.0,) * in_chans)
        self.register_buffer("mean", torch.tensor(mean)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(std)[:, None, None], persistent=False)
        self.first_stage = own.first_stage
        self.size_multiple = own.size_multiple
        self.num_features = own.num_features
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.min_size = min_size
        self.max_size = max_size
        self.num_clipped_boxes = 0

    @property
    def head(self) -> nn.Module:
        """The sibling layers: classes with the background first, and a box for each."""
        return self.roi_heads.box_predictor

    def example_inputs(self, batch_size: int = 2) -> tuple[Any, ...]:
        """Random arguments of one forward pass: square images, and in training mode a box in the middle of each."""
        size = self.min_size or 32
        images = [torch.rand(self.in_chans, size, size) for _ in range(batch_size)]
        box = torch.tensor([[0.25, 0.25, 0.75, 0.75]]) * size
        targets = [{"boxes": box, "labels": torch.zeros(1, dtype=torch.long)} for _ in images]
        return (images, targets) if self.training else (images,)

    def load_body(self, network: ResNet) -> None:
        """Copy the stem and the stages of a classification network, the start of the paper's fine-tuning.

        Raises:
            ReszooError: The network has other layers.
        """
        try:
            self.stem.load_state_dict(network.stem.state_dict())
            for ours, theirs in zip(self._body_stages(), network.stages, strict=True):
                ours.load_state_dict(theirs.state_dict())
        except (RuntimeError, ValueError) as error:
            raise ReszooError(f"the body has other layers than the given {type(network).__name__}: {error}") from error

    def feature_maps(self, x: Tensor) -> list[Tensor]:
        """Normalised images (N, in_chans, H, W) -> the maps that regions are proposed on, the finest first."""
        x = self.stem(x)
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return self.neck(maps[self.first_stage :])

    def forward(self, images: Sequence[Tensor] | Tensor, targets: Targets | None = None) -> Any:
        """Losses in training mode, detections in evaluation mode.

        Args:
            images: Images (in_chans, H, W) of any sizes, values in 0 .. 1; a list, or a batch of equal ones.
            targets: In training mode, for each image `boxes` (B, 4) and `labels` (B,) in 0 .. K - 1; an image without
                objects has boxes of shape (0, 4). A box that reaches beyond its image is clipped to it, and counted.

        Returns:
            In training mode the four losses to add up, by name; else for each image `boxes` (B, 4), `labels` (B,) in
            0 .. K - 1 and `scores` (B,), the highest first.

        Raises:
            ReszooError: An image or a target that can't be used; the message has its place.
        """
        from torchvision.models.detection.image_list import ImageList

        if self.training != (targets is not None):
            need = "needs targets" if self.training else "takes no targets; call .train() for losses"
            raise ReszooError(f"Faster R-CNN in {'training' if self.training else 'evaluation'} mode {need}")
        self._check_images(images)
        inputs = [self._resize((image - self.mean) / self.std) for image in images]
        sizes = [(x.shape[1], x.shape[2]) for x in inputs]
        scales = [_scale(image, x) for image, x in zip(images, inputs, strict=True)]
        scaled = self._inner_targets(images, targets, scales) if targets is not None else None
        batch = self._pad(inputs)  # (N, in_chans, H, W)
        maps = {str(level): x for level, x in enumerate(self.feature_maps(batch))}
        regions, proposal_losses = self.rpn(ImageList(batch, sizes), _floats(maps), scaled)
        detections, region_losses = self.roi_heads(maps, regions, sizes, scaled)
        if self.training:
            return region_losses | proposal_losses
        return [
            {"boxes": found["boxes"] / scale, "labels": found["labels"] - 1, "scores": found["scores"]}
            for found, scale in zip(detections, scales, strict=True)
        ]

    def _check_images(self, images: Sequence[Tensor] | Tensor) -> None:
        """Refuse what isn't a list of floating-point images with the right channels and a side that scaling keeps."""
        check_at_least("number of images", len(images), 1)
        for index, image in enumerate(images):
            if image.dim() != 3 or image.shape[0] != self.in_chans or not image.is_floating_point():
                raise ReszooError(
                    f"images[{index}] must be a floating-point tensor ({self.in_chans}, H, W) with values in 0 .. 1; "
                    f"got {image.dtype} of shape {tuple(image.shape)}"
                )
            shorter, longer = sorted(image.shape[1:])
            check_at_least(f"shorter side of images[{index}]", shorter, 1)
            if self.min_size is not None and shorter * self.max_size < longer:
                raise ReszooError(
                    f"images[{index}] of {image.shape[1]}x{image.shape[2]} would lose its shorter side when the longer "
                    f"is scaled to max_size={self.max_size}; crop it, or raise max_size"
                )

    def _resize(self, image: Tensor) -> Tensor:
        """Scale the shorter side to `min_size`, or the longer to `max_size` where it would exceed it."""
        if self.min_size is None:
            return image
        shorter, longer = sorted(image.shape[1:])
        scale = min(self.min_size / shorter, self.max_size / longer)
        return F.interpolate(
            image[None], scale_factor=scale, mode="bilinear", recompute_scale_factor=True, align_corners=False
        )[0]

    def _pad(self, images: list[Tensor]) -> Tensor:
        """Stack images over zeros, below and to the right, up to a common multiple of the coarsest stride."""
        height, width = (
            -(-max(x.shape[axis] for x in images) // self.size_multiple) * self.size_multiple for axis in (1, 2)
        )
        return torch.stack([F.pad(x, (0, width - x.shape[2], 0, height - x.shape[1])) for x in images])

    def _inner_targets(self, images: Sequence[Tensor] | Tensor, targets: Targets, scales: list[Tensor]) -> Targets:
        """Checked targets with clipped and scaled boxes, and labels that leave 0 to the background."""
        if len(targets) != len(images):
            raise ReszooError(f"{len(images)} images need as many targets, got {len(targets)}")
        inner, clipped = [], 0
        for index, (image, target, scale) in enumerate(zip(images, targets, scales, strict=True)):
            boxes, beyond = check_boxes(index, target, (image.shape[1], image.shape[2]))
            labels = check_labels(index, target, len(boxes), self.num_classes)
            inner.append({"boxes": boxes * scale, "labels": labels + 1})
            clipped += beyond
        if clipped and not self.num_clipped_boxes:
            warnings.warn(
                f"{clipped} boxes of this batch reach beyond their image and are clipped to it; later ones are only "
                "counted, in num_clipped_boxes",
                stacklevel=3,
            )
        self.num_clipped_boxes += clipped
        return inner

    def _body_stages(self) -> list[nn.Module]:
        """The stages of the residual network, wherever they run."""
        later = [self.roi_heads.box_head[0]] if isinstance(self.roi_heads.box_head, nn.Sequential) else []
        return [*self.stages, *later]

    def _freeze_early_stages(self, trainable_stages: int | None) -> None:
        stages = self._body_stages()
        if trainable_stages is None:
            return
        if not 0 <= trainable_stages <= len(stages):
            raise ReszooError(f"trainable_stages must be in 0 .. {len(stages)} or None, got {trainable_stages}")
        for part in (self.stem, *stages[: len(stages) - trainable_stages]):
            part.requires_grad_(False)
            freeze_batch_norm(part)


def _in_float32(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    """A forward hook that turns outputs, tensors or lists of them, into float32."""
    if isinstance(outputs, Tensor):
        return outputs.float()
    return type(outputs)(_in_float32(module, inputs, output) for output in outputs)


def _floats(maps: dict[str, Tensor]) -> dict[str, Tensor]:
    """Maps in float32, because anchors take the precision of the maps they stand on."""
    return {name: x.float() for name, x in maps.items()}


def _scale(image: Tensor, resized: Tensor) -> Tensor:
    """Factors that take a box of `image` to `resized`, (4,)."""
    rows, columns = resized.shape[1] / image.shape[1], resized.shape[2] / image.shape[2]
    return torch.tensor([columns, rows, columns, rows], device=image.device)


@register
def faster_rcnn_resnet101_c4(
    min_size: int | None = 600, max_size: int = 1000, stride_in: StrideIn = "1x1", **options: Any
) -> FasterRCNN:
    """Faster R-CNN on ResNet-101 without a pyramid: 48.4 mAP@.5, 27.2 mAP@[.5, .95] on COCO val (Table 8)."""
    body = partial(bottleneck_resnet, (3, 4, 23, 3), stride_in, shortcut="B")
    return FasterRCNN(body, c4_parts, min_size=min_size, max_size=max_size, **options)


@register
def faster_rcnn_resnet50_fpn(stride_in: StrideIn = "1x1", **options: Any) -> FasterRCNN:
    """Faster R-CNN on ResNet-50 with a feature pyramid (Lin et al. 2017)."""
    return FasterRCNN(partial(bottleneck_resnet, (3, 4, 6, 3), stride_in, shortcut="B"), pyramid_parts, **options)


@register
def faster_rcnn_resnet20_fpn(
    num_classes: int = 10,
    in_chans: int = 1,
    min_size: int | None = None,
    frozen_norm: bool = False,
    **options: Any,
) -> FasterRCNN:
    """Faster R-CNN on the CIFAR network ResNet-20 with a small pyramid, for scenes of digits; not a paper's."""
    return FasterRCNN(
        partial(cifar_resnet, 3),
        small_pyramid_parts,
        num_classes=num_classes,
        in_chans=in_chans,
        min_size=min_size,
        frozen_norm=frozen_norm,
        **options,
    )
