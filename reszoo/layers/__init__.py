"""Layers that two or more families share."""

from reszoo.layers.initialize import he_init
from reszoo.layers.shortcut import (
    MakeShortcut,
    ProjectionShortcut,
    Shortcut,
    ZeroPadding,
    ZeroPadShortcut,
    shortcut_maker,
)

__all__ = [
    "MakeShortcut",
    "ProjectionShortcut",
    "Shortcut",
    "ZeroPadShortcut",
    "ZeroPadding",
    "he_init",
    "shortcut_maker",
]
