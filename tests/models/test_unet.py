import math

import numpy as np
import pytest
import torch
from torch import nn

import reszoo
from reszoo.errors import ReszooError
from reszoo.models.unet import ExpandingBlock, border_weights, centre_crop, mirror, unpadded_convs

AR_01 = [(33, 47), (101, 101), (350, 525), (15, 15), (1, 1)]


def tiny(name: str, **options) -> nn.Module:
    torch.manual_seed(0)
    return reszoo.create(name, width=options.pop("width", 2), **options).eval()


def test_parameter_count_is_that_of_figure_1_with_biases():
    with torch.device("meta"):
        assert sum(p.numel() for p in reszoo.create("unet").parameters()) == 31_030_658


def test_there_are_23_convolutions_and_no_normalisation():
    modules = list(tiny("unet").modules())
    assert sum(isinstance(m, nn.Conv2d | nn.ConvTranspose2d) for m in modules) == 23
    assert not any(isinstance(m, nn.BatchNorm2d) for m in modules)


def test_sizes_along_the_path_are_those_of_figure_1():
    with torch.device("meta"):
        network = reszoo.create("unet", width=2)
        sizes = [m.shape[-1] for m in network.feature_maps(torch.empty(1, 1, 572, 572))]
        assert sizes == [568, 280, 136, 64, 28]
        assert network(torch.empty(1, 1, 572, 572)).shape == (1, 2, 388, 388)
        assert network(torch.empty(1, 1, 188, 204)).shape == (1, 2, 4, 20)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_size_is_taken_just_if_every_pooling_meets_an_even_one(depth):
    with torch.device("meta"):
        network = reszoo.create("unet", width=1, depth=depth)
        for size in range(1, 260):
            sizes = [size]
            for _ in range(depth):
                sizes.append((sizes[-1] - 4) / 2)
            out = sizes[-1] - 4
            for _ in range(depth):
                out = 2 * out - 4
            if out >= 1 and all(s == int(s) for s in sizes):
                assert network(torch.empty(1, 1, size, size)).shape[2:] == (out, out)
            else:
                with pytest.raises(ReszooError, match="does not fit a U-Net"):
                    network(torch.empty(1, 1, size, size))


def test_an_illegal_size_is_refused_with_the_nearest_legal_ones():
    with pytest.raises(ReszooError, match=r"height 256 .*fit: 252 or 268\. `overlap_tile`"):
        tiny("unet")(torch.randn(1, 1, 256, 252))
    with pytest.raises(ReszooError, match=r"width 32 .*fit: 188\."):
        tiny("unet")(torch.randn(1, 1, 188, 32))


def test_the_skip_is_cropped_at_its_centre_and_stands_in_front():
    block = ExpandingBlock(4, unpadded_convs)
    seen = []
    block.convs.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    x, skip = torch.randn(1, 4, 4, 4), torch.randn(1, 2, 16, 12)
    block(x, skip)
    assert torch.equal(seen[0][:, :2], skip[:, :, 4:12, 2:10])
    assert torch.equal(seen[0][:, 2:], block.up(x))


def test_an_uncropped_skip_is_left_alone():
    x = torch.randn(1, 2, 5, 7)
    assert torch.equal(centre_crop(x, x), x)


@pytest.mark.parametrize("size", AR_01)
def test_padded_output_is_as_large_as_the_input(size):
    assert tiny("unet_padded")(torch.randn(1, 1, *size)).shape == (1, 2, *size)


@pytest.mark.parametrize("size", AR_01)
def test_overlap_tile_output_is_as_large_as_the_input(size):
    with torch.no_grad():
        assert tiny("unet").overlap_tile(torch.randn(1, 1, *size), tile_size=252).shape == (1, 2, *size)


@pytest.mark.parametrize("name", ["unet_padded", "unet"])
def test_no_size_breaks_it(name):
    network = tiny(name, depth=2)
    for size in [(1, 40), (40, 1), *((s, s + 3) for s in range(2, 20))]:
        output = (
            network(torch.randn(1, 1, *size))
            if name == "unet_padded"
            else network.overlap_tile(torch.randn(1, 1, *size))
        )
        assert output.shape[2:] == size


