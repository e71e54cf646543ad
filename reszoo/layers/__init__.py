"""Layers that two or more families share."""

from reszoo.layers.attention import Packed, Padded, SelfAttention, lay_out
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
    "Packed",
    "Padded",
    "ProjectionShortcut",
    "SelfAttention",
    "Shortcut",
    "ZeroPadShortcut",
    "ZeroPadding",
    "he_init",
    "lay_out",
    "shortcut_maker",
]
