"""Stochastic depth: residual branches that are left out at random during training.

Paper: Huang et al. 2016, "Deep Networks with Stochastic Depth", arXiv:1603.09382, Section 3. Per sample, with the
scaling moved to training, it is what current libraries call drop path; the form that computes only the kept samples is
that of Oquab et al. 2023, arXiv:2304.07193.

Shapes: N batch; the other dimensions are the branch's own.
"""

from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from reszoo.errors import check_at_least, check_between, check_choice

DropPer = Literal["batch", "sample"]

MASK_UP_TO = 0.1  # measured: at this rate gathering the kept samples costs what leaving out the others saves


class StochasticDepth(nn.Sequential):
    """A residual branch that is dropped with probability `rate` in training; its keys are those of `nn.Sequential`.

    `per="batch"` is the paper's: one draw a mini-batch, b F(x) in training and (1 - rate) F(x) in evaluation. A dropped
    branch is not computed; it contributes a zero without dimensions, which the block's sum broadcasts. `per="sample"`
    draws for every sample and runs the branch on the kept ones alone, times 1 / (1 - rate), so evaluation is plain F(x)
    and BatchNorm in the branch sees the kept samples. It masks the full result instead where that is no slower (rate
    up to 0.1), where one sample is kept (BatchNorm cannot normalise a single value) and while a compiler traces, whose
    graph cannot depend on a draw. Rate 0 is exactly `nn.Sequential`; at rate 1 the branch is zero in either mode.

    The parameters of a dropped branch get no gradient (None), so an optimizer neither moves nor decays them in that
    step. Only among several processes do they get a zero gradient, because DistributedDataParallel waits for every
    parameter. That makes it safe for each process to draw for itself, as each has its own mini-batch. Only in a branch
    with SyncBatchNorm do the processes wait for each other: there all follow the draw of process 0, or mask samples.

    Args:
        layers: The layers of the branch, as for `nn.Sequential`.
        rate: Probability of dropping, from 0 to 1.
        per: What one draw decides for, the whole mini-batch or each sample.
    """

    def __init__(self, *layers: Any, rate: float = 0.0, per: DropPer = "batch") -> None:
        super().__init__(*layers)
        check_between("rate", rate, 0, 1)
        check_choice("per", per, get_args(DropPer))
        self.rate = rate
        self.per = per

    def forward(self, x: Tensor) -> Tensor:
        """What the branch returns for x, (N, ...), or a zero without dimensions if it is dropped."""
        if self.rate == 0:
            return super().forward(x)
        if self.rate == 1:
            return self.nothing(x)
        if self.training:
            return self._drop_batch(x) if self.per == "batch" else self._drop_samples(x)
        y = super().forward(x)
        return y * (1 - self.rate) if self.per == "batch" else y

    def _drop_batch(self, x: Tensor) -> Tensor:
        """Return the paper's b F(x), with one b for all."""
        if torch.compiler.is_compiling():
            y = super().forward(x)
            return torch.where(torch.rand((), device=x.device) >= self.rate, y, 0)
        return super().forward(x) if self.draw(1) else self.nothing(x)

    def _drop_samples(self, x: Tensor) -> Tensor:
        """Return b F(x) / (1 - rate), with one b a sample."""
        scale = 1 / (1 - self.rate)
        if torch.compiler.is_compiling():
            return _mask(super().forward(x), torch.rand(len(x), device=x.device) >= self.rate) * scale
        keep = self.draw(len(x))
        kept = keep.nonzero().flatten().to(x.device, non_blocking=True)
        if len(kept) == 0 and not self._synchronises():
            return self.nothing(x)
        if len(kept) == 1 or self.rate <= MASK_UP_TO or self._synchronises():
            return _mask(super().forward(x), keep.to(x.device, non_blocking=True)) * scale
        y = super().forward(x.index_select(0, kept))
        return y.new_zeros(len(x), *y.shape[1:]).index_add(0, kept, y, alpha=scale)

    def draw(self, count: int) -> Tensor:
        """(count,) truth values, True for kept; on the CPU, so that reading them never waits for an accelerator."""
        keep = torch.rand(count, device="cpu") >= self.rate
        if self.per == "batch" and self._synchronises():
            shared = keep.to(next(self.parameters()).device)
            dist.broadcast(shared, 0)
            keep = shared.cpu()
        return keep

    def _synchronises(self) -> bool:
        """Whether several processes train together and wait for each other within the branch."""
        return _distributed() and any(isinstance(module, nn.SyncBatchNorm) for module in self.modules())

    def nothing(self, x: Tensor) -> Tensor:
        """A zero of x's dtype; among several processes it hangs on every parameter, whose gradient is then zero."""
        zero = x.new_zeros(())
        if self.training and _distributed():
            for parameter in self.parameters():
                zero = zero + parameter.flatten()[:0].sum().to(x.dtype)  # an empty sum: 0 even where a weight is NaN
        return zero

    def extra_repr(self) -> str:
        return f"rate={self.rate:g}, per={self.per!r}"


def linear_rates(num_blocks: int, last_rate: float) -> list[float]:
    """The rates l / L · last_rate for l = 1 ... L: survival falls linearly from 1, before block 1, to 1 - last_rate.

    Args:
        num_blocks: The paper's L, at least 0.
        last_rate: Rate of the last block, 1 - p_L, from 0 to 1; the paper's is 0.5.

    Raises:
        ReszooError: A number is out of its range.
    """
    check_at_least("num_blocks", num_blocks, 0)
    check_between("last_rate", last_rate, 0, 1)
    return [number / num_blocks * last_rate for number in range(1, num_blocks + 1)]


def drop_linearly(network: nn.Module, last_rate: float, per: DropPer = "batch") -> None:
    """Give every `StochasticDepth` of the network, in the order of its modules, the rate of the linear rule."""
    check_choice("per", per, get_args(DropPer))
    branches = [module for module in network.modules() if isinstance(module, StochasticDepth)]
    for branch, rate in zip(branches, linear_rates(len(branches), last_rate), strict=True):
        branch.rate, branch.per = rate, per


def _distributed() -> bool:
    """Whether several processes train together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _mask(y: Tensor, keep: Tensor) -> Tensor:
    """Set the samples of y that are not kept to zero."""
    return torch.where(keep.view(-1, *[1] * (y.dim() - 1)), y, 0)
