"""Dense blocks trained in memory linear in their depth, with the plain block's outputs, gradients and statistics.

Paper: Pleiss et al. 2017, "Memory-Efficient Implementation of DenseNets", arXiv:1707.06990: concatenated and normalised
features are cheap, so the backward pass computes them again. Three steps go further:

- A block's features stand in one buffer from the start, so nothing is ever concatenated.
- A channel's batch mean and standard deviation σ are the same for every layer that reads it: they are computed once.
- So is the gradient through them. A layer with scale γ that finds the gradient d at its normalised input x̂ contributes
  γ / σ (d - mean(d) - x̂ mean(d x̂)) to the gradient of x. Only the first term is added layer by layer, together with
  the sums over layers S = Σ γ sum(d) and T = Σ γ sum(d x̂); (S + x̂ T) / (n σ) is taken off when no layer is left.

Shapes: N batch, C channels, c channels that one layer reads, H height, W width; n = N * H * W values a channel.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_input, conv2d_weight

CACHED = 1 << 18  # values that stay in a processor's cache from one pass over them to the next


def can_recompute(module: nn.Module, x: Tensor) -> bool:
    """Whether the layers of `module` may be run another way in this pass without anyone seeing it.

    They may not outside training; where a hook or a replaced `forward` looks inside; where a BatchNorm is frozen,
    synchronised or keeps no running statistics; under a compiler or a function transform, which have ways of their own;
    and for a batch of one value a channel, which BatchNorm refuses with its own message.
    """
    return (
        module.training
        and torch.is_grad_enabled()
        and x.device.type in ("cpu", "cuda")
        and x.numel() > x.shape[1]
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and all(_is_untouched(inner) for inner in module.modules() if inner is not module)
    )


def _is_untouched(module: nn.Module) -> bool:
    """No hook, no replaced `forward`, and a BatchNorm is in the state that a network is built in."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if any(hooks) or "forward" in vars(module):
        return False
    if not isinstance(module, nn.modules.batchnorm._BatchNorm):
        return True
    full = module.training and module.affine and module.track_running_stats and module.momentum is not None
    return full and type(module) is nn.BatchNorm2d and module.weight.dtype in (torch.float32, torch.float64)


class Step(NamedTuple):
    """BatchNorm, ReLU, convolution and dropout: the composite function of one or of each half of a dense layer."""

    norm: nn.BatchNorm2d
    conv: nn.Conv2d
    dropout: float


Layers = Sequence[Sequence[Step]]


def steps_of(branches: Sequence[nn.Module], channels: int) -> Layers | None:
    """The steps of each layer's branch, or None where a layer is no longer what `DenseLayer` built.

    Args:
        branches: The branch of each layer, in order.
        channels: Channels that the first one reads.
    """
    layers: list[list[Step]] = []
    for branch in branches:
        steps: list[Step] = []
        inner = list(branch.children())
        while len(inner) >= 3:
            (norm, relu, conv), inner = inner[:3], inner[3:]
            dropout = inner.pop(0) if inner and type(inner[0]) is nn.Dropout else None
            rate = dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0
            if not (type(norm) is nn.BatchNorm2d and type(relu) is nn.ReLU and type(conv) is nn.Conv2d):
                return None
            steps.append(Step(norm, conv, rate))
        if inner or not _fit(steps, channels):
            return None
        layers.append(steps)
        channels += steps[-1].conv.out_channels
    return layers or None


