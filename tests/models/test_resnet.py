import pytest
import torch
from torch import nn
from torchvision.models import resnet50 as torchvision_resnet50

import reszoo
from reszoo.layers import StochasticDepth, shortcut_maker
from reszoo.models.resnet import BasicBlock

TABLE_6 = {
    "resnet20": (269_722, 272_474),
    "resnet32": (464_154, 466_906),
    "resnet44": (658_586, 661_338),
    "resnet56": (853_018, 855_770),
    "resnet110": (1_727_962, 1_730_714),
    "resnet1202": (19_421_274, 19_424_026),
}
TABLE_1 = {
    ("resnet18", "A"): 11_515_688,
    ("resnet18", "B"): 11_689_512,
    ("resnet34", "A"): 21_623_848,
    ("resnet34", "B"): 21_797_672,
    ("resnet34", "C"): 22_716_840,
    ("resnet50", "B"): 25_557_032,
    ("resnet101", "B"): 44_549_160,
    ("resnet152", "B"): 60_192_808,
}


def count(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


@pytest.mark.parametrize(("name", "counts"), TABLE_6.items())
def test_parameter_count_is_that_of_table_6(name, counts):
    with torch.device("meta"):
        assert (count(reszoo.create(name)), count(reszoo.create(name, shortcut="B"))) == counts


@pytest.mark.parametrize("plain", reszoo.list_models("plain[0-9]*"))
def test_a_plain_network_has_the_parameters_of_its_residual_twin_with_option_a(plain):
    with torch.device("meta"):
        assert count(reszoo.create(plain)) == count(reszoo.create(plain.replace("plain", "resnet"), shortcut="A"))


@pytest.mark.parametrize(("key", "expected"), TABLE_1.items())
def test_parameter_count_is_that_of_table_1(key, expected):
    name, option = key
    with torch.device("meta"):
        assert count(reszoo.create(name, shortcut=option)) == expected


@pytest.mark.parametrize(("name", "expected"), [("resnet164", 1_704_154), ("resnet1001", 10_328_602)])
def test_original_bottlenecks_on_cifar_have_the_counts_of_their_description(name, expected):
    with torch.device("meta"):
        assert count(reszoo.create(name)) == expected


def test_a_hundred_class_head_adds_5850_parameters():
    assert count(reszoo.create("resnet20", num_classes=100)) == 275_572


@pytest.mark.parametrize("size", [8, 28, 32, 33])
@pytest.mark.parametrize("option", ["A", "B", "C"])
def test_logits_shape_at_any_size(size, option):
    network = reszoo.create("resnet8", num_classes=7, in_chans=2, shortcut=option)
    assert network(torch.randn(2, 2, size, size)).shape == (2, 7)


@pytest.mark.parametrize("padding", ["append", "split", "pool"])
def test_every_zero_padding_takes_odd_sizes(padding):
    assert reszoo.create("resnet8", zero_padding=padding)(torch.randn(2, 3, 33, 27)).shape == (2, 10)


def test_the_three_zero_paddings_share_weights_and_differ_in_the_function():
    torch.manual_seed(0)
    networks = {p: reszoo.create("resnet8", zero_padding=p).eval() for p in ("append", "split", "pool")}
    state = networks["append"].state_dict()
    x = torch.randn(4, 3, 16, 16)
    outputs = []
    for network in networks.values():
        network.load_state_dict(state)
        outputs.append(network(x))
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert (outputs[a] - outputs[b]).abs().max() > 1e-3


def test_append_keeps_the_subsampled_image_in_front_and_zeros_behind():
    x = torch.randn(2, 3, 8, 8)
    y = shortcut_maker("A")(3, 5, 2)(x)
    assert torch.equal(y[:, :3], x[:, :, ::2, ::2])
    assert torch.equal(y[:, 3:], torch.zeros(2, 2, 4, 4))


def test_block_with_silent_branch_is_relu_of_its_input():
    block = BasicBlock(4, 4, 1, shortcut_maker("A")).eval()
    nn.init.zeros_(block.residual[-1].weight)
    x = torch.randn(2, 4, 8, 8)
    torch.testing.assert_close(block(x), torch.relu(x))


def test_a_residual_net_without_its_shortcuts_is_the_plain_twin():
    torch.manual_seed(0)
    plain, residual = reszoo.create("plain14").eval(), reszoo.create("resnet14").eval()
    state = {key.replace(".layers.", ".residual."): value for key, value in plain.state_dict().items()}
    residual.load_state_dict(state)
    for module in residual.modules():
        if isinstance(module, BasicBlock):
            module.shortcut.forward = lambda x: torch.zeros(())
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(residual(x), plain(x))


def test_zero_gamma_starts_every_block_at_its_shortcut():
    torch.manual_seed(0)
    network = reszoo.create("resnet14", zero_gamma=True)
    network(torch.randn(4, 3, 16, 16)).sum().backward()
    blocks = [m for m in network.modules() if isinstance(m, BasicBlock)]
    assert all(b.residual[0].weight.grad.abs().max() == 0 for b in blocks)
    assert all(b.residual[-1].weight.grad.abs().max() > 0 for b in blocks)


def test_after_zero_gamma_every_parameter_has_moved_by_the_second_step():
    torch.manual_seed(0)
    network = reszoo.create("resnet14", zero_gamma=True)
    start = {name: p.detach().clone() for name, p in network.named_parameters()}
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(torch.randn(8, 3, 16, 16)), torch.arange(8)).backward()
        optimizer.step()
    assert [name for name, p in network.named_parameters() if torch.equal(p, start[name])] == []


