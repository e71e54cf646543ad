"""LightningDataModules and what they share."""

from reszoo.data.digits import Digits
from reszoo.data.image_files import ImageFiles

__all__ = ["Digits", "ImageFiles"]
