"""A reproduction's closing table: claim, published, ours, verdict."""

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


def within(text: str, values: Sequence[float], low: float, high: float, unit: str = "") -> Claim:
    """The claim that every value lies in the published range, ends included, at the published digits."""
    digits = max(len(f"{bound:g}".partition(".")[2]) for bound in (low, high))
    inside = all(low <= round(value, digits) <= high for value in values)
    ours = f"{min(values):.{digits}f} to {max(values):.{digits}f}{unit} (n = {len(values)})"
    return Claim(text, f"{low:g} to {high:g}{unit}", ours, inside)


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
