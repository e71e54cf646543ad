import pytest
import torch
from torch import nn

import reszoo
from reszoo.errors import ReszooError
from reszoo.layers import Gate

ACTIVATIONS = ["original", "bn_after_add", "relu_before_add", "relu_only_preact", "full_preact"]
MAPPINGS = ["identity", "scaled", "exclusive_gate", "shortcut_gate", "dropout"]


def count(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_all_five_activations_have_the_parameters_of_resnet_110(activation):
    with torch.device("meta"):
        assert count(reszoo.create("mapping_resnet110", activation=activation)) == 1_727_962


@pytest.mark.parametrize("mapping", ["exclusive_gate", "shortcut_gate"])
def test_gates_add_98784_parameters_to_resnet_110(mapping):
    with torch.device("meta"):
        assert count(reszoo.create("mapping_resnet110", mapping=mapping)) == 1_727_962 + 98_784


@pytest.mark.parametrize(
    ("name", "activation", "sibling"),
    [
        ("mapping_resnet20", "original", "resnet20"),
        ("mapping_resnet20", "full_preact", "preact_resnet20"),
        ("mapping_resnet164", "original", "resnet164"),
        ("mapping_resnet164", "full_preact", "preact_resnet164"),
    ],
)
def test_the_first_and_the_last_activation_are_resnet_and_preact_resnet(name, activation, sibling):
    torch.manual_seed(0)
    ours, theirs = reszoo.create(name, activation=activation).eval(), reszoo.create(sibling).eval()
    ours.load_state_dict({key.replace(".activation.", ".before."): v for key, v in theirs.state_dict().items()})
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize(
    ("activation", "branch", "after"),
    [
        ("original", "conv bn relu conv bn", "relu"),
        ("bn_after_add", "conv bn relu conv", "bn relu"),
        ("relu_before_add", "conv bn relu conv bn relu", ""),
        ("relu_only_preact", "relu conv bn relu conv bn", ""),
        ("full_preact", "bn relu conv bn relu conv", ""),
    ],
)
def test_the_layers_stand_as_in_figure_4(activation, branch, after):
    unit = reszoo.create("mapping_resnet20", activation=activation).stages[0][1]
    short = {nn.Conv2d: "conv", nn.BatchNorm2d: "bn", nn.ReLU: "relu"}
    assert " ".join(short[type(layer)] for layer in unit.residual) == branch
    assert " ".join(short[type(layer)] for layer in unit.after) == after


def equation(unit, mapping, x):
    """Fig. 2, written once more."""
    f, h = unit.residual(x), x
    if mapping == "scaled":
        return torch.relu(0.25 * f + 0.75 * h)
    g = torch.sigmoid(nn.functional.conv2d(x, unit.gate.layer.weight, unit.gate.bias))
    return torch.relu(g * f + (1 - g) * h if mapping == "exclusive_gate" else f + (1 - g) * h)


@pytest.mark.parametrize("mapping", ["scaled", "exclusive_gate", "shortcut_gate"])
def test_a_unit_is_its_equation(mapping):
    torch.manual_seed(0)
    options = {"scales": (0.75, 0.25)} if mapping == "scaled" else {"gate_bias": 0.0}
    unit = reszoo.create("mapping_resnet20", mapping=mapping, **options).stages[0][1].eval()
    x = torch.randn(2, 16, 8, 8)
    torch.testing.assert_close(unit(x), equation(unit, mapping, x))


def test_without_its_shortcut_the_network_is_the_plain_twin():
    torch.manual_seed(0)
    scaled, plain = (
        reszoo.create("mapping_resnet20", mapping="scaled", scales=[0, 1]).eval(),
        reszoo.create("plain20").eval(),
    )
    scaled.load_state_dict({k.replace(".layers.", ".residual."): v for k, v in plain.state_dict().items()})
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(scaled(x), plain(x))


@pytest.mark.parametrize("bias", [0.0, -6.0])
@pytest.mark.parametrize("mapping", ["exclusive_gate", "shortcut_gate"])
def test_gate_biases_survive_the_initialisation(mapping, bias):
    network = reszoo.create("mapping_resnet20", mapping=mapping, gate_bias=bias)
    gates = [m for m in network.modules() if isinstance(m, Gate)]
    assert len(gates) == 9
    assert all((gate.bias == bias).all() for gate in gates)


def test_a_closed_exclusive_gate_leaves_the_shortcut():
    torch.manual_seed(0)
    unit = reszoo.create("mapping_resnet20", mapping="exclusive_gate", gate_bias=-50.0).stages[0][1].eval()
    x = torch.randn(2, 16, 8, 8)
    torch.testing.assert_close(unit(x), torch.relu(x))


def test_dropout_on_the_shortcut_acts_in_training_only():
    torch.manual_seed(0)
    unit = reszoo.create("mapping_resnet20", mapping="dropout").stages[0][1]
    nn.init.zeros_(unit.residual[-1].weight)
    x = torch.rand(2, 16, 8, 8) + 0.1
    y = unit(x)
    assert 0.4 < (y == 0).float().mean() < 0.6
    torch.testing.assert_close(y[y > 0], 2 * x[y > 0])
    assert torch.equal(unit.eval()(x), x)


def test_option_c_is_the_convolution_on_every_shortcut():
    network = reszoo.create("mapping_resnet20", shortcut="C")
    assert sum(key.endswith("shortcut.0.weight") for key in network.state_dict()) == 9


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_every_combination_learns(mapping, activation):
    torch.manual_seed(0)
    network = reszoo.create("mapping_resnet8", mapping=mapping, activation=activation)
    x, y = torch.randn(16, 3, 8, 8), torch.arange(16) % 10
    optimizer, losses = torch.optim.SGD(network.parameters(), lr=0.05), []
    for _ in range(15):
        optimizer.zero_grad()
        losses.append(nn.functional.cross_entropy(network(x), y))
        losses[-1].backward()
        optimizer.step()
    assert all(p.grad is not None for p in network.parameters())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("options", [{"scales": (1.0, 0.5)}, {"gate_bias": 0.0}])
def test_a_setting_that_would_not_be_used_is_refused(options):
    with pytest.raises(ReszooError, match="no meaning with mapping='identity'"):
        reszoo.create("mapping_resnet8", **options)
