from functools import partial

import pytest
import torch
from torch import nn

import reszoo
from reszoo.errors import ReszooError
from reszoo.layers import Gate
from reszoo.models.highway import conv_block, linear_block

BUILDS = {
    "highway_mlp": {"depth": 4, "width": 6, "image_size": 8},
    "plain_mlp": {"depth": 4, "width": 6, "image_size": 8},
    "highway10": {"width": 4, "image_size": 8},
    "highway19": {"widths": [4, 6, 8], "in_chans": 1},
}
every_network = pytest.mark.parametrize(("name", "options"), BUILDS.items())


def count(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def gates(network: nn.Module) -> list[Gate]:
    return [m for m in network.modules() if isinstance(m, Gate)]


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [("highway10", {}, 151_690), ("highway10", {"width": 16}, 38_986), ("highway19", {}, 2_256_838)],
)
def test_parameter_count_is_that_of_the_authors_caffe_networks(name, options, expected):
    assert count(reszoo.create(name, **options)) == expected


@pytest.mark.parametrize(("name", "expected"), [("highway_mlp", 5_100), ("plain_mlp", 5_112)])
def test_a_further_layer_of_the_mnist_study_costs_as_published(name, expected):
    assert count(reszoo.create(name, depth=11)) - count(reszoo.create(name, depth=10)) == expected


@pytest.mark.parametrize("depth", [10, 20, 50, 100])
def test_depth_counts_the_first_plain_layer_and_the_highway_layers(depth):
    assert len(gates(reszoo.create("highway_mlp", depth=depth))) == depth - 1


