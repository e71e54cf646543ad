import pytest
import torch
from torch import nn

import reszoo
from reszoo.models.skipinit import SkipInitBlock


def test_without_batch_norm_each_convolution_has_a_bias_and_each_branch_a_scalar():
    network, sibling = reszoo.create("skipinit_resnet20"), reszoo.create("preact_resnet20")
    scales = sum(p.numel() for m in sibling.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters())
    biases = 16 + 3 * 2 * (16 + 32 + 64)
    assert sum(p.numel() for p in network.parameters()) == 269_722 - scales + biases + 9
    assert not any(isinstance(m, nn.BatchNorm2d) for m in network.modules())


def test_the_network_starts_as_its_shortcuts():
    torch.manual_seed(0)
    network = reszoo.create("skipinit_resnet20")
    x = network.stem(torch.randn(2, 3, 9, 9))
    assert torch.equal(network.stages[0](x), x)


def test_at_first_only_alpha_moves_in_a_branch_and_then_everything():
    torch.manual_seed(0)
    network = reszoo.create("skipinit_resnet8")
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    start = {name: p.detach().clone() for name, p in network.named_parameters()}
    for step in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(torch.randn(8, 3, 9, 9)), torch.arange(8)).backward()
        if step == 0:
            assert all(m.weight.grad.abs().max() == 0 for b in blocks(network) for m in convs(b))
            assert all(b.residual[-1].alpha.grad != 0 for b in blocks(network))
        optimizer.step()
    assert [name for name, p in network.named_parameters() if torch.equal(p, start[name])] == []


def blocks(network):
    return [m for m in network.modules() if isinstance(m, SkipInitBlock)]


def convs(block):
    return [m for m in block.residual if isinstance(m, nn.Conv2d)]


def test_a_block_is_its_formula():
    torch.manual_seed(0)
    block, x = SkipInitBlock(3, 3, 1, lambda *_: nn.Identity()), torch.randn(2, 3, 6, 6)
    nn.init.constant_(block.residual[-1].alpha, 0.7)
    first, second = convs(block)
    expected = x + 0.7 * second(torch.relu(first(torch.relu(x))))
    torch.testing.assert_close(block(x), expected)


@pytest.mark.parametrize("name", ["skipinit_resnet110", "skipinit_wrn16_4"])
def test_it_trains_without_normalisation(name):
    torch.manual_seed(0)
    network, x, y = reszoo.create(name), torch.randn(16, 3, 8, 8), torch.arange(16) % 10
    optimizer, losses = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9), []
    for _ in range(6):
        optimizer.zero_grad()
        losses.append(nn.functional.cross_entropy(network(x), y))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]
