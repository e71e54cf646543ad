import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import reszoo
from reszoo.errors import ReszooError
from reszoo.layers import FrozenBatchNorm2d, freeze_batch_norm
from reszoo.models._detection_targets import check_boxes

LOSSES = {"loss_classifier", "loss_box_reg", "loss_objectness", "loss_rpn_box_reg"}


def small(**options) -> nn.Module:
    torch.manual_seed(0)
    return reszoo.create("faster_rcnn_resnet20_fpn", **options)


def target(*rows: tuple[float, ...], labels: list[int] | None = None) -> dict[str, torch.Tensor]:
    boxes = torch.tensor(rows, dtype=torch.float32).reshape(-1, 4)
    return {"boxes": boxes, "labels": torch.tensor(labels or [0] * len(rows), dtype=torch.long)}


def randomise_statistics(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d | FrozenBatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)


@pytest.fixture(scope="module")
def both():
    """Torchvision's network and ours with its weights, 6 classes of objects."""
    from torchvision.models.detection import fasterrcnn_resnet50_fpn

    torch.manual_seed(0)
    sizes = {"min_size": 64, "max_size": 96}
    theirs = fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=7, **sizes)
    randomise_statistics(theirs)
    ours = reszoo.create("faster_rcnn_resnet50_fpn", num_classes=6, stride_in="3x3", frozen_norm=False, **sizes)
    # Both list their tensors in the same order: the body, the pyramid, the proposals, the heads.
    ours.load_state_dict(dict(zip(ours.state_dict(), theirs.state_dict().values(), strict=True)))
    for network in (theirs, ours):
        network.roi_heads.score_thresh = 0.0
    return theirs, ours


IMAGES = [(64, 80), (50, 47), (90, 200)]


def test_detections_equal_torchvision_s(both):
    theirs, ours = (network.eval() for network in both)
    torch.manual_seed(1)
    images = [torch.rand(3, *size) for size in IMAGES]
    with torch.no_grad():
        expected, got = theirs(images), ours(images)
    assert all(len(found["boxes"]) == 100 for found in expected)
    for one, other in zip(expected, got, strict=True):
        torch.testing.assert_close(other["boxes"], one["boxes"], rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(other["scores"], one["scores"], rtol=1e-4, atol=1e-6)
        assert torch.equal(other["labels"], one["labels"] - 1)


def test_losses_equal_torchvision_s(both):
    theirs, ours = (network.train() for network in both)
    for module in (*theirs.modules(), *ours.modules()):
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    torch.manual_seed(1)
    images = [torch.rand(3, *size) for size in IMAGES]
    targets = [target((5, 6, 40, 50), (20, 9, 60, 30), labels=[0, 5]), target(), target((80, 3, 150, 88), labels=[2])]
    shifted = [{"boxes": t["boxes"], "labels": t["labels"] + 1} for t in targets]
    with torch.no_grad():
        torch.manual_seed(2)
        expected = theirs(images, shifted)
        torch.manual_seed(2)  # so that both draw the same anchors and regions to train on
        for _ in images:
            torch.rand(1)  # torchvision draws a size for each image first
        got = ours(images, targets)
    assert set(got) == set(expected) == LOSSES
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-6, atol=1e-7)


def test_parameter_count_is_torchvision_s_at_91_outputs():
    from torchvision.models.detection import FasterRCNN_ResNet50_FPN_Weights

    with torch.device("meta"):
        network = reszoo.create("faster_rcnn_resnet50_fpn", num_classes=90)
    count = sum(p.numel() for p in network.parameters())
    assert count == FasterRCNN_ResNet50_FPN_Weights.COCO_V1.meta["num_params"]


def test_c4_shares_91_convolutions_and_runs_the_last_stage_on_regions():
    with torch.device("meta"):
        network = reszoo.create("faster_rcnn_resnet101_c4")
        shared = nn.ModuleList([network.stem, network.stages])
        projections = sum(len(stage[0].shortcut) > 0 for stage in network.stages)
        convolutions = sum(isinstance(m, nn.Conv2d) for m in shared.modules())
        (features,) = network.feature_maps(torch.empty(1, 3, 160, 320))
        region = network.roi_heads.box_head(torch.empty(5, 1024, 14, 14))
    assert convolutions - projections == 91
    assert features.shape == (1, 1024, 10, 20)
    assert region.shape == (5, 2048)


