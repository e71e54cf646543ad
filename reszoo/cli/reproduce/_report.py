"""A reproduction's closing table: claim, published, ours, verdict."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Claim:
    """A published statement beside what was measured here."""

    text: str
    published: str
    ours: str
    holds: bool


def within(text: str, values: Sequence[float], low: float, high: float, form: str = ".1f", unit: str = "") -> Claim:
    """The claim that our seeds centre inside the published range; how many lie inside is shown.

    Of two samples of ten from one distribution, the second lies wholly inside the first's range in less than a quarter
    of all cases, so the verdict is on the median.
    """
    inside = sum(low <= float(format(value, form)) <= high for value in values)
    middle = statistics.median(values)
    ours = f"{min(values):{form}} to {max(values):{form}}{unit}, median {middle:{form}}{unit}"
    published = f"{low:{form}} to {high:{form}}{unit}"
    return Claim(text, published, f"{ours}; {inside} of {len(values)} seeds inside", low <= middle <= high)


def show(title: str, claims: Sequence[Claim]) -> None:
    """Print the table."""
    table = Table(title=title, title_justify="left")
    for name in ("claim", "published", "ours", "verdict"):
        table.add_column(name, overflow="fold")
    for claim in claims:
        table.add_row(claim.text, claim.published, claim.ours, "holds" if claim.holds else "DIFFERS")
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 120)
    console.print(table)


def as_records(claims: Sequence[Claim]) -> list[dict[str, object]]:
    """The claims as plain values."""
    return [asdict(claim) for claim in claims]
