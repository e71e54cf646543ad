"""Pictures named one by one, to predict on."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

from reszoo.errors import ReszooError, check_at_least
from reszoo.preprocessing import ImageTransform

_LOG = logging.getLogger(__name__)


class ImageFiles(LightningDataModule):
    """Picture files in the order given, prepared as the network was trained.

    Args:
        paths: Files to read; a folder stands for the pictures in it, by name.
        transform: The network's preprocessing, as `ImageTransform.as_dict` gives it.
        batch_size: Pictures of a batch.
    """

    def __init__(self, paths: list[str], transform: dict[str, object], batch_size: int = 64) -> None:
        super().__init__()
        check_at_least("batch_size", batch_size, 1)
        self.paths = _expand(paths)
        self.transform = ImageTransform.from_dict(transform)
        self.batch_size = batch_size

    def predict_dataloader(self) -> "PictureBatches":
        return PictureBatches(self.paths, self.transform, self.batch_size)


class PictureBatches:
    """An iterable of prepared batches (N, C, H, W); a file that cannot be read is named in the error."""

    def __init__(self, paths: Sequence[Path], transform: ImageTransform, batch_size: int) -> None:
        self.paths = paths
        self.transform = transform
        self.batch_size = batch_size

    def __len__(self) -> int:
        return -(-len(self.paths) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor]]:
        for start in range(0, len(self.paths), self.batch_size):
            yield (torch.stack([self.transform(path) for path in self.paths[start : start + self.batch_size]]),)


def _expand(paths: Sequence[str]) -> list[Path]:
    """Files as they are, folders as the pictures in them, by name; what a folder holds besides is counted aloud."""
    from PIL import Image

    Image.init()
    files: list[Path] = []
    for text in paths:
        path = Path(text)
        if path.is_dir():
            inside = sorted(child for child in path.iterdir() if not child.name.startswith("."))
            pictures = [child for child in inside if child.is_file() and child.suffix.lower() in Image.EXTENSION]
            if not pictures:
                raise ReszooError(f"folder {text!r} holds no pictures; name pictures, or a folder of them")
            if len(pictures) < len(inside):
                left = [child.name for child in inside if child not in pictures]
                _LOG.warning("%s: %d other files and folders left out, first %s", text, len(left), left[0])
            files.extend(pictures)
        elif path.is_file():
            files.append(path)
        else:
            raise ReszooError(f"image {text!r}: no such file or folder")
    return files