def test_c4_trains_and_detects():
    torch.manual_seed(0)
    network = reszoo.create("faster_rcnn_resnet101_c4", num_classes=3, min_size=64, max_size=64)
    network.roi_heads.fg_bg_sampler.batch_size_per_image = 4
    losses = network([torch.rand(3, 64, 64)], [target((8, 8, 40, 48), labels=[2])])
    assert set(losses) == LOSSES
    sum(losses.values()).backward()
    assert network.roi_heads.box_head[0][0].residual[0].weight.grad.isfinite().all()
    network.rpn._post_nms_top_n["testing"] = 4
    with torch.no_grad():
        (found,) = network.eval()([torch.rand(3, 64, 64)])
    assert set(found) == {"boxes", "labels", "scores"}


def test_regions_are_pooled_by_maximum_at_stride_16():
    with torch.device("meta"):
        network = reszoo.create("faster_rcnn_resnet101_c4")
    x = torch.arange(16.0).reshape(1, 1, 4, 4)
    pooled = network.roi_heads.box_roi_pool({"0": x}, [torch.tensor([[0.0, 0.0, 63.0, 63.0]])], [(64, 64)])
    assert pooled.shape == (1, 1, 14, 14)
    assert pooled.unique().tolist() == x.flatten().tolist()


def test_frozen_norm_is_batch_norm_in_evaluation_mode():
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(5, eps=1e-3)
    randomise_statistics(norm)
    nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    frozen, x = FrozenBatchNorm2d.from_batch_norm(norm), torch.randn(2, 5, 4, 3)
    torch.testing.assert_close(frozen(x), norm.eval()(x), rtol=1e-5, atol=1e-6)
    assert list(frozen.parameters()) == []
    frozen.load_state_dict(nn.BatchNorm2d(5).state_dict())
    assert torch.equal(frozen.running_var, torch.ones(5))


