from itertools import chain

import pytest
import torch
from sklearn.datasets import load_digits

from reszoo.data import Digits
from reszoo.data._in_memory import Split, TensorBatches
from reszoo.errors import ReszooError


@pytest.fixture(scope="module")
def digits():
    return Digits()


def split_of(n):
    return Split(torch.arange(n, dtype=torch.uint8).view(n, 1, 1, 1), torch.arange(n))


def labels(batches):
    return torch.cat([labels for _, labels in batches]).tolist()


def test_the_splits_hold_every_sample_once(digits):
    assert {key: len(split) for key, split in digits.splits.items()} == {"train": 1293, "val": 144, "test": 360}
    everything = torch.cat([split.images for split in digits.splits.values()]).flatten(1).tolist()
    values = (torch.from_numpy(load_digits().data) * 255 / 16).round().to(torch.uint8).tolist()
    assert sorted(everything) == sorted(values)


def test_each_split_has_each_class_in_proportion(digits):
    for split in digits.splits.values():
        share = split.labels.bincount(minlength=10) / len(split)
        assert ((share - 0.1).abs() < 0.01).all()


def test_the_seed_decides_the_split_and_its_hash(digits):
    assert Digits().describe() == digits.describe()
    assert Digits(seed=1).describe()["sha256"] != digits.describe()["sha256"]


def test_training_images_are_standardised(digits):
    images = digits.transform.normalize(digits.splits["train"].images)
    assert images.mean().abs() < 1e-5
    assert (images.std(correction=0) - 1).abs() < 1e-5


def test_each_epoch_has_its_own_order_and_the_seed_repeats_it():
    batches = TensorBatches(split_of(32), 8, shuffle=True, seed=3)
    first = labels(batches)
    batches.set_epoch(1)
    second = labels(batches)
    assert sorted(first) == sorted(second) == list(range(32))
    assert first != second
    assert labels(TensorBatches(split_of(32), 8, shuffle=True, seed=3)) == first


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_ranks_share_the_batches_of_one_process(world):
    alone = [sorted(labels.tolist()) for _, labels in TensorBatches(split_of(40), 8, shuffle=True)]
    ranks = [TensorBatches(split_of(40), 8, shuffle=True, rank=r, world_size=world) for r in range(world)]
    together = [sorted(torch.cat([labels for _, labels in parts]).tolist()) for parts in zip(*ranks, strict=True)]
    assert together == alone


@pytest.mark.parametrize(("n", "world", "kept"), [(9, 1, 8), (10, 1, 10), (11, 2, 8), (12, 2, 12)])
def test_training_drops_a_remainder_that_leaves_a_rank_one_sample(n, world, kept):
    ranks = [
        TensorBatches(split_of(n), 4 * world if n > 10 else 4, shuffle=True, rank=r, world_size=world)
        for r in range(world)
    ]
    assert sum(len(labels(batches)) for batches in ranks) == kept


@pytest.mark.parametrize("world", [1, 2, 4])
def test_evaluation_sees_every_sample_once_on_any_number_of_ranks(world):
    ranks = [TensorBatches(split_of(5), 4, shuffle=False, rank=r, world_size=world) for r in range(world)]
    assert sorted(chain.from_iterable(labels(batches) for batches in ranks)) == [0, 1, 2, 3, 4]


def test_a_validation_size_that_cannot_be_is_refused():
    with pytest.raises(ReszooError, match="val_size must be from 10"):
        Digits(val_size=3)
