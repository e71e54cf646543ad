"""Degradation on real digits: plain and residual networks of 8 and 26 weight layers, trained alike.

The phenomenon of He et al. 2015 (arXiv:1512.03385, Fig. 1) at a size that a laptop trains in minutes: added layers make
a plain network train worse, and a residual one not. The published ranges are those of an article's own ten seeds, whose
text gives depth, data and training, not the width; 20 is chosen here, whose gradients and accuracies lie nearest.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reszoo.analysis import plots
from reszoo.cli._run_folder import RunFolder
from reszoo.cli.reproduce._report import Claim, as_records, show, within
from reszoo.models.plain import PlainBlock, PlainNet
from reszoo.models.resnet import BasicBlock, ResNet

EPOCHS, BATCH, RATE, MOMENTUM, TRAIN, WIDTH = 6, 64, 0.05, 0.9, 1437, 20
NETWORKS = [("plain", 8), ("residual", 8), ("plain", 26), ("residual", 26)]
PUBLISHED_ACCURACY = {"plain": (39.5, 83.4), "residual": (96.6, 98.8)}
PUBLISHED_GRADIENT = {"plain": (1.9, 3.2), "residual": (0.4, 0.7)}


@dataclass(frozen=True)
class Outcome:
    """One training: means over its last epoch, taken while training, and the first step's gradient."""

    kind: str
    layers: int
    seed: int
    loss: float
    accuracy: float
    gradient: float


def reproduce(seeds: int, root: Path) -> bool:
    """Train the four networks from each seed; print, draw and store what came of it; whether every claim held."""
    run = RunFolder(root, "reproduce/degradation-digits")
    images, labels = training_digits()
    outcomes = []
    for seed in range(seeds):
        for kind, layers in NETWORKS:
            outcome = train(kind, layers, seed, images, labels)
            outcomes.append(outcome)
            figures = f"loss {outcome.loss:.3f}  training accuracy {100 * outcome.accuracy:.1f}%"
            print(f"seed {seed}  {kind} {layers}: {figures}  step-1 gradient {outcome.gradient:.2f}", flush=True)
    claims = judge(outcomes)
    run.make("", None, {"name": "digits", "n": {"train": len(labels)}})
    figure = draw(outcomes, run.path / "degradation.png")
    run.finish("finished", claims=as_records(claims), outcomes=[vars(outcome) for outcome in outcomes])
    show(f"degradation on digits, {seeds} seeds", claims)
    print(f"figure: {figure}\nnumbers: {run.path / 'results.json'}")
    return all(claim.holds for claim in claims)


def training_digits() -> tuple[Tensor, Tensor]:
    """1,437 of scikit-learn's digits: (1437, 1, 8, 8) in [0, 1], and their classes."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    values, classes = load_digits(return_X_y=True)
    train, _, targets, _ = train_test_split(values, classes, train_size=TRAIN, random_state=0)
    return torch.from_numpy(train).float().view(-1, 1, 8, 8) / 16, torch.from_numpy(targets).long()


def build(kind: str, layers: int) -> nn.Module:
    """Stem, (layers - 2) / 2 blocks of constant width, head; PyTorch's default initialisation."""
    depths = ((layers - 2) // 2,)
    network: nn.Module
    if kind == "plain":
        network = PlainNet("cifar", (WIDTH,), depths, PlainBlock, in_chans=1)
    else:
        network = ResNet("cifar", (WIDTH,), depths, BasicBlock, in_chans=1)
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            module.reset_parameters()
    return network


def train(kind: str, layers: int, seed: int, images: Tensor, labels: Tensor) -> Outcome:
    """Six epochs of SGD from one seed."""
    torch.manual_seed(seed)
    network = build(kind, layers)
    optimizer = torch.optim.SGD(network.parameters(), RATE, MOMENTUM)
    gradient = 0.0
    for _ in range(EPOCHS):
        total = right = 0.0
        for batch in torch.randperm(len(labels)).split(BATCH):
            logits = network(images[batch])
            loss = F.cross_entropy(logits, labels[batch])
            optimizer.zero_grad()
            loss.backward()
            if not gradient:
                gradient = float(first_convolution(network).weight.grad.norm())  # type: ignore[union-attr]
            optimizer.step()
            total += loss.item() * len(batch)
            right += (logits.argmax(1) == labels[batch]).sum().item()
    return Outcome(kind, layers, seed, total / len(labels), right / len(labels), gradient)


def first_convolution(network: nn.Module) -> nn.Conv2d:
    """The convolution that sees the image."""
    return next(module for module in network.modules() if isinstance(module, nn.Conv2d))


def judge(outcomes: Sequence[Outcome]) -> list[Claim]:
    """The published ranges, and the two comparisons that the experiment is about, seed by seed."""
    by = {(kind, n): [o for o in outcomes if (o.kind, o.layers) == (kind, n)] for kind, n in NETWORKS}
    claims = []
    for kind in ("plain", "residual"):
        accuracy = [100 * o.accuracy for o in by[kind, 26]]
        claims.append(within(f"{kind} 26, last-epoch training accuracy", accuracy, *PUBLISHED_ACCURACY[kind], unit="%"))
        gradient = [o.gradient for o in by[kind, 26]]
        claims.append(within(f"{kind} 26, step-1 gradient norm of the first conv", gradient, *PUBLISHED_GRADIENT[kind]))
    return [
        *claims,
        _in_every_seed("plain 26 trains worse than plain 8", by["plain", 26], by["plain", 8]),
        _in_every_seed("plain 26 trains worse than residual 26", by["plain", 26], by["residual", 26]),
    ]


def _in_every_seed(text: str, worse: Sequence[Outcome], better: Sequence[Outcome]) -> Claim:
    seeds = sum(a.accuracy < b.accuracy for a, b in zip(worse, better, strict=True))
    return Claim(text, "in every seed", f"in {seeds} of {len(worse)} seeds", seeds == len(worse))


def draw(outcomes: Sequence[Outcome], path: Path) -> Path:
    """Training error and first gradient of every training, the median as a bar."""
    figure, (left, right) = plots.new_figure(2)
    values: list[tuple[Any, Any, str]] = [
        (left, lambda o: 100 * (1 - o.accuracy), "last-epoch training error (%)"),
        (right, lambda o: o.gradient, "step-1 gradient norm of the first conv"),
    ]
    for ax, value, label in values:
        for place, (kind, layers) in enumerate(NETWORKS):
            points = [value(o) for o in outcomes if (o.kind, o.layers) == (kind, layers)]
            colour = "tab:red" if kind == "plain" else "tab:blue"
            ax.bar(place, statistics.median(points), color=colour, alpha=0.35)
            ax.plot([place] * len(points), points, "o", color=colour, markersize=3)
        ax.set_xticks(range(len(NETWORKS)), [f"{kind}\n{layers}" for kind, layers in NETWORKS])
        ax.set_ylabel(label)
    figure.savefig(path, dpi=150)
    return path
