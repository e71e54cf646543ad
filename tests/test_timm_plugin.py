import copy
import pickle
import subprocess
import sys

import pytest
import timm
import torch
from torch import nn

import reszoo
import reszoo.timm_plugin
from reszoo.cli.list_models import count_parameters
from reszoo.errors import ReszooError
from reszoo.models import factory_of


def smallest_of_each_file():
    """One name a file of `reszoo.models` among those in timm's registry."""
    names = [name.removeprefix("reszoo_") for name in timm.list_models("reszoo_*")]
    by_file: dict[str, str] = {}
    for name in sorted(names, key=count_parameters):
        by_file.setdefault(factory_of(name).__module__, name)
    return sorted(by_file.values())


def test_every_image_classifier_is_in_timms_registry():
    listed = {name.removeprefix("reszoo_") for name in timm.list_models("reszoo_*")}
    assert {"resnet20", "resnet50", "preact_resnet164", "densenet121", "vit_b16"} <= listed
    assert "bert_base" not in listed
    assert "unet" not in " ".join(listed)


def test_names_appear_by_the_import_alone_and_reszoo_leaves_timm_unloaded():
    program = (
        "import sys, reszoo; before = 'timm' in sys.modules; import timm, reszoo.timm_plugin;"
        "print(before, type(timm.create_model('reszoo_resnet20', num_classes=3)).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "TimmResNet"]


@pytest.mark.parametrize("name", smallest_of_each_file())
def test_timms_methods_agree_with_the_network(name):
    torch.manual_seed(0)
    network = timm.create_model(f"reszoo_{name}", num_classes=5, in_chans=2).eval()
    x = torch.randn(2, *network.default_cfg["input_size"])
    assert network.default_cfg["input_size"][0] == 2
    with torch.no_grad():
        torch.testing.assert_close(network.forward_head(network.forward_features(x)), network(x))
        features = network.forward_head(network.forward_features(x), pre_logits=True)
        assert features.shape == (2, network.num_features)
        network.reset_classifier(0)
        torch.testing.assert_close(network(x), features)
        network.reset_classifier(7)
    assert network(x).shape == (2, 7)
    assert (network.num_classes, network.arguments["num_classes"]) == (7, 7)
    assert isinstance(network.get_classifier(), nn.Linear)


def test_the_tensors_and_outputs_are_those_of_our_own_network():
    torch.manual_seed(0)
    ours = reszoo.create("resnet20").eval()
    theirs = timm.create_model("reszoo_resnet20").eval()
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(theirs(x), ours(x))


def test_feature_maps_come_with_their_channels_and_reductions():
    network = timm.create_model("reszoo_resnet50", features_only=True)
    maps = network(torch.randn(1, 3, 64, 64))
    assert [m.shape[1] for m in maps] == network.feature_info.channels() == [256, 512, 1024, 2048]
    assert [64 // m.shape[-1] for m in maps] == network.feature_info.reduction() == [4, 8, 16, 32]


def test_feature_maps_may_be_chosen():
    network = timm.create_model("reszoo_resnet20", features_only=True, out_indices=(0, -1))
    assert [m.shape[1] for m in network(torch.randn(1, 3, 32, 32))] == network.feature_info.channels() == [16, 64]
    with pytest.raises(ReszooError, match="out_indices must be below 3"):
        timm.create_model("reszoo_resnet20", features_only=True, out_indices=(4,))


def test_weights_that_do_not_exist_are_a_clear_error():
    with pytest.raises(ReszooError, match="no weights of reszoo_resnet20 are published"):
        timm.create_model("reszoo_resnet20", pretrained=True)


def test_timms_options_reach_ours():
    network = timm.create_model("reszoo_resnet20", drop_path_rate=0.2, drop_rate=0.0)
    assert (network.arguments["stochastic_depth"], network.arguments["drop_per"]) == (0.2, "sample")
    assert timm.create_model("reszoo_vit_ti16", img_size=64, num_classes=2).image_size == (64, 64)
    with pytest.raises(ReszooError, match="unknown argument 'drop_rate'"):
        timm.create_model("reszoo_resnet20", drop_rate=0.2)
    with pytest.raises(ReszooError, match="global_pool='max' is not available"):
        timm.create_model("reszoo_resnet8").reset_classifier(3, "max")


def test_a_network_survives_pickling_and_copying():
    network = timm.create_model("reszoo_resnet8").eval()
    x = torch.randn(1, 3, 16, 16)
    assert torch.equal(pickle.loads(pickle.dumps(network))(x), network(x))
    assert torch.equal(copy.deepcopy(network)(x), network(x))


def test_timms_optimizer_factory_takes_a_network():
    from timm.optim import create_optimizer_v2

    network = timm.create_model("reszoo_vit_ti16", img_size=32, num_classes=2)
    optimizer = create_optimizer_v2(network, opt="adamw", lr=1e-3, weight_decay=0.05)
    plain = {id(p) for group in optimizer.param_groups if group["weight_decay"] == 0 for p in group["params"]}
    assert id(network.positions) in plain
