from functools import partial
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import reszoo
from reszoo.callbacks import FiniteGuard
from reszoo.data._in_memory import InMemoryImages, Split
from reszoo.errors import ReszooError
from reszoo.tasks import ImageClassification

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)


class Fixed(nn.Module):
    """Answers with the logits written in the picture."""

    def __init__(self, classes):
        super().__init__()
        self.classes = classes
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x.flatten(1)[:, : self.classes] * self.scale


class Given(InMemoryImages):
    """Pictures whose brightest pixel is the answer of `Fixed`."""

    def __init__(self, answers, targets, classes, batch_size=4):
        self.given = answers, targets, classes
        super().__init__(batch_size=batch_size)

    def prepare(self):
        answers, targets, classes = self.given
        images = (F.one_hot(torch.tensor(answers), classes) * 255).to(torch.uint8).view(-1, 1, 1, classes)
        split = Split(images, torch.tensor(targets))
        return [str(i) for i in range(classes)], {"train": split, "val": split, "test": split}


def trainer(**options):
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(**{"accelerator": "cpu", "max_epochs": 1, "num_sanity_val_steps": 0, **quiet, **options})


def judged(answers, targets, classes=3, **options):
    run = trainer()
    run.test(ImageClassification(Fixed(classes), **options), Given(answers, targets, classes), verbose=False)
    return {key: float(value) for key, value in run.callback_metrics.items()}


def test_accuracy_is_over_samples_and_its_macro_form_over_the_classes_that_occur():
    metrics = judged([0, 0, 0, 0], [0, 0, 0, 1])
    assert metrics["test/accuracy"] == 0.75
    assert metrics["test/accuracy_macro"] == 0.5
    assert metrics["test/n"] == 4


def test_a_short_last_batch_weighs_by_its_samples():
    metrics = judged([0, 1, 2, 0, 0], [0, 1, 2, 0, 1])
    assert metrics["test/accuracy"] == pytest.approx(0.8)
    assert metrics["test/n"] == 5


def test_top5_appears_from_eleven_classes_on():
    assert "test/accuracy_top5" not in judged([0, 1], [0, 1], classes=10)
    assert judged([0, 1], [0, 1], classes=11)["test/accuracy_top5"] == 1


def test_norms_and_biases_are_not_decayed_unless_asked():
    task = ImageClassification(reszoo.create("resnet8"), SGD)
    groups = {group["name"]: group for group in task.parameter_groups()}
    assert all(p.dim() > 1 for p in groups["decay"]["params"])
    assert groups["no_decay"]["weight_decay"] == 0
    assert sum(p.numel() for g in groups.values() for p in g["params"]) == 75_290
    decayed = ImageClassification(reszoo.create("resnet8"), SGD, decay_norm_and_bias=True).parameter_groups()
    assert [group["name"] for group in decayed] == ["all"]


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_mixed_loss_is_the_two_term_formula(kind, smoothing):
    torch.manual_seed(0)
    task = ImageClassification(Fixed(3), label_smoothing=smoothing, **{kind: 1.0})
    task.labels = ["a", "b", "c"]
    task.__dict__["_trainer"] = SimpleNamespace(datamodule=None)
    task.setup("fit")
    images, labels = torch.randn(3, 1, 4, 4), torch.tensor([0, 1, 2])
    seen = {}
    task._log = lambda stage, loss, logits, labels: seen.update(logits=logits)
    task._mix.register_forward_hook(lambda module, given, mixed: seen.update(images=mixed[0], targets=mixed[1]))
    loss = task._step((images, labels), "train")
    share = seen["targets"].gather(1, labels[:, None])[0].item()
    partner = labels.roll(1)
    logits = seen["images"].flatten(1)[:, :3]
    two_terms = share * F.cross_entropy(logits, labels, label_smoothing=smoothing) + (1 - share) * F.cross_entropy(
        logits, partner, label_smoothing=smoothing
    )
    torch.testing.assert_close(loss, two_terms, rtol=1e-6, atol=1e-6)


def test_with_mixing_the_training_accuracy_says_what_it_is_measured_on():
    run = trainer(limit_val_batches=0)
    run.fit(ImageClassification(Fixed(3), SGD, mixup=1.0), Given([0, 1, 2, 0], [0, 1, 2, 0], 3))
    assert "train/accuracy_of_dominant_label" in run.callback_metrics
    assert "train/accuracy" not in run.callback_metrics


def test_a_class_count_that_contradicts_the_data_is_refused():
    task = ImageClassification(reszoo.create("resnet8", num_classes=7, in_chans=1), SGD)
    with pytest.raises(ReszooError, match="num_classes is 7 in the network, but the data has 3 classes"):
        trainer().fit(task, Given([0, 1, 2, 0], [0, 1, 2, 0], 3))


def test_a_loss_that_is_not_finite_stops_at_its_step():
    task = ImageClassification(Fixed(3), partial(torch.optim.SGD, lr=float("inf")))
    data = Given([0, 1, 2, 0] * 4, [0, 1, 2, 1] * 4, 3)
    with pytest.raises(ReszooError, match=r"the training loss is nan at step 2 \(epoch 0\)"):
        trainer(callbacks=[FiniteGuard()]).fit(task, data)


@pytest.mark.parametrize("bad", [{"label_smoothing": 1.0}, {"mixup": -1.0}, {"cutmix": -0.1}])
def test_options_out_of_range_are_refused(bad):
    with pytest.raises(ReszooError, match=f"{next(iter(bad))} must be"):
        ImageClassification(Fixed(3), **bad)
