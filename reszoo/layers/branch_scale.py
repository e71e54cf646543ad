"""Trained factors behind a residual branch: y = shortcut(x) + s F(x).

Papers: ReZero, Bachlechner et al. 2020, arXiv:2003.04887; SkipInit, De and Smith 2020, arXiv:2002.10444; and
LayerScale, Touvron et al. 2021, arXiv:2103.17239. Each is the last layer of its branch, so the sum of a block
stays as it is.
"""

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from reszoo.errors import check_choice
from reszoo.layers.stochastic_depth import StochasticDepth

BranchScale = Literal["none", "rezero", "layer_scale"]


class ScalarScale(nn.Module):
    """One trained number times the input: alpha of ReZero and SkipInit, 0 at the start in both.

    Args:
        initial: Its first value.
    """

    def __init__(self, initial: float = 0.0) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(initial))

    def forward(self, x: Tensor) -> Tensor:
        """(...) -> (...)."""
        return self.alpha * x


class LayerScale(nn.Module):
    """One trained number a channel times the input, all starting at the same small value.

    Args:
        channels: Length of the channel dimension.
        initial: Their first value; CaiT takes 0.1 up to 18 blocks, 1e-5 at 24 and 1e-6 beyond.
        dim: The channel dimension, -1 for (B, L, D) and 1 for (N, C, H, W).
    """

    def __init__(self, channels: int, initial: float, dim: int = -1) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((channels,), initial))
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """(..., channels, ...) -> (..., channels, ...)."""
        behind = -1 - self.dim if self.dim < 0 else x.dim() - 1 - self.dim
        return self.gamma.view(-1, *[1] * behind) * x


def scale_branches(network: nn.Module, kind: BranchScale) -> None:
    """Append a trained factor to every branch of the network's blocks.

    Args:
        network: Its branches are `StochasticDepth` modules, its blocks carry `out_channels`.
        kind: "none"; "rezero", one number, 0 at the start; "layer_scale", one a channel, starting by depth as in CaiT.

    Raises:
        ReszooError: The kind is unknown.
    """
    check_choice("branch_scale", kind, get_args(BranchScale))
    blocks: list[Any] = [m for m in network.modules() if isinstance(getattr(m, "residual", None), StochasticDepth)]
    for block in blocks:
        if kind == "rezero":
            block.residual.append(ScalarScale())
        elif kind == "layer_scale":
            block.residual.append(LayerScale(block.out_channels, cait_initial(len(blocks)), dim=1))


def cait_initial(num_blocks: int) -> float:
    """CaiT's first value of LayerScale for a network of so many blocks."""
    return 0.1 if num_blocks <= 18 else 1e-5 if num_blocks <= 24 else 1e-6
