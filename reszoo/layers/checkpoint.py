"""Activation checkpointing: a segment of blocks keeps its input alone and computes the rest again in the backward pass.

Paper: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174: segments of
about sqrt(L) of L blocks need memory for O(sqrt(L)) of them.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def run_in_segments(blocks: nn.Sequential, x: Tensor, every: int) -> Tensor:
    """The result of `blocks(x)`, with each run of `every` blocks checkpointed; 0 is the plain call.

    Args:
        blocks: Modules of one argument and one result.
        x: Input of the first.
        every: Blocks a segment. L blocks that each keep c times their input need L / every + c · every inputs, least at
            sqrt(L / c), with a flat minimum; c is about 2 in a pre-activation bottleneck.
    """
    if every == 0:
        return blocks(x)
    for start in range(0, len(blocks), every):
        x = recompute(list(blocks)[start : start + every], x)
    return x


def recompute(blocks: Sequence[nn.Module], x: Tensor, *context: Any) -> Tensor:
    """Run x through the blocks, whose inner results are freed and computed again when the gradient needs them.

    Gradients and dropout masks are those of the plain call, and so is every buffer: the second computation works on
    copies, so that BatchNorm's running statistics and its count of batches move once a step. Without gradients, and
    while a compiler traces (which decides itself what to recompute), it is the plain call.

    Args:
        blocks: Modules of `(x, *context)` and one result.
        x: Input of the first.
        context: What every block gets beside x.
    """

    def run(x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x, *context)
        return x

    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return run(x)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _buffers_copied(blocks)

    return checkpoint(run, x, use_reentrant=False, context_fn=contexts)


@contextmanager
def _buffers_copied(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Put a copy in the place of every buffer, and the originals back at the end."""
    originals = [
        (module, name, buffer)
        for block in blocks
        for module in block.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    for module, name, buffer in originals:
        setattr(module, name, buffer.clone())
    try:
        yield
    finally:
        for module, name, buffer in originals:
            setattr(module, name, buffer)