def _fit(steps: Sequence[Step], channels: int) -> bool:
    """One or two steps that follow on each other and keep the resolution, without biases."""
    for step in steps:
        conv, size = step.conv, step.conv.kernel_size[0]
        plain = (conv.stride, conv.dilation, conv.groups, conv.bias) == ((1, 1), (1, 1), 1, None)
        same = conv.kernel_size == (size, size) and conv.padding == (size // 2, size // 2) and size % 2 == 1
        if not (plain and same and conv.padding_mode == "zeros" and step.norm.num_features == channels):
            return False
        channels = conv.out_channels
    return len(steps) in (1, 2)


def dense_features(x: Tensor, layers: Layers, keep_bottleneck: bool) -> Tensor:
    """(N, C, H, W) -> (N, C + k * len(layers), H, W): what the dense block of these layers gives in training.

    Args:
        x: Input of the block.
        layers: The steps of each layer, see `steps_of`.
        keep_bottleneck: Keep the output of the first of two convolutions instead of computing it again.
    """
    parameters = [p for steps in layers for s in steps for p in (s.norm.weight, s.norm.bias, s.conv.weight)]
    return cast(Tensor, _DenseFeatures.apply(x, layers, keep_bottleneck, *parameters))


class _Normalize(NamedTuple):
    """BatchNorm by known moments of the batch, then ReLU."""

    mean: Tensor
    var: Tensor
    scale: Tensor
    shift: Tensor
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        """(N, c, H, W) -> (N, c, H, W)."""
        return F.batch_norm(x, self.mean, self.var, self.scale, self.shift, eps=self.eps).relu_()

    def backward(self, grad: Tensor, x: Tensor, y: Tensor, through_moments: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the input `x`, scale and shift from `grad`, that of the output `y`, which is overwritten."""
        torch.ops.aten.threshold_backward.grad_input(grad, y, 0, grad_input=grad)
        invstd = (self.var + self.eps).rsqrt()
        moments = (None, None, self.mean, invstd) if through_moments else (self.mean, self.var, None, None)
        backward = torch.ops.aten.native_batch_norm_backward
        return cast(
            tuple[Tensor, Tensor, Tensor],
            backward(grad, x, self.scale, *moments, through_moments, self.eps, [True, True, True]),
        )


class _Convolve(NamedTuple):
    """Convolution that keeps the resolution, then dropout."""

    weight: Tensor
    dropout: float

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """(N, c, H, W) -> (N, c', H, W), and what dropout kept; draws the random numbers that `nn.Dropout` would."""
        y = F.conv2d(x, self.weight, padding=self.padding)
        kept = F.dropout(torch.ones_like(y), self.dropout) > 0 if self.dropout else None
        return self.drop(y, kept), kept

    @property
    def padding(self) -> int:
        """Zeros at each side."""
        return self.weight.shape[-1] // 2

    def drop(self, y: Tensor, kept: Tensor | None) -> Tensor:
        """Dropout of `y` or of its gradient, in place."""
        return y if kept is None else y.mul_(kept).mul_(1 / (1 - self.dropout))

    def input_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """Gradient of the input `x` from that of the convolution."""
        return conv2d_input(x.shape, self.weight, grad, padding=self.padding)

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """Gradient of the weight from that of the convolution."""
        return conv2d_weight(x, self.weight.shape, grad, padding=self.padding)


class _Saved(NamedTuple):
    """What one step leaves for the backward pass; moments and output are those of a bottleneck, else the buffer's."""

    scale: Tensor
    shift: Tensor
    weight: Tensor
    mean: Tensor | None
    var: Tensor | None
    output: Tensor | None
    kept: Tensor | None

    def parts(self, step: Step, mean: Tensor, var: Tensor, dtype: torch.dtype) -> tuple[_Normalize, _Convolve]:
        """The step as two operations, for the moments of its input."""
        normalize = _Normalize(mean, var, self.scale, self.shift, step.norm.eps)
        return normalize, _Convolve(self.weight.to(dtype), step.dropout)


class _DenseFeatures(torch.autograd.Function):
    """The block's features as one operation, whose backward pass computes the normalised ones again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: Layers, keep_bottleneck: bool, *parameters: Tensor) -> Tensor:
        device, c = x.device.type, x.shape[1]
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        features = _wider(x, c + sum(steps[-1].conv.out_channels for steps in layers), dtype)
        mean, var = (parameters[0].new_zeros(features.shape[1]) for _ in range(2))
        features[:, :c] = x
        mean[:c], var[:c] = _moments(x, mean.dtype)
        own, saved = iter(parameters), []
        for steps in layers:
            y, moments = features[:, :c], (mean[:c], var[:c])
            for step in steps:
                record = _Saved(next(own), next(own), next(own), None, None, None, None)
                normalize, convolve = record.parts(step, *moments, dtype)
                _count(step.norm, *moments, x.numel() // x.shape[1])
                y, kept = convolve.forward(normalize.forward(_packed(y)).to(dtype))
                moments = _moments(y, mean.dtype)
                inner = (*moments, y if keep_bottleneck else None) if step is not steps[-1] else (None, None, None)
                saved += [*record[:3], *inner, kept]
            new = slice(c, c + y.shape[1])
            features[:, new] = y
            mean[new], var[new] = moments
            c = new.stop
        ctx.save_for_backward(features, mean, var, *saved)
        ctx.layers, ctx.dtype, ctx.first, ctx.input_dtype = layers, dtype, x.shape[1], x.dtype
        return features

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        features, mean, var, *flat = ctx.saved_tensors
        saved = [_Saved(*flat[i : i + 7]) for i in range(0, len(flat), 7)]
        block = _Backward(features, mean, var, grad_output, ctx.dtype)
        c, grads = features.shape[1], list[Tensor | None]()
        with torch.autocast(features.device.type, enabled=False):
            for steps in reversed(ctx.layers):
                c -= steps[-1].conv.out_channels
                records = [saved.pop() for _ in steps][::-1]
                grads = [*block.layer(steps, records, c), *grads]
            grad_input = block.total(0, ctx.first) if ctx.needs_input_grad[0] else None
        return None if grad_input is None else grad_input.to(ctx.input_dtype), None, None, *grads


class _Backward:
    """The backward pass through a block, from its last layer to its first.

    Args:
        features: The block's output.
        mean: Mean of each channel.
        var: Variance of each channel.
        grad_output: Gradient of the block's output.
        dtype: Type that the convolutions compute in.
    """

    def __init__(self, features: Tensor, mean: Tensor, var: Tensor, grad_output: Tensor, dtype: torch.dtype) -> None:
        self.features, self.mean, self.var, self.dtype = features, mean, var, dtype
        self.direct = grad_output.clone(memory_format=_format(features))
        self.grad_sum = torch.zeros_like(mean)  # S / σ of the module docstring
        self.grad_x_sum = torch.zeros_like(mean)  # T / σ²

    def layer(self, steps: Sequence[Step], saved: Sequence[_Saved], c: int) -> list[Tensor]:
        """Gradients of the parameters of the layer that reads the first `c` channels."""
        grad = self.total(c, c + steps[-1].conv.out_channels).to(self.dtype)
        if len(steps) == 1:
            return self._read(steps[0], saved[0], c, grad)
        grad, *later = self._bottleneck(steps, saved, c, grad)
        return [*self._read(steps[0], saved[0], c, grad), *later]

    def total(self, lo: int, hi: int) -> Tensor:
        """The gradient of channels lo to hi, (N, hi - lo, H, W), once no layer that reads them is left."""
        n = self.features.numel() // self.features.shape[1]
        grad = self.features[:, lo:hi] - _per_channel(self.mean[lo:hi])
        grad.mul_(_per_channel(self.grad_x_sum[lo:hi] / -n)).add_(self.direct[:, lo:hi])
        return grad.sub_(_per_channel(self.grad_sum[lo:hi] / n))

    def _bottleneck(self, steps: Sequence[Step], saved: Sequence[_Saved], c: int, grad: Tensor) -> list[Tensor]:
        """Gradients of the bottleneck's channels and of the second step's parameters."""
        first, second = saved
        mean, var, z = cast(Tensor, first.mean), cast(Tensor, first.var), first.output
        if z is None:
            z = self._compute_again(steps[0], first, c)
        normalize, convolve = second.parts(steps[1], mean, var, self.dtype)
        y = normalize.forward(z).to(self.dtype)
        grad = convolve.drop(grad, second.kept)
        grad_weight = convolve.weight_gradient(grad, y)
        grad, grad_scale, grad_shift = normalize.backward(convolve.input_gradient(grad, y), z, y, through_moments=True)
        return [grad, grad_scale, grad_shift, grad_weight.to(second.weight.dtype)]

    def _compute_again(self, step: Step, saved: _Saved, c: int) -> Tensor:
        """The bottleneck, with what dropout kept the first time."""
        normalize, convolve = saved.parts(step, self.mean[:c], self.var[:c], self.dtype)
        pieces = []
        for rows in self._pieces(c):
            y = normalize.forward(_packed(self.features[rows, :c])).to(self.dtype)
            pieces.append(F.conv2d(y, convolve.weight, padding=convolve.padding))
        return convolve.drop(torch.cat(pieces), saved.kept)

    def _read(self, step: Step, saved: _Saved, c: int, grad: Tensor) -> list[Tensor]:
        """Gradients of the parameters of a step that reads features; adds to the gradient of these."""
        normalize, convolve = saved.parts(step, self.mean[:c], self.var[:c], self.dtype)
        grad = convolve.drop(grad, saved.kept)
        scale, shift, weight = (torch.zeros_like(p) for p in saved[:3])
        for rows in self._pieces(c):
            x = _packed(self.features[rows, :c])
            y = normalize.forward(x)
            weight += convolve.weight_gradient(grad[rows], y.to(self.dtype))
            grad_y = convolve.input_gradient(grad[rows], y).to(x.dtype)
            grad_x, grad_scale, grad_shift = normalize.backward(grad_y, x, y, through_moments=False)
            self.direct[rows, :c] += grad_x
            scale += grad_scale
            shift += grad_shift
        invstd = (self.var[:c] + step.norm.eps).rsqrt()
        self.grad_sum[:c] += saved.scale * shift * invstd
        self.grad_x_sum[:c] += saved.scale * scale * invstd.square()
        return [scale, shift, weight]

    def _pieces(self, channels: int) -> Iterator[slice]:
        """Parts of the batch, so that what is made again stays small: as large as a CPU's cache, or quarters."""
        samples, _, height, width = self.features.shape
        cached = max(1, CACHED // (channels * height * width))
        size = cached if self.features.device.type == "cpu" else math.ceil(samples / 4)
        return (slice(start, start + size) for start in range(0, samples, size))


def _wider(x: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    """Room for `channels` channels in the memory format of `x`, in the type that joins `x` with features of `dtype`."""
    shape = (x.shape[0], channels, *x.shape[2:])
    dtype = torch.promote_types(x.dtype, dtype)
    return torch.empty(shape, dtype=dtype, device=x.device, memory_format=_format(x))


def _format(x: Tensor) -> torch.memory_format:
    """The memory format of `x`, which may be a slice of channels."""
    return torch.channels_last if x.stride(1) == 1 and x.shape[1] > 1 else torch.contiguous_format


def _packed(x: Tensor) -> Tensor:
    """A slice of channels without the gaps between samples, in which elementwise kernels are several times faster."""
    return x.contiguous(memory_format=_format(x))


def _per_channel(values: Tensor) -> Tensor:
    """(C,) -> (1, C, 1, 1)."""
    return values.view(1, -1, 1, 1)


def _moments(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Mean and variance of each channel, summed in the type of the running statistics."""
    mean, var = x.new_zeros(x.shape[1], dtype=dtype), x.new_ones(x.shape[1], dtype=dtype)
    # The one reduction that BatchNorm itself uses: torch.var_mean takes four times as long on a CPU.
    return torch.batch_norm_update_stats(x, mean, var, 0.0)


def _count(norm: nn.BatchNorm2d, mean: Tensor, var: Tensor, n: int) -> None:
    """Move the running statistics of `norm` as its own forward pass would have."""
    momentum = cast(float, norm.momentum)
    cast(Tensor, norm.num_batches_tracked).add_(1)
    cast(Tensor, norm.running_mean).lerp_(mean, momentum)
    cast(Tensor, norm.running_var).lerp_(var * (n / (n - 1)), momentum)
