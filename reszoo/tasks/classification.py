"""Image classification: one label a picture."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassCalibrationError,
    MulticlassConfusionMatrix,
)

from reszoo.errors import ReszooError
from reszoo.tasks._base import Task
from reszoo.tasks.schedules import Schedule

Stage = Literal["train", "val", "test"]


class ImageClassification(Task):
    """Cross-entropy on one label a picture, with the metrics a reader expects.

    Logged: `{stage}/loss`, `{stage}/accuracy` (share of samples), for val and test also `accuracy_macro` (mean over the
    classes that occur), `accuracy_top5` (from 11 classes on), `calibration_error` (expected, 15 bins) and `n`. Where
    labels are mixed, the training accuracy is that on the dominant label, `train/accuracy_of_dominant_label`.

    Args:
        network: A network with K outputs for images (N, C, H, W).
        optimizer: Builds the optimizer from the parameters.
        schedule: The learning-rate schedule; None keeps the rate.
        decay_norm_and_bias: See `Task`.
        label_smoothing: Share of the target spread over all classes, in [0, 1) (Szegedy et al. 2016).
        mixup: Alpha of the Beta distribution of mixup (Zhang et al. 2018); 0 is off.
        cutmix: Alpha of the Beta distribution of CutMix (Yun et al. 2019); 0 is off. With both on, a batch draws one.
    """

    kind = "image_classification"
    confusion: MulticlassConfusionMatrix

    def __init__(
        self,
        network: nn.Module,
        optimizer: OptimizerCallable = torch.optim.SGD,
        schedule: Schedule | None = None,
        decay_norm_and_bias: bool = False,
        label_smoothing: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
    ) -> None:
        super().__init__(network, optimizer, schedule, decay_norm_and_bias)
        if not 0 <= label_smoothing < 1:
            raise ReszooError(f"label_smoothing must be in [0, 1), got {label_smoothing}")
        for name, alpha in (("mixup", mixup), ("cutmix", cutmix)):
            if not 0 <= alpha < float("inf"):
                raise ReszooError(f"{name} must be 0 (off) or positive, got {alpha}")
        self.label_smoothing = label_smoothing
        self.mixup = mixup
        self.cutmix = cutmix

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "predict":
            return  # pictures to predict on carry no labels
        if self.labels is None:
            raise ReszooError("the data module names no classes; give it a list `labels`")
        classes = len(self.labels)
        arguments = getattr(self.network, "arguments", {})
        outputs = arguments.get("num_classes", classes)
        if outputs != classes:
            raise ReszooError(
                f"num_classes is {outputs} in the network, but the data has {classes} classes; "
                "leave network.init_args.num_classes out, and it follows from the data"
            )
        self._mix = _mixing(self.mixup, self.cutmix, classes)
        accuracy = "accuracy" if self._mix is None else "accuracy_of_dominant_label"
        self.train_metrics = MetricCollection({accuracy: _accuracy(classes)}, prefix="train/")
        judged: dict[str, Metric | MetricCollection] = {
            "accuracy": _accuracy(classes),
            "accuracy_macro": MulticlassAccuracy(num_classes=classes, average="macro"),
            "calibration_error": MulticlassCalibrationError(num_classes=classes, n_bins=15),
            "n": _Count(),
        }
        if classes > 10:
            judged["accuracy_top5"] = _accuracy(classes, top_k=5)
        metrics = MetricCollection(judged, compute_groups=False)
        self.val_metrics = metrics.clone(prefix="val/")
        self.test_metrics = metrics.clone(prefix="test/")
        self.confusion = MulticlassConfusionMatrix(num_classes=classes)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self._step(batch, "train")

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._step(batch, "val")

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._step(batch, "test")

    def predict_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        """(N, C, H, W) -> probabilities (N, K)."""
        return self(batch[0]).softmax(1)

    def _step(self, batch: tuple[Tensor, Tensor], stage: Stage) -> Tensor:
        images, labels = batch
        targets = labels
        if stage == "train" and self._mix is not None:
            images, targets = self._mix(images, labels)  # targets: (N, K), rows sum to 1
        logits = self(images)  # (N, K)
        smoothing = self.label_smoothing if stage == "train" else 0.0
        loss = F.cross_entropy(logits, targets, label_smoothing=smoothing)
        self._log(stage, loss, logits.detach(), targets.argmax(1) if targets.dim() > 1 else targets)
        return loss

    def _log(self, stage: Stage, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Every figure is over the epoch, each sample weighing the same."""
        metrics: MetricCollection = getattr(self, f"{stage}_metrics")
        metrics.update(logits, labels)
        self.log(
            f"{stage}/loss",
            loss,
            on_step=False,
            on_epoch=True,
            batch_size=len(labels),
            prog_bar=True,
            sync_dist=stage != "train",
        )
        self.log_dict(metrics, on_step=False, on_epoch=True)
        if stage == "test":
            self.confusion.update(logits, labels)


def _accuracy(num_classes: int, top_k: int = 1) -> MulticlassAccuracy:
    """Share of samples whose label is among the `top_k` most probable classes."""
    return MulticlassAccuracy(num_classes=num_classes, average="micro", top_k=top_k)


class _Count(Metric):
    """Number of samples seen, over all ranks."""

    full_state_update = False
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        self.total += len(labels)

    def compute(self) -> Tensor:
        return self.total.float()  # Lightning logs floats


def _mixing(mixup: float, cutmix: float, num_classes: int) -> Any:
    """The batch transform that mixes images and labels; None if neither is on."""
    if not (mixup or cutmix):
        return None
    from torchvision.transforms import v2

    chosen = [v2.MixUp(alpha=mixup, num_classes=num_classes)] if mixup else []
    chosen += [v2.CutMix(alpha=cutmix, num_classes=num_classes)] if cutmix else []
    return v2.RandomChoice(chosen)
