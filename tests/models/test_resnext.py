import pytest
import torch
from torch import nn
from torchvision.models import resnext50_32x4d as torchvision_resnext50

import reszoo
from reszoo.layers import shortcut_maker
from reszoo.models.resnet import Bottleneck, ResNet
from reszoo.models.resnext import ResNeXtBlock


def test_parameter_count_of_resnext50_32x4d():
    with torch.device("meta"):
        assert sum(p.numel() for p in reszoo.create("resnext50_32x4d").parameters()) == 25_028_904


def test_one_group_of_width_64_is_the_bottleneck_of_resnet():
    torch.manual_seed(0)
    grouped = ResNeXtBlock(8, 4, 2, shortcut_maker("B"), cardinality=1, group_width=64)
    plain = Bottleneck(8, 4, 2, shortcut_maker("B"), stride_in="3x3")
    grouped.load_state_dict(plain.state_dict())
    x = torch.randn(2, 8, 9, 9)
    torch.testing.assert_close(grouped(x), plain(x))


def test_a_grouped_convolution_is_the_sum_over_paths_of_figure_3a():
    torch.manual_seed(0)
    block = ResNeXtBlock(8, 16, 1, shortcut_maker("B"), cardinality=4, group_width=8).eval()
    x, f = torch.randn(2, 8, 5, 5), block.residual
    inner = torch.relu(f[1](f[0](x)))
    paths = []
    for path in range(4):
        part = slice(2 * path, 2 * path + 2)
        y = nn.functional.conv2d(inner[:, part], f[3].weight[part], padding=1)
        y = torch.relu(y / (1 + f[4].eps) ** 0.5)  # BatchNorm as it starts
        paths.append(nn.functional.conv2d(y, f[6].weight[:, part]))
    torch.testing.assert_close(f(x), f[7](sum(paths)))


def test_it_equals_torchvision():
    torch.manual_seed(0)
    theirs = torchvision_resnext50().eval()
    for module in theirs.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    ours = reszoo.create("resnext50_32x4d").eval()
    ours.load_state_dict(dict(zip(ours.state_dict(), theirs.state_dict().values(), strict=True)))
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert (ours(x) - theirs(x)).abs().max() < 1e-5 * theirs(x).abs().max()


@pytest.mark.parametrize("size", [7, 33])
def test_a_small_network_trains_at_odd_sizes(size):
    torch.manual_seed(0)

    def block(*shape):
        return ResNeXtBlock(*shape, cardinality=4, group_width=16)

    network = ResNet("cifar", (8, 16), (1, 2), block, shortcut="B", zero_gamma=True)
    x, y = torch.randn(8, 3, size, size), torch.arange(8)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    before = nn.functional.cross_entropy(network(x), y)
    before.backward()
    optimizer.step()
    assert nn.functional.cross_entropy(network(x), y) < before
