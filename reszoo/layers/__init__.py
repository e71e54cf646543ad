"""Layers that two or more families share."""

from reszoo.layers.attention import Packed, Padded, SelfAttention, lay_out
from reszoo.layers.bias import Bias
from reszoo.layers.branch_scale import BranchScale, LayerScale, ScalarScale, cait_initial, scale_branches
from reszoo.layers.checkpoint import recompute, run_in_segments
from reszoo.layers.frozen_norm import FrozenBatchNorm2d, freeze_batch_norm
from reszoo.layers.gate import Gate
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
    "Bias",
    "BranchScale",
    "DropPer",
    "FrozenBatchNorm2d",
    "Gate",
    "LayerScale",
    "MakeShortcut",
    "Packed",
    "Padded",
    "ProjectionShortcut",
    "ScalarScale",
    "SelfAttention",
    "Shortcut",
    "StochasticDepth",
    "ZeroPadShortcut",
    "ZeroPadding",
    "cait_initial",
    "drop_linearly",
    "freeze_batch_norm",
    "he_init",
    "lay_out",
    "linear_rates",
    "recompute",
    "run_in_segments",
    "scale_branches",
    "shortcut_maker",
]
