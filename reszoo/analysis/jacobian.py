"""Jacobians of blocks and stacks: how a small change of the input, or a gradient, passes through depth.

Source: He et al. 2016, "Identity Mappings in Deep Residual Networks", arXiv:1603.05027, Eq. 3 to 5.

Shapes: D width, L blocks.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]


def jacobian(function: Function, x: Tensor) -> Tensor:
    """The matrix of partial derivatives, J[i, j] = d function(x)[i] / d x[j]; (D,) -> (D, D)."""
    return torch.autograd.functional.jacobian(function, x)


def identity_error(branch: Function, x: Tensor) -> float:
    """Largest deviation of the Jacobian of x + F(x) from I + dF/dx; the two are equal, up to rounding."""
    with_shortcut = jacobian(lambda v: v + branch(v), x)
    expected = torch.eye(x.numel(), dtype=x.dtype) + jacobian(branch, x)
    return float((with_shortcut - expected).abs().max())


def stack_gain(branches: Sequence[Function], x: Tensor, *, residual: bool) -> float:
    """Spectral norm of the Jacobian of a whole stack at `x`: the most that any small change of the input can grow.

    Args:
        branches: The L branches F, each (D,) -> (D,).
        x: Where to take the derivative.
        residual: Whether each block is x + F(x), or F(x) alone.

    Returns:
        The largest singular value; below 1 every change fades, above 1 some grow.
    """
    product = torch.eye(x.numel(), dtype=torch.float64)
    for branch in branches:
        own = jacobian(branch, x).double()
        product = (own + torch.eye(x.numel(), dtype=torch.float64) if residual else own) @ product
        x = x + branch(x) if residual else branch(x)
    return float(torch.linalg.matrix_norm(product, 2))
