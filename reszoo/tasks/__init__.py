"""LightningModules: how a network is trained and judged."""

from reszoo.tasks._base import CHECKPOINT_KEY, Task
from reszoo.tasks.classification import ImageClassification
from reszoo.tasks.schedules import Cosine, InverseSqrt, Linear, MultiStep, Schedule, TorchSchedule

__all__ = [
    "CHECKPOINT_KEY",
    "Cosine",
    "ImageClassification",
    "InverseSqrt",
    "Linear",
    "MultiStep",
    "Schedule",
    "Task",
    "TorchSchedule",
]
