"""Every mapped name: another library's network with random weights becomes ours with equal outputs, and back."""

import logging

import pytest
import timm
import torch
import torchvision
import transformers
from torch import nn

import reszoo
from reszoo.errors import ReszooError
from reszoo.hub.adopt import save_weights
from reszoo.hub.convert import check_value, convert, export_state
from reszoo.models.vit import resize_position_table

SLOW = pytest.mark.slow


def lively(network: nn.Module) -> nn.Module:
    """The network in eval mode with norms that a wrong place would give away."""
    torch.manual_seed(0)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
        if isinstance(module, nn.BatchNorm2d | nn.LayerNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.1)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.normal_(module.bias, 0, 0.1)
    for name, parameter in network.named_parameters():
        if name.endswith(
            ("pos_embed", "pos_embedding", "cls_token", "class_token", "position_embeddings", "positions")
        ):
            nn.init.normal_(parameter, 0, 0.5)
    return network.eval()


def relative(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


def logits(network, x):
    with torch.no_grad():
        y = network(x)
    return y if isinstance(y, torch.Tensor) else y.logits


def hf_resnet(layer_type, depths, sizes):
    config = transformers.ResNetConfig(layer_type=layer_type, depths=depths, hidden_sizes=sizes, num_labels=1000)
    return transformers.ResNetForImageClassification(config)


def hf_vit():
    config = transformers.ViTConfig(hidden_size=192, num_attention_heads=3, intermediate_size=768, num_labels=9)
    return transformers.ViTForImageClassification(config)


def tv(name):
    return lambda: getattr(torchvision.models, name)(
        **({"init_weights": False} if name in ("googlenet", "inception_v3") else {})
    )


def tv_vit_tiny():
    return torchvision.models.VisionTransformer(224, 16, 12, 3, 192, 768)


def of_timm(name, **options):
    return lambda: timm.create_model(name, **options)


SMALL = (1, 3, 64, 64)
CASES = [
    ("resnet18", "timm", of_timm("resnet18"), SMALL, ()),
    ("resnet18", "torchvision", tv("resnet18"), SMALL, ()),
    ("resnet18", "transformers", lambda: hf_resnet("basic", [2, 2, 2, 2], [64, 128, 256, 512]), SMALL, ()),
    ("resnet34", "timm", of_timm("resnet34"), SMALL, SLOW),
    ("resnet50", "timm", of_timm("resnet50"), SMALL, ()),
    ("resnet50", "torchvision", tv("resnet50"), SMALL, SLOW),
    ("resnet50", "transformers", lambda: hf_resnet("bottleneck", [3, 4, 6, 3], [256, 512, 1024, 2048]), SMALL, SLOW),
    ("resnet101", "timm", of_timm("resnet101"), SMALL, SLOW),
    ("resnet152", "torchvision", tv("resnet152"), SMALL, SLOW),
    ("wide_resnet50_2", "timm", of_timm("wide_resnet50_2"), SMALL, SLOW),
    ("wide_resnet101_2", "torchvision", tv("wide_resnet101_2"), SMALL, SLOW),
    ("resnext50_32x4d", "timm", of_timm("resnext50_32x4d"), SMALL, ()),
    ("resnext101_32x4d", "timm", of_timm("resnext101_32x4d"), SMALL, SLOW),
    ("preact_resnet50", "timm", of_timm("resnetv2_50"), SMALL, ()),
    ("preact_resnet101", "timm", of_timm("resnetv2_101"), SMALL, SLOW),
    ("densenet121", "timm", of_timm("densenet121"), SMALL, ()),
    ("densenet121", "torchvision", tv("densenet121"), SMALL, SLOW),
    ("densenet161", "torchvision", tv("densenet161"), SMALL, SLOW),
    ("densenet169", "timm", of_timm("densenet169"), SMALL, SLOW),
    ("densenet201", "torchvision", tv("densenet201"), SMALL, SLOW),
    ("vit_ti16", "timm", of_timm("vit_tiny_patch16_224"), (1, 3, 224, 224), ()),
    ("vit_ti16", "torchvision", tv_vit_tiny, (1, 3, 224, 224), ()),
    ("vit_ti16", "transformers", hf_vit, (1, 3, 224, 224), ()),
    ("vit_s16", "timm", of_timm("vit_small_patch16_224"), (1, 3, 224, 224), SLOW),
    ("vit_b16", "torchvision", tv("vit_b_16"), (1, 3, 224, 224), SLOW),
    ("vit_b32", "timm", of_timm("vit_base_patch32_224"), (1, 3, 224, 224), SLOW),
]


@pytest.mark.parametrize(
    ("name", "library", "build", "shape"),
    [pytest.param(*case[:4], marks=case[4], id=f"{case[0]}-{case[1]}") for case in CASES],
)
def test_another_librarys_network_becomes_ours_and_back_with_equal_outputs(name, library, build, shape):
    theirs = lively(build())
    ours = convert(theirs.state_dict(), name).eval()
    x = torch.randn(shape)
    expected = logits(theirs, x)
    assert relative(logits(ours, x), expected) < 1e-5
    assert ours.conversion.loaded == ours.conversion.total
    exported = export_state(ours, library)
    assert {k: v.shape for k, v in exported.items()} == {k: v.shape for k, v in theirs.state_dict().items()}
    again = build().eval()
    again.load_state_dict(exported)
    torch.testing.assert_close(logits(again, x), expected, rtol=0, atol=0)


def test_the_stride_of_another_librarys_bottlenecks_is_in_the_3x3():
    with torch.device("cpu"):
        network = convert(timm.create_model("resnet50").state_dict(), "resnet50")
    assert network.arguments["stride_in"] == "3x3"
    assert network.conversion.options["stride_in"] == "3x3"
    with pytest.raises(ReszooError, match="timm computes resnet50 with stride_in='3x3'"):
        export_state(reszoo.create("resnet50"), "timm")


def test_a_file_that_records_its_stride_is_refused_under_another(tmp_path):
    file = tmp_path / "model.safetensors"
    network = reszoo.create("resnet50", stride_in="3x3", num_classes=3)
    save_weights(network, file)
    assert convert(file, "resnet50").arguments["stride_in"] == "3x3"
    with pytest.raises(ReszooError, match="trained with stride_in='3x3', and stride_in='1x1' was asked for"):
        convert(file, "resnet50", stride_in="1x1")
    with pytest.raises(ReszooError, match="of resnet50, not of resnet101"):
        convert(file, "resnet101")


def test_our_weights_without_a_record_warn_and_give_a_value_to_compare():
    network = lively(reszoo.create("resnet20", zero_padding="split"))
    with pytest.warns(UserWarning, match="assuming zero_padding='append'. Its check value is"):
        other = convert(network.state_dict(), "resnet20")
    assert abs(check_value(other) - check_value(network)) > 1e-3
    same = convert(network.state_dict(), "resnet20", zero_padding="split")
    assert check_value(same) == pytest.approx(check_value(network))


def test_akamasters_zero_channels_stand_on_both_sides():
    split = lively(reszoo.create("resnet20", zero_padding="split"))
    foreign = export_state(split, "akamaster")
    assert {"linear.weight", "layer3.2.conv2.weight", "bn1.running_var"} < set(foreign)

    def theirs(x):  # a plain loop over the names of that code
        def norm(x, name):
            parts = (foreign[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias"))
            return nn.functional.batch_norm(x, *parts)

        x = norm(nn.functional.conv2d(x, foreign["conv1.weight"], padding=1), "bn1").relu()
        for stage in (1, 2, 3):
            for block in range(3):
                at, stride = f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
                y = norm(nn.functional.conv2d(x, foreign[f"{at}.conv1.weight"], None, stride, 1), f"{at}.bn1").relu()
                y = norm(nn.functional.conv2d(y, foreign[f"{at}.conv2.weight"], padding=1), f"{at}.bn2")
                if stride == 2:
                    quarter = y.shape[1] // 4
                    x = nn.functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, quarter, quarter))
                x = (x + y).relu()
        return nn.functional.linear(x.mean((2, 3)), foreign["linear.weight"], foreign["linear.bias"])

    ours = convert({f"module.{name}": tensor for name, tensor in foreign.items()}, "resnet20").eval()
    x = torch.randn(2, 3, 32, 32)
    assert ours.arguments["zero_padding"] == "split"
    assert relative(logits(ours, x), theirs(x)) < 1e-5


def test_the_kind_of_shortcut_is_read_from_the_file():
    for option in "ABC":
        state = reszoo.create("resnet8", shortcut=option).state_dict()
        renamed = {}
        for name, tensor in state.items():
            renamed[name.replace("stem.0", "conv1").replace("stem.1", "bn1").replace("head", "fc")] = tensor
        theirs = {}
        for name, tensor in renamed.items():
            parts = name.split(".")
            if parts[0] == "stages":
                kind = {"0": "conv1", "1": "bn1", "3": "conv2", "4": "bn2"}[parts[4]] if parts[3] == "residual" else ""
                layer = kind or f"downsample.{parts[4]}"
                name = f"layer{int(parts[1]) + 1}.{parts[2]}.{layer}.{parts[5]}"
            theirs[name] = tensor
        network = convert(theirs, "resnet8")
        assert network.arguments["shortcut"] == option
        assert all(torch.equal(network.state_dict()[key], state[key]) for key in state)


def test_a_first_norm_with_a_negative_scale_is_refused_where_timm_pools_before_it():
    theirs = timm.create_model("resnetv2_50")
    theirs.stages[0].blocks[0].norm1.weight.data[3] = -0.5
    with pytest.raises(ReszooError, match="1 channels of the first norm have a negative scale"):
        convert(theirs.state_dict(), "preact_resnet50")


def test_timms_basic_preactivation_networks_are_refused_for_they_add_another_input():
    with pytest.raises(ReszooError, match="adds the first block's input before its norm"):
        convert(timm.create_model("resnetv2_18").state_dict(), "preact_resnet18")
    with pytest.raises(ReszooError, match="adds the first block's input before its norm"):
        export_state(reszoo.create("preact_resnet18"), "timm")


@pytest.mark.parametrize("name", ["resnetv2_50x1_bit", "resnetv2_50d"])
def test_timms_other_preactivation_networks_are_refused_with_counts(name):
    with torch.device("meta"):
        state = timm.create_model(name).state_dict()
    with pytest.raises(ReszooError, match=r"do not fit preact_resnet50: \d+ missing: "):
        convert(state, "preact_resnet50")


@pytest.mark.parametrize("counters", [True, False])
def test_old_densenet_names_load_to_the_bit(counters):
    ours = lively(reszoo.create("densenet121", num_classes=5))
    state = export_state(ours, "torchvision")
    old = {}
    for name, tensor in state.items():
        for layer in ("norm1", "norm2", "conv1", "conv2"):
            name = name.replace(f".{layer}.", f".{layer[:-1]}.{layer[-1]}.")
        if counters or not name.endswith("num_batches_tracked"):
            old[f"module.densenet121.{name}"] = tensor
    loaded = convert({"state_dict": old}, "densenet121").state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in ours.state_dict().items())


