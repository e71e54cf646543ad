"""`reszoo reproduce`: published experiments repeated, with the published numbers beside ours."""

import argparse
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from reszoo.cli._parser import Parser

EXPERIMENTS = {
    "degradation-digits": "deeper plain networks train worse, deeper residual ones do not (1,437 digits, 10 seeds)",
    "gradient-identity": "the Jacobian of x + F(x) is I + dF/dx, and what that does to 30 blocks",
}
"""Each is a module of this folder with `reproduce(seeds, folder)`."""


def main(command: str, argv: Sequence[str]) -> int:
    """Run one experiment; the exit code is 0 if every claim held, 1 if one did not."""
    parser = Parser(
        "reproduce",
        "Repeat a published experiment and compare.",
        epilog="\n".join(f"{name}: {about}" for name, about in EXPERIMENTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds, from 0 on (default 10, as published)")
    parser.add_argument("--root", type=Path, default=Path(), help="folder that holds `runs` (default: here)")
    options = parser.parse_args(argv)
    if options.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {options.seeds}")
    module = import_module(f"{__name__}.{options.experiment.replace('-', '_')}")
    held: bool = module.reproduce(options.seeds, options.root)
    return 0 if held else 1
