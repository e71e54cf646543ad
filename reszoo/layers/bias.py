"""A trained offset: what networks without normalisation have in the place of BatchNorm's shift.

Shapes: N batch, C channels, H height, W width.
"""

import torch
from torch import Tensor, nn


class Bias(nn.Module):
    """A trained offset, 0 at the start: one number for all channels, or one for each.

    Args:
        channels: 1, or the channels of the input.
    """

    def __init__(self, channels: int = 1) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C, H, W)."""
        return x + self.bias.view(-1, 1, 1)
