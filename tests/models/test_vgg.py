import pytest
import torch
from torch import nn
from torchvision.models.vgg import cfgs, make_layers

import reszoo
from reszoo.errors import ReszooError

NARROW = {"vgg9": [4, 5, 6], "vgg15": [4, 5, 6, 7, 8]}
both = pytest.mark.parametrize(("name", "widths"), NARROW.items())


@pytest.mark.parametrize(("name", "layers"), [("vgg9", 9), ("vgg15", 15)])
def test_the_layers_with_weights_are_those_of_the_name(name, layers):
    with torch.device("meta"):
        network = reszoo.create(name)
    assert sum(isinstance(m, nn.Conv2d | nn.Linear) for m in network.modules()) == layers


def by_hand(depths, widths, side):
    """Convolution and BatchNorm: 9 c w + w + 2 w; hidden: its input times w, and 3 w; head: 10 w + 10."""
    total, before = 0, 3
    for depth, width in zip(depths, widths, strict=True):
        total += sum(9 * (width if i else before) * width + 3 * width for i in range(depth))
        before = width
    return total + before * side**2 * before + 3 * before + 10 * before + 10


@pytest.mark.parametrize(
    ("name", "depths", "widths", "side"),
    [
        ("vgg9", (2, 2, 3), (64, 128, 256), 4),
        ("vgg15", (2, 2, 3, 3, 3), (64, 128, 256, 512, 512), 1),
    ],
)
def test_parameter_count_is_that_of_the_sum_by_hand(name, depths, widths, side):
    with torch.device("meta"):
        assert sum(p.numel() for p in reszoo.create(name).parameters()) == by_hand(depths, widths, side)


@torch.no_grad()
def test_the_convolutions_of_vgg15_are_those_of_torchvisions_vgg16():
    torch.manual_seed(0)
    theirs, ours = make_layers(cfgs["D"], batch_norm=True).eval(), reszoo.create("vgg15").eval()
    for module in theirs:
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    ours.stages.load_state_dict(dict(zip(ours.stages.state_dict(), theirs.state_dict().values(), strict=True)))
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(ours.feature_maps(x)[-1], theirs(x))


@both
@pytest.mark.parametrize("size", [1, 8, 28, 32, 33])
def test_logits_shape_at_the_size_it_was_built_for(name, widths, size):
    network = reszoo.create(name, widths=widths, num_classes=7, in_chans=2, image_size=size)
    assert network(torch.randn(2, 2, size, size)).shape == (2, 7)


@both
def test_without_classes_the_output_is_the_hidden_layer(name, widths):
    network = reszoo.create(name, widths=widths, num_classes=0).eval()
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(network(x), network.hidden(network.feature_maps(x)[-1]))
    assert network(x).shape == (1, network.num_features)


@both
def test_a_silent_layer_silences_the_network(name, widths):
    torch.manual_seed(0)
    network = reszoo.create(name, widths=widths).eval()
    nn.init.zeros_(network.stages[1][0][1].weight)  # no shortcut carries the image past it
    x = torch.randn(3, 3, 32, 32)
    logits = network(x)
    torch.testing.assert_close(logits, logits[:1].expand(3, -1))


@both
def test_steps_of_sgd_lower_the_loss(name, widths):
    torch.manual_seed(0)
    network = reszoo.create(name, widths=[2 * width for width in widths], in_chans=1, image_size=8)
    x, y = torch.randn(16, 1, 8, 8), torch.arange(16) % 2
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for _ in range(60):  # one step of 14 plain layers may go either way
        optimizer.zero_grad()
        losses.append(nn.functional.cross_entropy(network(x), y))
        losses[-1].backward()
        optimizer.step()
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


def test_wrong_widths_and_other_images_are_refused():
    with pytest.raises(ReszooError, match=r"widths must name the channels of 3 stages, got \[8\]"):
        reszoo.create("vgg9", widths=[8])
    with pytest.raises(ReszooError, match=r"images must be \(N, 3, 32, 32\), got \(2, 1, 8, 8\)"):
        reszoo.create("vgg9", widths=[2, 2, 2])(torch.randn(2, 1, 8, 8))
