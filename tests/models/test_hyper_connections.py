import pytest
import torch
from torch import nn

import reszoo
from reszoo.errors import ReszooError
from reszoo.models.hyper_connections import DoublyStochasticMixing, HyperConnection, StreamWeights, sinkhorn

SMALL = {"vocab_size": 50, "embed_dim": 16, "depth": 3, "num_heads": 2, "max_length": 12, "dropout": 0.0}
KINDS = [(name, dynamic) for name in ("hyper_connections_encoder", "mhc_encoder") for dynamic in (False, True)]


def ragged(lengths):
    torch.manual_seed(1)
    return torch.randint(50, (len(lengths), 12)), torch.arange(12) < torch.tensor(lengths)[:, None]


@pytest.mark.parametrize(("name", "dynamic"), KINDS)
@pytest.mark.parametrize("streams", [1, 4])
def test_at_the_start_it_is_the_pre_ln_encoder(name, dynamic, streams):
    torch.manual_seed(0)
    plain = reszoo.create("preln_encoder", **SMALL)
    network = reszoo.create(name, num_streams=streams, dynamic=dynamic, **SMALL)
    missing, unexpected = network.load_state_dict(plain.state_dict(), strict=False)
    assert unexpected == []
    assert all(".read." in key or ".write." in key or ".mix." in key for key in missing)
    torch.testing.assert_close(network(*ragged([3, 12, 0])), plain(*ragged([3, 12, 0])), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_connection_is_a_loop_over_its_streams(dynamic):
    torch.manual_seed(0)
    f, x = nn.Linear(8, 8), torch.randn(5, 3, 8)
    connection = HyperConnection(8, [f], num_streams=3, dynamic=dynamic)
    for p in connection.parameters():
        nn.init.normal_(p, std=0.5)
    norm, weights = connection.residual[0], (connection.read, connection.write, connection.shortcut.mix)
    for token, got in zip(x, connection(x), strict=True):
        read, write, mix = (by_hand(w, token) for w in weights)
        y = f(norm(sum(read[0, j] * token[j] for j in range(3))))
        for i in range(3):
            expected = write[0, i] * y + sum(mix[i, j] * token[j] for j in range(3))
            torch.testing.assert_close(got[i], expected)


def by_hand(weights, streams):
    """The (m, n) matrix of one token."""
    matrix = weights.weight.detach().clone()
    if weights.dynamic:
        for j, stream in enumerate(streams):
            matrix[:, j] += weights.scale * torch.tanh(weights.norm(stream) @ weights.project)
    return matrix


@pytest.mark.parametrize("dynamic", [False, True])
def test_rows_and_columns_of_mhcs_mixing_sum_to_one_far_from_the_start_as_well(dynamic):
    torch.manual_seed(0)
    mixing = DoublyStochasticMixing(StreamWeights(8, torch.randn(4, 4), dynamic, 1e-5))
    for p in mixing.parameters():
        nn.init.normal_(p)
    matrix = mixing.matrix(torch.randn(5, 4, 8))
    assert (matrix >= 0).all()
    torch.testing.assert_close(matrix.sum(-1), torch.ones_like(matrix.sum(-1)), rtol=0, atol=1e-3)
    torch.testing.assert_close(matrix.sum(-2), torch.ones_like(matrix.sum(-2)), rtol=0, atol=1e-5)


def test_a_doubly_stochastic_matrix_is_what_sinkhorn_leaves_alone():
    matrix = 0.7 * torch.eye(4) + 0.3 * torch.full((4, 4), 0.25)
    torch.testing.assert_close(sinkhorn(matrix.log()), matrix)


def test_a_deep_product_of_mhcs_mixings_stays_bounded_and_that_of_free_ones_does_not():
    torch.manual_seed(0)
    logits = torch.randn(60, 4, 4)
    constrained, free = (torch.linalg.multi_dot(list(m)) for m in (sinkhorn(logits), torch.eye(4) + 0.5 * logits))
    assert torch.linalg.matrix_norm(constrained, 2) < 1.01
    assert torch.linalg.matrix_norm(free, 2) > 100


def test_sub_layers_read_the_streams_in_turn():
    network = reszoo.create("hyper_connections_encoder", num_streams=4, **SMALL)
    reads = [m.read.weight.argmax().item() for m in network.modules() if isinstance(m, HyperConnection)]
    assert reads == [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize(("name", "dynamic"), KINDS)
@pytest.mark.parametrize("per", ["batch", "sample"])
def test_it_trains_with_dropped_and_checkpointed_branches(name, dynamic, per):
    torch.manual_seed(0)
    options = {"stochastic_depth": 0.5, "drop_per": per, "checkpoint_every": 2}
    network = reszoo.create(name, dynamic=dynamic, **options, **SMALL)
    (tokens, mask), y = ragged([5, 12, 1, 9] * 4), torch.arange(16) % 10
    before = nn.functional.cross_entropy(network.eval()(tokens, mask), y)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network.train()(tokens, mask), y).backward()
        optimizer.step()
    assert nn.functional.cross_entropy(network.eval()(tokens, mask), y) < before


def test_no_streams_are_refused():
    with pytest.raises(ReszooError, match="num_streams must be at least 1"):
        reszoo.create("mhc_encoder", num_streams=0)
