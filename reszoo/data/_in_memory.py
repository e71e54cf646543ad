"""Images held in memory as uint8 tensors, batched without workers.

The order of samples is a pure function of (seed, epoch), and each step's global batch is dealt out to the ranks, so
that any number of processes trains on the same batches.
"""

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

from reszoo.errors import ReszooError, check_at_least, check_between
from reszoo.preprocessing import ImageTransform

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Split:
    """uint8 images (N, C, H, W) with int64 labels (N,)."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def sha256(self) -> str:
        """Hash of shapes, pixels and labels, in order."""
        digest = hashlib.sha256()
        for tensor in (self.images, self.labels):
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()


class TensorBatches:
    """An iterable of (images, labels) batches of one rank.

    Training shuffles by (seed, epoch), deals each global batch to the ranks and drops a remainder that would leave a
    rank fewer than two samples, since BatchNorm has no variance of one. Evaluation keeps the order and
    every sample, once.

    Args:
        split: The samples.
        batch_size: Samples of a global batch, over all ranks.
        shuffle: Whether these are training batches.
        seed: Seed of the order.
        rank: This process, in [0, world_size).
        world_size: Number of processes.
    """

    def __init__(
        self, split: Split, batch_size: int, *, shuffle: bool, seed: int = 0, rank: int = 0, world_size: int = 1
    ) -> None:
        check_at_least("batch_size", batch_size, world_size)
        self.split = split
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        remainder = len(split) % batch_size
        self.dropped = remainder if shuffle and remainder // world_size < 2 else 0
        if shuffle and self.dropped == len(split):
            raise ReszooError(
                f"{len(split)} training samples do not give one batch of at least 2 on each of {world_size} ranks"
            )

    batch_sampler = None  # Lightning asks for it of whatever has a sampler

    @property
    def sampler(self) -> "TensorBatches":
        """Where Lightning looks for `set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration follows."""
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-(len(self.split) - self.dropped) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = self._order()
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            if self.shuffle:
                batch = batch[: len(batch) // self.world_size * self.world_size]
            own = batch[self.rank :: self.world_size]
            yield self.split.images[own], self.split.labels[own]

    def _order(self) -> Tensor:
        """Indices of this epoch, over all ranks."""
        if not self.shuffle:
            return torch.arange(len(self.split))
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        return torch.randperm(len(self.split), generator=generator)[: len(self.split) - self.dropped]


class InMemoryImages(LightningDataModule):
    """Base of the data modules whose images fit in memory; a subclass fills `splits` and `labels` in `prepare`.

    Args:
        batch_size: Samples of a training batch, over all devices.
        eval_batch_size: Samples of a validation or test batch, over all devices.
        seed: Seed of the split and of the training order.

    Attributes:
        labels: Names of the classes, in the order of the network's outputs.
        transform: The preprocessing that the network was trained with.
    """

    name = "images"

    def __init__(self, batch_size: int = 64, eval_batch_size: int = 256, seed: int = 0) -> None:
        super().__init__()
        check_at_least("batch_size", batch_size, 2)
        check_at_least("eval_batch_size", eval_batch_size, 1)
        check_between("seed", seed, 0, 2**32 - 1)
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.seed = seed
        self.labels, self.splits = self.prepare()
        train = self.splits["train"].images
        self.transform = ImageTransform(tuple(train.shape[-2:]), *_channel_statistics(train))  # type: ignore[arg-type]

    def prepare(self) -> tuple[list[str], dict[str, Split]]:
        """Class names, and the splits `train`, `val` and `test`."""
        raise NotImplementedError(f"{type(self).__name__} must return its class names and splits")

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.labels)

    @property
    def in_chans(self) -> int:
        """Channels of the images."""
        return self.splits["train"].images.shape[1]

    def describe(self) -> dict[str, object]:
        """What a result must name to be repeated: data set, sizes of the splits, hash of every sample in order."""
        digest = hashlib.sha256("".join(self.splits[key].sha256() for key in sorted(self.splits)).encode())
        sizes = {key: len(split) for key, split in self.splits.items()}
        return {"name": self.name, "n": sizes, "sha256": digest.hexdigest()}

    def setup(self, stage: str) -> None:
        batches = self._batches("train")
        if stage == "fit" and batches.dropped and batches.rank == 0:
            _LOG.warning(
                "%d of %d training samples are left out at the end of each epoch: they would not give every rank two",
                batches.dropped,
                len(batches.split),
            )

    def train_dataloader(self) -> TensorBatches:
        return self._batches("train")

    def val_dataloader(self) -> TensorBatches:
        return self._batches("val")

    def test_dataloader(self) -> TensorBatches:
        return self._batches("test")

    def predict_dataloader(self) -> TensorBatches:
        return self._batches("test")

    def _batches(self, name: str) -> TensorBatches:
        rank, world_size = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        train = name == "train"
        batch_size = self.batch_size if train else max(self.eval_batch_size, world_size)
        return TensorBatches(
            self.splits[name], batch_size, shuffle=train, seed=self.seed, rank=rank, world_size=world_size
        )

    def on_after_batch_transfer(self, batch: tuple[Tensor, Tensor], dataloader_idx: int) -> tuple[Tensor, Tensor]:
        images, labels = batch
        return self.transform.normalize(images), labels


def _channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel over the training images, in [0, 1] units."""
    values = images.double() / 255
    return tuple(values.mean((0, 2, 3)).tolist()), tuple(values.std((0, 2, 3), correction=0).tolist())