def test_zero_gamma_does_not_touch_weights_that_are_loaded_later():
    trained, network = reszoo.create("resnet8"), reszoo.create("resnet8", zero_gamma=True)
    network.load_state_dict(trained.state_dict())
    assert (network.stages[0][0].residual[-1].weight == 1).all()


def test_v15_equals_torchvision_and_v1_does_not():
    torch.manual_seed(0)
    theirs = torchvision_resnet50().eval()
    for module in theirs.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    x = torch.randn(2, 3, 64, 64)
    differences = {}
    for stride_in in ("1x1", "3x3"):
        ours = reszoo.create("resnet50", stride_in=stride_in).eval()
        # Both list their tensors in the same order: the branch, then the projection.
        ours.load_state_dict(dict(zip(ours.state_dict(), theirs.state_dict().values(), strict=True)))
        with torch.no_grad():
            differences[stride_in] = ((ours(x) - theirs(x)).abs().max() / theirs(x).abs().max()).item()
    assert differences["3x3"] < 1e-5
    assert differences["1x1"] > 1e-2


def test_feature_maps_halve_the_resolution_stage_by_stage():
    maps = reszoo.create("resnet50").feature_maps(torch.randn(1, 3, 64, 64))
    assert [tuple(m.shape[1:]) for m in maps] == [(256, 16, 16), (512, 8, 8), (1024, 4, 4), (2048, 2, 2)]


def test_without_classes_the_output_is_the_pooled_last_map():
    network = reszoo.create("resnet8", num_classes=0).eval()
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(network(x), network.feature_maps(x)[-1].mean((2, 3)))


def test_one_step_of_sgd_lowers_the_loss():
    torch.manual_seed(0)
    network, x, y = reszoo.create("resnet8"), torch.randn(16, 3, 8, 8), torch.arange(16) % 10
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    before = nn.functional.cross_entropy(network(x), y)
    before.backward()
    optimizer.step()
    assert nn.functional.cross_entropy(network(x), y) < before


@pytest.mark.parametrize("options", [{"stochastic_depth": 0.5, "drop_per": "sample"}, {"checkpoint_every": 2}])
def test_stochastic_depth_and_checkpointing_leave_every_key_as_it_is(options):
    assert list(reszoo.create("resnet14", **options).state_dict()) == list(reszoo.create("resnet14").state_dict())


def test_drop_rates_rise_linearly_to_the_last_block():
    network = reszoo.create("resnet110", stochastic_depth=0.5)
    rates = [m.rate for m in network.modules() if isinstance(m, StochasticDepth)]
    assert rates == pytest.approx([block / 54 * 0.5 for block in range(1, 55)])


def test_at_rate_1_the_last_block_is_its_shortcut():
    network = reszoo.create("resnet8", stochastic_depth=1.0)
    *_, before, last = network.feature_maps(torch.randn(2, 3, 16, 16))
    torch.testing.assert_close(last, network.stages[-1][-1].shortcut(before))


@pytest.mark.parametrize("per", ["batch", "sample"])
def test_stochastic_depth_trains(per):
    torch.manual_seed(0)
    network = reszoo.create("resnet14", stochastic_depth=0.5, drop_per=per)
    x, y = torch.randn(16, 3, 8, 8), torch.arange(16) % 10
    optimizer, losses = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9), []
    for _ in range(20):
        optimizer.zero_grad()
        losses.append(nn.functional.cross_entropy(network(x), y))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]


def test_rezero_starts_every_block_at_its_shortcut_and_moves_alpha_first():
    torch.manual_seed(0)
    network = reszoo.create("resnet14", branch_scale="rezero")
    network(torch.randn(4, 3, 16, 16)).sum().backward()
    blocks = [m for m in network.modules() if isinstance(m, BasicBlock)]
    assert all(b.residual[0].weight.grad.abs().max() == 0 for b in blocks)
    assert all(b.residual[-1].alpha.grad != 0 for b in blocks)


@pytest.mark.parametrize(("name", "initial"), [("resnet20", 0.1), ("resnet56", 1e-6)])
def test_layer_scale_starts_by_depth_with_one_number_a_channel(name, initial):
    network = reszoo.create(name, branch_scale="layer_scale")
    scales = [b.residual[-1].gamma for b in network.modules() if isinstance(b, BasicBlock)]
    assert {len(gamma) for gamma in scales} == {16, 32, 64}
    assert all((gamma == initial).all() for gamma in scales)


def test_a_padding_that_would_not_be_used_is_refused():
    with pytest.raises(reszoo.errors.ReszooError, match="no meaning with shortcut='B'"):
        reszoo.create("resnet20", shortcut="B", zero_padding="split")
