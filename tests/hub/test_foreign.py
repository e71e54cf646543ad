import json

import huggingface_hub
import pytest
import timm
import torch
from safetensors.torch import save_file

from reszoo.errors import ReszooError
from reszoo.hub import foreign
from reszoo.hub.foreign import TIMM, from_timm, from_timm_hub


@pytest.fixture
def folder(tmp_path):
    """What timm pushes to the Hub."""
    torch.manual_seed(0)
    network = timm.create_model("resnet18", num_classes=6).eval()
    config = {"architecture": "resnet18", "num_classes": 6, "pretrained_cfg": {"tag": "t", "mean": [0.5, 0.5, 0.5]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(network.state_dict(), tmp_path / "model.safetensors")
    return tmp_path, network


def test_a_timm_folder_becomes_our_network_with_equal_outputs(folder):
    path, theirs = folder
    ours = from_timm_hub(path).eval()
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
    assert ours.pretrained_cfg["mean"] == [0.5, 0.5, 0.5]
    assert from_timm_hub(path, num_classes=2)(x).shape == (2, 2)


def test_two_files_are_fetched_from_the_hub_by_exact_name(folder, monkeypatch):
    path, theirs = folder
    asked = []

    def download(repository, name, revision=None):
        asked.append((repository, name, revision))
        return str(path / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    ours = from_timm("resnet18.a1_in1k", pretrained=True)
    assert torch.equal(ours.stem[0].weight, theirs.conv1.weight)
    assert [entry[1] for entry in asked] == ["config.json", "model.safetensors"]
    assert {entry[0] for entry in asked} == {"timm/resnet18.a1_in1k"}
    asked.clear()
    from_timm("resnet18", pretrained=True)
    assert asked[0][0] == f"timm/resnet18.{timm.models.get_pretrained_cfg('resnet18').tag}"


def test_without_weights_the_function_is_timms():
    assert from_timm("resnet50", num_classes=3).arguments["stride_in"] == "3x3"
    assert from_timm("vit_tiny_patch16_384", num_classes=3).image_size == (384, 384)


@pytest.mark.parametrize("name", TIMM)
def test_every_name_is_timms_and_ours_with_the_same_tensors(name):
    name = f"{name}_224" if name.startswith("vit") else name
    with torch.device("meta"):
        theirs, ours = timm.create_model(name), from_timm(name)
    assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in ours.parameters())


def test_a_network_that_is_not_here_is_named_with_its_neighbours():
    with pytest.raises(ReszooError, match=r"timm's 'resnet50d' is none of the networks here; did you mean resnet50"):
        from_timm("resnet50d")


def test_arguments_that_change_the_function_are_refused(folder):
    path, _ = folder
    config = json.loads((path / "config.json").read_text()) | {"model_args": {"act_layer": "silu"}}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ReszooError, match="built with act_layer='silu'"):
        from_timm_hub(path)


def test_a_folder_without_weights_says_what_it_lacks(folder):
    path, _ = folder
    (path / "model.safetensors").unlink()
    with pytest.raises(ReszooError, match=r"has no model\.safetensors"):
        from_timm_hub(path)


def test_timm_is_imported_only_where_its_default_tag_is_asked_for():
    assert "timm" not in vars(foreign)