@pytest.mark.parametrize(
    "prefix", ["_orig_mod.", "model._orig_mod.", "module._orig_mod.", "_orig_mod.module.", "module.", "model."]
)
def test_what_wrappers_left_in_front_is_taken_off(prefix):
    network = reszoo.create("resnet8")
    state = {prefix + name: tensor for name, tensor in network.state_dict().items()}
    loaded = convert(state, "resnet8", zero_padding="append").state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in network.state_dict().items())


def test_what_a_compiled_part_left_in_the_middle_is_taken_out():
    network = reszoo.create("resnet8")
    state = {name.replace("stages.", "stages._orig_mod."): t for name, t in network.state_dict().items()}
    loaded = convert(state, "resnet8", zero_padding="append").state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in network.state_dict().items())


def test_a_network_with_a_part_called_module_keeps_its_name():
    from reszoo.hub.convert._names import unwrap

    known = {"module.weight", "weight", "model.module.bias"}
    assert set(unwrap(known, known.__contains__)) == known
    assert set(unwrap([f"module.{name}" for name in known], known.__contains__)) == known
    assert set(unwrap([f"_orig_mod.{name}" for name in known], known.__contains__)) == known


def test_two_names_that_become_one_are_refused():
    state = reszoo.create("resnet8").state_dict()
    state["module.head.bias"] = state["head.bias"]
    with pytest.raises(ReszooError, match=r"two stored tensors, head\.bias and module\.head\.bias"):
        convert(state, "resnet8", zero_padding="append")


