"""ResNeXt: named as ResNet by torchvision and timm."""

from reszoo.hub.convert.resnet import INVISIBLE, LAYOUTS

__all__ = ["INVISIBLE", "LAYOUTS"]
