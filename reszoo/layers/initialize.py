"""Weight initialisation shared by the convolutional families.

Paper: He et al. 2015, "Delving Deep into Rectifiers", arXiv:1502.01852.
"""

from torch import nn


def he_init(network: nn.Module) -> None:
    """Draw every convolution from N(0, 2 / fan_out) with zero bias; all else keeps PyTorch's default.

    fan_out, the form that preserves the gradients' variance, is what the authors' and fb.resnet.torch's code draw.
    """
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
