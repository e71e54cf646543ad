"""The digits that scikit-learn carries: 1,797 grey 8x8 images of handwritten digits, no download.

Source: the test part of the UCI "Optical Recognition of Handwritten Digits" set (Alpaydin and Kaynak 1998).
"""

import torch

from reszoo.data._in_memory import InMemoryImages, Split
from reszoo.errors import ReszooError


class Digits(InMemoryImages):
    """1,797 handwritten digits, split by class: 1,437 to train and choose on, 360 to test.

    Args:
        batch_size: Samples of a training batch, over all devices.
        eval_batch_size: Samples of a validation or test batch, over all devices.
        seed: Seed of the split and of the training order.
        val_size: Samples taken from the 1,437 for validation, stratified; at least one a class.
    """

    name = "digits"

    def __init__(self, batch_size: int = 64, eval_batch_size: int = 360, seed: int = 0, val_size: int = 144) -> None:
        self.val_size = val_size
        super().__init__(batch_size, eval_batch_size, seed)

    def prepare(self) -> tuple[list[str], dict[str, Split]]:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        if not 10 <= self.val_size <= 1_000:
            raise ReszooError(
                f"val_size must be from 10 (one a class) to 1000 of the 1437 samples, got {self.val_size}"
            )
        values, classes = load_digits(return_X_y=True)
        # The set counts inked pixels of a 4x4 cell, 0 to 16: as bytes, the 17 levels stay distinct.
        images = torch.from_numpy(values).mul(255 / 16).round().to(torch.uint8).view(-1, 1, 8, 8)
        targets = torch.from_numpy(classes).long()
        rest, test = train_test_split(range(len(targets)), test_size=360, stratify=targets, random_state=self.seed)
        train, val = train_test_split(rest, test_size=self.val_size, stratify=targets[rest], random_state=self.seed)
        parts = {"train": train, "val": val, "test": test}
        return [str(digit) for digit in range(10)], {k: Split(images[i], targets[i]) for k, i in parts.items()}
