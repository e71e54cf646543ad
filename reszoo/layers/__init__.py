"""Layers that two or more families share."""

from reszoo.layers.frozen_norm import FrozenBatchNorm2d, freeze_batch_norm
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
    "FrozenBatchNorm2d",
    "MakeShortcut",
    "ProjectionShortcut",
    "Shortcut",
    "ZeroPadShortcut",
    "ZeroPadding",
    "freeze_batch_norm",
    "he_init",
    "shortcut_maker",
]
