import pytest
import timm
import torch
import torchvision
from torch import nn

import reszoo
from reszoo.errors import ReszooError
from reszoo.layers import SelfAttention
from reszoo.models._encoder import encoder_blocks
from reszoo.models.transformer import PreLN
from reszoo.models.vit import resize_position_table

COUNTS = {
    "vit_ti16": 5_717_416,
    "vit_s16": 22_050_664,
    "vit_b16": 86_567_656,
    "vit_b32": 88_224_232,
    "vit_l16": 304_326_632,
    "vit_h14": 632_045_800,
}
TINY = {"image_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 10}


def tiny(**options):
    torch.manual_seed(0)
    return reszoo.create("vit_b16", **TINY | options).eval()


def randomize(network):
    """Weights and biases large enough that a wrong epsilon, order or scale shows."""
    torch.manual_seed(0)
    for p in network.parameters():
        nn.init.normal_(p, 1.0 if p.dim() == 1 else 0.0, 0.1 if p.dim() == 1 else p[0].numel() ** -0.5)
    return network.eval()


@pytest.mark.parametrize(("name", "expected"), COUNTS.items())
def test_parameter_count_is_that_of_its_size(name, expected):
    with torch.device("meta"):
        assert sum(p.numel() for p in reszoo.create(name).parameters()) == expected


@pytest.mark.parametrize(("ours", "theirs", "options"), [
    ("vit_ti16", "vit_tiny_patch16_224", {}),
    ("vit_s16", "vit_small_patch16_224", {}),
    ("vit_b16", "vit_base_patch16_224", {"depth": 2}),
    ("vit_b32", "vit_base_patch32_224", {"depth": 2}),
])  # fmt: skip
def test_it_equals_timm(ours, theirs, options):
    reference = randomize(timm.create_model(theirs, pretrained=False, **options))
    network = reszoo.create(ours, **options).eval()
    network.load_state_dict(in_our_order(network, reference))
    x = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        expected = reference(x)
        assert ((network(x) - expected).abs().max() / expected.abs().max()).item() < 1e-5


def test_it_equals_torchvision():
    reference = torchvision.models.VisionTransformer(224, 16, 2, 12, 768, 3072)
    network = reszoo.create("vit_b16", depth=2).eval()
    network.load_state_dict(in_our_order(network, randomize(reference)))
    x = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        expected = reference(x)
        assert ((network(x) - expected).abs().max() / expected.abs().max()).item() < 1e-5


def in_our_order(network, reference):
    """The reference's tensors under our names: blocks, norms and head come in the same order in all three."""
    table = {"cls_token": "class_token", "class_token": "class_token", "pos_embed": "positions"}
    table |= {"encoder.pos_embedding": "positions", "conv_proj.weight": "stem.weight", "conv_proj.bias": "stem.bias"}
    table |= {"patch_embed.proj.weight": "stem.weight", "patch_embed.proj.bias": "stem.bias"}
    theirs = reference.state_dict()
    state = {table[key]: theirs.pop(key) for key in list(theirs) if key in table}
    rest = [key for key in network.state_dict() if key not in state]
    return state | dict(zip(rest, theirs.values(), strict=True))


def test_its_blocks_are_those_of_the_pre_ln_encoder():
    vit = reszoo.create("vit_b16", **TINY)
    encoder = reszoo.create("preln_encoder", embed_dim=16, depth=2, num_heads=2, vocab_size=5)
    assert list(vit.blocks.state_dict()) == list(encoder.blocks.state_dict())
    assert list(vit.blocks.state_dict()) == list(encoder_blocks(PreLN, 16, 2, 2, 64).state_dict())


def test_a_patch_size_that_does_not_divide_the_image_is_refused():
    with pytest.raises(ReszooError, match=r"multiple of patch_size, got \[30, 30\] and 8"):
        tiny(image_size=30)


def test_an_image_of_another_size_is_refused():
    with pytest.raises(ReszooError, match=r"image_size=\[48, 48\]"):
        tiny()(torch.randn(1, 3, 48, 48))


@pytest.mark.parametrize(("size", "grid"), [(48, (6, 6)), ([32, 64], (4, 8))])
def test_loading_at_another_size_resizes_the_patches_positions_and_no_others(size, grid):
    trained, other = tiny(), tiny(image_size=size)
    state = trained.state_dict()
    other.load_state_dict(state)
    assert torch.equal(other.positions[:, 0], trained.positions[:, 0])
    assert torch.equal(other.positions, resize_position_table(trained.positions, (4, 4), grid))
    assert state["positions"].shape == (1, 17, 16)
    assert other(torch.randn(2, 3, 8 * grid[0], 8 * grid[1])).shape == (2, 10)


def test_positions_resized_there_and_back_are_close_to_the_original():
    rows, columns = torch.meshgrid(torch.linspace(-1, 1, 4), torch.linspace(-1, 1, 4), indexing="ij")
    smooth = torch.stack((rows, columns, rows * columns, torch.cos(rows + columns)), -1).reshape(1, 16, 4)
    table = torch.cat((torch.randn(1, 1, 4), smooth), 1)
    back = resize_position_table(resize_position_table(table, (4, 4), (6, 6)), (6, 6), (4, 4))
    torch.testing.assert_close(back, table, rtol=0, atol=0.25)
    torch.testing.assert_close(resize_position_table(table, (4, 4), (4, 4)), table)


def test_a_table_without_a_class_token_resizes_as_a_whole():
    table = torch.randn(1, 16, 4)
    both = resize_position_table(torch.cat((torch.zeros(1, 1, 4), table), 1), (4, 4), (2, 8))
    torch.testing.assert_close(resize_position_table(table, (4, 4), (2, 8), num_prefix=0), both[:, 1:])


def test_a_table_of_unknown_grid_is_refused():
    with pytest.raises(ReszooError, match="32 patches is not of a grid of 5 by 5"):
        tiny().load_state_dict(tiny(image_size=[32, 64]).state_dict())


def test_without_classes_the_output_is_the_class_token():
    network, x = tiny(num_classes=0), torch.randn(2, 3, 32, 32)
    assert network(x).shape == (2, 16)
    assert [tuple(m.shape) for m in network.feature_maps(x)] == [(2, 16, 4, 4)]


def test_silent_branches_leave_the_class_token_blind():
    network = tiny()
    for module in network.modules():
        if isinstance(module, SelfAttention):
            nn.init.zeros_(module.out.weight)
    a, b = network(torch.randn(2, 3, 32, 32))
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize("options", [{}, {"stochastic_depth": 0.2}, {"checkpoint_every": 2}, {"dropout": 0.1}])
def test_one_step_lowers_the_loss_on_digit_sized_images(options):
    network = tiny(image_size=8, patch_size=2, in_chans=1, **options).train()
    x, y = torch.randn(16, 1, 8, 8), torch.arange(16) % 10
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    before = nn.functional.cross_entropy(network.eval()(x), y)
    nn.functional.cross_entropy(network.train()(x), y).backward()
    optimizer.step()
    assert nn.functional.cross_entropy(network.eval()(x), y) < before
