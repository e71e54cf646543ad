"""From a loaded checkpoint to bare names: which set of weights, and without what wrappers left in the keys."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import combinations
from typing import Any

from torch import Tensor

from reszoo.errors import ReszooError

RAW = ("state_dict", "model", "model_state_dict")
AVERAGED = ("state_dict_ema", "model_ema", "ema_state_dict", "ema")
WRAPPERS = ("module", "model", "_orig_mod")
"""DistributedDataParallel and DataParallel, Lightning's usual attribute, torch.compile."""


def pick(checkpoint: Mapping[str, Any], ema: bool | None) -> tuple[Mapping[str, Tensor], str]:
    """The state dict inside a loaded checkpoint.

    Args:
        checkpoint: A state dict, or a dictionary that holds one under a usual name.
        ema: Whether to take the averaged weights. None takes the only set there is.

    Returns:
        The state dict, and "raw" or "averaged".

    Raises:
        ReszooError: The set asked for is absent, both are there and none was chosen, or there is none.
    """
    raw, averaged = _first(checkpoint, RAW), _first(checkpoint, AVERAGED)
    if raw is None and averaged is None:
        raw = checkpoint
    if ema is None and raw is not None and averaged is not None:
        raise ReszooError("the checkpoint holds raw and averaged weights; choose with ema=False or ema=True")
    if ema and averaged is None:
        raise ReszooError(
            "averaged weights were asked for (ema=True), and the checkpoint holds none; drop the argument"
        )
    if ema is False and raw is None:
        raise ReszooError("raw weights were asked for (ema=False), and the checkpoint holds averaged ones only")
    chosen, kind = (raw, "raw") if (raw is not None and not ema) else (averaged, "averaged")
    tensors = {key: value for key, value in (chosen or {}).items() if isinstance(value, Tensor)}
    others = [key for key in chosen or {} if key not in tensors]
    if not tensors or others:
        what = f"{others[0]!r} is {type((chosen or {})[others[0]]).__name__}" if others else "it is empty"
        raise ReszooError(f"expected a state dict, names with tensors; {what}. Give the state dict itself")
    return tensors, kind


def _first(checkpoint: Mapping[str, Any], keys: Iterable[str]) -> Mapping[str, Any] | None:
    """The first dictionary found under one of the keys."""
    return next((checkpoint[key] for key in keys if isinstance(checkpoint.get(key), Mapping)), None)


def unwrap(
    stored: Iterable[str],
    known: Callable[[str], bool],
    wrappers: Iterable[str] = (),
    modern: Callable[[str], str] = lambda name: name,
) -> dict[str, str]:
    """Bare names of stored ones: parts that wrappers left are taken out, where that leads to a known name.

    First what stands in front of all names goes, as long as more of them are then known: so a layer of the network that
    is itself called `module` keeps its name. What is still unknown is tried without each wrapper's part in its middle.

    Args:
        stored: Names of a file.
        known: Whether a bare name is expected.
        wrappers: Parts that may go beside `WRAPPERS`.
        modern: Brings older spellings to today's.

    Returns:
        Bare name -> stored name.

    Raises:
        ReszooError: Two stored names become one.
    """
    stored, removable = list(stored), {*WRAPPERS, *wrappers}
    prefix = max(_prefixes(stored, removable), key=lambda p: sum(known(modern(name[len(p) :])) for name in stored))
    bare: dict[str, str] = {}
    for name in stored:
        clean = _without_wrappers(name[len(prefix) :] if name.startswith(prefix) else name, known, removable, modern)
        if clean in bare:
            raise ReszooError(f"two stored tensors, {bare[clean]} and {name}, are both {clean}; remove one")
        bare[clean] = name
    return bare


def _prefixes(stored: list[str], removable: set[str]) -> list[str]:
    """Nothing, and every run of wrappers' parts that opens most names, the shortest first."""
    prefixes = [""]
    while True:
        parts = {name[len(prefixes[-1]) :].split(".")[0] for name in stored if name.startswith(prefixes[-1])}
        longer = [prefixes[-1] + part + "." for part in parts & removable]
        if not longer:
            return prefixes
        prefixes.append(max(longer, key=lambda p: sum(name.startswith(p) for name in stored)))


def _without_wrappers(
    name: str, known: Callable[[str], bool], removable: set[str], modern: Callable[[str], str]
) -> str:
    """The name without as few wrappers' parts as make it known; the name itself if none do."""
    for candidate in _candidates(name, removable):
        for spelling in (candidate, modern(candidate)):
            if known(spelling):
                return spelling
    return name


def _candidates(name: str, removable: set[str]) -> Iterator[str]:
    """The name, then without one removable part, then without two, and so on."""
    parts = name.split(".")
    places = [index for index, part in enumerate(parts) if part in removable]
    for count in range(len(places) + 1):
        for gone in combinations(places, count):
            yield ".".join(part for index, part in enumerate(parts) if index not in gone)
