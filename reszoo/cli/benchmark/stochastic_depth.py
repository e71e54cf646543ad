"""Stochastic depth at rate 0.5 in every block, against the same network with timm's drop path, which masks.

One step of SGD of ResNet-110 (32 images of 32 pixels) and of ViT-S/16 (8 images of 224). The weights are the same; a
network that only masks must give the same output in evaluation mode first.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reszoo.cli.benchmark._harness import Row, interleaved
from reszoo.errors import ReszooError
from reszoo.layers import DropPer, StochasticDepth
from reszoo.models import create

RATE = 0.5
BATCHES = {"resnet110": 32, "vit_s16": 8}


def measure(rounds: int = 15) -> list[Row]:
    """Time a training step per mini-batch and per sample, the peer first.

    Args:
        rounds: Timed rounds of each network; a draw decides how much a step computes, so few rounds scatter.

    Returns:
        Three rows a network: timm's masking, ours per mini-batch, ours per sample.

    Raises:
        ReszooError: The outputs differ.
    """
    rows = []
    for name in BATCHES:
        rows += interleaved(contestants(name), rounds)
    return rows


def contestants(name: str) -> dict[str, Callable[[], None]]:
    """A training step of the peer and of both forms of ours, from equal weights."""
    torch.manual_seed(0)
    peer, per_batch, per_sample = create(name), create(name), create(name)
    for network in (per_batch, per_sample):
        network.load_state_dict(peer.state_dict())
    mask_as_timm(peer)
    drop(per_batch, "batch")
    drop(per_sample, "sample")
    inputs = peer.example_inputs(BATCHES[name])  # type: ignore[operator]
    with torch.no_grad():
        difference = (peer.eval()(*inputs) - per_sample.eval()(*inputs)).abs().max().item()
    if difference > 1e-5:
        raise ReszooError(f"outputs differ by {difference:.1e} where 1e-5 was allowed, so the timing means nothing")
    return {
        f"{name}, timm drop_path": training_step(peer, inputs),
        f"{name}, reszoo per mini-batch": training_step(per_batch, inputs),
        f"{name}, reszoo per sample": training_step(per_sample, inputs),
    }


def drop(network: nn.Module, per: DropPer) -> None:
    """Give every branch the same rate."""
    for branch in network.modules():
        if isinstance(branch, StochasticDepth):
            branch.rate, branch.per = RATE, per


def mask_as_timm(network: nn.Module) -> None:
    """Compute every branch in full, then mask its samples by timm's function."""
    for branch in network.modules():
        if isinstance(branch, StochasticDepth):
            branch.forward = partial(masked, branch.forward, branch)  # type: ignore[method-assign]


def masked(forward: Callable[..., Tensor], branch: StochasticDepth, *inputs: Any) -> Tensor:
    """A branch at rate 0, through timm's drop path."""
    from timm.layers import drop_path

    return drop_path(forward(*inputs), RATE, branch.training)


def training_step(network: nn.Module, inputs: tuple[Tensor, ...]) -> Callable[[], None]:
    """Forward, backward and update."""
    network.train()
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        logits = network(*inputs)
        F.cross_entropy(logits, torch.arange(len(logits)) % logits.shape[1]).backward()
        optimizer.step()

    return step