def test_renamed_keys_are_never_a_silent_no_op():
    state = {f"junk{name}": t for name, t in timm.create_model("resnet18").state_dict().items()}
    with pytest.raises(
        ReszooError, match=r"only 0 of \d+ tensors were found: \d+ missing: .*122 unexpected: junkconv1"
    ):
        convert(state, "resnet18", strict=False)
    with pytest.raises(ReszooError, match="none of the 1 stored names looks like"):
        convert({"weights": torch.zeros(1)}, "resnet18", strict=False)
    state = {f"junk.{name}": t for name, t in timm.create_model("resnet18").state_dict().items()}
    with pytest.raises(ReszooError, match=r"only 0 of 122 tensors were found: 100 missing: .*122 unexpected: junk"):
        convert(state, "resnet18", strict=False)


def test_without_strict_what_is_missing_is_reported_and_initialised():
    state = timm.create_model("resnet18").state_dict()
    del state["layer4.1.conv2.weight"]
    with pytest.raises(ReszooError, match=r"1 missing: layer4\.1\.conv2\.weight"):
        convert(state, "resnet18")
    network = convert(state, "resnet18", strict=False)
    assert network.conversion.fresh == ("stages.3.1.residual.3.weight",)
    assert network.conversion.loaded == 121


@pytest.mark.parametrize("ema", [None, True, False])
def test_one_of_two_sets_of_weights_must_be_chosen(ema):
    state = timm.create_model("resnet18").state_dict()
    both = {
        "state_dict": {k: torch.zeros_like(v) for k, v in state.items()},
        "state_dict_ema": {k: torch.ones_like(v) for k, v in state.items()},
        "epoch": 3,
    }
    if ema is None:
        with pytest.raises(ReszooError, match="choose with ema=False or ema=True"):
            convert(both, "resnet18")
        return
    network = convert(both, "resnet18", ema=ema)
    assert network.stem[0].weight.unique().tolist() == [float(ema)]
    assert network.conversion.weights == ("averaged" if ema else "raw")


