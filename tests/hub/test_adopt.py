import hashlib
import threading

import pytest
import torch
from torch import nn

import reszoo
from reszoo.errors import ReszooError
from reszoo.hub.adopt import SafetensorsFile, bare, build_with, save_weights, without_initialization


@pytest.fixture
def stored(tmp_path):
    torch.manual_seed(0)
    network = reszoo.create("resnet8", shortcut="B", num_classes=4)
    network(torch.randn(4, 3, 16, 16))
    save_weights(network, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors", network


def test_the_network_holds_the_file_to_the_bit(stored):
    file, network = stored
    built = build_with(file, "resnet8", {"shortcut": "B", "num_classes": 4})
    assert all(torch.equal(built.state_dict()[key], value) for key, value in network.state_dict().items())
    assert built.arguments == network.arguments


@pytest.mark.parametrize("mapped", [True, False])
def test_it_trains_and_the_file_stays_as_it_is(stored, mapped):
    file, network = stored
    before = hashlib.sha256(file.read_bytes()).digest()
    built = build_with(file, "resnet8", mapped=mapped)
    assert all(p.is_leaf and p.requires_grad and p.device.type == "cpu" for p in built.parameters())
    optimizer = torch.optim.SGD(built.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        built(torch.randn(4, 3, 16, 16)).square().mean().backward()
        optimizer.step()
    assert not torch.equal(built.head.weight, network.head.weight)
    assert hashlib.sha256(file.read_bytes()).digest() == before


def test_the_file_may_be_replaced_or_deleted_afterwards(stored):
    file, network = stored
    built = build_with(file, "resnet8")
    save_weights(reszoo.create("resnet8"), file)
    file.unlink()
    assert torch.equal(built.stages[2][0].residual[3].weight, network.stages[2][0].residual[3].weight)


def test_a_network_that_read_its_file_outlives_its_cutting(stored):
    file, network = stored
    built = build_with(file, "resnet8", mapped=False)
    file.write_bytes(b"")
    assert torch.equal(built.stages[2][0].residual[3].weight, network.stages[2][0].residual[3].weight)


def test_two_networks_of_one_file_do_not_share_what_they_learn(stored):
    one, other = build_with(stored[0], "resnet8"), build_with(stored[0], "resnet8")
    with torch.no_grad():
        one.head.weight.add_(1)
    assert torch.equal(other.head.weight, stored[1].head.weight)


@pytest.mark.parametrize("mapped", [True, False])
def test_a_saved_tensor_takes_its_own_size(stored, mapped, tmp_path):
    built = build_with(stored[0], "resnet8", mapped=mapped)
    torch.save(built.head.weight.detach(), tmp_path / "one.pt")
    assert (tmp_path / "one.pt").stat().st_size < 4 * built.head.weight.numel() + 4000
    save_weights(built, tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == stored[0].read_bytes()


def test_a_tied_head_stays_tied(tmp_path):
    options = {"vocab_size": 20, "num_classes": 20, "max_length": 12, "pooling": "none", "tied": True}
    network = reszoo.create("preln_encoder", **options).eval()
    save_weights(network, tmp_path / "model.safetensors")
    built = build_with(tmp_path / "model.safetensors", "preln_encoder").eval()
    tokens = torch.randint(0, 20, (2, 12))
    assert torch.equal(built(tokens), network(tokens))


def test_buffers_that_no_file_holds_are_computed(tmp_path):
    options = {"vocab_size": 20, "max_length": 12, "positions": "sinusoidal"}
    network = reszoo.create("preln_encoder", **options).eval()
    save_weights(network, tmp_path / "model.safetensors")
    built = build_with(tmp_path / "model.safetensors", "preln_encoder", options).eval()
    tokens = torch.randint(0, 20, (2, 12))
    assert torch.equal(built(tokens), network(tokens))


def test_initialisation_is_back_after_the_block_and_after_an_exception():
    with without_initialization():
        pass
    with pytest.raises(RuntimeError, match="stop"), without_initialization():
        raise RuntimeError("stop")
    assert nn.Linear(8, 8).weight.abs().max() <= 8**-0.5
    assert torch.equal(nn.BatchNorm2d(3).weight, torch.ones(3))


def test_another_thread_initialises_as_always():
    inside, done, found = threading.Event(), threading.Event(), []

    def other():
        inside.wait(10)
        found.append(nn.BatchNorm2d(1000).weight.detach())
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with without_initialization():
        inside.set()
        assert done.wait(10)
    thread.join()
    assert torch.equal(found[0], torch.ones(1000))


def test_skipping_draws_nothing():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    bare(reszoo.models.factory_of("resnet8"))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_half_precision_file_fills_a_float_network(tmp_path):
    network = reszoo.create("resnet8")
    saved = reszoo.create("resnet8")
    saved.load_state_dict(network.state_dict())
    save_weights(saved.half(), tmp_path / "model.safetensors")
    built = build_with(tmp_path / "model.safetensors", "resnet8")
    assert built.head.weight.dtype == torch.float32
    assert torch.equal(built.head.weight, network.head.weight.half().float())


def test_what_does_not_fit_is_counted_and_named(stored):
    file, network = stored
    state = network.state_dict()
    state["extra"] = state.pop("head.bias")
    with pytest.raises(ReszooError, match=r"do not fit resnet8: 1 missing: head\.bias; 1 unexpected: extra"):
        build_with(state, "resnet8", {"shortcut": "B", "num_classes": 4})
    with pytest.raises(ReszooError, match=r"2 of another shape: head\.weight \(4, 64\) instead of \(5, 64\)"):
        build_with(network.state_dict(), "resnet8", {"shortcut": "B", "num_classes": 5})
    with pytest.raises(ReszooError, match="trained with shortcut='B', and shortcut='A' was asked for"):
        build_with(file, "resnet8", {"shortcut": "A"})


@pytest.mark.parametrize("damage", ["cut", "pointer", "absent"])
def test_a_damaged_file_is_one_readable_error(stored, damage):
    file, _ = stored
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "pointer":
        file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    else:
        file.unlink()
    with pytest.raises(ReszooError, match="not a whole safetensors file" if damage != "absent" else "no weights file"):
        SafetensorsFile(file)


def test_a_channels_last_network_saves_the_same_bytes(stored, tmp_path):
    file, network = stored
    save_weights(network.to(memory_format=torch.channels_last), tmp_path / "other.safetensors")
    assert (tmp_path / "other.safetensors").read_bytes() == file.read_bytes()
