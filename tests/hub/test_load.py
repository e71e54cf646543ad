import json
import pickle
import zipfile

import pytest
import torch

import reszoo
from reszoo.errors import ReszooError
from reszoo.hub import bundle
from reszoo.models import _registry
from reszoo.preprocessing import ImageTransform

TRANSFORM = ImageTransform((8, 8), (0.3,), (0.4,))
LABELS = ["no", "010", "a: b"]


@pytest.fixture
def network():
    torch.manual_seed(0)
    network = reszoo.create("resnet8", in_chans=1, num_classes=3)
    network(torch.randn(8, 1, 8, 8))  # moves the running statistics off their start
    return network


@pytest.fixture
def folder(network, tmp_path):
    return bundle.save(
        network, tmp_path / "b", labels=LABELS, transform=TRANSFORM, recipe="model: x\n", card="# card\n"
    )


def checkpoint(network, path, **changes):
    values = {
        "state_dict": {f"network.{key}": value for key, value in network.state_dict().items()},
        "reszoo": {
            "architecture": network.architecture,
            "arguments": network.arguments,
            "labels": LABELS,
            "transform": None,
        },
    }
    torch.save(values | changes, path)
    return path


def test_a_bundle_comes_back_bit_for_bit_with_all_that_travels(network, folder):
    loaded = reszoo.load(folder)
    x = torch.randn(4, 1, 8, 8)
    assert torch.equal(loaded(x), network.eval()(x))
    assert (loaded.labels, loaded.transform, loaded.card, loaded.recipe) == (
        LABELS,
        TRANSFORM,
        "# card\n",
        "model: x\n",
    )
    assert not loaded.training


def test_a_checkpoint_file_comes_back_bit_for_bit(network, tmp_path):
    loaded = reszoo.load(checkpoint(network, tmp_path / "x.ckpt"))
    x = torch.randn(4, 1, 8, 8)
    assert torch.equal(loaded(x), network.eval()(x))


class Shared(torch.nn.Module):
    """One layer under two names."""

    def __init__(self):
        super().__init__()
        self.first = self.second = torch.nn.Linear(2, 2)


def test_a_layer_under_two_names_comes_back_as_one(tmp_path, monkeypatch):
    monkeypatch.setattr(_registry, "_FACTORIES", dict(_registry._FACTORIES))

    @reszoo.register
    def shared() -> Shared:
        """Two names, one layer."""
        return Shared()

    network = shared()
    loaded = reszoo.load(bundle.save(network, tmp_path / "b"))
    assert set(loaded.state_dict()) == set(network.state_dict())
    assert torch.equal(loaded.second.weight, network.first.weight)
    assert loaded.first.weight is loaded.second.weight


def test_saving_twice_gives_the_same_bytes(network, tmp_path):
    first, second = (bundle.save(network, tmp_path / name) for name in ("a", "b"))
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()


def test_a_channels_last_network_saves_the_same_bytes(network, tmp_path):
    plain = bundle.save(network, tmp_path / "a")
    last = bundle.save(network.to(memory_format=torch.channels_last), tmp_path / "b")
    assert (plain / "model.safetensors").read_bytes() == (last / "model.safetensors").read_bytes()


@pytest.mark.parametrize("classes", [10, 3, 0])
def test_another_class_count_changes_the_head_alone_and_says_so(network, folder, classes):
    loaded = reszoo.load(folder, num_classes=classes)
    ours = network.state_dict()
    assert all(
        torch.equal(value, ours[key]) for key, value in loaded.state_dict().items() if not key.startswith("head")
    )
    report = loaded.load_report
    assert (report.fresh, report.dropped) == {
        10: (["head.bias", "head.weight"], []),
        3: ([], []),
        0: ([], ["head.bias", "head.weight"]),
    }[classes]
    assert loaded.labels == (LABELS if classes == 3 else None)


def test_another_channel_count_changes_the_stem_alone(folder):
    loaded = reszoo.load(folder, in_chans=3)
    assert loaded.load_report.fresh == ["stem.0.weight"]
    assert loaded.transform is None


def test_a_flipped_byte_is_refused(folder):
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ReszooError, match=r"model.safetensors.* is damaged or another file: sha256"):
        reszoo.load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 2}, "format version 2, this reszoo reads 1; update reszoo"),
        ({"library_name": "timm"}, "not written by reszoo"),
        ({"architecture": "os.system"}, "unknown architecture 'os.system'"),
        ({"arguments": {"num_classes": 3, "in_chans": 1, "widht": 2}}, "unknown argument 'widht'"),
        ({"arguments": {"num_classes": 4, "in_chans": 1}, "labels": None}, "do not fit resnet8: 2 tensors"),
        ({"arguments": {"num_classes": 4, "in_chans": 1}}, "3 `labels` for num_classes=4"),
        ({"arguments": {"num_classes": "3", "in_chans": 1}, "labels": None}, "resnet8 cannot be built with"),
        ({"arguments": {"num_classes": 10**12, "in_chans": 1}, "labels": None}, "far larger than the weights"),
        ({"transform": TRANSFORM.as_dict() | {"mean": [0.1] * 3, "std": [1] * 3}}, "has 3 channels, in_chans is 1"),
        ({"transform": TRANSFORM.as_dict() | {"size": [8.9, 8.9]}}, "size must be a list of numbers"),
        ({"format_version": True}, "format version True, this reszoo reads 1"),
        ({"format_version": 10**400}, "update reszoo"),
        ({"labels": "abc"}, "`labels` must be a list of texts"),
        ({"transform": {"size": [8, 8]}}, "transform: expected the keys"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(folder, change, message):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ReszooError, match=message):
        reszoo.load(folder)


