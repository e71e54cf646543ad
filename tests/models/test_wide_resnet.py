import pytest
import torch
from torch import nn
from torchvision.models import wide_resnet50_2 as torchvision_wide_resnet50_2

import reszoo
from reszoo.errors import ReszooError
from reszoo.layers import shortcut_maker
from reszoo.models.preact_resnet import PreActBasicBlock
from reszoo.models.wide_resnet import WideBlock, wide_resnet

COUNTS = {"wrn16_8": 10_961_370, "wrn28_10": 36_479_194, "wide_resnet50_2": 68_883_240}


@pytest.mark.parametrize(("name", "expected"), COUNTS.items())
def test_parameter_count(name, expected):
    with torch.device("meta"):
        assert sum(p.numel() for p in reszoo.create(name).parameters()) == expected


def test_a_block_without_dropout_is_a_pre_activation_block():
    torch.manual_seed(0)
    wide, plain = (block(4, 4, 1, shortcut_maker("B")) for block in (WideBlock, PreActBasicBlock))
    wide.load_state_dict(dict(zip(wide.state_dict(), plain.state_dict().values(), strict=True)))
    x = torch.randn(2, 4, 8, 8)
    torch.testing.assert_close(wide(x), plain(x))


def test_dropout_stands_between_the_convolutions():
    kinds = [type(layer).__name__ for layer in WideBlock(4, 4, 1, shortcut_maker("B"), dropout=0.3).residual]
    assert kinds == ["BatchNorm2d", "ReLU", "Conv2d", "BatchNorm2d", "ReLU", "Dropout", "Conv2d"]


def test_dropout_has_the_given_rate_and_no_keys():
    network = reszoo.create("wrn16_4", dropout=0.3)
    assert {m.p for m in network.modules() if isinstance(m, nn.Dropout)} == {0.3}
    assert list(network.state_dict()) == list(reszoo.create("wrn16_4").state_dict())


def test_the_bottleneck_network_equals_torchvision():
    torch.manual_seed(0)
    theirs = torchvision_wide_resnet50_2().eval()
    for module in theirs.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    ours = reszoo.create("wide_resnet50_2").eval()
    ours.load_state_dict(dict(zip(ours.state_dict(), theirs.state_dict().values(), strict=True)))
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert (ours(x) - theirs(x)).abs().max() < 1e-5 * theirs(x).abs().max()


@pytest.mark.parametrize("size", [7, 33])
def test_logits_shape_at_odd_sizes(size):
    assert wide_resnet(10, 1, 0.0, shortcut="B")(torch.randn(1, 3, size, size)).shape == (1, 10)


@pytest.mark.parametrize("depth", [4, 20])
def test_a_depth_that_is_not_6n_plus_4_is_refused(depth):
    with pytest.raises(ReszooError, match=r"depth must be 6n \+ 4"):
        wide_resnet(depth, 1, 0.0)


def test_one_step_of_sgd_lowers_the_loss():
    torch.manual_seed(0)
    network, x, y = wide_resnet(10, 2, 0.0, shortcut="B"), torch.randn(16, 3, 8, 8), torch.arange(16) % 10
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02)
    before = nn.functional.cross_entropy(network(x), y)
    before.backward()
    optimizer.step()
    assert nn.functional.cross_entropy(network(x), y) < before
