"""A learned gate over a signal's units.

Papers: Srivastava, Greff and Schmidhuber 2015, "Training Very Deep Networks", arXiv:1507.06228, for both terms of a
block; He et al. 2016, "Identity Mappings in Deep Residual Networks", arXiv:1603.05027, Table 1, for the shortcut.

Departure: the bias is a parameter of the gate and not of its linear map, so that an initialiser that walks over
`nn.Linear` and `nn.Conv2d` cannot reset it.

Shapes: N batch, D units or channels; further dimensions are positions.
"""

import torch
from torch import Tensor, nn


class Gate(nn.Module):
    """The share of a signal that passes: sigmoid(W x + b), between 0 and 1 for each unit.

    Args:
        layer: The linear map W, without a bias.
        bias: Where every entry of b starts.
    """

    def __init__(self, layer: nn.Linear | nn.Conv2d, bias: float) -> None:
        super().__init__()
        self.initial_bias = bias
        self.layer = layer
        self.bias = nn.Parameter(torch.empty(layer.weight.shape[0]))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Put the bias back where it starts; what materialises a network from the meta device calls this."""
        nn.init.constant_(self.bias, self.initial_bias)

    def forward(self, x: Tensor) -> Tensor:
        """(N, D, ...) -> the same shape."""
        return torch.sigmoid(self.layer(x) + self.bias.view(-1, *(1,) * (x.dim() - 2)))

    def extra_repr(self) -> str:
        return f"initial_bias={self.initial_bias}"