def test_a_pickle_with_code_is_refused_unread(tmp_path):
    marker = tmp_path / "marker"

    class Bomb:
        def __reduce__(self):
            return (open, (str(marker), "w"))

    path = tmp_path / "x.ckpt"
    torch.save({"state_dict": {}, "bomb": Bomb()}, path)
    with pytest.raises(ReszooError, match="could run code; refused unread"):
        reszoo.load(path)
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ReszooError, match="truncated or no checkpoint"):
        reszoo.load(path)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda data: data[: len(data) // 2], "truncated or no checkpoint"),
        (lambda data: b"<html>404</html>", "truncated or no checkpoint"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
        (lambda data: b"", "truncated or no checkpoint"),
    ],
)
def test_a_damaged_checkpoint_says_what_it_is(network, tmp_path, make, message):
    path = checkpoint(network, tmp_path / "x.ckpt")
    path.write_bytes(make(path.read_bytes()))
    with pytest.raises(ReszooError, match=message):
        reszoo.load(path)


def test_a_zip_that_is_no_checkpoint_is_refused(tmp_path):
    path = tmp_path / "x.ckpt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "a")
    with pytest.raises(ReszooError, match="is damaged"):
        reszoo.load(path)


def test_a_foreign_checkpoint_is_told_apart(tmp_path):
    torch.save({"state_dict": {"a": torch.zeros(1)}}, tmp_path / "x.ckpt")
    with pytest.raises(ReszooError, match="was not written by reszoo"):
        reszoo.load(tmp_path / "x.ckpt")


def test_missing_and_surplus_tensors_are_refused(network, tmp_path):
    state = {f"network.{key}": value for key, value in network.state_dict().items()}
    state["network.head.bais"] = state.pop("network.head.bias")
    with pytest.raises(ReszooError, match=r"2 tensors are missing.* first head.bias, head.bais"):
        reszoo.load(checkpoint(network, tmp_path / "x.ckpt", state_dict=state))


def test_weights_that_are_not_finite_are_neither_saved_nor_loaded(network, tmp_path):
    path = checkpoint(network, tmp_path / "x.ckpt")
    network.head.bias.data[0] = float("nan")
    with pytest.raises(ReszooError, match=r"'head.bias' holds NaN"):
        bundle.save(network, tmp_path / "b")
    checkpoint(network, path)
    with pytest.raises(ReszooError, match=r"'head.bias' holds NaN"):
        reszoo.load(path)


def test_a_folder_with_other_files_is_never_overwritten(network, tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ReszooError, match=r"'thesis.tex', which is no part of a bundle"):
        bundle.save(network, tmp_path)


def test_an_unknown_source_names_the_bundled_ones():
    with pytest.raises(ReszooError, match=r"nothing to load at 'resnet20\.mnist'"):
        reszoo.load("resnet20.mnist")


def test_a_network_of_no_registered_factory_is_refused(tmp_path):
    with pytest.raises(ReszooError, match=r"put its factory under @reszoo.register"):
        bundle.save(torch.nn.Linear(1, 1), tmp_path / "b")


def test_a_config_without_the_sum_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    del config["sha256"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ReszooError, match=r"where config.json says None"):
        reszoo.load(folder)


def test_a_flipped_byte_in_a_checkpoint_is_refused(network, tmp_path):
    path = checkpoint(network, tmp_path / "x.ckpt")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ReszooError, match="does not match its sum"):
        reszoo.load(path)


@pytest.mark.parametrize("change", [{"state_dict": 3}, {"state_dict": {1: 2}}, {"reszoo": {}}])
def test_a_checkpoint_of_another_shape_is_refused(network, tmp_path, change):
    with pytest.raises(ReszooError, match="use another checkpoint"):
        reszoo.load(checkpoint(network, tmp_path / "x.ckpt", **change))


def test_a_card_that_is_no_text_is_named(folder):
    (folder / "README.md").write_bytes(bytes([255]))
    with pytest.raises(ReszooError, match=r"README.md' is not text"):
        reszoo.load(folder)


def test_labels_that_contradict_the_network_are_not_saved(network, tmp_path):
    with pytest.raises(ReszooError, match="2 `labels` for num_classes=3"):
        bundle.save(network, tmp_path / "b", labels=["a", "b"])
    assert not (tmp_path / "b").exists()