def test_an_absent_set_of_weights_is_an_error():
    state = timm.create_model("resnet18").state_dict()
    for checkpoint in (state, {"model": state}):
        with pytest.raises(ReszooError, match="holds none"):
            convert(checkpoint, "resnet18", ema=True)
    with pytest.raises(ReszooError, match="averaged ones only"):
        convert({"model_ema": state}, "resnet18", ema=False)
    assert convert({"model_ema": state}, "resnet18").conversion.weights == "averaged"


@pytest.mark.parametrize("classes", [1000, 7, 0])
def test_another_number_of_classes_replaces_the_head_alone_and_says_so(classes, caplog):
    theirs = timm.create_model("resnet18")
    with caplog.at_level(logging.INFO, "reszoo"):
        network = convert(theirs.state_dict(), "resnet18", num_classes=classes)
    assert torch.equal(network.stages[3][1].residual[3].weight, theirs.layer4[1].conv2.weight)
    assert network(torch.randn(2, 3, 32, 32)).shape == (2, classes or 512)
    new = ("head.weight", "head.bias")
    assert network.conversion.fresh == (new if classes == 7 else ())
    assert network.conversion.dropped == (() if classes == 1000 else ("fc.weight", "fc.bias"))
    assert ("new: head.weight, head.bias" in caplog.text) == (classes == 7)


def test_a_file_without_a_head_gives_features():
    theirs = timm.create_model("resnet18", num_classes=0, in_chans=1)
    network = convert(theirs.state_dict(), "resnet18")
    assert network.arguments["num_classes"] == 0
    assert network.arguments["in_chans"] == 1


def test_converting_leaves_the_given_tensors_alone():
    state = timm.create_model("resnet18").state_dict()
    before = state["conv1.weight"].clone()
    network = convert(state, "resnet18")
    with torch.no_grad():
        network.stem[0].weight.add_(1)
    assert torch.equal(state["conv1.weight"], before)


@pytest.mark.parametrize("size", [192, [96, 160]])
def test_a_position_table_follows_the_image_size(size):
    theirs = lively(timm.create_model("vit_tiny_patch16_224", num_classes=3))
    network = convert(theirs.state_dict(), "vit_ti16", image_size=size)
    grid = [side // 16 for side in ([size, size] if isinstance(size, int) else size)]
    expected = resize_position_table(theirs.pos_embed.detach(), (14, 14), grid)
    torch.testing.assert_close(network.positions.detach(), expected)
    assert torch.equal(network.positions[:, 0], theirs.pos_embed[:, 0])
    assert network.conversion.resized == ("positions",)
    assert network(*network.example_inputs(1)).shape == (1, 3)


def test_a_network_without_layouts_takes_its_own_names():
    network = reszoo.create("plain8")
    loaded = convert({"model": network.state_dict()}, "plain8").state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in network.state_dict().items())
    with pytest.raises(ReszooError, match="no layout of 'timm' is known for plain8"):
        export_state(network, "timm")


def test_something_else_than_a_state_dict_is_refused():
    with pytest.raises(ReszooError, match="'epoch' is int"):
        convert({"epoch": 3, "optimizer": {}}, "resnet18")
