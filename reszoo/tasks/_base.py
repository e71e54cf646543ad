"""What every task shares: an injected network, its optimizer and schedule, and checkpoints of plain values."""

import logging
import math
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.optim import Optimizer

from reszoo.errors import ReszooError
from reszoo.tasks.schedules import Schedule, TorchSchedule

_LOG = logging.getLogger(__name__)

CHECKPOINT_KEY = "reszoo"
"""Where a checkpoint says what network it holds."""


class Task(LightningModule):
    """How a network is trained; a subclass writes `_step` for train, validation and test.

    Args:
        network: The network to train, built by any factory.
        optimizer: Builds the optimizer from the parameters.
        schedule: The learning-rate schedule; None keeps the rate.
        decay_norm_and_bias: Whether weight decay also falls on parameters of at most one dimension (norm scales,
            biases, gates). He et al. 2015 name no exception; Goyal et al. 2017 decay no BatchNorm.
    """

    kind = "task"

    def __init__(
        self,
        network: nn.Module,
        optimizer: OptimizerCallable = torch.optim.SGD,
        schedule: Schedule | None = None,
        decay_norm_and_bias: bool = False,
    ) -> None:
        super().__init__()
        self.network = network
        self.optimizer = optimizer
        self.schedule = schedule or Schedule()
        self.decay_norm_and_bias = decay_norm_and_bias
        self.labels: list[str] | None = None
        self.transform: dict[str, Any] | None = None
        self._resumed_rates: list[dict[str, Any]] | None = None

    def forward(self, *inputs: Tensor) -> Tensor:
        """The network's own output."""
        return self.network(*inputs)

    def setup(self, stage: str) -> None:
        data: Any = getattr(self.trainer, "datamodule", None)
        if hasattr(data, "labels"):
            self.labels = list(data.labels)
        if hasattr(data, "transform"):
            self.transform = data.transform.as_dict()

    def configure_optimizers(self) -> Any:
        optimizer = self._fresh_optimizer()
        total = self.trainer.estimated_stepping_batches
        if total == float("inf"):
            raise ReszooError("a schedule needs an end: set trainer.max_epochs or trainer.max_steps")
        if not math.isfinite(self.trainer.num_training_batches):
            self.trainer.fit_loop.setup_data()  # with max_steps alone, nobody has counted the batches yet
        batches = self.trainer.num_training_batches
        steps_per_epoch = max(1, -(-int(batches) // self.trainer.accumulate_grad_batches))
        scheduler = self.schedule.build(optimizer, int(total), steps_per_epoch)
        by_epoch = isinstance(self.schedule, TorchSchedule) and self.schedule.unit == "epochs"
        interval = "epoch" if by_epoch else "step"
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": interval}}

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Trainable parameters as named groups: `decay`, and `no_decay` with weight decay 0 (see the class)."""
        trainable = [p for p in self.network.parameters() if p.requires_grad]
        if self.decay_norm_and_bias:
            return [{"params": trainable, "name": "all"}]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in trainable if p.dim() > 1], "name": "decay"},
            {"params": [p for p in trainable if p.dim() <= 1], "name": "no_decay", "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[CHECKPOINT_KEY] = {
            "format": 1,
            "task": self.kind,
            "architecture": getattr(self.network, "architecture", None),
            "arguments": getattr(self.network, "arguments", None),
            "labels": self.labels,
            "transform": self.transform,
            "optimizer_class": type(self.trainer.optimizers[0]).__name__ if self._optimizer_groups() else None,
            "optimizer": [_settings(group) for group in self._optimizer_groups()],
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        stored = checkpoint.get(CHECKPOINT_KEY)
        if not isinstance(stored, dict):
            raise ReszooError("this checkpoint was not written by reszoo: it does not say what network it holds")
        here, there = getattr(self.network, "architecture", None), stored.get("architecture")
        if here != there:
            raise ReszooError(
                f"the network is {here or type(self.network).__name__!r} here and {there!r} in the checkpoint, whose "
                "weights do not fit: use the checkpoint's own recipe, or train from the start without --ckpt_path"
            )
        ours = getattr(self.network, "arguments", None)
        if stored["arguments"] is not None and ours is not None:
            for key in sorted(set(stored["arguments"]) | set(ours)):
                there, here = stored["arguments"].get(key), ours.get(key)
                if there != here:
                    raise ReszooError(
                        f"network argument {key!r} is {here!r} here and {there!r} in the checkpoint, whose weights do "
                        "not fit: drop the option, or train from the start without --ckpt_path"
                    )
        self._refuse_other_weights(checkpoint["state_dict"])
        self._resumed_rates = stored.get("optimizer")
        if self._resumed_rates is not None and self._trainer is not None and self.trainer.state.fn == "fit":
            self._refuse_other_optimizer(self._resumed_rates, stored.get("optimizer_class"))

    def _refuse_other_weights(self, state: dict[str, Tensor]) -> None:
        """Weights must match by name and shape, in networks of any origin."""
        own = {key: tensor.shape for key, tensor in self.network.state_dict(prefix="network.").items()}
        stored = {key: tensor.shape for key, tensor in state.items() if key.startswith("network.")}
        wrong = sorted(key for key in set(own) | set(stored) if own.get(key) != stored.get(key))
        if wrong:
            raise ReszooError(
                f"the checkpoint's weights do not fit the network: {len(wrong)} are missing, too many or of another "
                f"shape, first {wrong[0]!r}; use the checkpoint's own recipe"
            )

    def _refuse_other_optimizer(self, stored: list[dict[str, Any]], name: str | None) -> None:
        """The state of one optimizer is none of another's."""
        fresh = self._fresh_optimizer()
        here, there = type(fresh).__name__, name or type(fresh).__name__  # older checkpoints name no class
        if here != there or len(stored) != len(fresh.param_groups):
            raise ReszooError(
                f"the optimizer is {here} with {len(fresh.param_groups)} parameter groups here and {there} with "
                f"{len(stored)} in the checkpoint, whose state does not fit: keep the optimizer and "
                "decay_norm_and_bias, or train from the start without --ckpt_path"
            )

    def on_fit_start(self) -> None:
        """Training mode, whichever mode the network came in: `load` returns it in eval mode."""
        self.train()

    def on_train_start(self) -> None:
        """After a resume, let every optimizer setting that the user changed win over the restored one, and say so."""
        stored, self._resumed_rates = self._resumed_rates, None
        groups = self._optimizer_groups()
        if stored is None or len(stored) != len(groups):
            return
        asked = [_settings(group) for group in self._fresh_optimizer().param_groups]
        for index, (group, was, now) in enumerate(zip(groups, stored, asked, strict=True)):
            for key in sorted(set(was) & set(now)):
                if was[key] == now[key]:
                    continue
                if self.trainer.is_global_zero:
                    name = group.get("name", index)
                    _LOG.warning(
                        "resume: %s of group %s is %s, as asked; the checkpoint had %s", key, name, now[key], was[key]
                    )
                if key == "lr":
                    self._scale_rate(group, index, now["lr"], was["lr"])
                else:
                    group[key] = now[key]

    def _scale_rate(self, group: dict[str, Any], index: int, asked: float, stored: float) -> None:
        """Move the rate and the schedule's base to the asked one, at the place where the schedule stands."""
        if not stored:
            raise ReszooError("the checkpoint's learning rate is 0, so a new one cannot be placed on its schedule")
        group["lr"] = group["lr"] / stored * asked
        group["initial_lr"] = asked
        for config in self.trainer.lr_scheduler_configs:
            if hasattr(config.scheduler, "base_lrs"):
                config.scheduler.base_lrs[index] = asked

    def _fresh_optimizer(self) -> Optimizer:
        """The optimizer that the recipe describes, before any checkpoint."""
        groups = self.parameter_groups()
        if not groups:
            raise ReszooError(f"the network {type(self.network).__name__} has no parameter to train")
        try:
            return self.optimizer(groups)
        except (TypeError, ValueError) as error:
            raise ReszooError(f"the optimizer cannot be built: {error}; see model.optimizer in the recipe") from error

    def _optimizer_groups(self) -> list[dict[str, Any]]:
        """The groups of the running optimizer; none before training."""
        optimizers = self.trainer.optimizers if self._trainer is not None else []
        return optimizers[0].param_groups if optimizers else []


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """The numbers of one parameter group as the recipe gave them: the rate before any schedule."""
    plain = {k: v for k, v in group.items() if k not in ("params", "initial_lr") and isinstance(v, bool | int | float)}
    return plain | {"lr": float(group.get("initial_lr", group["lr"]))}