def test_padding_is_below_and_to_the_right():
    network, x = tiny("unet_padded", depth=2), torch.randn(2, 1, 6, 9)
    padded = torch.zeros(2, 1, 8, 12)
    padded[:, :, :6, :9] = x
    torch.testing.assert_close(network(x), network(padded)[:, :, :6, :9], rtol=0, atol=0)


def test_overlap_tile_equals_one_full_pass_on_the_interior():
    network, x = tiny("unet"), torch.randn(1, 1, 236, 252)
    with torch.no_grad():
        expected = network(x)  # (1, 2, 52, 68)
        tiled = network.overlap_tile(x, tile_size=204)
    torch.testing.assert_close(tiled[:, :, 92:-92, 92:-92], expected, rtol=1e-5, atol=1e-6 * expected.abs().max())
    assert (tiled[:, :, 91:-93, 92:-92] - expected).abs().max() > 1e-3 * expected.abs().max()


def test_overlap_tile_equals_one_pass_over_the_mirrored_image_everywhere():
    network, x = tiny("unet", depth=2), torch.randn(2, 1, 30, 41)
    whole = mirror(x, 24, 22, 24, 23)  # the margin of 20 and 4 more to reach the grid; 32 x 44 pixels remain
    with torch.no_grad():
        expected = network(whole)[:, :, 4:, 4:][:, :, :30, :41]
        for tile_size in (48, 60, 572):
            got = network.overlap_tile(x, tile_size)
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6 * expected.abs().max())


@pytest.mark.parametrize("tile_size", [187, 188, 512])
def test_a_tile_size_that_does_not_fit_is_refused(tile_size):
    with pytest.raises(ReszooError, match=r"tile_size must be 204 plus a multiple of 16"):
        tiny("unet").overlap_tile(torch.randn(1, 1, 20, 20), tile_size)


def test_mirror_equals_reflection_padding_where_that_is_defined():
    x = torch.randn(1, 2, 6, 7)
    assert torch.equal(mirror(x, 2, 3, 4, 5), nn.functional.pad(x, (4, 5, 2, 3), mode="reflect"))
    assert torch.equal(mirror(x[:, :, :1, :2], 0, 2, 0, 3)[0, 0], x[0, 0, :1, :2].repeat(3, 3)[:, :5])


def test_initial_weights_keep_the_variance_of_section_3():
    torch.manual_seed(0)
    network = reszoo.create("unet", width=32)
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d) and module.weight.numel() > 5000:
            taps = module.kernel_size[0] ** 2 if isinstance(module, nn.Conv2d) else 1
            assert module.weight.std().item() == pytest.approx(math.sqrt(2 / (taps * module.in_channels)), rel=0.03)
            assert module.bias.abs().max() == 0


def test_dropout_acts_at_the_bottom_and_in_training_alone():
    network, x = tiny("unet", depth=1, dropout=0.5), torch.randn(1, 1, 18, 18)
    plain = tiny("unet", depth=1)
    assert torch.equal(network(x), plain(x))
    bottom = network.train().feature_maps(x)[-1]
    kept = bottom != 0
    torch.testing.assert_close(bottom[kept], 2 * plain.feature_maps(x)[-1][kept])


def test_a_batch_that_the_bottom_cannot_normalise_is_refused():
    network = tiny("unet_padded").train()
    with pytest.raises(ReszooError, match="single pixel at the bottom"):
        network(torch.randn(1, 1, 16, 16))
    assert network(torch.randn(2, 1, 16, 16)).shape == (2, 2, 16, 16)
    assert network(torch.randn(1, 1, 16, 17)).shape == (1, 2, 16, 17)


def test_an_image_without_pixels_is_refused():
    with pytest.raises(ReszooError, match="height of the images must be at least 1"):
        tiny("unet_padded")(torch.randn(1, 1, 0, 4))
    with pytest.raises(ReszooError, match="width of the images must be at least 1"):
        tiny("unet").overlap_tile(torch.randn(1, 1, 4, 0))


def test_without_classes_the_output_is_the_map_before_the_head():
    network, features = tiny("unet_padded", depth=2), tiny("unet_padded", depth=2, num_classes=0)
    features.load_state_dict({k: v for k, v in network.state_dict().items() if not k.startswith("head.")})
    x = torch.randn(1, 1, 9, 9)
    torch.testing.assert_close(network.head(features(x)), network(x))


