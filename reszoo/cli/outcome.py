"""What a command leaves behind: measurements with their n, figures, the bundle, and a closing table."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.console import Console
from rich.table import Table
from torch import Tensor

from reszoo.analysis import plots
from reszoo.callbacks import read_rows
from reszoo.cli._run_folder import RunFolder, environment
from reszoo.errors import ReszooError
from reszoo.hub import bundle
from reszoo.hub.checkpoint import KEY, network_in, open_checkpoint
from reszoo.models import create
from reszoo.tasks import ImageClassification


def after_fit(
    trainer: Trainer,
    task: ImageClassification,
    data: LightningDataModule,
    run: RunFolder,
    best: ModelCheckpoint,
    recipe: str,
) -> None:
    """Test the best checkpoint once; write results, figures and bundle into the run folder."""
    folder = run.path
    chosen = Path(trainer.strategy.broadcast(best.best_model_path or str(folder / "checkpoints" / "last.ckpt")))
    steps, epochs = trainer.global_step, trainer.current_epoch
    trainer.loggers = []  # the log is of the training alone
    trainer.validate(task, datamodule=data, ckpt_path=chosen, verbose=False)
    metrics = measured(trainer)
    trainer.test(task, datamodule=data, ckpt_path=chosen, verbose=False)
    metrics |= measured(trainer)
    matrix = task.confusion.compute().cpu()  # (true, predicted); every rank takes part in the sum
    if not trainer.is_global_zero:
        return
    curve = plots.training_curve(read_rows(folder), run.recipe, folder / "training_curve.png")
    confusion = write_confusion(matrix, task.labels or [], folder)
    run.finish(
        "finished",
        metrics=metrics,
        epochs=epochs,
        steps=steps,
        checkpoint=chosen.name,
        per_class=per_class(matrix, task.labels or []),
    )
    values = open_checkpoint(chosen)
    saved = write_bundle(values, folder / "bundle", recipe, run.results)
    rows = {name: f"{value['value']:.4f}  (n = {value['n']})" for name, value in metrics.items() if name != "test/n"}
    rows |= {
        "measured on": f"{chosen.stem} checkpoint, of epoch {values['epoch'] + 1} of {epochs}",
        "training": f"{epochs} epochs, {steps} steps, {run.results['wall_seconds']} s",
        "run folder": str(folder),
    }
    rows |= {
        "training curve": str(curve),
        "confusion matrix": str(confusion),
        "load it with": f"reszoo.load({str(folder)!r})",
    }
    if saved is None:
        rows["load it with"] = "no bundle: the network was not built by a registered factory"
    table(run.recipe, rows)


def after_evaluation(
    trainer: Trainer, task: ImageClassification, command: str, data: LightningDataModule, folder: Path
) -> None:
    """Write and show what `validate` or `test` measured."""
    matrix = task.confusion.compute().cpu() if command == "test" else None  # every rank takes part in the sum
    if not trainer.is_global_zero:
        return
    metrics = measured(trainer)
    described = data.describe() if hasattr(data, "describe") else None
    record = {"metrics": metrics, "data": described, "environment": environment()}
    rows = {name: f"{value['value']:.4f}  (n = {value['n']})" for name, value in metrics.items()}
    if matrix is not None:
        record["per_class"] = per_class(matrix, task.labels or [])
    folder.mkdir(parents=True)
    if matrix is not None:
        rows["confusion matrix"] = str(write_confusion(matrix, task.labels or [], folder))
    bundle.write_json(record, folder / "results.json")
    rows["results"] = str(folder / "results.json")
    table(command, rows)


def after_predict(batches: Sequence[Any], data: LightningDataModule, labels: list[str] | None, folder: Path) -> None:
    """Write `predictions.csv`: one row a sample in input order, with the label and every class's probability."""
    probabilities = torch.cat(list(batches))  # (n, K)
    names = labels or [str(index) for index in range(probabilities.shape[1])]
    paths = [str(path) for path in getattr(data, "paths", range(len(probabilities)))]
    if len(paths) != len(probabilities):
        raise ReszooError(f"{len(paths)} samples went in and {len(probabilities)} predictions came out")
    folder.mkdir(parents=True)
    target = folder / "predictions.csv"
    with target.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["sample", "label", "probability", *(f"p({name})" for name in names)])
        for path, row in zip(paths, probabilities.tolist(), strict=True):
            top = max(range(len(row)), key=row.__getitem__)
            writer.writerow([path, names[top], f"{row[top]:.6f}", *(f"{value:.6f}" for value in row)])
    shown = {
        path: f"{names[int(p.argmax())]}  ({p.max():.3f})" for path, p in zip(paths[:20], probabilities, strict=False)
    }
    if len(paths) > 20:
        shown["…"] = f"{len(paths) - 20} more"
    table("predict", {**shown, "predictions": str(target)})


def measured(trainer: Trainer) -> dict[str, dict[str, float | int]]:
    """The metrics of the last evaluation, each with the number of samples behind it."""
    values = {name: float(value) for name, value in trainer.callback_metrics.items() if not name.startswith("train/")}
    counts = {name.partition("/")[0]: int(value) for name, value in values.items() if name.endswith("/n")}
    named = {k: v for k, v in values.items() if not k.endswith("/n")}
    return {name: {"value": value, "n": counts[name.partition("/")[0]]} for name, value in sorted(named.items())}


def per_class(matrix: Tensor, labels: list[str]) -> dict[str, dict[str, float | int | None]]:
    """Recall, precision and count of each class, from (true, predicted) counts; None where the ratio is of nothing."""
    right, true, predicted = matrix.diagonal(), matrix.sum(1), matrix.sum(0)
    return {
        label: {
            "recall": float(right[i] / true[i]) if true[i] else None,
            "precision": float(right[i] / predicted[i]) if predicted[i] else None,
            "n": int(true[i]),
        }
        for i, label in enumerate(labels)
    }


def write_confusion(matrix: Tensor, labels: list[str], folder: Path) -> Path:
    """The confusion matrix of the test split as figure and CSV."""
    with (folder / "confusion_matrix.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["true \\ predicted", *labels])
        writer.writerows([label, *row] for label, row in zip(labels, matrix.tolist(), strict=True))
    return plots.confusion_matrix(matrix, labels, folder / "confusion_matrix.png")


def write_bundle(values: dict[str, Any], folder: Path, recipe: str, results: dict[str, Any]) -> Path | None:
    """The bundle of an opened checkpoint, rebuilt from it; None if no registered factory built its network."""
    if values[KEY]["architecture"] is None:
        return None
    description, state = network_in(values, "the run's checkpoint")
    network = create(description.architecture, **description.arguments)
    network.load_state_dict(state)
    return bundle.save(
        network,
        folder,
        labels=description.labels,
        transform=description.transform,
        recipe=portable(recipe),
        results=results,
    )


def portable(recipe: str) -> str:
    """A resolved configuration without the folder of the machine that ran it."""
    values = yaml.safe_load(recipe)
    values["trainer"]["default_root_dir"] = None
    return yaml.safe_dump(values, sort_keys=False)


def table(title: str, rows: dict[str, str]) -> None:
    """A closing table of two columns; whole paths, however narrow the terminal."""
    shown = Table(title=title, show_header=False, title_justify="left")
    shown.add_column(no_wrap=True)
    shown.add_column(overflow="fold")
    for name, value in rows.items():
        shown.add_row(name, value)
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, max(map(len, rows)) + max(map(len, rows.values())) + 7)
    console.print(shown)