def test_highway19_has_19_layers_and_highway10_ten():
    for name, layers in (("highway19", 19), ("highway10", 10)):
        network = reszoo.create(name)
        weighted = [m for m in network.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
        assert len(weighted) - len(gates(network)) == layers


@pytest.mark.parametrize("block", [partial(linear_block, 5, "tanh"), partial(conv_block, 5)])
@pytest.mark.parametrize("carry", ["coupled", "free"])
def test_the_block_is_its_equation_written_out(block, carry):
    torch.manual_seed(0)
    block = block(gate_bias=-1.0, carry=carry)
    x = torch.randn(3, 5) if isinstance(block.residual[0], nn.Linear) else torch.randn(3, 5, 4, 4)
    axes = (1, -1) if x.dim() == 2 else (1, -1, 1, 1)
    t = 1 / (1 + torch.exp(-block.gate.layer(x) - block.gate.bias.view(axes)))
    c = (
        1 - t
        if carry == "coupled"
        else 1 / (1 + torch.exp(-block.carry_gate.layer(x) - block.carry_gate.bias.view(axes)))
    )
    torch.testing.assert_close(block(x), block.residual(x) * t + x * c)


@pytest.mark.parametrize("carry", ["coupled", "free"])
def test_a_closed_gate_is_the_identity(carry):
    torch.manual_seed(0)
    x = torch.randn(2, 5, 4, 4)
    assert torch.equal(conv_block(5, -200.0, carry)(x), x)
    assert torch.equal(linear_block(5, "relu", -200.0, carry)(x[:, :, 0, 0]), x[:, :, 0, 0])


def test_open_gates_give_the_plain_network():
    torch.manual_seed(0)
    plain = reszoo.create("plain_mlp", depth=6, width=20, image_size=8)
    highway = reszoo.create("highway_mlp", depth=6, width=20, image_size=8, gate_bias=200.0)
    highway.stem, highway.head = plain.stem, plain.head
    for block, layer in zip(highway.layers, plain.layers, strict=True):
        block.residual = layer
    x = torch.randn(4, 1, 8, 8)
    assert torch.equal(highway(x), plain(x))


def test_a_free_carry_gate_that_mirrors_the_transform_gate_is_the_coupled_block():
    torch.manual_seed(0)
    coupled, free = linear_block(6, "relu", -2.0, "coupled"), linear_block(6, "relu", -2.0, "free")
    free.load_state_dict(coupled.state_dict(), strict=False)
    with torch.no_grad():
        free.carry_gate.layer.weight.copy_(-free.gate.layer.weight)
    x = torch.randn(4, 6)
    torch.testing.assert_close(free(x), coupled(x))


def initialise_everything(module):
    if isinstance(module, nn.Linear | nn.Conv2d):
        nn.init.kaiming_normal_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def test_the_gate_bias_survives_building_global_initialisers_and_materialising():
    network = reszoo.create("highway_mlp", depth=50, gate_bias=-2.0)
    with torch.device("meta"):
        shell = reszoo.create("highway_mlp", depth=50, gate_bias=-2.0)
    shell.to_empty(device="cpu")
    for module in shell.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for built in (network, network.apply(initialise_everything), shell):
        assert len(gates(built)) == 49
        assert all(torch.equal(gate.bias, torch.full((50,), -2.0)) for gate in gates(built))


def test_loading_keeps_the_gate_bias_that_was_trained():
    trained, fresh = (reszoo.create("highway_mlp", depth=50, gate_bias=bias) for bias in (-2.0, -5.0))
    fresh.load_state_dict(trained.state_dict())
    assert all(torch.equal(gate.bias, torch.full((50,), -2.0)) for gate in gates(fresh))


def mean_gates_and_changes(network, x):
    """Of each block: the mean of its transform gate, and how far its output lies from its input."""
    x = network.stem(x.flatten(1))
    means, changes = [], []
    for block in network.layers:
        y = block(x)
        means.append(block.gate(x).mean().item())
        changes.append(((y - x).norm() / x.norm()).item())
        x = y
    return means, changes


@torch.no_grad()
def test_at_bias_minus_two_the_transform_gates_let_twelve_percent_through():
    torch.manual_seed(0)
    means, changes = mean_gates_and_changes(reszoo.create("highway_mlp", depth=50), torch.randn(64, 1, 28, 28))
    assert sum(means) / 49 == pytest.approx(0.12, abs=0.01)
    assert max(changes) < 0.25


@torch.no_grad()
def test_the_sign_of_the_bias_is_that_of_the_transform_gate():
    torch.manual_seed(0)
    means, changes = mean_gates_and_changes(
        reszoo.create("highway_mlp", depth=50, gate_bias=2.0), torch.randn(64, 1, 28, 28)
    )
    assert sum(means) / 49 == pytest.approx(0.88, abs=0.02)
    assert min(changes) > 0.5


@torch.no_grad()
def test_fifty_layers_put_out_nearly_their_input_when_the_bias_is_low():
    torch.manual_seed(0)
    network = reszoo.create("highway_mlp", depth=50, gate_bias=-8.0)
    x = torch.rand(8, 50)
    assert (network.layers(x) - x).norm() / x.norm() < 0.05


def test_a_step_trains_900_highway_layers_from_end_to_end():
    torch.manual_seed(0)
    network = reszoo.create("highway_mlp", depth=900, width=20, image_size=8, gate_bias=-8.0)
    lowers_the_loss(network, torch.randn(16, 1, 8, 8), lr=0.02)
    assert network.stem[0].weight.grad.norm() > 1e-2


def test_no_gradient_crosses_900_plain_layers():
    torch.manual_seed(0)
    network = reszoo.create("plain_mlp", depth=900, width=20, image_size=8)
    nn.functional.cross_entropy(network(torch.randn(16, 1, 8, 8)), torch.arange(16) % 10).backward()
    assert network.stem[0].weight.grad.norm() < 1e-20


@every_network
def test_one_step_of_sgd_lowers_the_loss(name, options):
    torch.manual_seed(0)
    lowers_the_loss(reszoo.create(name, **options), torch.randn(16, 1, 8, 8), lr=0.02)


def lowers_the_loss(network, x, lr):
    y = torch.arange(16) % 10
    network.eval()  # dropout would blur the comparison
    optimizer = torch.optim.SGD(network.parameters(), lr=lr)
    before = nn.functional.cross_entropy(network(x), y)
    before.backward()
    assert all(p.grad.isfinite().all() for p in network.parameters())
    optimizer.step()
    assert nn.functional.cross_entropy(network(x), y) < before


@pytest.mark.parametrize("size", [1, 8, 28, 32, 33])
def test_highway19_takes_any_size(size):
    assert reszoo.create("highway19", widths=[2, 3, 4], num_classes=7)(torch.randn(1, 3, size, size)).shape == (1, 7)


@torch.no_grad()
def test_at_32_pixels_highway19_pools_an_8x8_map():
    assert reszoo.create("highway19").feature_maps(torch.randn(1, 3, 32, 32))[-1].shape == (1, 128, 8, 8)


@pytest.mark.parametrize("size", [8, 9, 27, 28, 32, 33])
def test_highway10_takes_the_size_it_was_built_for(size):
    network = reszoo.create("highway10", width=2, image_size=size, num_classes=7)
    assert network(torch.randn(1, 1, size, size)).shape == (1, 7)


def test_caffe_pooling_takes_28_pixels_to_24_12_6_and_3():
    network = reszoo.create("highway10", width=2, num_classes=0)
    x = torch.randn(1, 1, 28, 28)
    assert [m.shape[-1] for m in network.feature_maps(x)] == [24, 12, 6]
    assert network(x).shape == (1, 2 * 3 * 3)


def test_too_small_or_other_images_are_refused():
    with pytest.raises(ReszooError, match="image_size must be at least 8, got 7"):
        reszoo.create("highway10", image_size=7)
    for name in ("highway10", "highway_mlp"):
        with pytest.raises(ReszooError, match=r"images must be \(N, 1, 28, 28\), got \(2, 3, 32, 32\)"):
            reszoo.create(name)(torch.randn(2, 3, 32, 32))


def test_an_unknown_carry_or_activation_is_refused():
    with pytest.raises(ReszooError, match="carry must be one of coupled, free"):
        reszoo.create("highway10", carry="open")
    with pytest.raises(ReszooError, match="activation must be one of relu, tanh"):
        reszoo.create("highway_mlp", activation="gelu")
    with pytest.raises(ReszooError, match=r"widths must name the channels of three stages, got \[8, 8\]"):
        reszoo.create("highway19", widths=[8, 8])
