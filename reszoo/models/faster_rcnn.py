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
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reszoo.errors import ReszooError, check_at_least
from reszoo.layers import freeze_batch_norm
from reszoo.models._registry import register
from reszoo.models.resnet import ResNet, StrideIn, bottleneck_resnet, cifar_resnet

Targets = Sequence[dict[str, Tensor]]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class FeaturePyramid(nn.Module):
    """Lateral 1x1 and top-down paths over the maps of some stages, and a coarser map by subsampling (Lin et al.).

    Args:
        in_channels: Channels of each map, the finest first.
        out_channels: Channels of every output.
    """

    def __init__(self, in_channels: list[int], out_channels: int) -> None:
        from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelMaxPool

        super().__init__()
        self.fpn = FeaturePyramidNetwork(in_channels, out_channels, LastLevelMaxPool())

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        """(N, C_i, H_i, W_i) each -> (N, out_channels, H_i, W_i) each, and one more of half the last size."""
        return list(self.fpn({str(level): x for level, x in enumerate(maps)}).values())


class RegionPool(nn.Module):
    """RoI pooling: the maximum in each cell of a grid laid over a region of the one feature map (Section 4.3)."""

    def __init__(self, output_size: int, stride: int) -> None:
        super().__init__()
        self.output_size = output_size
        self.stride = stride

    def forward(self, maps: dict[str, Tensor], regions: list[Tensor], image_sizes: Any) -> Tensor:
        """One map (N, C, H, W) and the regions of each image -> (R, C, output_size, output_size)."""
        from torchvision.ops import roi_pool

        (x,) = maps.values()
        return roi_pool(x.float(), regions, self.output_size, 1 / self.stride)


class Parts(NamedTuple):
    """What a kind of Faster R-CNN puts around the stages of a residual network.

    Attributes:
        first_stage: First stage whose map is used.
        neck: Turns the maps, a list, into those that regions are proposed on; None leaves them as they are.
        box_head: Turns a pooled region into features.
        num_features: Number of these features.
        region_pool: Pools the regions out of the maps.
        anchor_sizes: Sides of the anchors in pixels, for each map.
        proposal_channels: Channels of the maps.
        num_proposals: Regions kept an image, in training and in evaluation.
        num_candidates: Regions a map that go into their non-maximum suppression, in training and in evaluation.
        num_sampled: Regions an image that the second stage trains on.
        size_multiple: Padded images are multiples of this, the stride of the coarsest map.
    """

    first_stage: int
    neck: nn.Module | None
    box_head: nn.Module
    num_features: int
    region_pool: nn.Module
    anchor_sizes: tuple[tuple[int, ...], ...]
    proposal_channels: int
    num_proposals: tuple[int, int]
    num_candidates: tuple[int, int]
    num_sampled: int
    size_multiple: int


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


def check_boxes(index: int, target: dict[str, Tensor], image_size: tuple[int, int]) -> tuple[Tensor, int]:
    """The boxes of one target inside the image, (B, 4), and how many of them reached beyond it.

    Args:
        index: Place of the target in its batch, for the message.
        target: Holds `boxes`.
        image_size: Height and width.

    Raises:
        ReszooError: Boxes that are missing, of another shape, not finite, without area, or outside the image.
    """
    where = f"targets[{index}]['boxes']"
    boxes = target.get("boxes")
    if boxes is None or boxes.dim() != 2 or boxes.shape[1] != 4:
        found = "nothing" if boxes is None else f"shape {tuple(boxes.shape)}"
        raise ReszooError(f"{where} must have shape (B, 4), (0, 4) for an image without objects; got {found}")
    boxes = boxes.float()
    height, width = image_size
    inside = torch.stack((boxes[:, 0::2].clamp(0, width), boxes[:, 1::2].clamp(0, height)), dim=2).flatten(1)  # (B, 4)
    for candidate, reason in (
        (boxes, "is not a box (x1, y1, x2, y2) with x1 < x2 and y1 < y2; mend or drop it"),
        (inside, f"lies outside its image of height {height} and width {width}; mend or drop it"),
    ):
        # Written so that a NaN fails.
        good = (candidate[:, :2] < candidate[:, 2:]).all(1) & boxes.isfinite().all(1)
        if not good.all():
            first = int(good.logical_not().nonzero()[0])
            raise ReszooError(f"{where}[{first}] = {boxes[first].tolist()} {reason}")
    return inside, int((inside != boxes).any(1).sum())


