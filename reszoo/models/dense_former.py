"""DenseFormer: behind every block, a learned weighted average of the outputs of all blocks so far.

Paper: Pagliardini et al. 2024, "DenseFormer: Enhancing Information Flow in Transformers via Depth Weighted Averaging",
arXiv:2402.02622, without its dilation and period. On the pre-LN encoder, which it equals at the start.

Shapes: B batch, L length, T real tokens, D width, d blocks; (..., D) is (B, L, D) or packed (T, D).
"""

from typing import Any

import torch
from torch import Tensor, nn

from reszoo.errors import ReszooError
from reszoo.layers import Packed, Padded
from reszoo.models._encoder import Encoder
from reszoo.models._registry import register
from reszoo.models.transformer import PreLN


class DepthWeightedAverage(nn.Module):
    """A weighted sum of everything so far, in which the newest has weight 1 and the rest 0 at first.

    Args:
        count: How many outputs there are, the embedding included.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.cat((torch.zeros(count - 1), torch.ones(1))))

    def forward(self, outputs: list[Tensor]) -> Tensor:
        """A list of (..., D) -> (..., D)."""
        return sum((w * y for w, y in zip(self.weight, outputs, strict=True)), torch.zeros_like(outputs[-1]))


class DenseFormer(Encoder):
    """Encoder of d pre-LN blocks, each followed by an average over the embedding and all blocks' outputs so far.

    The averages add d (d + 3) / 2 parameters.

    Args:
        options: Those of `Encoder`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(PreLN, True, **options)
        if self.checkpoint_every:
            raise ReszooError("a DenseFormer keeps every block's output, so checkpoint_every must be 0")
        self.averages = nn.ModuleList(DepthWeightedAverage(number + 2) for number in range(len(self.blocks)))

    def run_blocks(self, x: Tensor, rows: Padded | Packed) -> Tensor:
        """(..., D) -> (..., D)."""
        outputs = [x]
        for block, average in zip(self.blocks, self.averages, strict=True):
            outputs.append(block(x, rows))
            x = average(outputs)
        return x


@register
def denseformer_encoder(**options: Any) -> Encoder:
    """DenseFormer's averages over a pre-LN encoder; d (d + 3) / 2 parameters more; 4 blocks of 64."""
    return DenseFormer(**options)
