import copy

import pytest
import timm
import torch
import torchvision
from torch import nn
from torch.nn import functional as F

import reszoo
from reszoo.errors import ReszooError
from reszoo.models.densenet import DenseBlock, DenseLayer, DenseNet

COUNTS = {
    "densenet40_k12": 1_019_722,
    "densenet100_k12": 6_979_642,
    "densenet100_k24": 27_249_082,
    "densenet_bc100_k12": 769_162,
    "densenet_bc250_k24": 15_324_406,
    "densenet_bc190_k40": 25_624_430,
    "densenet121": 7_978_856,
    "densenet161": 28_681_000,
    "densenet169": 14_149_480,
    "densenet201": 20_013_928,
    "densenet264": 33_337_704,
}
SMALL = "densenet_bc22_k12"
CIFAR = ("cifar", 4, (3, 2, 3), True, 0.5)  # stem, growth rate, depths, bottleneck, compression
BASIC = ("cifar", 4, (3, 2, 3), False, 1.0)
IMAGENET = ("imagenet", 4, (2, 3, 2), True, 0.5)
EFFICIENT = ["shared", "lean"]


def count(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def shake(network: nn.Module) -> nn.Module:
    """Scales, shifts and running statistics that no two channels share."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.weight.data.uniform_(0.5, 1.5)
            module.bias.data.normal_(0, 0.3)
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    return network


def pair(memory: str, kind: tuple = CIFAR, **options) -> tuple[nn.Module, nn.Module]:
    """The plain and the memory-efficient network with equal weights, in double precision."""
    torch.manual_seed(0)
    plain = shake(DenseNet(*kind, **options)).double()
    other = DenseNet(*kind, memory=memory, **options).double()
    other.load_state_dict(plain.state_dict())
    return plain, other


def images(size: int = 12, samples: int = 5) -> torch.Tensor:
    return torch.randn(samples, 3, size, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def train(network: nn.Module, x: torch.Tensor, steps: int = 1, learning_rate: float = 0.0) -> dict[str, torch.Tensor]:
    """Everything a few training steps leave behind."""
    torch.manual_seed(2)
    for _ in range(steps):
        network.zero_grad()
        output = network(x)
        output.square().mean().backward()
        with torch.no_grad():
            for p in network.parameters():
                if p.grad is not None:
                    p -= learning_rate * p.grad
    gradients = {f"{name}.grad": p.grad for name, p in network.named_parameters() if p.grad is not None}
    return {"output": output.detach(), **gradients, **copy.deepcopy(network.state_dict())}


def assert_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for key in expected:
        torch.testing.assert_close(got[key], expected[key], rtol=1e-9, atol=1e-11, msg=lambda m, k=key: f"{k}: {m}")


def runs_the_plain_layers(network: nn.Module, x: torch.Tensor) -> bool:
    """Whether a pass calls the ReLUs themselves, as the efficient form does not."""
    calls = []
    relu = F.relu

    def counted(*args, **kwargs):
        calls.append(1)
        return relu(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "relu", counted)
        network(x)
    return len(calls) > 1  # the last one belongs to the network


@pytest.mark.parametrize(("name", "expected"), COUNTS.items())
def test_parameter_count_is_that_of_the_tables(name, expected):
    with torch.device("meta"):
        assert count(reszoo.create(name)) == expected


def test_the_authors_code_opens_the_basic_network_with_twice_the_growth_rate():
    with torch.device("meta"):
        assert count(reszoo.create("densenet40_k12", stem_width="code")) == 1_059_298
        assert count(reszoo.create("densenet_bc100_k12", stem_width="code")) == COUNTS["densenet_bc100_k12"]


def test_compression_without_the_paper_stem_is_imgclsmobs_network():
    with torch.device("meta"):
        assert count(reszoo.create("densenet40_k12", stem_width="code", compression=0.5)) == 599_050


def test_bottlenecks_and_compression_together_are_bc():
    with torch.device("meta"):
        bc = reszoo.create("densenet100_k12", bottleneck=True, compression=0.5)
    assert count(bc) == COUNTS["densenet_bc100_k12"]


def test_b_alone_halves_the_layers_and_c_alone_keeps_half_the_channels():
    with torch.device("meta"):
        basic = reszoo.create("densenet40_k12")
        b = reszoo.create("densenet40_k12", bottleneck=True)
        c = reszoo.create("densenet40_k12", compression=0.5)
    assert [len(stage[-1]) for stage in b.stages] == [6, 6, 6]
    assert basic.stage_channels == [160, 304, 448]
    assert b.stage_channels == [88, 160, 232]
    assert c.stage_channels == [160, 80 + 144, 112 + 144]


def test_depth_counts_the_layers_with_weights():
    for name, depth in (("densenet40_k12", 40), ("densenet_bc100_k12", 100), ("densenet121", 121)):
        with torch.device("meta"):
            network = reszoo.create(name)
        assert sum(isinstance(m, nn.Conv2d | nn.Linear) for m in network.modules()) == depth


def test_a_layer_keeps_its_input_and_appends_k_channels():
    layer, x = DenseLayer(6, 4, bottleneck=True), torch.randn(2, 6, 5, 5)
    y = layer(x)
    assert y.shape == (2, 10, 5, 5)
    assert torch.equal(y[:, :6], x)


def test_a_block_is_the_papers_list_of_features():
    block, x = DenseBlock(6, 3, 4, bottleneck=False).eval(), torch.randn(2, 6, 5, 5)
    features = [x]
    for layer in block:
        features.append(layer.residual(torch.cat(features, 1)))
    torch.testing.assert_close(block(x), torch.cat(features, 1))


@pytest.mark.parametrize("build", [torchvision.models.densenet121, timm.models.densenet121])
@pytest.mark.parametrize("size", [64, 75])
def test_densenet121_equals_independent_code(build, size):
    torch.manual_seed(0)
    theirs = shake(build()).eval()
    ours = reszoo.create("densenet121").eval()
    # All list their tensors in the order of the forward pass.
    ours.load_state_dict(dict(zip(ours.state_dict(), theirs.state_dict().values(), strict=True)))
    x = torch.randn(2, 3, size, size)
    with torch.no_grad():
        difference = (ours(x) - theirs(x)).abs().max() / theirs(x).abs().max()
    assert difference < 1e-5


@pytest.mark.parametrize("size", [8, 28, 32, 33])
@pytest.mark.parametrize("options", [{}, {"bottleneck": True}, {"compression": 0.5}])
def test_logits_shape_at_any_size(size, options):
    network = reszoo.create("densenet40_k12", num_classes=7, in_chans=2, **options).eval()
    with torch.no_grad():
        assert network(torch.randn(2, 2, size, size)).shape == (2, 7)


@pytest.mark.parametrize("size", [8, 28, 33])
def test_the_imagenet_network_takes_small_images(size):
    network = reszoo.create("densenet121", num_classes=3).eval()
    with torch.no_grad():
        assert network(torch.randn(1, 3, size, size)).shape == (1, 3)


def test_feature_maps_halve_the_resolution_and_end_normalised():
    network = reszoo.create("densenet121").eval()
    with torch.no_grad():
        maps = network.feature_maps(torch.randn(1, 3, 64, 64))
    assert [tuple(m.shape[1:]) for m in maps] == [(256, 16, 16), (512, 8, 8), (1024, 4, 4), (1024, 2, 2)]
    assert [m.shape[1] for m in maps] == network.stage_channels
    assert maps[-1].min() >= 0


def test_without_classes_the_output_is_the_pooled_last_map():
    network = reszoo.create(SMALL, num_classes=0).eval()
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(network(x), network.feature_maps(x)[-1].mean((2, 3)))


def test_dropout_follows_every_convolution_but_the_first():
    modules = [m for m in reszoo.create(SMALL, dropout=0.2).modules() if isinstance(m, nn.Conv2d | nn.Dropout)]
    kinds = [type(m) for m in modules]
    assert kinds == [nn.Conv2d, *[nn.Conv2d, nn.Dropout] * (2 * 9 + 2)]


def test_one_step_of_sgd_lowers_the_loss():
    torch.manual_seed(0)
    network, x, y = reszoo.create(SMALL), torch.randn(16, 3, 8, 8), torch.arange(16) % 10
    before = F.cross_entropy(network(x), y)
    before.backward()
    torch.optim.SGD(network.parameters(), lr=0.05).step()
    assert F.cross_entropy(network(x), y) < before


@pytest.mark.parametrize(
    "options", [{"compression": 0}, {"compression": 1.5}, {"dropout": 1}, {"memory": "low"}, {"stem_width": 16}]
)
def test_an_option_out_of_range_is_refused_by_name(options):
    with pytest.raises(ReszooError, match=next(iter(options))):
        reszoo.create("densenet40_k12", **options)


# Training in less memory: the same outputs, gradients and statistics.


@pytest.mark.parametrize("memory", EFFICIENT)
@pytest.mark.parametrize(
    ("kind", "dropout"), [(CIFAR, 0.0), (CIFAR, 0.3), (BASIC, 0.0), (BASIC, 0.2), (IMAGENET, 0.0), (IMAGENET, 0.2)]
)
def test_five_steps_equal_those_of_the_plain_form(memory, kind, dropout):
    plain, other = pair(memory, kind, dropout=dropout)
    x = images(32 if kind is IMAGENET else 8)
    assert_equal(train(other, x, 5, 0.1), train(plain, x, 5, 0.1))


@pytest.mark.parametrize("memory", EFFICIENT)
def test_batches_are_counted_once(memory):
    _, other = pair(memory, IMAGENET)
    state = train(other, images(32))
    assert {int(value) for key, value in state.items() if key.endswith("num_batches_tracked")} == {1}


@pytest.mark.parametrize("memory", EFFICIENT)
def test_float32_rounds_no_worse_than_the_plain_form(memory):
    exact, other = pair(memory)
    x = images()
    plain = copy.deepcopy(exact).float()
    other.float()
    expected, rounded, got = train(exact, x), train(plain, x.float()), train(other, x.float())
    for key, value in expected.items():
        if value.is_floating_point():
            error, allowed = (got[key] - value).norm(), (rounded[key] - value).norm()
            assert error <= 3 * allowed + 1e-6 * value.norm(), key


@pytest.mark.parametrize("memory", EFFICIENT)
@pytest.mark.parametrize("frozen", [("stem",), ("stem", "stages.0"), ("stages.0.0.1", "stages.1.0"), ()])
def test_frozen_parts_and_input_gradients_are_those_of_the_plain_form(memory, frozen):
    networks, x = pair(memory), images()
    gradients = []
    for network in networks:
        for name, p in network.named_parameters():
            p.requires_grad_(not name.startswith(frozen) if frozen else True)
        own = x.clone().requires_grad_(not frozen)
        gradients.append(train(network, own))
        if not frozen:
            gradients[-1]["input"] = own.grad
    assert_equal(gradients[1], gradients[0])


@pytest.mark.parametrize("memory", EFFICIENT)
@pytest.mark.parametrize("size", [8, 9])
def test_channels_last_and_odd_sizes_train_equally(memory, size):
    plain, other = pair(memory)
    x = images(size)
    other.to(memory_format=torch.channels_last)
    assert_equal(train(other, x.contiguous(memory_format=torch.channels_last)), train(plain, x))


@pytest.mark.parametrize("memory", EFFICIENT)
def test_evaluation_is_the_plain_form_to_the_bit(memory):
    plain, other = pair(memory)
    assert torch.equal(plain.eval()(images()), other.eval()(images()))
    assert runs_the_plain_layers(other, images())


def test_every_memory_has_the_same_state():
    keys = [list(reszoo.create("densenet121", memory=memory).state_dict()) for memory in ("plain", *EFFICIENT)]
    assert keys[0] == keys[1] == keys[2]


@pytest.mark.parametrize("memory", EFFICIENT)
def test_accumulated_gradients_add_up(memory):
    plain, other = pair(memory)
    for network in (plain, other):
        network(images(samples=2)).sum().backward()
    assert_equal(train(other, images()), train(plain, images()))


@pytest.mark.parametrize("memory", EFFICIENT)
def test_it_trains_under_autocast_close_to_the_plain_form(memory):
    plain, other = (network.float() for network in pair(memory, dropout=0.1))
    states = []
    for network in (plain, other):
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16):
            output = network(images(16).float())
        output.float().square().mean().backward()
        states.append({"output": output, **{k: p.grad for k, p in network.named_parameters()}, **network.state_dict()})
    for key, value in states[0].items():
        assert states[1][key].dtype == value.dtype
        difference = (states[1][key].double() - value.double()).norm() / (value.double().norm() + 1e-3)
        assert difference < 0.1, key


def hook(network):
    network.stages[0][0][1].register_forward_hook(lambda *_: None)


def freeze_norm(network):
    network.stages[1][1][0].residual[0].eval()


def cumulative_norm(network):
    network.stages[1][1][0].residual[0].momentum = None


def silence(network):
    network.stages[0][0][1].residual = nn.Sequential(nn.Conv2d(12, 4, 1).double())


def dilate(network):
    conv = network.stages[0][0][1].residual[-1]
    conv.dilation, conv.padding = (2, 2), (2, 2)


def replace_forward(network):
    residual = network.stages[0][0][1].residual
    residual.forward = lambda x: 0 * nn.Sequential.forward(residual, x)


def parametrize(network):
    nn.utils.parametrizations.weight_norm(network.stages[0][0][1].residual[-1])


@pytest.mark.parametrize("memory", EFFICIENT)
@pytest.mark.parametrize("change", [hook, freeze_norm, cumulative_norm, silence, dilate, replace_forward, parametrize])
def test_a_changed_network_is_honoured(memory, change):
    plain, other = pair(memory)
    change(plain)
    torch.manual_seed(0)
    change(other)
    other.load_state_dict(plain.state_dict())
    assert_equal(train(other, images()), train(plain, images()))


@pytest.mark.parametrize("memory", EFFICIENT)
def test_every_hook_is_called_once_a_step(memory):
    _, other = pair(memory, IMAGENET)
    calls = []
    for name, module in other.named_modules():
        module.register_forward_hook(lambda *_, name=name: calls.append(name))
    train(other, images(32))
    assert sorted(calls) == sorted(name for name, _ in other.named_modules())


@pytest.mark.parametrize("memory", EFFICIENT)
def test_function_transforms_see_the_plain_form(memory):
    plain, other = pair(memory)
    x = images(8)

    def gradient(network):
        def loss(parameters):
            # Made inside, because a transform forbids writing to what comes from outside.
            buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
            return torch.func.functional_call(network, parameters | buffers, (x,)).square().sum()

        return torch.func.grad(loss)(dict(network.named_parameters()))

    assert_equal(gradient(other), gradient(plain))


@pytest.mark.parametrize("memory", EFFICIENT)
def test_one_value_a_channel_is_refused_as_by_batch_norm(memory):
    _, other = pair(memory)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        other(images(1, 1))


@pytest.mark.parametrize("memory", EFFICIENT)
def test_export_in_evaluation(memory):
    network = DenseNet(*CIFAR, memory=memory).eval()
    exported = torch.export.export(network, network.example_inputs(2)).module()
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(exported(x), network(x), rtol=1e-4, atol=1e-5)


def kept_for_backward(memory: str) -> int:
    """Bytes that a forward pass keeps, each storage counted once."""
    network = reszoo.create("densenet_bc100_k12", memory=memory)
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = network(torch.randn(8, 3, 16, 16))
    size = sum(storages.values()) - sum(p.numel() * 4 for p in network.parameters())
    del output
    return size


def test_shared_keeps_less_than_a_third_of_the_plain_forms_memory_and_lean_less_than_a_tenth():
    plain, shared, lean = (kept_for_backward(memory) for memory in ("plain", *EFFICIENT))
    assert shared < 0.33 * plain
    assert lean < 0.1 * plain
