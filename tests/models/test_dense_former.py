import pytest
import torch
from torch import nn

import reszoo
from reszoo.errors import ReszooError
from reszoo.layers import Padded

SMALL = {"vocab_size": 50, "embed_dim": 16, "num_heads": 2, "max_length": 12, "dropout": 0.0}


def pair(depth=3):
    """The pre-LN encoder and a DenseFormer with its weights."""
    torch.manual_seed(0)
    plain, dense = (reszoo.create(name, depth=depth, **SMALL) for name in ("preln_encoder", "denseformer_encoder"))
    missing, unexpected = dense.load_state_dict(plain.state_dict(), strict=False)
    assert unexpected == []
    assert all(key.startswith("averages.") for key in missing)
    return plain, dense


@pytest.mark.parametrize("depth", [1, 3, 12])
def test_it_adds_d_times_d_plus_3_halves_scalars(depth):
    plain, dense = (sum(p.numel() for p in network.parameters()) for network in pair(depth))
    assert dense - plain == depth * (depth + 3) // 2


def test_at_the_start_it_is_the_pre_ln_encoder():
    plain, dense = pair()
    tokens, mask = torch.randint(50, (2, 12)), torch.arange(12) < torch.tensor([[4], [12]])
    torch.testing.assert_close(dense(tokens, mask), plain(tokens, mask))


def test_every_average_reads_the_embedding_and_all_blocks_so_far():
    _, network = pair(2)
    for p in network.averages.parameters():
        nn.init.normal_(p)
    tokens = torch.randint(50, (2, 12))
    x0 = network.embedding(tokens, Padded())
    (a, b), (c, d, e) = (average.weight for average in network.averages)
    x1 = network.blocks[0](x0)
    x2 = network.blocks[1](a * x0 + b * x1)
    torch.testing.assert_close(network.features(tokens), network.norm(c * x0 + d * x1 + e * x2))


def test_one_step_lowers_the_loss():
    _, network = pair()
    tokens, y = torch.randint(50, (16, 12)), torch.arange(16) % 10
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    before = nn.functional.cross_entropy(network(tokens), y)
    before.backward()
    optimizer.step()
    assert nn.functional.cross_entropy(network(tokens), y) < before


def test_checkpointing_is_refused():
    with pytest.raises(ReszooError, match="keeps every block's output"):
        reszoo.create("denseformer_encoder", checkpoint_every=1)
