"""The gradient identity: d(x + F(x))/dx = I + dF/dx, and what it does to a deep stack.

He et al. 2016 (arXiv:1603.05027), Eq. 5: the derivative of a residual stack is a sum whose first term is the identity,
that of a plain stack a product that fades or grows with depth. Each branch is F(x) = W2 relu(W1 x) of width 8 with
entries drawn from N(0, spread^2); the plain and the residual stack of 30 share every weight and the input. The
published lines come from an article whose program is not at hand: its ranges over seeds are compared, and its digits
are shown beside ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from reszoo.analysis import plots
from reszoo.analysis.jacobian import Function, identity_error, stack_gain
from reszoo.cli._run_folder import RunFolder
from reszoo.cli.reproduce._report import Claim, as_records, show, within

WIDTH, BLOCKS = 8, 30
PUBLISHED = {
    ("plain", 0.1): (2.4e-39, (0.0, 3.9e-39)),
    ("residual", 0.1): (1.7, (1.3, 1.9)),
    ("plain", 0.3): (1.0e-15, (1.0e-13, 3.0e-10)),
    ("residual", 0.3): (81.0, (23.0, 280.0)),
}
"""Stack and spread -> the published gain of seed 0, and the range of seeds 1 to 9."""


@dataclass(frozen=True)
class Outcome:
    """One seed: the identity's largest deviation, and the gain of each stack."""

    seed: int
    deviation: float
    gains: dict[tuple[str, float], float]


def reproduce(seeds: int, root: Path) -> bool:
    """Measure the Jacobians from each seed; print, draw and store them; whether every claim held."""
    run = RunFolder(root, "reproduce/gradient-identity")
    outcomes = [measure(seed) for seed in range(seeds)]
    claims = judge(outcomes)
    run.make("", None, None)
    figure = draw(outcomes, run.path / "gradient_identity.png")
    records = [
        {"seed": o.seed, "deviation": o.deviation, **{f"{kind} {spread}": g for (kind, spread), g in o.gains.items()}}
        for o in outcomes
    ]
    run.finish("finished", claims=as_records(claims), outcomes=records)
    for line in five_lines(outcomes[0]):
        print(line)
    show(f"gain of {BLOCKS} blocks (spectral norm of the Jacobian), {seeds} seeds", claims)
    print(f"figure: {figure}\nnumbers: {run.path / 'results.json'}")
    return all(claim.holds for claim in claims)


def measure(seed: int) -> Outcome:
    """Everything that one seed draws, in order: the branch of the identity, then a stack for each spread."""
    torch.manual_seed(seed)
    deviation = identity_error(draw_branch(1.0), torch.randn(WIDTH))
    gains = {}
    for spread in (0.1, 0.3):
        x = torch.randn(WIDTH)
        branches = [draw_branch(spread) for _ in range(BLOCKS)]
        for kind in ("plain", "residual"):
            gains[kind, spread] = stack_gain(branches, x, residual=kind == "residual")
    return Outcome(seed, deviation, gains)


def draw_branch(spread: float) -> Function:
    """F(x) = W2 relu(W1 x), (WIDTH,) -> (WIDTH,)."""
    first, second = (spread * torch.randn(WIDTH, WIDTH) for _ in range(2))

    def branch(x: Tensor) -> Tensor:
        return second @ torch.relu(first @ x)

    return branch


def five_lines(first: Outcome) -> list[str]:
    """Seed 0 beside the published lines of seed 0, which another program drew."""
    lines = [f"Jacobian of x + F(x) equals I + dF/dx: {first.deviation < 1e-5} (published: True)"]
    for (kind, spread), (value, _) in PUBLISHED.items():
        lines.append(f"{kind}, spread {spread}: {first.gains[kind, spread]:.1e} (published: {value:.1e})")
    return lines


def judge(outcomes: Sequence[Outcome]) -> list[Claim]:
    """The identity, and each stack's gain against the published seeds."""
    worst = max(o.deviation for o in outcomes)
    claims = [Claim("Jacobian of x + F(x) equals I + dF/dx", "True", f"largest deviation {worst:.1e}", worst < 1e-5)]
    for (kind, spread), (_, (low, high)) in PUBLISHED.items():
        gains = [o.gains[kind, spread] for o in outcomes]
        claims.append(within(f"{kind}, spread {spread}: gain of {BLOCKS} blocks", gains, low, high, ".1e"))
    return claims


def draw(outcomes: Sequence[Outcome], path: Path) -> Path:
    """Every gain as a point, on a logarithmic axis."""
    figure, (ax,) = plots.new_figure(1)
    for place, key in enumerate(PUBLISHED):
        gains = [max(o.gains[key], 1e-45) for o in outcomes]
        ax.semilogy([place] * len(gains), gains, "o", color="tab:red" if key[0] == "plain" else "tab:blue")
    ax.axhline(1, color="black", linewidth=0.8)
    ax.set_xticks(range(len(PUBLISHED)), [f"{kind}\nspread {spread}" for kind, spread in PUBLISHED])
    ax.set_ylabel(f"gain of {BLOCKS} blocks")
    figure.savefig(path, dpi=150)
    return path