def check_labels(index: int, target: dict[str, Tensor], num_boxes: int, num_classes: int) -> Tensor:
    """The labels of one target, (B,), int64.

    Raises:
        ReszooError: Labels that are missing, not whole numbers, of another number than the boxes, or out of range.
    """
    where = f"targets[{index}]['labels']"
    labels = target.get("labels")
    if labels is None or labels.shape != (num_boxes,):
        found = "nothing" if labels is None else f"shape {tuple(labels.shape)}"
        raise ReszooError(f"{where} must have one label a box, shape ({num_boxes},); got {found}")
    if num_boxes and (labels.is_floating_point() or labels.dtype == torch.bool):
        raise ReszooError(f"{where} must be whole numbers, got {labels.dtype}")
    bad = ((labels < 0) | (labels >= num_classes)).nonzero().flatten()
    if len(bad):
        raise ReszooError(
            f"{where}[{int(bad[0])}] = {int(labels[bad[0]])} is no class: labels run from 0 to num_classes - 1 = "
            f"{num_classes - 1}, without a background"
        )
    return labels.long()


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


def proposal_network(parts: Parts) -> Any:
    """The region proposal network: three aspect ratios, 256 anchors sampled an image, overlaps 0.7 and 0.3."""
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead

    anchors = AnchorGenerator(parts.anchor_sizes, ((0.5, 1.0, 2.0),) * len(parts.anchor_sizes))
    head = RPNHead(parts.proposal_channels, 3 * len(parts.anchor_sizes[0]))
    candidates, proposals = (
        {"training": number[0], "testing": number[1]} for number in (parts.num_candidates, parts.num_proposals)
    )
    return RegionProposalNetwork(anchors, head, 0.7, 0.3, 256, 0.5, candidates, proposals, 0.7)


def region_heads(parts: Parts, num_classes: int) -> Any:
    """The second stage: a quarter of the regions overlap an object by half; at most 100 detections."""
    from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
    from torchvision.models.detection.roi_heads import RoIHeads

    predictor = FastRCNNPredictor(parts.num_features, num_classes + 1)
    return RoIHeads(
        parts.region_pool, parts.box_head, predictor, 0.5, 0.5, parts.num_sampled, 0.25, None, 0.05, 0.5, 100
    )


def c4_parts(resnet: ResNet) -> Parts:
    """Regions on conv4_x at stride 16, pooled before conv5_1; conv5_x and average pooling are the box head."""
    conv5 = resnet.stages.pop(3)
    return Parts(
        first_stage=2,
        neck=None,
        box_head=nn.Sequential(conv5, nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        num_features=resnet.stage_channels[3],
        region_pool=RegionPool(14, stride=16),
        anchor_sizes=((128, 256, 512),),
        proposal_channels=resnet.stage_channels[2],
        num_proposals=(2000, 300),
        num_candidates=(12000, 6000),
        num_sampled=128,
        size_multiple=16,
    )


def pyramid_parts(resnet: ResNet) -> Parts:
    """Regions on a pyramid of 256 channels over conv2_x to conv5_x, strides 4 to 32, and one map more; two layers."""
    return _pyramid_parts(
        resnet,
        first_stage=0,
        first_stride=4,
        channels=256,
        hidden=1024,
        anchor_sizes=((32,), (64,), (128,), (256,), (512,)),
        canonical=(224, 4),
        num_proposals=(2000, 1000),
        num_candidates=(2000, 1000),
        num_sampled=512,
        size_multiple=32,
    )


def small_pyramid_parts(resnet: ResNet) -> Parts:
    """The pyramid for scenes of 64 to 128 pixels with objects of 8 to 32: strides 2, 4 and 8 of a CIFAR network."""
    return _pyramid_parts(
        resnet,
        first_stage=1,
        first_stride=2,
        channels=64,
        hidden=128,
        anchor_sizes=((8,), (16,), (32,)),
        canonical=(16, 2),
        num_proposals=(200, 100),
        num_candidates=(400, 200),
        num_sampled=64,
        size_multiple=8,
    )


def _pyramid_parts(
    resnet: ResNet,
    *,
    first_stage: int,
    first_stride: int,
    channels: int,
    hidden: int,
    canonical: tuple[int, int],
    **numbers: Any,
) -> Parts:
    """A pyramid whose regions are pooled to 7x7 from the map that suits their size.

    `canonical` is the side of a region in pixels and the map it is pooled from, as the logarithm of a stride.
    """
    from torchvision.models.detection.faster_rcnn import TwoMLPHead
    from torchvision.ops import MultiScaleRoIAlign
    from torchvision.ops.poolers import LevelMapper

    stage_channels = resnet.stage_channels[first_stage:]
    strides = [first_stride * 2**level for level in range(len(stage_channels))]
    names = [str(level) for level in range(len(strides))]
    pool = MultiScaleRoIAlign(names, 7, 2, canonical_scale=canonical[0], canonical_level=canonical[1])
    # torchvision infers strides from the first batch, and is wrong where images are small beside their padding.
    pool.scales = [1 / stride for stride in strides]
    pool.map_levels = LevelMapper(strides[0].bit_length() - 1, strides[-1].bit_length() - 1, *canonical)
    return Parts(
        first_stage=first_stage,
        neck=FeaturePyramid(stage_channels, channels),
        box_head=TwoMLPHead(channels * 7 * 7, hidden),
        num_features=hidden,
        region_pool=pool,
        proposal_channels=channels,
        **numbers,
    )


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
