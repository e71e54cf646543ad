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
from reszoo.layers.stochastic_depth import DropPer, StochasticDepth, drop_linearly, linear_rates

__all__ = [
    "DropPer",
    "MakeShortcut",
    "ProjectionShortcut",
    "Shortcut",
    "StochasticDepth",
    "ZeroPadShortcut",
    "ZeroPadding",
    "drop_linearly",
    "he_init",
    "linear_rates",
    "shortcut_maker",
]
