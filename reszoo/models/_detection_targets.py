"""Targets of a detection network: the boxes and labels of each image, checked before anything is computed.

Shapes: B boxes of an image, K classes. Boxes are (x1, y1, x2, y2) in pixels of the image, x to the right and y down.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from reszoo.errors import ReszooError

Targets = Sequence[dict[str, Tensor]]
"""For each image `boxes` (B, 4) and `labels` (B,)."""


def check_boxes(index: int, target: dict[str, Tensor], image_size: tuple[int, int]) -> tuple[Tensor, int]:
    """The boxes of one target inside the image, (B, 4), and how many of them reached beyond it.

    Args:
        index: Place of the target in its batch, for the message.
        target: Holds `boxes`.
        image_size: Height and width.

    Raises:
        ReszooError: Boxes that are missing, of another shape, not finite, without area, or outside the image.
    """
    where = f"targets[{index}]['boxes']"
    boxes = target.get("boxes")
    if boxes is None or boxes.dim() != 2 or boxes.shape[1] != 4:
        found = "nothing" if boxes is None else f"shape {tuple(boxes.shape)}"
        raise ReszooError(f"{where} must have shape (B, 4), (0, 4) for an image without objects; got {found}")
    boxes = boxes.float()
    height, width = image_size
    inside = torch.stack((boxes[:, 0::2].clamp(0, width), boxes[:, 1::2].clamp(0, height)), dim=2).flatten(1)  # (B, 4)
    for candidate, reason in (
        (boxes, "is not a box (x1, y1, x2, y2) with x1 < x2 and y1 < y2; mend or drop it"),
        (inside, f"lies outside its image of height {height} and width {width}; mend or drop it"),
    ):
        # Written so that a NaN fails.
        good = (candidate[:, :2] < candidate[:, 2:]).all(1) & boxes.isfinite().all(1)
        if not good.all():
            first = int(good.logical_not().nonzero()[0])
            raise ReszooError(f"{where}[{first}] = {boxes[first].tolist()} {reason}")
    return inside, int((inside != boxes).any(1).sum())


def check_labels(index: int, target: dict[str, Tensor], num_boxes: int, num_classes: int) -> Tensor:
    """The labels of one target, (B,), int64.

    Raises:
        ReszooError: Labels that are missing, not whole numbers, of another number than the boxes, or out of range.
    """
    where = f"targets[{index}]['labels']"
    labels = target.get("labels")
    if labels is None or labels.shape != (num_boxes,):
        found = "nothing" if labels is None else f"shape {tuple(labels.shape)}"
        raise ReszooError(f"{where} must have one label a box, shape ({num_boxes},); got {found}")
    if num_boxes and (labels.is_floating_point() or labels.dtype == torch.bool):
        raise ReszooError(f"{where} must be whole numbers, got {labels.dtype}")
    bad = ((labels < 0) | (labels >= num_classes)).nonzero().flatten()
    if len(bad):
        raise ReszooError(
            f"{where}[{int(bad[0])}] = {int(labels[bad[0]])} is no class: labels run from 0 to num_classes - 1 = "
            f"{num_classes - 1}, without a background"
        )
    return labels.long()
