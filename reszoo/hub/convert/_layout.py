"""Layouts: what another library calls our tensors, as a table of name patterns."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import Tensor

from reszoo.errors import ReszooError
from reszoo.hub.adopt import Weights

Name = str | tuple[str, ...]
_FIELD = re.compile(r"\{(\w+)([+-]\d+)?\}")


@dataclass(frozen=True, eq=False)
class Layout:
    """How the checkpoints of one or more libraries name the tensors of one of our files.

    Args:
        libraries: Who writes it.
        table: Our pattern -> theirs, the first that fits a name wins; an empty table keeps every name. `{s}` stands for
            a number, `{s+1}` for the next one; what follows the pattern (`.weight`) stays. Several names are joined
            along the first dimension.
        fixed: Options of our factory that the library's code settles and no tensor shows.
        implied: Options that the stored tensors show, from their names and shapes.
        exports: Options without which the library cannot run what we would export, beside `fixed`.
        wrappers: Names of modules that this library's files may put in front of every name.
        base: What stands in front of every exported name but the head's, where there is a head.
        legacy: Regular expressions and replacements that bring older spellings to the table's.
        unused: Regular expressions of stored names that ours has no place for and whose absence changes no output.
        ones: Trailing dimensions of one element that the library's tensor has and ours has not, by our name.
        check: Raises where tensors under our names would give another function than the library's.
        first: Our name of the layer that reads the images.
        heads_from: An option with which the number of attention heads varies, which no tensor shows.
    """

    libraries: tuple[str, ...]
    table: Mapping[str, Name]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    implied: Callable[[Weights], dict[str, Any]] = lambda weights: {}
    exports: Mapping[str, Any] = field(default_factory=dict)
    wrappers: tuple[str, ...] = ()
    base: str = ""
    legacy: tuple[tuple[str, str], ...] = ()
    unused: tuple[str, ...] = ()
    ones: Mapping[str, int] = field(default_factory=dict)
    check: Callable[[Mapping[str, Tensor]], None] = lambda state: None
    first: str = "stem.0.weight"
    heads_from: str = ""

    def names(self, ours: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Their names for each of ours.

        Raises:
            ReszooError: The library has no counterpart of one.
        """
        return {name: self._name(name) for name in ours}

    def _name(self, name: str) -> tuple[str, ...]:
        if not self.table:
            return (name,)
        for pattern, theirs in self.table.items():
            match = _ours(pattern).match(name)
            if match:
                rest = name[match.end() :]
                return tuple(_render(t, match) + rest for t in ((theirs,) if isinstance(theirs, str) else theirs))
        raise ReszooError(f"{' and '.join(self.libraries)} have no counterpart of {name}")

    def share(self, names: Iterable[str]) -> float:
        """The share of stored names that look like this layout, whatever stands in front of them."""
        names, theirs = [self.modern(name) for name in names], self._theirs
        return sum(bool(theirs.search(name)) for name in names) / max(1, len(names))

    def modern(self, name: str) -> str:
        """The name with older spellings brought to the table's."""
        for old, new in self.legacy:
            name = re.sub(old, new, name)
        return name

    def is_unused(self, name: str) -> bool:
        """Whether ours has no place for this stored name, and no output depends on it."""
        return any(re.fullmatch(pattern, name) for pattern in self.unused)

    @property
    def _theirs(self) -> re.Pattern[str]:
        return _any_of(tuple(t for v in self.table.values() for t in ((v,) if isinstance(v, str) else v)))


@cache
def _ours(pattern: str) -> re.Pattern[str]:
    """A table's left side as an expression that ends where a name's part ends."""
    return re.compile(
        _FIELD.sub(r"(?P<\1>\\d+)", re.escape(pattern).replace(r"\{", "{").replace(r"\}", "}")) + r"(?=\.|$)"
    )


@cache
def _any_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """Right sides of a table as one expression, behind anything that ends in a dot."""
    escaped = (
        re.escape(p).replace(r"\{", "{").replace(r"\}", "}").replace(r"\+", "+").replace(r"\-", "-") for p in patterns
    )
    return re.compile(r"(?:^|\.)(?:" + "|".join(_FIELD.sub(r"\\d+", p) for p in escaped) + r")(?=\.|$)(?:\.\w+)?$")


def _render(theirs: str, match: re.Match[str]) -> str:
    """A table's right side with the numbers of a match filled in."""
    return _FIELD.sub(lambda part: str(int(match[part[1]]) + int(part[2] or 0)), theirs)


def ending(weights: Weights, *names: str) -> str | None:
    """The stored name that is, or after a dot ends in, one of the given; the shortest, None if there is none."""
    found = [n for n in weights.names() for name in names if n == name or n.endswith("." + name)]
    return min(found, key=len, default=None)
