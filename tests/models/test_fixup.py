import pytest
import torch
from torch import nn

import reszoo
from reszoo.models.fixup import FixupBasicBlock, FixupBottleneck


def blocks_of(network):
    return [m for m in network.modules() if isinstance(m, FixupBasicBlock | FixupBottleneck)]


def test_a_basic_block_adds_five_scalars_in_place_of_batch_norm():
    network, sibling = reszoo.create("fixup_resnet20"), reszoo.create("resnet20")
    batch_norm = sum(p.numel() for m in sibling.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters())
    expected = 269_722 - batch_norm + 9 * 5 + 2  # and one bias behind the stem, one before the head
    assert sum(p.numel() for p in network.parameters()) == expected


@pytest.mark.parametrize(("name", "blocks", "convs"), [("fixup_resnet110", 54, 2), ("fixup_resnet50", 16, 3)])
def test_inner_convolutions_start_smaller_by_the_rule_and_the_last_at_zero(name, blocks, convs):
    torch.manual_seed(0)
    network = reszoo.create(name)
    assert len(blocks_of(network)) == blocks
    for block in blocks_of(network)[-2:]:
        *others, last = (m for m in block.residual if isinstance(m, nn.Conv2d))
        assert len(others) == convs - 1
        assert last.weight.abs().max() == 0
        for conv in others:
            he = (2 / (conv.out_channels * conv.kernel_size[0] ** 2)) ** 0.5
            assert conv.weight.std().item() == pytest.approx(he * blocks ** (-1 / (2 * convs - 2)), rel=0.03)


def test_every_block_starts_as_relu_of_its_shortcut_and_the_logits_at_zero():
    torch.manual_seed(0)
    network, x = reszoo.create("fixup_resnet8"), torch.randn(2, 3, 9, 9)
    block, features = network.stages[0][0], network.stem(x)
    torch.testing.assert_close(block(features), torch.relu(features))
    assert torch.equal(network(x), torch.zeros(2, 10))


def test_a_block_is_the_formula_of_the_paper():
    torch.manual_seed(0)
    block, x = FixupBasicBlock(3, 3, 1, lambda *_: nn.Identity()), torch.randn(2, 3, 6, 6)
    for p in block.parameters():
        nn.init.normal_(p)
    b1a, w1, b1b, b2a, w2, multiplier, b2b = block.residual.parameters()
    y = nn.functional.conv2d(x + b1a, w1, padding=1)
    y = nn.functional.conv2d(torch.relu(y + b1b) + b2a, w2, padding=1)
    torch.testing.assert_close(block(x), torch.relu(x + multiplier * y + b2b), rtol=1e-4, atol=1e-4)


def test_a_projection_is_preceded_by_a_bias():
    keys = [k for k in reszoo.create("fixup_resnet8", shortcut="B").state_dict() if "stages.1.0.shortcut" in k]
    assert keys == ["stages.1.0.shortcut.0.bias", "stages.1.0.shortcut.1.weight"]


def test_it_has_no_normalisation_and_trains_at_56_layers():
    torch.manual_seed(0)
    network, x, y = reszoo.create("fixup_resnet56"), torch.randn(16, 3, 8, 8), torch.arange(16) % 10
    assert not any("Norm" in type(m).__name__ for m in network.modules())
    start = {name: p.detach().clone() for name, p in network.named_parameters()}
    optimizer, losses = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9), []
    for _ in range(8):
        optimizer.zero_grad()
        losses.append(nn.functional.cross_entropy(network(x), y))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    assert [name for name, p in network.named_parameters() if torch.equal(p, start[name])] == []