def test_frozen_norm_keeps_the_precision_of_its_input():
    assert FrozenBatchNorm2d(3)(torch.randn(1, 3, 2, 2, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_freezing_a_network_keeps_its_output_and_replaces_every_norm():
    torch.manual_seed(0)
    network = reszoo.create("resnet8").eval()
    randomise_statistics(network)
    x = torch.randn(2, 3, 16, 16)
    expected = network(x)
    freeze_batch_norm(network)
    torch.testing.assert_close(network(x), expected)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in network.modules())


def test_training_leaves_the_buffers_of_a_frozen_network_bit_equal():
    network = small(frozen_norm=True)
    randomise_statistics(network)
    before = {name: buffer.clone() for name, buffer in network.named_buffers()}
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    for _ in range(2):
        sum(network(*network.example_inputs()).values()).backward()
        optimizer.step()
    assert len(before) > 4
    assert all(torch.equal(buffer, before[name]) for name, buffer in network.named_buffers())


@pytest.mark.parametrize("trainable", [0, 1, 3])
def test_stages_that_do_not_train_keep_weights_and_statistics(trainable):
    network = small(trainable_stages=trainable)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    sum(network(*network.example_inputs()).values()).backward()
    optimizer.step()
    changed = {name for name, value in network.state_dict().items() if not torch.equal(value, before[name])}
    stages = {int(name.split(".")[1]) for name in changed if name.startswith("stages.")}
    assert stages == set(range(3 - trainable, 3))
    assert not any(name.startswith("stem.") for name in changed)


def test_the_last_stage_of_c4_is_the_one_that_runs_on_regions():
    with torch.device("meta"):
        network = reszoo.create("faster_rcnn_resnet101_c4", trainable_stages=1)
    assert not any(p.requires_grad for p in network.stages.parameters())
    assert all(p.requires_grad for p in network.roi_heads.box_head.parameters())


@pytest.mark.parametrize("trainable", [-1, 4])
def test_a_number_of_stages_that_is_not_there_is_refused(trainable):
    with pytest.raises(ReszooError, match=r"trainable_stages must be in 0 \.\. 3"):
        small(trainable_stages=trainable)


def test_a_classification_network_lends_its_body():
    torch.manual_seed(1)
    network, classifier = small(frozen_norm=True), reszoo.create("resnet20", in_chans=1)
    randomise_statistics(classifier)
    network.load_body(classifier)
    x = torch.randn(1, 1, 16, 16)
    torch.testing.assert_close(network.stages(network.stem(x)), classifier.eval().feature_maps(x)[-1])
    for other in (reszoo.create("resnet14", in_chans=1), reszoo.create("resnet20"), reszoo.create("resnet18")):
        with pytest.raises(ReszooError, match="the body has other layers"):
            network.load_body(other)


def test_images_of_several_sizes_go_through_together():
    network = small().eval()
    network.roi_heads.score_thresh = 0.0
    with torch.no_grad():
        found = network([torch.rand(1, 64, 64), torch.rand(1, 33, 47), torch.rand(1, 1, 1)])
    assert len(found) == 3
    for one, (height, width) in zip(found, [(64, 64), (33, 47), (1, 1)], strict=True):
        assert len(one["boxes"]) == len(one["labels"]) == len(one["scores"])
        assert (one["boxes"] >= 0).all()
        assert (one["boxes"][:, 0::2] <= width).all()
        assert (one["boxes"][:, 1::2] <= height).all()
    assert found[0]["labels"].min() >= 0
    assert found[0]["labels"].max() <= 9


def test_a_batch_tensor_is_a_list_of_its_images():
    network, images = small().eval(), torch.rand(2, 1, 32, 40)
    network.roi_heads.score_thresh = 0.0
    with torch.no_grad():
        torch.testing.assert_close(network(images), network(list(images)), rtol=0, atol=0)


def test_regions_are_pooled_at_the_true_stride_of_a_padded_image():
    # 9 pixels are padded to 16, whose map has 8 columns: 8 / 9 would round to stride 1.
    x = torch.arange(8.0).expand(1, 1, 8, 8)
    box = torch.tensor([[2.0, 2.0, 8.0, 8.0]])
    pooled = small().roi_heads.box_roi_pool({"0": x, "1": x[:, :, :4, :4]}, [box], [(9, 9)])
    torch.testing.assert_close(pooled[0, 0, 0], 1 + 3 * (torch.arange(7) + 0.5) / 7)


def test_boxes_keep_their_pixels_under_bfloat16():
    network = small(min_size=256).eval()
    network.roi_heads.score_thresh = 0.0
    images = [torch.rand(1, 256, 256)]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        (found,) = network(images)
    assert found["boxes"].dtype == found["scores"].dtype == torch.float32
    assert not torch.equal(found["boxes"], found["boxes"].bfloat16().float())


@pytest.mark.parametrize("name", ["min_size", "max_size"])
def test_scaling_bounds_the_sides(name):
    sizes = {"min_size": 32, "max_size": 40}
    network = small(**sizes)
    seen = network._resize(torch.rand(1, 16, 18) if name == "min_size" else torch.rand(1, 16, 40)).shape
    assert seen == ((1, 32, 36) if name == "min_size" else (1, 16, 40))


def test_label_0_is_a_class_and_the_background_stays_inside():
    network, seen = small(num_classes=2), []
    network.roi_heads.register_forward_pre_hook(lambda _, args: seen.append(args[3]))
    network([torch.rand(1, 32, 32)] * 2, [target((2, 2, 12, 12), (4, 9, 20, 30), labels=[0, 1]), target()])
    assert [t["labels"].tolist() for t in seen[0]] == [[1, 2], []]
    assert network.head.cls_score.out_features == 3


@pytest.mark.parametrize("label", [-1, 10])
def test_a_label_out_of_range_is_refused_with_its_place(label):
    targets = [target(), target((2, 2, 9, 9), (2, 2, 9, 9), labels=[9, label])]
    with pytest.raises(ReszooError, match=rf"targets\[1\]\['labels'\]\[1\] = {label} is no class: .* 0 to .* 9"):
        small()([torch.rand(1, 32, 32)] * 2, targets)


def test_an_image_without_objects_trains_as_a_negative():
    network = small()
    losses = network([torch.rand(1, 32, 32)] * 2, [target(), target()])
    assert all(loss.isfinite() for loss in losses.values())
    assert losses["loss_box_reg"] == losses["loss_rpn_box_reg"] == 0
    sum(losses.values()).backward()
    assert network.head.cls_score.weight.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ((5, 5, 5, 9), "is not a box"),
        ((5, 9, 9, 9), "is not a box"),
        ((9, 5, 5, 9), "is not a box"),
        ((5, 5, float("nan"), 9), "is not a box"),
        ((5, 5, float("inf"), 9), "is not a box"),
        ((33, 5, 40, 9), "lies outside its image"),
        ((5, 32, 9, 40), "lies outside its image"),
    ],
)
def test_a_box_without_area_in_the_image_is_refused_with_its_place(row, reason):
    with pytest.raises(ReszooError, match=rf"targets\[1\]\['boxes'\]\[1\] = .* {reason}"):
        small()([torch.rand(1, 32, 32)] * 2, [target(), target((2, 2, 9, 9), row)])


