import pytest
import torch
from torch import nn

import reszoo
from reszoo.errors import ReszooError
from reszoo.models.value_residual import ValueResidualAttention

SMALL = {"vocab_size": 50, "embed_dim": 16, "num_heads": 2, "max_length": 12, "dropout": 0.0}


def pair(depth=3):
    """The pre-LN encoder and a ResFormer with its weights."""
    torch.manual_seed(0)
    plain, dense = (reszoo.create(name, depth=depth, **SMALL) for name in ("preln_encoder", "resformer_encoder"))
    missing, unexpected = dense.load_state_dict(plain.state_dict(), strict=False)
    assert unexpected == []
    assert all(key.endswith(".first_value") for key in missing)
    return plain, dense


def ragged(lengths):
    return torch.randint(50, (len(lengths), 12)), torch.arange(12) < torch.tensor(lengths)[:, None]


def test_without_weight_on_the_first_values_it_is_the_pre_ln_encoder():
    plain, network = pair()
    tokens, mask = ragged([4, 12, 0])
    assert (network(tokens, mask) - plain(tokens, mask)).abs().max() > 1e-3
    for module in network.modules():
        if isinstance(module, ValueResidualAttention) and module.first_value is not None:
            nn.init.zeros_(module.first_value)
    torch.testing.assert_close(network(tokens, mask), plain(tokens, mask))


def test_it_adds_one_scalar_to_every_layer_but_the_first():
    plain, network = (sum(p.numel() for p in n.parameters()) for n in pair(5))
    assert network - plain == 4


def test_later_layers_attend_over_their_own_and_the_first_values():
    torch.manual_seed(0)
    attention, x, first = ValueResidualAttention(8, 2, first_value=0.3), torch.randn(1, 5, 8), torch.randn(1, 5, 2, 4)
    q, k, _ = attention.qkv(x)[0].unflatten(-1, (3, 2, 4)).permute(1, 2, 0, 3)  # (heads, L, head_dim)
    v = (attention.values(x) + 0.3 * first)[0].transpose(0, 1)
    mixed = torch.softmax(q @ k.transpose(1, 2) / 2, -1) @ v
    torch.testing.assert_close(attention(x, None, first)[0], attention.out(mixed.transpose(0, 1).flatten(1)))


@pytest.mark.parametrize("options", [{}, {"checkpoint_every": 2}, {"stochastic_depth": 0.5}])
def test_training_lowers_the_loss(options):
    torch.manual_seed(0)
    network = reszoo.create("resformer_encoder", depth=3, **options, **SMALL)
    (tokens, mask), y = ragged([5, 12, 1, 9] * 4), torch.arange(16) % 10
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    before = nn.functional.cross_entropy(network.eval()(tokens, mask), y)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network.train()(tokens, mask), y).backward()
        optimizer.step()
    assert nn.functional.cross_entropy(network.eval()(tokens, mask), y) < before


def test_dropping_single_sequences_is_refused():
    with pytest.raises(ReszooError, match="use drop_per='batch'"):
        reszoo.create("resformer_encoder", stochastic_depth=0.1, drop_per="sample")
