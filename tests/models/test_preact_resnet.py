import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

import reszoo
from reszoo.layers import shortcut_maker
from reszoo.models.preact_resnet import PreActBasicBlock, PreActBottleneck

COUNTS = {
    ("preact_resnet110", 10): 1_727_962,
    ("preact_resnet164", 10): 1_703_258,
    ("preact_resnet164", 100): 1_726_388,
    ("preact_resnet1001", 10): 10_327_706,
    ("preact_resnet1001", 100): 10_350_836,
}
SIBLINGS = ["8", "14", "20", "26", "32", "44", "56", "110"]


def count(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def with_statistics(network: nn.Module) -> nn.Module:
    """The network in eval mode, with BatchNorm scales and statistics that are not trivial."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.1)
    return network.eval()


@pytest.mark.parametrize(("key", "expected"), COUNTS.items())
def test_parameter_count_is_that_of_tables_3_and_4(key, expected):
    name, num_classes = key
    with torch.device("meta"):
        assert count(reszoo.create(name, num_classes=num_classes)) == expected


@pytest.mark.parametrize("depth", SIBLINGS)
def test_a_basic_network_has_the_parameters_of_its_v1_sibling(depth):
    with torch.device("meta"):
        assert count(reszoo.create(f"preact_resnet{depth}")) == count(reszoo.create(f"resnet{depth}"))


def test_the_network_equals_a_plain_loop_over_its_weights():
    torch.manual_seed(0)
    network = with_statistics(reszoo.create("preact_resnet14"))
    state = network.state_dict()

    def activate(x, key):
        names = "running_mean", "running_var", "weight", "bias"
        return F.relu(F.batch_norm(x, *(state[f"{key}.{name}"] for name in names)))

    x = image = torch.randn(2, 3, 15, 15)
    x = activate(F.conv2d(x, state["stem.0.weight"], padding=1), "stem.1")
    for number in range(6):
        key, stride = f"stages.{number // 2}.{number % 2}", 2 if number in (2, 4) else 1
        shortcut, first = x, 2 if number % 2 else 0
        if number % 2:  # the branch alone is activated
            x = activate(x, f"{key}.residual.0")
        elif number > 0:  # the shape changes: both are
            x = activate(x, f"{key}.activation.0")
            shortcut = torch.cat([x[:, :, ::2, ::2], torch.zeros_like(x[:, :, ::2, ::2])], 1)
        x = F.conv2d(x, state[f"{key}.residual.{first}.weight"], padding=1, stride=stride)
        x = activate(x, f"{key}.residual.{first + 1}")
        x = F.conv2d(x, state[f"{key}.residual.{first + 3}.weight"], padding=1) + shortcut
    x = activate(x, "final.0").mean((2, 3))
    expected = F.linear(x, state["head.weight"], state["head.bias"])
    torch.testing.assert_close(network(image), expected, rtol=1e-5, atol=1e-5)


def test_the_50_layer_network_equals_that_of_timm_with_the_stride_in_the_3x3_and_only_then():
    torch.manual_seed(0)
    # Its stem pools before it activates, which is the same where the scales are positive.
    theirs = with_statistics(timm.create_model("resnetv2_50"))
    state = {}
    for key, value in theirs.state_dict().items():
        _, stage, _, block, *rest = (*key.split("."), "", "", "")
        ours = f"stages.{stage}.{block}" if key.startswith("stages") else ""
        first = (stage, block) == ("0", "0")
        begins = 0 if block == "0" else 2
        layer = ".".join(rest).rstrip(".")
        part, _, tensor = layer.rpartition(".")
        place = {
            "norm1": "stem.1" if first else f"{ours}.activation.0" if block == "0" else f"{ours}.residual.0",
            "conv1": f"{ours}.residual.{begins}",
            "norm2": f"{ours}.residual.{begins + 1}",
            "conv2": f"{ours}.residual.{begins + 3}",
            "norm3": f"{ours}.residual.{begins + 4}",
            "conv3": f"{ours}.residual.{begins + 6}",
            "downsample.conv": f"{ours}.shortcut.0",
        }
        if ours:
            state[f"{place[part]}.{tensor}"] = value
        elif key.startswith("stem"):
            state["stem.0.weight"] = value
        elif key.startswith("norm"):
            state[key.replace("norm", "final.0")] = value
        else:
            state[key.replace("head.fc", "head")] = value.flatten(1) if value.dim() == 4 else value
    # theirs: norm1 of the first block normalises 64 channels, as our stem does
    x = torch.randn(2, 3, 64, 64)
    differences = {}
    for stride_in in ("1x1", "3x3"):
        ours = reszoo.create("preact_resnet50", stride_in=stride_in).eval()
        ours.load_state_dict(state)
        with torch.no_grad():
            differences[stride_in] = ((ours(x) - theirs(x)).abs().max() / theirs(x).abs().max()).item()
    assert differences["3x3"] < 1e-5
    assert differences["1x1"] > 1e-2


@pytest.mark.parametrize("size", [8, 28, 32, 33])
@pytest.mark.parametrize("option", ["A", "B", "C"])
def test_logits_shape_at_any_size(size, option):
    network = reszoo.create("preact_resnet8", num_classes=7, in_chans=2, shortcut=option)
    assert network(torch.randn(1, 2, size, size)).shape == (1, 7)


def test_a_signal_passes_a_silent_block_unchanged_even_where_it_is_negative():
    block = PreActBasicBlock(4, 4, 1, shortcut_maker("A"))
    nn.init.zeros_(block.residual[-1].weight)
    x = torch.randn(2, 4, 8, 8)
    assert torch.equal(block(x), x)


@pytest.mark.parametrize("block", [PreActBasicBlock, PreActBottleneck])
def test_both_paths_take_the_activated_input_where_the_shape_changes(block):
    changing = block(4, 8, 2, shortcut_maker("B", norm=False))
    seen = []
    for path in (changing.residual, changing.shortcut):
        path.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    changing(torch.randn(2, 4, 8, 8))
    assert torch.equal(*seen)
    assert seen[0].min() == 0


def test_a_projection_has_no_batch_norm():
    shapes = {k: tuple(v.shape) for k, v in reszoo.create("preact_resnet8", shortcut="B").named_parameters()}
    assert [k for k in shapes if "shortcut" in k] == ["stages.1.0.shortcut.0.weight", "stages.2.0.shortcut.0.weight"]


def test_the_last_feature_map_is_activated():
    *_, last = reszoo.create("preact_resnet14").feature_maps(torch.randn(2, 3, 16, 16))
    assert last.min() == 0


def test_one_step_of_sgd_lowers_the_loss():
    torch.manual_seed(0)
    network, x, y = reszoo.create("preact_resnet8"), torch.randn(16, 3, 8, 8), torch.arange(16) % 10
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02)
    before = nn.functional.cross_entropy(network(x), y)
    before.backward()
    optimizer.step()
    assert nn.functional.cross_entropy(network(x), y) < before


def test_rezero_starts_the_network_as_its_shortcuts():
    torch.manual_seed(0)
    network = reszoo.create("preact_resnet14", branch_scale="rezero")
    x = network.stem(torch.randn(2, 3, 8, 8))
    assert torch.equal(network.stages[0](x), x)
