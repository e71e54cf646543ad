"""Encoder on a batch of which a third is real tokens, against transformers' BertModel on the same padded batch.

Four blocks of 512 with 8 heads, 32 sequences of up to 128 tokens whose lengths follow a log-normal law, as those of
sentences do. Both have the same random weights and no dropout; outputs at real tokens must be equal first.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from reszoo.cli.benchmark._harness import Row, interleaved
from reszoo.errors import ReszooError
from reszoo.hub.convert import convert

VOCAB, WIDTH, DEPTH, HEADS, LENGTH, BATCH = 8192, 512, 4, 8, 128, 32


def measure(rounds: int = 9) -> list[Row]:
    """Time inference, then a forward and backward pass, of either model.

    Args:
        rounds: Timed rounds of each.

    Returns:
        Rows of inference, the peer first, then of training, the peer first.

    Raises:
        ReszooError: The outputs differ.
    """
    torch.manual_seed(0)
    tokens, mask = batch()
    theirs = bert()
    ours, peer = encoder(theirs), Peer(theirs)
    with torch.inference_mode():
        difference = (ours(tokens, mask)[mask] - peer(tokens, mask)[mask]).abs().max().item()
    if difference > 5e-6:
        raise ReszooError(f"outputs differ by {difference:.1e} where 5e-6 was allowed, so the timing means nothing")
    rows = []
    for task, call in (("inference", inference), ("training", training)):
        contestants = {
            f"{task}, transformers padded": call(peer, tokens, mask),
            f"{task}, reszoo packed": call(ours, tokens, mask),
        }
        rows += interleaved(contestants, rounds)
    return rows


def batch() -> tuple[Tensor, Tensor]:
    """(B, L) random tokens and their mask, 34% of it real; one sequence has the full length."""
    lengths = torch.distributions.LogNormal(3.5, 0.6).sample((BATCH,)).round().long().clamp(4, LENGTH)
    lengths[0] = LENGTH
    return torch.randint(1, VOCAB, (BATCH, LENGTH)), torch.arange(LENGTH) < lengths[:, None]


def encoder(theirs: nn.Module) -> nn.Module:
    """Our network with the weights of the peer's, without pooling and head."""
    state = theirs.state_dict()
    return convert(state, "bert_base", num_heads=HEADS, dropout=0.0, attention_dropout=0.0, pooling="none")


def bert() -> nn.Module:
    """The peer's network of the same shape."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertModel(config, add_pooling_layer=False)


class Peer(nn.Module):
    """BertModel with our arguments and result."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """(B, L) ids and mask -> (B, L, D)."""
        return self.model(input_ids=tokens, attention_mask=mask.long()).last_hidden_state


def inference(network: nn.Module, tokens: Tensor, mask: Tensor) -> Callable[[], Any]:
    """One forward pass without gradients."""
    network.eval()

    @torch.inference_mode()
    def call() -> None:
        network(tokens, mask)

    return call


def training(network: nn.Module, tokens: Tensor, mask: Tensor) -> Callable[[], Any]:
    """One forward and backward pass."""
    network.train()

    def call() -> None:
        network(tokens, mask).square().mean().backward()
        network.zero_grad()

    return call
