"""Side-by-side timing: contestants take turns in one process, and medians of each round's ratio are compared.

Absolute times on a shared machine mean little; a ratio of two runs a second apart means much.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One contestant: its figure, its ratio to the peer (the first contestant), and the quartiles of that ratio."""

    name: str
    figure: float
    unit: str
    ratio: float
    low: float
    high: float
    rounds: int


def interleaved(contestants: Mapping[str, Callable[[], object]], rounds: int = 9, warmup: int = 1) -> list[Row]:
    """Time each contestant once a round, in alternating order; the first is the peer.

    Args:
        contestants: What to call, by name.
        rounds: Timed rounds.
        warmup: Untimed calls of each before the first round.

    Returns:
        One row a contestant: median seconds, and the median and quartiles of its per-round ratio to the peer.
    """
    for call in contestants.values():
        for _ in range(warmup):
            call()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            start = time.perf_counter()
            contestants[name]()
            seconds[name].append(time.perf_counter() - start)
    return [_row(name, seconds[name], seconds[names[0]]) for name in names]


def _row(name: str, own: list[float], peer: list[float]) -> Row:
    """Ratios are taken round by round, so that a slow minute of the machine falls on both."""
    ratios = sorted(a / b for a, b in zip(own, peer, strict=True))
    low, high = ratios[len(ratios) // 4], ratios[(3 * len(ratios)) // 4]
    return Row(name, statistics.median(own), "s", statistics.median(ratios), low, high, len(ratios))


def memory_rows(mebibytes: Mapping[str, float]) -> list[Row]:
    """Peak memory by contestant, the first being the peer, as rows."""
    peer = next(iter(mebibytes.values()))
    return [Row(name, value, "MiB", value / peer, value / peer, value / peer, 1) for name, value in mebibytes.items()]


def peak_memory(call: Callable[[], object]) -> float:
    """MiB by which `call` raises this process's resident memory above where it started (Linux).

    Run it in a fresh process per contestant: freed memory of an earlier one would be reused unseen.
    """
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _status("VmRSS")
    call()
    return (_status("VmHWM") - before) / 1024


def _status(key: str) -> int:
    """A figure of the kernel's report on this process, in KiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key + ":"))
    return int(line.split()[1])