def test_a_box_past_the_border_is_clipped_and_counted():
    network, seen = small(), []
    network.roi_heads.register_forward_pre_hook(lambda _, args: seen.append(args[3]))
    arguments = [torch.rand(1, 32, 24)] * 2, [target((-3, 4, 9, 99)), target((20, 2, 30, 9), (0, 0, 24, 32))]
    with pytest.warns(UserWarning, match="2 boxes of this batch reach beyond their image"):
        losses = network(*arguments)
    assert seen[0][0]["boxes"].tolist() == [[0, 4, 9, 32]]
    assert seen[0][1]["boxes"].tolist() == [[20, 2, 24, 9], [0, 0, 24, 32]]
    assert all(loss.isfinite() for loss in losses.values())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        network(*arguments)
    assert network.num_clipped_boxes == 4


def test_the_targets_given_are_left_as_they_are():
    given = target((-3, 4, 9, 30))
    check_boxes(0, given, (32, 32))
    assert given["boxes"].tolist() == [[-3, 4, 9, 30]]


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (None, "in training mode needs targets"),
        ([target()], "2 images need as many targets, got 1"),
        ([target(), {"boxes": torch.tensor([])}], r"\(0, 4\) for an image without objects; got shape \(0,\)"),
        ([target(), {"labels": torch.tensor([])}], r"targets\[1\]\['boxes'\] .* got nothing"),
        ([target(), {"boxes": torch.zeros(0, 4)}], r"targets\[1\]\['labels'\] .* got nothing"),
        ([{**target((0, 0, 9, 9)), "labels": torch.zeros(2).long()}, target()], r"shape \(1,\); got shape \(2,\)"),
        ([{**target((0, 0, 9, 9)), "labels": torch.zeros(1)}, target()], "whole numbers, got torch.float32"),
    ],
)
def test_a_malformed_target_is_refused(targets, message):
    with pytest.raises(ReszooError, match=message):
        small()([torch.rand(1, 32, 32)] * 2, targets)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (torch.rand(3, 32, 32), r"images\[0\] must be a floating-point tensor \(1, H, W\)"),
        (torch.rand(32, 32), r"got torch.float32 of shape \(32, 32\)"),
        (torch.zeros(1, 32, 32, dtype=torch.uint8), "got torch.uint8"),
        (torch.rand(1, 0, 32), r"shorter side of images\[0\] must be at least 1"),
        (torch.rand(1, 1, 65), "would lose its shorter side"),
    ],
)
def test_an_image_that_cannot_be_used_is_refused(image, message):
    with pytest.raises(ReszooError, match=message):
        small(min_size=32, max_size=64).eval()([image])


def test_targets_in_evaluation_mode_and_an_empty_batch_are_refused():
    network = small().eval()
    with pytest.raises(ReszooError, match="takes no targets"):
        network([torch.rand(1, 32, 32)], [target()])
    with pytest.raises(ReszooError, match="number of images must be at least 1"):
        network([])


def test_a_copy_and_its_state_are_the_network():
    network = small().eval()
    network.roi_heads.score_thresh = 0.0
    again, images = copy.deepcopy(network), [torch.rand(1, 32, 32)]
    again.load_state_dict(network.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(again(images), network(images), rtol=0, atol=0)


@pytest.mark.slow
def test_the_small_network_overfits_four_scenes(digit_scene):
    from torchvision.ops import box_iou

    torch.manual_seed(0)
    generator = np.random.default_rng(1)
    scenes = [digit_scene(generator, *size) for size in ((64, 64), (64, 96), (96, 80), (64, 64))]
    images = [image for image, _, _, _ in scenes]
    targets = [{"boxes": boxes, "labels": labels} for _, _, boxes, labels in scenes]
    network, losses = small(), []
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    for _ in range(80):
        losses.append(sum(network(images, targets).values()))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] / 2
    with torch.no_grad():
        detections = network.eval()(images)
    found = []
    for given, detected in zip(targets, detections, strict=True):
        sure = detected["scores"] > 0.5
        same = given["labels"][:, None] == detected["labels"][sure]
        found += (same & (box_iou(given["boxes"], detected["boxes"][sure]) > 0.5)).any(1).tolist()
    assert sum(found) >= 0.9 * len(found)
