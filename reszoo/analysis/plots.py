"""Figures, each from plain numbers to a PNG file; the one place that draws."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def new_figure(columns: int = 1, width: float = 5.0, height: float = 3.6) -> tuple[Any, list[Any]]:
    """A figure with `columns` axes side by side, drawn without a display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25)
    return figure, list(axes)


def training_curve(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> Path:
    """Loss and error of training and validation over the epochs, from the rows of `metrics.jsonl`."""
    figure, (left, right) = new_figure(2)
    for stage, style in (("train", "--"), ("val", "-")):
        _curve(left, rows, f"{stage}/loss", stage, style)
        for key in (f"{stage}/accuracy", f"{stage}/accuracy_of_dominant_label"):
            _curve(right, rows, key, stage, style, lambda value: 100 * (1 - value))
    left.set(xlabel="epoch", ylabel="cross-entropy", title=title)
    right.set(xlabel="epoch", ylabel="error (%)")
    for ax in (left, right):
        ax.set_xlim(left=0)
        ax.set_ylim(bottom=0)
        if ax.lines:
            ax.legend(frameon=False)
    figure.savefig(path, dpi=150)
    return path


def _curve(ax: Any, rows: Sequence[Mapping[str, Any]], key: str, label: str, style: str, change: Any = float) -> None:
    """One line; a value that was not finite ends it."""
    points = [(row["epoch"] + 1, change(float(row[key]))) for row in rows if key in row and "epoch" in row]
    if points:
        marker = "o" if len(points) < 20 else None
        ax.plot(*zip(*points, strict=True), style, label=label, marker=marker, markersize=3)


def confusion_matrix(matrix: Tensor, labels: Sequence[str], path: Path) -> Path:
    """Counts of true class (rows) against predicted class (columns), coloured by the share of the row."""
    from matplotlib.figure import Figure

    size = max(3.6, min(14.0, 0.42 * len(labels) + 1.6))
    figure = Figure(figsize=(size, size), layout="constrained")
    ax = figure.subplots()
    share = matrix.double() / matrix.sum(1, keepdim=True).clamp(min=1)
    ax.imshow(share.numpy(), cmap="Blues", vmin=0, vmax=1)
    if len(labels) <= 30:
        ax.set_xticks(range(len(labels)), labels, rotation=45, ha="right")
        ax.set_yticks(range(len(labels)), labels)
        for true, predicted in torch.nonzero(matrix).tolist():
            colour = "white" if share[true, predicted] > 0.6 else "black"
            ax.text(
                predicted, true, str(int(matrix[true, predicted])), ha="center", va="center", color=colour, fontsize=8
            )
    ax.set(xlabel="predicted", ylabel="true")
    figure.savefig(path, dpi=150)
    return path
