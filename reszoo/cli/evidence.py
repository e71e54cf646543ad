"""`reszoo record`: turn finished runs of a recipe into its stored evidence and its header's two measured lines.

The evidence lies beside the recipe, `recipes/<dataset>/<model>.json`, so that no number in a header is typed.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reszoo.cli._parser import Parser
from reszoo.cli.recipes import find_recipe
from reszoo.errors import ReszooError

KEPT = ("seed", "metrics", "epochs", "steps", "wall_seconds", "data", "started")
METRIC = "test/accuracy"


def main(command: str, argv: Sequence[str]) -> int:
    """Record runs of one recipe, one seed each."""
    parser = Parser("record", "Store finished runs as a recipe's evidence.")
    parser.add_argument("runs", nargs="+", type=Path, help="run folders of one recipe, a seed each")
    results = [read_results(run) for run in parser.parse_args(argv).runs]
    names = sorted({result["recipe"]["name"] for result in results})
    if len(names) != 1:
        raise ReszooError(f"the runs are of several recipes, {', '.join(names)}; record one recipe at a time")
    recipe = find_recipe(names[0])
    kept = [{key: result[key] for key in KEPT} | _origin(result) for result in results]
    evidence_of(recipe).write_text(json.dumps(sorted(kept, key=lambda run: run["seed"]), indent=2) + "\n", "utf-8")
    rewrite_header(recipe)
    print("\n".join(recipe.read_text("utf-8").splitlines()[:4]))
    return 0


def read_results(run: Path) -> dict[str, Any]:
    """The record of a finished run."""
    path = run / "results.json"
    if not path.is_file():
        raise ReszooError(f"{str(run)!r} is no run folder: it has no results.json")
    results: dict[str, Any] = json.loads(path.read_text("utf-8"))
    if results.get("status") != "finished":
        raise ReszooError(f"run {str(run)!r} ended as {results.get('status')!r}; only finished runs are evidence")
    return results


def evidence_of(recipe: Path) -> Path:
    """Where a recipe's evidence lies."""
    return recipe.with_suffix(".json")


def measured_lines(runs: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """The header's `Expected` and `Cost` lines for the stored runs."""
    values = [100 * run["metrics"][METRIC]["value"] for run in runs]
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    count = {run["metrics"][METRIC]["n"] for run in runs}
    seconds = statistics.median(run["wall_seconds"] for run in runs)
    cpu, threads = runs[0]["cpu"], runs[0]["threads"]
    seeds = "1 seed" if len(runs) == 1 else f"{len(runs)} seeds"
    n = ", ".join(map(str, sorted(count)))
    return (
        f"# Expected: test accuracy {statistics.mean(values):.2f}{spread}% ({seeds}, n = {n})",
        f"# Cost: {seconds:.0f} s with {threads} thread{'s' * (threads > 1)} of {cpu}",
    )


def rewrite_header(recipe: Path) -> None:
    """Put the measured lines of the stored evidence into the recipe's header."""
    lines = recipe.read_text("utf-8").splitlines()
    lines[1:3] = measured_lines(json.loads(evidence_of(recipe).read_text("utf-8")))
    recipe.write_text("\n".join(lines) + "\n", "utf-8")


def _origin(result: Mapping[str, Any]) -> dict[str, Any]:
    """Where a run came from: commit, processor and versions."""
    environment = result["environment"]
    return {key: environment[key] for key in ("commit", "cpu", "cpu_count", "threads", "gpus", "versions")}
