"""`create`: a network with fresh weights, by our name or by timm's."""

from typing import Any

from torch import nn

from reszoo import models
from reszoo.hub.foreign import from_timm

PREFIX = "timm:"


def create(name: str, **arguments: Any) -> nn.Module:
    """Build an architecture with fresh weights.

    Args:
        name: A name of `list_models()`; or `timm:` and a name of timm, such as `timm:resnet50`, for our network that
            computes the same function as timm's.
        arguments: Options of the factory, such as `num_classes=5` or `in_chans=1`; with `timm:` also `pretrained=True`.

    Returns:
        The network in training mode, with `.architecture` and `.arguments`.

    Raises:
        ReszooError: The name or an argument is unknown; the message names the nearest.
    """
    if name.startswith(PREFIX):
        return from_timm(name.removeprefix(PREFIX), **arguments)
    return models.create(name, **arguments)
