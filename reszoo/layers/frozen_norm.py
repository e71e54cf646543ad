"""Batch normalisation whose statistics and scales no longer change.

Paper: He et al. 2015, "Deep Residual Learning for Image Recognition", arXiv:1512.03385, Appendix A: in detection the
layers keep the statistics of pre-training and act as constant offsets and scales, mainly to save memory.

Shapes: N batch, C channels, H height, W width.
"""

from typing import Any

import torch
from torch import Tensor, nn


class FrozenBatchNorm2d(nn.Module):
    """A BatchNorm as a fixed affine map of each channel: y = weight (x - mean) / sqrt(var + eps) + bias.

    All four are buffers, so neither training mode nor an optimizer changes them, and the input isn't kept for the
    backward pass. Its state is a BatchNorm's without the number of batches; a BatchNorm's own state loads too.

    Args:
        num_features: Channels.
        eps: Added to the variance.
    """

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, num_features: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.num_features = num_features
        self.eps = eps
        self.register_buffer("weight", torch.ones(num_features))
        self.register_buffer("bias", torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    @classmethod
    def from_batch_norm(cls, norm: nn.BatchNorm2d) -> "FrozenBatchNorm2d":
        """The frozen form of a layer that has scales and statistics; its tensors are copied."""
        frozen = cls(norm.num_features, norm.eps).to(norm.weight.device, norm.weight.dtype)
        frozen.load_state_dict(norm.state_dict())
        return frozen

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C, H, W)."""
        scale = self.weight * torch.rsqrt(self.running_var + self.eps)  # (C,)
        shift = self.bias - self.running_mean * scale  # (C,)
        # In the input's precision: float32 constants would promote the maps of a mixed-precision network.
        scale, shift = (constant.to(x.dtype)[:, None, None] for constant in (scale, shift))
        return torch.addcmul(shift, x, scale)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict.pop(f"{prefix}num_batches_tracked", None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}"


def freeze_batch_norm(network: nn.Module) -> None:
    """Put a `FrozenBatchNorm2d` in the place of every BatchNorm2d inside `network`."""
    for name, module in network.named_children():
        if isinstance(module, nn.BatchNorm2d):
            setattr(network, name, FrozenBatchNorm2d.from_batch_norm(module))
        else:
            freeze_batch_norm(module)