def test_border_weights_equal_a_plain_loop():
    cells = torch.zeros(9, 11, dtype=torch.long)
    cells[1:4, 1:4], cells[5:9, 2:6], cells[0:5, 8:11] = 1, 2, 7
    share = (cells > 0).double().mean().item()
    borders: dict[int, list[tuple[int, int]]] = {1: [], 2: [], 7: []}
    for i in range(9):
        for j in range(11):
            around = [(i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)]
            inside = [cells[p].item() for p in around if 0 <= p[0] < 9 and 0 <= p[1] < 11]
            if cells[i, j] and any(label != cells[i, j] for label in inside):
                borders[cells[i, j].item()].append((i, j))
    expected = torch.empty(9, 11)
    for i in range(9):
        for j in range(11):
            d1, d2, _ = sorted(min(math.dist((i, j), p) for p in pixels) for pixels in borders.values())
            balance = 0.5 / share if cells[i, j] else 0.5 / (1 - share)
            expected[i, j] = balance + 10 * math.exp(-((d1 + d2) ** 2) / (2 * 5**2))
    torch.testing.assert_close(border_weights(cells), expected)


def test_border_weights_need_two_cells_for_a_border_and_two_classes_to_balance():
    one = torch.zeros(4, 4, dtype=torch.long)
    assert torch.equal(border_weights(one), torch.ones(4, 4))
    one[0, 0] = 1
    assert border_weights(one)[0, 0] == 8
    assert border_weights(one).mean() == pytest.approx(1)
    with pytest.raises(ReszooError, match=r"shape \(H, W\)"):
        border_weights(one[None])


@pytest.mark.parametrize("option", [{"dropout": 1.0}, {"depth": 0}, {"width": 0}, {"in_chans": 0}, {"num_classes": -1}])
def test_an_option_out_of_range_is_refused(option):
    with pytest.raises(ReszooError, match=f"{next(iter(option))} must be"):
        reszoo.create("unet_padded", **option)


@pytest.mark.parametrize(("name", "size"), [("unet", 44), ("unet_padded", 21)])
def test_one_step_of_sgd_lowers_the_loss(name, size):
    network = tiny(name, depth=2, width=4).train()
    x = torch.randn(2, 1, size, size)
    labels = torch.randint(2, network(x).shape[:1] + network(x).shape[2:])
    before = nn.functional.cross_entropy(network(x), labels)
    before.backward()
    torch.optim.SGD(network.parameters(), lr=0.01).step()
    assert nn.functional.cross_entropy(network(x), labels) < before


def mean_iou(predictions: list[torch.Tensor], masks: list[torch.Tensor]) -> float:
    """The mean over both classes of intersection over union, each summed over all images."""
    ratios = []
    for label in (0, 1):
        pairs = [(p == label, m == label) for p, m in zip(predictions, masks, strict=True)]
        ratios.append(sum((p & m).sum() for p, m in pairs) / sum((p | m).sum() for p, m in pairs))
    return (sum(ratios) / 2).item()


@pytest.mark.slow
def test_a_small_padded_net_learns_to_tell_digits_from_shuffled_digits(digit_scene):
    torch.manual_seed(0)
    generator = np.random.default_rng(0)
    network = reszoo.create("unet_padded", width=8, depth=3)
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)

    def batch(height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        images, masks, _, _ = zip(*(digit_scene(generator, height, width) for _ in range(8)), strict=True)
        return torch.stack(images), torch.stack(masks)

    test = [batch(*size) for size in ((32, 32), (50, 61), (64, 64))]
    for step in range(200):
        images, masks = batch(*[(32, 48, 64)[step % 3]] * 2)
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(images), masks).backward()
        optimizer.step()
    network.eval()
    with torch.no_grad():
        found = mean_iou([network(images).argmax(1) for images, _ in test], [masks for _, masks in test])
    by_threshold = mean_iou([(images[:, 0] > 0.3).long() for images, _ in test], [masks for _, masks in test])
    assert found > 0.8 > by_threshold
