"""`reszoo benchmark`: measurements against peers; each file here compares outputs first and times after."""

from collections.abc import Sequence
from importlib import import_module
from pkgutil import iter_modules

from rich.console import Console
from rich.table import Table

from reszoo.cli._parser import Parser
from reszoo.cli.benchmark._harness import Row


def names() -> list[str]:
    """What can be measured: the files of this folder."""
    return sorted(module.name.replace("_", "-") for module in iter_modules(__path__) if module.name[0] != "_")


def main(command: str, argv: Sequence[str]) -> int:
    """Measure one thing and print a row a contestant; the first of each group is the peer."""
    parser = Parser("benchmark", "Measure ours beside its peers in one run.")
    parser.add_argument("what", choices=names())
    what = parser.parse_args(argv).what
    module = import_module(f"{__name__}.{what.replace('-', '_')}")
    show(what, module.measure())
    return 0


def show(what: str, rows: Sequence[Row]) -> None:
    """A table of medians, ratios to the peer, and the ratios' quartiles."""
    table = Table(title=what, title_justify="left")
    for name in ("contestant", "median", "ratio", "quartiles", "rounds"):
        table.add_column(name, overflow="fold")
    for row in rows:
        median = f"{row.figure:.4g} {row.unit}"
        table.add_row(row.name, median, f"{row.ratio:.3f}", f"{row.low:.3f} to {row.high:.3f}", str(row.rounds))
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 120)
    console.print(table)
