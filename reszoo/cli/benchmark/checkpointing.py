"""Memory and time of a training step of pre-activation ResNet-1001, kept whole and with blocks computed twice.

Batch 16 at 32x32. The peer keeps every inner result; its gradients must equal those of the checkpointed network first.
"""

import gc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reszoo.cli.benchmark._harness import Row, interleaved, memory_rows, peak_memory
from reszoo.errors import ReszooError
from reszoo.models import create

NAME, BATCH = "preact_resnet1001", 16
EVERY = {"all kept": 0, "18 blocks a segment": 18, "5 blocks a segment": 5}


def measure(rounds: int = 3) -> list[Row]:
    """Peak memory above that of the network itself, then time, of one forward and backward pass.

    Args:
        rounds: Timed rounds.

    Returns:
        Rows of memory, the peer first, then of time, the peer first.

    Raises:
        ReszooError: The gradients differ.
    """
    check_gradients()
    rows = memory_rows({f"memory, {label}": in_fresh_process(every) for label, every in EVERY.items()})
    return rows + interleaved({f"time, {label}": backward_pass(every) for label, every in EVERY.items()}, rounds)


def in_fresh_process(every: int) -> float:
    """Peak MiB of the pass in a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(peak, every).result()


def peak(every: int) -> float:
    """Peak MiB of one pass."""
    run = backward_pass(every)
    gc.collect()
    return peak_memory(run)


def backward_pass(every: int, name: str = NAME, size: int = BATCH) -> Callable[[], None]:
    """Forward and backward on random images; a tiny pass has loaded the kernels and allocated the gradients."""
    torch.manual_seed(0)
    network = create(name, checkpoint_every=every)
    x = torch.randn(size, 3, 32, 32)
    loss_and_gradients(network, x[:2, :, :8, :8])
    return partial(loss_and_gradients, network, x)


def loss_and_gradients(network: nn.Module, x: Tensor) -> None:
    """One pass."""
    F.cross_entropy(network(x), torch.arange(len(x)) % 10).backward()


def check_gradients() -> None:
    """Refuse to measure what computes something else, on a network of a tenth of the depth."""
    gradients = []
    for every in (0, 4):
        torch.manual_seed(0)
        network = create("preact_resnet110", checkpoint_every=every)
        loss_and_gradients(network, torch.randn(4, 3, 32, 32))
        gradients.append(torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None]))
    difference = (gradients[0] - gradients[1]).abs().max().item()
    if difference > 1e-6:
        raise ReszooError(f"gradients differ by {difference:.1e} where 1e-6 was allowed")
