import json

import timm
import torch
from safetensors.torch import save_file

import reszoo
from reszoo.hub import foreign


def test_a_timm_name_builds_our_network_of_the_same_function():
    torch.manual_seed(0)
    theirs = timm.create_model("resnet18", num_classes=3).eval()
    ours = reszoo.hub.convert.convert(theirs.state_dict(), "resnet18").eval()
    empty = reszoo.create("timm:resnet18", num_classes=3)
    assert empty.arguments == ours.arguments
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)


def test_a_timm_repository_loads_with_its_preprocessing(tmp_path, monkeypatch):
    torch.manual_seed(0)
    theirs = timm.create_model("resnet18").eval()
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    settings = theirs.pretrained_cfg
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "resnet18", "pretrained_cfg": settings}))
    asked = []

    def from_disk(repository, revision):
        asked.append(repository)
        return foreign._local(tmp_path)

    monkeypatch.setattr(foreign, "_remote", from_disk)
    ours = reszoo.load("timm/resnet18.a1_in1k")
    assert asked == ["timm/resnet18.a1_in1k"]
    assert ours.transform.crop == settings["crop_pct"]
    assert ours.transform.mean == settings["mean"]
    assert not ours.training
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
