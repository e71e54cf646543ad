import math

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel

import reszoo
from reszoo.errors import ReszooError
from reszoo.layers import Packed, Padded, SelfAttention, lay_out
from reszoo.models._encoder_blocks import Branch
from reszoo.models.transformer import DeepNorm, PostLN, PreLN, SandwichLN

SMALL = {"vocab_size": 50, "embed_dim": 16, "depth": 2, "num_heads": 2, "max_length": 12, "dropout": 0.0}
KINDS = ["postln_encoder", "preln_encoder", "sandwich_encoder", "deepnorm_encoder"]


def small(name="preln_encoder", **options):
    torch.manual_seed(0)
    return reszoo.create(name, **SMALL | options)


def ragged(lengths, length=12, vocab=50):
    """Random tokens and their mask, padded on the right with random ids that must not matter."""
    torch.manual_seed(1)
    return torch.randint(vocab, (len(lengths), length)), torch.arange(length) < torch.tensor(lengths)[:, None]


def count(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def joined(theirs):
    """BertModel's tensors under our names, with query, key and value in one."""
    names = {
        "embeddings.word_embeddings": "embedding.tokens",
        "embeddings.position_embeddings": "embedding.positions",
        "embeddings.token_type_embeddings": "embedding.segments",
        "embeddings.LayerNorm": "embedding.norm",
        "encoder.layer": "blocks",
        "attention.output.dense": "attention.residual.0.out",
        "attention.output.LayerNorm": "attention.norm",
        "intermediate.dense": "mlp.residual.0",
        "output.dense": "mlp.residual.3",
        "output.LayerNorm": "mlp.norm",
        "self.query": "residual.0.qkv",
        "pooler.dense": "pooler.0",
    }
    ours = {}
    for key, value in theirs.items():
        if ".self.query." in key:
            value = torch.cat([theirs[key.replace("query", part)] for part in ("query", "key", "value")])
        elif ".self." in key:
            continue
        for old, new in names.items():
            key = key.replace(old, new)
        ours[key] = value
    return ours


def bert_pair(depth=2):
    """transformers' BertModel and our encoder, with the same random weights."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=depth,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=24,
        initializer_range=0.2,
    )
    theirs = BertModel(config)
    for p in theirs.parameters():
        if p.dim() == 1:
            nn.init.normal_(p, p.mean().item(), 0.1)
    ours = reszoo.create(
        "bert_base", vocab_size=60, embed_dim=32, depth=depth, num_heads=4, mlp_dim=64, max_length=24, dropout=0.0
    )
    ours.load_state_dict(joined(theirs.state_dict()))
    return ours.eval(), theirs.eval()


@pytest.mark.parametrize(("name", "expected"), [("bert_base", 109_482_240), ("bert_large", 335_141_888)])
def test_parameter_count_is_that_of_bert(name, expected):
    with torch.device("meta"):
        assert count(reszoo.create(name)) == expected


@pytest.mark.parametrize(("size", "expected"), [("base", 85_054_464), ("large", 302_309_376)])
def test_post_ln_and_pre_ln_have_equally_many_parameters_in_their_blocks(size, expected):
    with torch.device("meta"):
        assert [count(reszoo.create(f"{kind}_encoder_{size}").blocks) for kind in ("postln", "preln")] == [expected] * 2


@pytest.mark.parametrize("mode", ["train", "eval", "no_grad"])
def test_it_equals_transformers_bert_on_a_third_of_real_tokens(mode):
    ours, theirs = bert_pair()
    if mode == "train":
        ours.train()
        for module in ours.modules():
            if isinstance(module, SelfAttention):
                module.dropout = 0.0
    tokens, mask = ragged([3, 24, 1, 8, 5, 8], 24, 60)
    segments = (torch.arange(24) > 4).long().expand(6, 24)
    with torch.set_grad_enabled(mode != "no_grad"):
        output = theirs(input_ids=tokens, attention_mask=mask.long(), token_type_ids=segments)
        features = ours.features(tokens, mask, segments)
        pooled = ours(tokens, mask, segments)
    assert mask.float().mean().item() == pytest.approx(0.34, abs=0.01)
    torch.testing.assert_close(features[mask], output.last_hidden_state[mask], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(pooled, output.pooler_output, rtol=1e-5, atol=2e-6)
    assert (features[~mask] == 0).all()


def test_its_gradients_equal_those_of_transformers_bert():
    ours, theirs = bert_pair()
    tokens, mask = ragged([3, 24, 1, 8], 24, 60)
    theirs(input_ids=tokens, attention_mask=mask.long()).pooler_output.square().sum().backward()
    ours(tokens, mask).square().sum().backward()
    expected = joined({key: p.grad for key, p in theirs.named_parameters()})
    for key, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, expected[key], rtol=1e-3, atol=1e-5 * expected[key].abs().max().item())


@pytest.mark.parametrize("name", KINDS)
def test_packed_and_padded_layouts_agree(name, monkeypatch):
    network = small(name, pooling="none", num_classes=3)
    tokens, mask = ragged([5, 12, 1, 5, 0, 7])
    packed = network(tokens, mask)
    monkeypatch.setattr("reszoo.models._encoder.lay_out", Padded)
    padded = network(tokens, mask)
    torch.testing.assert_close(packed, padded, rtol=1e-5, atol=1e-6)


def test_a_padded_batch_is_packed_and_a_full_one_is_not():
    _, mask = ragged([3, 12, 0, 3])
    rows = lay_out(mask)
    assert isinstance(rows, Packed)
    assert rows.groups == ((2, 3), (1, 12))
    assert rows.pack(mask).shape == (18,)
    assert isinstance(lay_out(torch.ones_like(mask)), Padded)


def test_attention_of_an_accelerator_which_pads_inside_equals_that_of_the_cpu():
    rows = lay_out(ragged([3, 12, 0, 3])[1])
    qkv = torch.randn(18, 3, 2, 4)
    padded = rows.pack(Padded(rows.mask).attend(rows.unpack(qkv), 0.0))
    torch.testing.assert_close(rows.attend(qkv, 0.0), padded)


def test_linear_layers_see_the_real_tokens_alone():
    network, seen = small(), []
    for module in network.blocks.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[0]))
    network(*ragged([3, 12, 0, 2]))
    assert set(seen) == {17}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("length", [2, 0])
def test_a_sequence_of_padding_alone_gives_finite_outputs_and_leaves_the_other_as_it_is(name, training, length):
    network = small(name).train(training)
    tokens, mask = ragged([length, 0], 4)
    output = network(tokens, mask)
    output.square().sum().backward()
    assert output.isfinite().all()
    assert all(p.grad.isfinite().all() for p in network.parameters())
    torch.testing.assert_close(output[1], network.head.bias)
    torch.testing.assert_close(output[:1], network(tokens[:1, : max(length, 1)], mask[:1, : max(length, 1)]))


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_outputs_are_the_same_in_every_mode_and_zero_at_padding(layout, monkeypatch):
    if layout == "padded":
        monkeypatch.setattr("reszoo.models._encoder.lay_out", Padded)
    network = small(pooling="none", num_classes=0)
    tokens, mask = ragged([10] * 4)
    outputs = [network.train()(tokens, mask), network.eval()(tokens, mask)]
    with torch.no_grad():
        outputs.append(network(tokens, mask))
    network.blocks[0].attention.residual.register_forward_hook(lambda *_: None)
    outputs.append(network(tokens, mask))
    for output in outputs:
        torch.testing.assert_close(output, outputs[0], rtol=1e-5, atol=1e-6)
        assert (output[~mask] == 0).all()


def test_an_empty_batch_gives_an_empty_output_and_zero_gradients():
    network = small()
    for mask in (None, torch.ones(0, 12, dtype=torch.bool)):
        output = network(torch.zeros(0, 12, dtype=torch.long), mask)
        assert output.shape == (0, 10)
        output.sum().backward()
    assert all((p.grad == 0).all() for p in network.parameters())


@pytest.mark.parametrize("pooling", ["mean", "first", "pooler"])
def test_where_the_padding_stands_does_not_matter_without_positions(pooling):
    network = small(pooling=pooling)
    nn.init.zeros_(network.embedding.positions.weight)
    tokens = torch.randint(50, (3, 12))
    scattered = torch.zeros(3, 12, dtype=torch.bool)
    scattered[:, [2, 3, 7, 11]] = True
    torch.testing.assert_close(network(tokens, scattered), network(tokens[:, [2, 3, 7, 11]]))


def test_mean_pooling_averages_the_real_tokens():
    network = small(num_classes=0)
    tokens, mask = ragged([3, 12])
    expected = torch.stack([row[real].mean(0) for row, real in zip(network.features(tokens, mask), mask, strict=True)])
    torch.testing.assert_close(network(tokens, mask), expected)


def test_attention_equals_a_plain_loop_over_heads():
    torch.manual_seed(0)
    attention, x = SelfAttention(8, 2), torch.randn(1, 5, 8)
    q, k, v = attention.qkv(x)[0].chunk(3, -1)
    heads = [torch.softmax(q[:, s] @ k[:, s].T / math.sqrt(4), -1) @ v[:, s] for s in (slice(0, 4), slice(4, 8))]
    torch.testing.assert_close(attention(x)[0], attention.out(torch.cat(heads, -1)))


@pytest.mark.parametrize(("sublayer", "equation"), [
    (PostLN, lambda f, x, s: s.norm(f(x) + x)),
    (PreLN, lambda f, x, s: f(s.residual[0](x)) + x),
    (SandwichLN, lambda f, x, s: s.residual[-1](f(s.residual[0](x))) + x),
    (DeepNorm, lambda f, x, s: s.norm(f(x) + 3 * x)),
])  # fmt: skip
def test_a_sublayer_is_its_equation(sublayer, equation):
    torch.manual_seed(0)
    f, x = nn.Linear(8, 8), torch.randn(2, 5, 8)
    made = sublayer(8, [f], 1e-5, alpha=3.0) if sublayer is DeepNorm else sublayer(8, [f], 1e-5)
    for norm in made.modules():
        if isinstance(norm, nn.LayerNorm):
            nn.init.normal_(norm.weight)
    torch.testing.assert_close(made(x), equation(f, x, made))


def test_deepnorm_has_the_alpha_and_beta_of_an_encoder_of_100_blocks():
    network = small("deepnorm_encoder", depth=100, embed_dim=32, vocab_size=5)
    assert network.blocks[0].mlp.shortcut.factor == pytest.approx(3.761, abs=5e-4)
    attention = network.blocks[0].attention.residual[0]
    query, _, value = (part.std().item() for part in attention.qkv.weight.chunk(3))
    assert value / query == pytest.approx(0.188, abs=0.03)
    expected = 0.188 * math.sqrt(2 / (32 + 128))
    assert network.blocks[0].mlp.residual[0].weight.std().item() == pytest.approx(expected, rel=0.05)


def test_gpt2s_scaled_initial_branches_are_smaller_by_the_root_of_their_number():
    plain, scaled = small(depth=8), small(depth=8, scale_residual_init=True)
    for key in ("blocks.3.attention.residual.1.out.weight", "blocks.7.mlp.residual.4.weight"):
        torch.testing.assert_close(scaled.state_dict()[key] * 4, plain.state_dict()[key])
    key = "blocks.3.mlp.residual.1.weight"
    assert torch.equal(scaled.state_dict()[key], plain.state_dict()[key])


def test_silent_branches_leave_a_pre_ln_stack_at_its_embedding():
    network = small(num_classes=0, pooling="none")
    for branch in network.modules():
        if isinstance(branch, Branch):
            branch.register_forward_hook(lambda module, inputs, output: output * 0)
    tokens, _ = ragged([12])
    torch.testing.assert_close(network(tokens), network.norm(network.embedding(tokens, Padded())))


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_sequence_whose_branch_is_dropped_passes_and_the_others_are_scaled(layout):
    torch.manual_seed(0)
    branch = Branch(SelfAttention(8, 2), nn.Linear(8, 8), rate=0.5, per="sample")
    _, mask = ragged([3, 12, 0, 7, 3, 1])
    rows = lay_out(mask) if layout == "packed" else Padded(mask)
    x = rows.pack(torch.randn(6, 12, 8))
    whole = rows.unpack(branch.eval()(x, rows))
    dropped = rows.unpack(branch.train()(x, rows))
    kept = dropped.abs().sum((1, 2)) > 0
    assert 0 < kept.sum() < 5
    torch.testing.assert_close(dropped[kept], 2 * whole[kept])


@pytest.mark.parametrize("per", ["batch", "sample"])
def test_stochastic_depth_averages_to_the_output_in_evaluation(per):
    torch.manual_seed(0)
    branch = Branch(nn.Linear(8, 8), rate=0.3, per=per)
    rows = lay_out(ragged([3, 5], 6)[1])
    x = torch.randn(8, 8)
    mean = sum((branch(x, rows) + torch.zeros(8, 8)).detach() for _ in range(600)) / 600
    torch.testing.assert_close(mean, branch.eval()(x, rows), rtol=0.1, atol=0.02)


@pytest.mark.parametrize("rate", [0.0, 1.0])
@pytest.mark.parametrize("per", ["batch", "sample"])
def test_stochastic_depth_at_its_ends_is_the_plain_net_and_the_shortcut(rate, per):
    plain, dropping = small(), small(stochastic_depth=rate, drop_per=per)
    dropping.load_state_dict(plain.state_dict())
    if rate:
        dropping.blocks = dropping.blocks[-1:]
        dropping.blocks[0].attention.residual.rate = 1.0
        plain.blocks = nn.ModuleList()
    tokens, mask = ragged([4, 12])
    torch.testing.assert_close(dropping(tokens, mask), plain(tokens, mask))


@pytest.mark.parametrize("every", [1, 2])
def test_checkpointing_changes_no_gradient(every):
    plain, lean = (small(depth=3, dropout=0.2, checkpoint_every=e) for e in (0, every))
    tokens, mask = ragged([4, 12])
    for network in (plain, lean):
        torch.manual_seed(2)
        network(tokens, mask).square().sum().backward()
    for (key, p), q in zip(plain.named_parameters(), lean.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=key)


def test_sinusoidal_positions_are_those_of_section_3_5():
    network = small(positions="sinusoidal")
    table = network.embedding.positions.table
    for position, feature in ((0, 0), (3, 0), (3, 1), (11, 6), (11, 15)):
        angle = position / 10_000 ** (2 * (feature // 2) / 16)
        wave = math.sin(angle) if feature % 2 == 0 else math.cos(angle)
        assert table[position, feature].item() == pytest.approx(wave, abs=1e-6)
    assert network.embedding.scale == 4
    assert not any("table" in key for key in network.state_dict())


def test_tied_outputs_are_scored_by_the_embedding():
    network = small(pooling="none", num_classes=50, tied=True)
    tokens, mask = ragged([4, 9])
    expected = (network.features(tokens, mask) @ network.embedding.tokens.weight.T)[mask]
    torch.testing.assert_close(network(tokens, mask)[mask], expected)
    assert count(network) == count(small(pooling="none", num_classes=0)) + 50


@pytest.mark.parametrize(("options", "shape"), [
    ({"pooling": "mean"}, (2, 10)),
    ({"pooling": "first", "num_classes": 3}, (2, 3)),
    ({"pooling": "pooler", "num_classes": 0}, (2, 16)),
    ({"pooling": "none", "num_classes": 5}, (2, 12, 5)),
    ({"pooling": "none", "num_classes": 0}, (2, 12, 16)),
])  # fmt: skip
def test_output_shape_of_every_head(options, shape):
    assert small(**options)(*ragged([4, 12])).shape == shape


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_one_step_lowers_the_loss(name, positions):
    network, (tokens, mask) = small(name, positions=positions), ragged([5, 12, 1, 9] * 4)
    y = torch.arange(16) % 10
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    before = nn.functional.cross_entropy(network(tokens, mask), y)
    before.backward()
    optimizer.step()
    assert nn.functional.cross_entropy(network(tokens, mask), y) < before


@pytest.mark.parametrize(("options", "message"), [
    ({"num_heads": 3}, "multiple of num_heads"),
    ({"pooling": "max"}, "pooling must be one of"),
    ({"tied": True}, "tied=True needs pooling='none'"),
    ({"embed_dim": 15, "num_heads": 1, "positions": "sinusoidal"}, "even embed_dim"),
    ({"depth": 0}, "depth must be at least 1"),
])  # fmt: skip
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(ReszooError, match=message):
        small(**options)


def test_inputs_that_cannot_be_are_refused():
    with pytest.raises(ReszooError, match="up to max_length=12 long, got 13"):
        small()(torch.zeros(1, 13, dtype=torch.long))
    with pytest.raises(ReszooError, match="build it with num_segments"):
        small()(*ragged([3]), torch.zeros(1, 12, dtype=torch.long))
    with pytest.raises(ReszooError, match=r"mask must be bool.*got torch.int64.*mask.bool\(\)"):
        small()(ragged([3])[0], ragged([3])[1].long())
    with pytest.raises(ReszooError, match=r"mask must have the shape of the tokens, \[1, 12\], got \[1, 11\]"):
        small()(ragged([3])[0], ragged([3], 11)[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["preln_encoder", "sandwich_encoder", "deepnorm_encoder"])
def test_96_blocks_train(name):
    network = small(name, depth=96, checkpoint_every=10, num_classes=2)
    tokens, mask = ragged([5, 12, 1, 9] * 4)
    y = tokens[:, 0] % 2
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    losses = []
    for _ in range(12):
        loss = nn.functional.cross_entropy(network(tokens, mask), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["postln_encoder", "preln_encoder"])
def test_an_encoder_learns_which_symbol_occurs_most(name):
    torch.manual_seed(0)
    network = reszoo.create(name, vocab_size=4, embed_dim=32, depth=2, max_length=24, num_classes=4, dropout=0.0)
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=400)
    for _ in range(400):
        tokens, mask, y = majority(128)
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(tokens, mask), y).backward()
        optimizer.step()
        schedule.step()
    tokens, mask, y = majority(2000)
    assert (network.eval()(tokens, mask).argmax(1) == y).float().mean() > 0.95


def majority(count):
    """Sequences of 5 to 24 symbols out of 4, of which one, the label, occurs more often than any other."""
    mask = torch.arange(24) < torch.randint(5, 25, (2 * count, 1))
    tokens = torch.randint(4, (2 * count, 24))
    often = (nn.functional.one_hot(tokens, 4) * mask.unsqueeze(2)).sum(1).topk(2)
    clear = (often.values[:, 0] > often.values[:, 1]).nonzero().flatten()[:count]
    return tokens[clear], mask[clear], often.indices[clear, 0]
