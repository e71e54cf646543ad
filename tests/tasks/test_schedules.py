import math

import pytest
import torch

from reszoo.errors import ReszooError
from reszoo.tasks import Cosine, InverseSqrt, Linear, MultiStep, Schedule, TorchSchedule


def rates(schedule, total=20, per_epoch=5, lr=1.0):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    scheduler = schedule.build(optimizer, total, per_epoch)
    seen = []
    for _ in range(total):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_the_papers_constant_warmup_then_steps():
    schedule = MultiStep([2, 3], warmup_steps=4, warmup_from=0.1, warmup="constant")
    assert rates(schedule) == pytest.approx([0.1] * 4 + [1.0] * 6 + [0.1] * 5 + [0.01] * 5)


def test_linear_warmup_reaches_the_rate_at_its_last_step():
    assert rates(Schedule(warmup_steps=4, warmup_from=0.2))[:5] == pytest.approx([0.4, 0.6, 0.8, 1.0, 1.0])


@pytest.mark.parametrize(("unit", "at"), [("epochs", [2]), ("steps", [10]), ("share", [0.5])])
def test_a_milestone_in_any_unit_falls_on_the_same_step(unit, at):
    assert rates(MultiStep(at, unit=unit)) == pytest.approx([1.0] * 10 + [0.1] * 10)


def test_cosine_halves_midway_and_ends_near_zero():
    seen = rates(Cosine())
    assert seen[10] == pytest.approx(0.5)
    assert seen[-1] == pytest.approx((1 + math.cos(math.pi * 19 / 20)) / 2)


def test_linear_falls_by_equal_amounts_to_its_final_share():
    seen = rates(Linear(final=0.5))
    assert torch.tensor(seen).diff().tolist() == pytest.approx([-0.025] * 19, abs=1e-6)


def test_inverse_sqrt_has_the_transformers_peak():
    peak = 512**-0.5 * 4000**-0.5
    seen = rates(InverseSqrt(warmup_steps=4000), total=16_000, lr=peak)
    formula = [512**-0.5 * min(s**-0.5, s * 4000**-1.5) for s in range(1, 16_001)]
    assert seen == pytest.approx(formula)


def test_one_cycle_by_step_reaches_its_peak_and_ends_low():
    def one_cycle(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=16)

    seen = rates(TorchSchedule(one_cycle, unit="steps"), total=16, per_epoch=8)
    assert len(set(seen)) == 16
    assert max(seen) > 0.99
    assert seen[-1] < 0.01


def test_a_one_cycle_of_another_length_than_the_training_is_refused():
    def one_cycle(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=16)

    with pytest.raises(ReszooError, match="OneCycleLR is set for 16 epochs, the training has 4"):
        rates(TorchSchedule(one_cycle, unit="epochs"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rates(MultiStep([2, 4])), "the last milestone, 4 epochs, lies at or behind the end"),
        (lambda: MultiStep([3, 2]), "milestones must rise"),
        (lambda: rates(Schedule(warmup_steps=20)), "warmup_steps=20 must be fewer than the 20 steps"),
        (lambda: Schedule(warmup_from=2), "warmup_from must be between 0 and 1, got 2"),
        (lambda: Cosine(final=-1), "final must be between 0 and 1, got -1"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused(make, message):
    with pytest.raises(ReszooError, match=message):
        make()
