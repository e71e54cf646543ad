"""What stands around the stages of a residual network in Faster R-CNN: pyramid, pooling, proposals and region heads.

Papers: He et al. 2015, "Deep Residual Learning for Image Recognition", arXiv:1512.03385, Appendix A, for `c4_parts`;
Lin et al. 2017, "Feature Pyramid Networks", arXiv:1612.03144, for the pyramids. Anchors, proposals, pooling and losses
are torchvision's, imported where they are built, so that the other networks do not wait for it.

Shapes: N images, C channels, H height, W width, R regions of all images.
"""

from typing import Any, NamedTuple

from torch import Tensor, nn

from reszoo.models.resnet import ResNet


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
