from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

Scene = tuple[Tensor, Tensor, Tensor, Tensor]
"""Image (1, H, W), mask of digits (H, W), boxes (B, 4), labels (B,)."""


@pytest.fixture(scope="session")
def digit_scene() -> Callable[..., Scene]:
    """A function that pastes digits of twice their size on a noisy canvas, among digits with shuffled pixels."""
    digits = pytest.importorskip("sklearn.datasets").load_digits()

    def draw(generator: np.random.Generator, height: int, width: int) -> Scene:
        cells = list(product(range(height // 16), range(width // 16)))
        chosen = generator.permutation(len(cells))[: max(2, len(cells) // 2)]
        image = generator.uniform(0, 0.3, (height, width))
        mask, boxes, labels = np.zeros((height, width), int), [], []
        for number, cell in enumerate(chosen):
            index = generator.integers(len(digits.images))
            digit = digits.images[index] / 16
            is_digit = number % 2 == 0
            if not is_digit:
                digit = generator.permutation(digit.ravel()).reshape(8, 8)
            digit = np.kron(digit, np.ones((2, 2)))
            top, left = 16 * np.array(cells[cell])
            place = np.s_[top : top + 16, left : left + 16]
            image[place] = np.maximum(image[place], digit)
            if is_digit:
                mask[place] = digit > 0.3
                rows, columns = (np.flatnonzero((digit > 0.3).any(axis)) for axis in (1, 0))
                boxes.append((left + columns[0], top + rows[0], left + columns[-1] + 1, top + rows[-1] + 1))
                labels.append(digits.target[index])
        return (
            torch.tensor(image, dtype=torch.float32)[None],
            torch.tensor(mask),
            torch.tensor(np.array(boxes), dtype=torch.float32),
            torch.tensor(labels),
        )

    return draw
