"""Callbacks of the trainer."""

from reszoo.callbacks.checkpoint_io import AtomicCheckpointIO
from reszoo.callbacks.finite_guard import FiniteGuard
from reszoo.callbacks.metrics_log import MetricsLog, read_rows, write_csv
from reszoo.callbacks.progress import EpochLines, on_terminal

__all__ = ["AtomicCheckpointIO", "EpochLines", "FiniteGuard", "MetricsLog", "on_terminal", "read_rows", "write_csv"]
