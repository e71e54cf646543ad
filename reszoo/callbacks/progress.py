"""Progress in a log file: one plain line an epoch. On a terminal, Lightning's progress bar does it."""

import sys
import time

from lightning.pytorch import Callback, LightningModule, Trainer


class EpochLines(Callback):
    """Prints one line an epoch: losses, accuracy, learning rate, seconds."""

    def __init__(self) -> None:
        self._start = 0.0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start = time.monotonic()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        metrics = trainer.callback_metrics
        shown = ["train/loss", *(key for key in metrics if key.startswith("train/acc")), "val/loss", "val/accuracy"]
        parts = [f"{key} {metrics[key]:.4f}" for key in shown if key in metrics]
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        epoch = f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}"
        print("  ".join([epoch, *parts, f"lr {rate:.3g}", f"{time.monotonic() - self._start:.1f} s"]), flush=True)


def on_terminal() -> bool:
    """Whether a person watches: standard output is a terminal."""
    return sys.stdout.isatty()
