"""The metrics of a run as files that any tool reads: JSON lines as they come, CSV at the end."""

import csv
import json
import math
from argparse import Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

FIRST = ("epoch", "step")


class MetricsLog(Logger):
    """Writes `metrics.jsonl`, one line a logging event, and `metrics.csv` with the same rows.

    Args:
        folder: The run folder; nothing is written before it exists.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    @property
    def name(self) -> str:
        """The recipe's folder."""
        return self.folder.parent.name

    @property
    def version(self) -> str:
        """The run's folder."""
        return self.folder.name

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the run folder holds the whole configuration."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append one line."""
        row: dict[str, Any] = {"step": step}
        row |= {key: value if math.isfinite(value) else str(value) for key, value in metrics.items()}
        if "epoch" in row:
            row["epoch"] = int(row["epoch"])
        with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write the CSV."""
        rows = read_rows(self.folder)
        if rows:
            write_csv(rows, self.folder / "metrics.csv")


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's `metrics.jsonl`, in the order they came; empty if there are none."""
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def write_csv(rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Rows of any keys as one table: epoch and step first, then the rest by name; absent cells empty."""
    rows = list(rows)
    keys = sorted({key for row in rows for key in row} - set(FIRST))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*FIRST, *keys], restval="")
        writer.writeheader()
        writer.writerows(rows)
