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
from reszoo.layers.stochastic_depth import DropPer, StochasticDepth, drop_linearly, linear_rates

__all__ = [
    "DropPer",
    "MakeShortcut",
    "Packed",
    "Padded",
    "ProjectionShortcut",
    "SelfAttention",
    "Shortcut",
    "StochasticDepth",
    "ZeroPadShortcut",
    "ZeroPadding",
    "drop_linearly",
    "he_init",
    "lay_out",
    "linear_rates",
    "shortcut_maker",
]
