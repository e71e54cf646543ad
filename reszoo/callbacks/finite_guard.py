"""Stops a training whose loss or weights are no longer finite, before they reach a checkpoint."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from reszoo.errors import ReszooError

READ_EVERY = 50
"""Steps between two looks at an accelerator's verdict."""


class FiniteGuard(Callback):
    """Ends the training at the first step whose loss is NaN or infinite; the last checkpoint stays a good one.

    On an accelerator the verdict is kept on the device and read every 50 steps, so that no step waits for it. Weights
    are checked again before every checkpoint.
    """

    def __init__(self) -> None:
        self._first_bad: Tensor | None = None

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        step = trainer.global_step + 1
        bad = ~loss.detach().isfinite()
        if loss.device.type == "cpu":
            if bad:
                raise _stopped(f"the training loss is {loss.item()} at step {step} (epoch {trainer.current_epoch})")
            return
        if self._first_bad is None:
            self._first_bad = torch.zeros((), dtype=torch.long, device=loss.device)
        self._first_bad = torch.where((self._first_bad == 0) & bad, step, self._first_bad)
        if step % READ_EVERY == 0:
            self._read()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._read()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._read()
        for name, tensor in checkpoint["state_dict"].items():
            if tensor.is_floating_point() and not tensor.isfinite().all():
                raise _stopped(f"{name} holds NaN or infinite values after step {trainer.global_step}")

    def _read(self) -> None:
        """Raise if a step since the last look was bad."""
        if self._first_bad is not None and (step := int(self._first_bad)):
            raise _stopped(f"the training loss stopped being finite at step {step}")


def _stopped(what: str) -> ReszooError:
    return ReszooError(
        f"{what}; training stopped, the last good checkpoint is kept; lower the learning rate or add a warm-up"
    )
