"""Learning-rate schedules as factors of the optimizer's rate, counted in optimizer steps, with the warm-up built in.

A schedule knows the length of the training, so a recipe states epochs once; every number says its unit.
"""

import math
from collections.abc import Callable
from typing import Literal, get_args

from lightning.pytorch.cli import LRSchedulerCallable
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from reszoo.errors import ReszooError, check_at_least, check_between, check_choice

Warmup = Literal["linear", "constant"]
Unit = Literal["epochs", "steps", "share"]


class Schedule:
    """A constant rate behind an optional warm-up; base of the other schedules.

    Args:
        warmup_steps: Optimizer steps of the warm-up, at least 0.
        warmup_from: Factor of the rate at the first step, in [0, 1].
        warmup: "linear" rises step by step to 1 (Goyal et al. 2017); "constant" stays at `warmup_from`
            (He et al. 2015, Section 4.2, ResNet-110).
    """

    def __init__(self, warmup_steps: int = 0, warmup_from: float = 0.0, warmup: Warmup = "linear") -> None:
        check_at_least("warmup_steps", warmup_steps, 0)
        check_choice("warmup", warmup, get_args(Warmup))
        check_between("warmup_from", warmup_from, 0, 1)
        self.warmup_steps = warmup_steps
        self.warmup_from = warmup_from
        self.warmup = warmup

    def build(self, optimizer: Optimizer, total_steps: int, steps_per_epoch: int) -> LRScheduler:
        """The schedule as PyTorch's own, to be stepped after every optimizer step.

        Raises:
            ReszooError: The warm-up is no shorter than the training, or a milestone lies behind its end.
        """
        if self.warmup_steps >= total_steps:
            raise ReszooError(
                f"warmup_steps={self.warmup_steps} must be fewer than the {total_steps} steps of the training; "
                "lower it, or train longer"
            )
        after = self.after_warmup(total_steps, steps_per_epoch)

        def factor(step: int) -> float:
            if step >= self.warmup_steps:
                return after(step)
            if self.warmup == "constant":
                return self.warmup_from
            return self.warmup_from + (1 - self.warmup_from) * (step + 1) / self.warmup_steps

        return LambdaLR(optimizer, factor)

    def after_warmup(self, total_steps: int, steps_per_epoch: int) -> Callable[[int], float]:
        """Step -> factor, for steps from `warmup_steps` on."""
        return lambda step: 1.0


class MultiStep(Schedule):
    """Multiply the rate by `gamma` at each milestone: the schedule of the ResNet papers.

    Args:
        milestones: Where to drop, rising, in `unit`.
        unit: "epochs", "steps", or "share" of the whole training (DenseNet: 0.5 and 0.75).
        gamma: The factor of each drop.
        warmup_steps: See `Schedule`.
        warmup_from: See `Schedule`.
        warmup: See `Schedule`.
    """

    def __init__(
        self,
        milestones: list[float],
        unit: Unit = "epochs",
        gamma: float = 0.1,
        warmup_steps: int = 0,
        warmup_from: float = 0.0,
        warmup: Warmup = "linear",
    ) -> None:
        super().__init__(warmup_steps, warmup_from, warmup)
        check_choice("unit", unit, get_args(Unit))
        if sorted(set(milestones)) != list(milestones) or (milestones and milestones[0] <= 0):
            raise ReszooError(f"milestones must rise from above 0, got {milestones}")
        self.milestones = milestones
        self.unit = unit
        self.gamma = gamma

    def after_warmup(self, total_steps: int, steps_per_epoch: int) -> Callable[[int], float]:
        scale = {"epochs": steps_per_epoch, "steps": 1, "share": total_steps}[self.unit]
        drops = [milestone * scale for milestone in self.milestones]
        if drops and drops[-1] >= total_steps:
            raise ReszooError(
                f"the last milestone, {self.milestones[-1]:g} {self.unit}, lies at or behind the end of the training "
                f"({total_steps} steps, {steps_per_epoch} an epoch); lower it or train longer"
            )
        return lambda step: self.gamma ** sum(step >= drop for drop in drops)


class Cosine(Schedule):
    """Fall from 1 to `final` along half a cosine (Loshchilov and Hutter 2017, without restarts).

    Args:
        final: Factor of the rate at the end, in [0, 1].
        warmup_steps: See `Schedule`.
        warmup_from: See `Schedule`.
        warmup: See `Schedule`.
    """

    def __init__(
        self,
        final: float = 0.0,
        warmup_steps: int = 0,
        warmup_from: float = 0.0,
        warmup: Warmup = "linear",
    ) -> None:
        super().__init__(warmup_steps, warmup_from, warmup)
        check_between("final", final, 0, 1)
        self.final = final

    def after_warmup(self, total_steps: int, steps_per_epoch: int) -> Callable[[int], float]:
        def factor(step: int) -> float:
            progress = min(1.0, (step - self.warmup_steps) / (total_steps - self.warmup_steps))
            return self.final + (1 - self.final) * (1 + math.cos(math.pi * progress)) / 2

        return factor


class Linear(Cosine):
    """Fall from 1 to `final` along a straight line."""

    def after_warmup(self, total_steps: int, steps_per_epoch: int) -> Callable[[int], float]:
        span = total_steps - self.warmup_steps
        return lambda step: 1 - (1 - self.final) * min(1.0, (step - self.warmup_steps) / span)


class InverseSqrt(Schedule):
    """Fall as 1 / sqrt(step) behind the warm-up: the Transformer's schedule (Vaswani et al. 2017, Eq. 3).

    The optimizer's rate is the peak, reached at `warmup_steps`; for the paper's base model it is
    512**-0.5 * 4000**-0.5 = 6.99e-4.
    """

    def after_warmup(self, total_steps: int, steps_per_epoch: int) -> Callable[[int], float]:
        peak = max(1, self.warmup_steps)
        return lambda step: math.sqrt(peak / max(peak, step + 1))


class TorchSchedule(Schedule):
    """Any scheduler of PyTorch, with the unit of its step stated.

    Args:
        scheduler: The scheduler's class and arguments.
        unit: What one of its steps is.
    """

    def __init__(self, scheduler: LRSchedulerCallable, unit: Literal["steps", "epochs"]) -> None:
        super().__init__()
        check_choice("unit", unit, ("steps", "epochs"))
        self.scheduler = scheduler
        self.unit = unit

    def build(self, optimizer: Optimizer, total_steps: int, steps_per_epoch: int) -> LRScheduler:
        built = self.scheduler(optimizer)
        planned = total_steps if self.unit == "steps" else -(-total_steps // steps_per_epoch)
        stated = getattr(built, "total_steps", planned)
        if stated != planned:
            raise ReszooError(
                f"{type(built).__name__} is set for {stated} {self.unit}, the training has {planned}; make them equal"
            )
        return built
