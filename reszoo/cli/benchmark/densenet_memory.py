"""Training memory and step time of DenseNet against torchvision's, plain and checkpointed.

Every contestant holds the same weights, and its output and gradients are compared with torchvision's before anything is
measured. Memory is the peak of one forward and backward pass in a process of its own; time is measured in turns.
"""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import reszoo
from reszoo.cli.benchmark._harness import Row, interleaved, memory_rows, peak_memory
from reszoo.errors import ReszooError

Architecture = Literal["densenet121", "densenet_bc100_k12"]

BATCHES: dict[Architecture, tuple[int, int]] = {"densenet121": (8, 224), "densenet_bc100_k12": (32, 32)}
CONTESTANTS = ("torchvision", "torchvision checkpointed", "plain", "shared", "lean")


def measure(rounds: int = 9) -> list[Row]:
    """Memory, then time, of both architectures; the first row of each five is the peer."""
    rows = []
    for name in BATCHES:
        _compare(name)
        rows += memory_rows({f"{name}, {kind}": _in_new_process(name, kind) for kind in CONTESTANTS})
        rows += interleaved({f"{name}, {kind}": _step(name, kind) for kind in CONTESTANTS}, rounds)
    return rows


def _compare(name: Architecture) -> None:
    """Refuse to measure contestants that differ from torchvision's plain network in output or gradient."""
    shape = (4, 3, *(size // 2 for size in (BATCHES[name][1],) * 2))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = _output_and_gradients(_build(name, CONTESTANTS[0]).double(), x)
    for kind in CONTESTANTS[1:]:
        got = _output_and_gradients(_build(name, kind).double(), x)
        worst = max(((a - b).abs().max() / a.abs().max()).item() for a, b in zip(expected, got, strict=True))
        if worst > 1e-8:
            raise ReszooError(f"{name}, {kind}: differs from torchvision's by {worst:.1e} of the largest value")


def _output_and_gradients(network: nn.Module, x: Tensor) -> list[Tensor]:
    output = network(x)
    output.square().sum().backward()
    return [output.detach(), *(p.grad for p in network.parameters() if p.grad is not None)]


def _in_new_process(name: Architecture, kind: str) -> float:
    """The peak of a contestant in MiB, untouched by what the others left in the allocator."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_peak, name, kind, torch.get_num_threads()).result()


def _peak(name: Architecture, kind: str, threads: int) -> float:
    torch.set_num_threads(threads)
    step = _step(name, kind)
    step(1)  # loads the kernels' code, which is no part of the network
    return peak_memory(step)


def _step(name: Architecture, kind: str) -> Callable[..., None]:
    """One training pass without the optimizer, on a batch of random images."""
    network = _build(name, kind)
    batch, size = BATCHES[name]
    x, y = torch.randn(batch, 3, size, size), torch.arange(batch) % 10

    def step(samples: int = batch) -> None:
        network.zero_grad()
        F.cross_entropy(network(x[:samples]), y[:samples]).backward()

    return step


def _build(name: Architecture, kind: str) -> nn.Module:
    """The contestant in training mode, with weights drawn from seed 0."""
    torch.manual_seed(0)
    ours = reszoo.create(name, num_classes=10, memory="plain" if kind.startswith("torchvision") else kind)
    if not kind.startswith("torchvision"):
        return ours
    theirs = _torchvision(name, memory_efficient=kind.endswith("checkpointed"))
    # Both list their tensors in the order of the forward pass.
    theirs.load_state_dict(dict(zip(theirs.state_dict(), ours.state_dict().values(), strict=True)))
    return theirs


def _torchvision(name: Architecture, memory_efficient: bool) -> nn.Module:
    """torchvision's network; for CIFAR, with the paper's 3x3 convolution as its stem."""
    from torchvision.models import DenseNet

    build = partial(DenseNet, num_classes=10, memory_efficient=memory_efficient)
    if name == "densenet121":
        return build(32, (6, 12, 24, 16), 64)
    network = build(12, (16, 16, 16), 24)
    network.features.conv0 = nn.Conv2d(3, 24, 3, padding=1, bias=False)
    for layer in ("norm0", "relu0", "pool0"):
        setattr(network.features, layer, nn.Identity())
    return network
