import pytest
import torch
from torch import nn

import reszoo
from reszoo.errors import ReszooError
from reszoo.layers import Padded
from reszoo.models.attention_residual import AttentionResidual, DepthAttention

SMALL = {"vocab_size": 50, "embed_dim": 16, "depth": 2, "num_heads": 2, "max_length": 12, "dropout": 0.0}


def small(**options):
    torch.manual_seed(0)
    return reszoo.create("attention_residual_encoder", **SMALL | options)


def test_at_the_start_every_sub_layer_reads_the_plain_mean_of_all_outputs():
    network, tokens = small(), torch.randint(50, (2, 12))
    outputs = [network.embedding(tokens, Padded())]
    for sublayer in (s for block in network.blocks for s in (block.attention, block.mlp)):
        outputs.append(sublayer.residual(torch.stack(outputs).mean(0)))
    torch.testing.assert_close(network.features(tokens), network.norm(torch.stack(outputs).mean(0)))


def test_depth_attention_is_a_softmax_over_the_normed_outputs():
    torch.manual_seed(0)
    reading, outputs = DepthAttention(8, 0.0), torch.randn(3, 8)
    nn.init.normal_(reading.query)
    scores = [reading.query @ (v / v.square().mean().sqrt()) for v in outputs]
    share = torch.softmax(torch.stack(scores), 0)
    torch.testing.assert_close(reading(outputs), sum(a * v for a, v in zip(share, outputs, strict=True)))


def test_a_strong_query_reads_the_newest_output_alone():
    reading = DepthAttention(2)
    with torch.no_grad():
        reading.query.copy_(torch.tensor([100.0, 0.0]))
    newest = torch.tensor([1.0, -1.0])
    torch.testing.assert_close(reading(torch.stack((-newest, newest))), newest)


def test_it_has_one_query_a_sub_layer_and_one_at_the_end_more_than_the_pre_ln_encoder():
    plain = reszoo.create("preln_encoder", **SMALL)
    assert sum(p.numel() for p in small().parameters()) - sum(p.numel() for p in plain.parameters()) == 5 * 16
    assert sum(isinstance(m, AttentionResidual) for m in small().modules()) == 4


def test_padding_does_not_matter():
    network, tokens = small(), torch.randint(50, (2, 12))
    mask = torch.arange(12) < torch.tensor([[4], [0]])
    torch.testing.assert_close(network(tokens, mask)[:1], network(tokens[:1, :4]))
    torch.testing.assert_close(network(tokens, mask)[1], network.head.bias)


@pytest.mark.parametrize("options", [{}, {"stochastic_depth": 0.5}, {"stochastic_depth": 0.5, "drop_per": "sample"}])
def test_training_lowers_the_loss(options):
    network = small(**options)
    tokens, mask, y = torch.randint(50, (16, 12)), torch.rand(16, 12) < 0.6, torch.arange(16) % 10
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    before = nn.functional.cross_entropy(network.eval()(tokens, mask), y)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network.train()(tokens, mask), y).backward()
        optimizer.step()
    assert nn.functional.cross_entropy(network.eval()(tokens, mask), y) < before


def test_checkpointing_is_refused():
    with pytest.raises(ReszooError, match="keep every output"):
        small(checkpoint_every=1)
