"""The package's own error, the one a user sees: what, where, expected, found, and what to do next."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class ReszooError(ValueError):
    """An input that cannot be used; the message names it, what was expected, what came and the next step."""


def nearest(word: str, known: Iterable[str], count: int = 3) -> str:
    """The known words closest to `word`, as the end of an error message; empty if none is close."""
    matches = get_close_matches(word, list(known), n=count, cutoff=0.5)
    return f"; did you mean {' or '.join(matches)}?" if matches else ""


def check_at_least(name: str, value: float, least: float) -> None:
    """Refuse a value below its least."""
    if value < least:
        raise ReszooError(f"{name} must be at least {least}, got {value}")


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """Refuse a value that is not one of the choices."""
    choices = list(choices)
    if value not in choices:
        raise ReszooError(f"{name} must be one of {', '.join(map(str, choices))}; got {value!r}")


def check_between(name: str, value: float, low: float, high: float) -> None:
    """Refuse a value outside the closed interval from `low` to `high` (and NaN)."""
    if not low <= value <= high:
        raise ReszooError(f"{name} must be between {low} and {high}, got {value}")


def check_image_shape(found: Sequence[int], expected: Sequence[int]) -> None:
    """Refuse a batch (N, C, H, W) whose images are not of the shape (C, H, W) that the network was built for."""
    if tuple(found[1:]) != tuple(expected):
        raise ReszooError(
            f"images must be (N, {', '.join(map(str, expected))}), got {tuple(found)}; "
            "build the network with the in_chans and image_size of the data"
        )
