import csv
import json
import shutil
import signal
import subprocess
import sys

import pytest
import torch
import yaml
from lightning.pytorch.utilities.exceptions import SIGTERMException
from PIL import Image

import reszoo
from reszoo.__main__ import main
from reszoo.data import Digits

SHORT = ["--trainer.max_epochs", "1", "--model.schedule.warmup_steps", "0"]


def test_the_folder_holds_all_that_a_run_leaves(run):
    files = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    assert files >= {
        "config.yaml",
        "metrics.csv",
        "metrics.jsonl",
        "results.json",
        "training_curve.png",
        "confusion_matrix.png",
        "checkpoints/best.ckpt",
        "checkpoints/last.ckpt",
        "bundle/model.safetensors",
        "bundle/config.json",
    }


def test_the_results_say_how_to_repeat_them(run):
    results = json.loads((run / "results.json").read_text())
    assert results["status"] == "finished"
    assert results["recipe"]["name"] == "digits/resnet8"
    assert results["data"] == Digits().describe()
    assert results["metrics"]["test/accuracy"]["n"] == 360
    assert results["seed"] == 0
    assert results["steps"] == 42
    assert {"versions", "commit", "cpu", "threads"} <= set(results["environment"])
    assert sum(row["n"] for row in results["per_class"].values()) == 360


def test_both_logs_hold_the_same_rows_and_every_learning_rate(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(lines) == len(rows)
    assert [line["val/accuracy"] for line in lines if "val/accuracy" in line] == [
        float(row["val/accuracy"]) for row in rows if row["val/accuracy"]
    ]
    assert any("lr-SGD/all" in line for line in lines)


def test_the_checkpoint_holds_plain_values_only(run):
    values = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)
    assert values["reszoo"]["architecture"] == "resnet8"
    assert values["reszoo"]["arguments"]["in_chans"] == 1
    assert values["reszoo"]["labels"] == [str(i) for i in range(10)]


def test_the_saved_configuration_holds_what_followed_from_the_data(run):
    network = yaml.safe_load((run / "config.yaml").read_text())["model"]["init_args"]["network"]
    assert network["init_args"]["in_chans"] == 1


def test_a_fresh_process_loads_the_same_predictions_bit_for_bit(run, tmp_path):
    split = Digits().splits["test"]
    network = reszoo.load(run)
    x = network.transform.normalize(split.images)
    torch.save(x, tmp_path / "x.pt")
    code = (
        "import torch, reszoo; torch.set_num_threads(1)\n"
        f"x = torch.load({str(tmp_path / 'x.pt')!r})\n"
        f"a, b = (reszoo.load(p)(x) for p in ({str(run)!r}, {str(run / 'bundle')!r}))\n"
        f"assert torch.equal(a, b); torch.save(a.detach(), {str(tmp_path / 'y.pt')!r})"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert torch.equal(torch.load(tmp_path / "y.pt"), network(x))
    accuracy = (network(x).argmax(1) == split.labels).double().mean().item()
    stored = json.loads((run / "results.json").read_text())["metrics"]["test/accuracy"]["value"]
    assert accuracy == pytest.approx(stored, abs=1e-6)


def test_test_and_validate_need_only_the_run(run, capsys):
    assert main(["test", "--ckpt_path", str(run)]) == 0
    (record,) = run.glob("test/*/results.json")
    stored = json.loads((run / "results.json").read_text())
    assert json.loads(record.read_text())["metrics"]["test/accuracy"] == stored["metrics"]["test/accuracy"]
    assert main(["validate", "--ckpt_path", str(run / "checkpoints" / "best.ckpt")]) == 0
    assert f"{stored['metrics']['val/accuracy']['value']:.4f}" in capsys.readouterr().out


def test_predict_writes_a_row_a_picture_in_the_order_given(run, tmp_path):
    split = Digits().splits["test"]
    names = [tmp_path / f"{name}.png" for name in ("b", "a", "c")]
    for path, image in zip(names, split.images, strict=False):
        Image.fromarray(image[0].numpy()).save(path)
    assert main(["predict", "--ckpt_path", str(run), *map(str, names)]) == 0
    (table,) = run.glob("predict/*/predictions.csv")
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["sample"] for row in rows] == [str(path) for path in names]
    network = reszoo.load(run)
    expected = network(torch.stack([network.transform(path) for path in names])).softmax(1)
    assert [row["label"] for row in rows] == [network.labels[i] for i in expected.argmax(1)]
    torch.testing.assert_close(
        torch.tensor([float(row["probability"]) for row in rows]), expected.max(1).values, atol=1e-6, rtol=0
    )
    shutil.rmtree(run / "predict")


def test_two_runs_never_share_a_folder(tmp_path):
    from reszoo.cli._run_folder import RunFolder

    first = RunFolder(tmp_path, "r")
    first.make("a: 1\n", 0, None)
    assert RunFolder(tmp_path, "r").path != first.path


def test_an_explicit_value_wins_over_the_checkpoints(run, tmp_path, caplog):
    words = ["fit", "--ckpt_path", str(run), "--trainer.max_epochs", "3", "--trainer.default_root_dir", str(tmp_path)]
    assert main([*words, "--model.optimizer.lr", "0.003", "--model.schedule", "reszoo.tasks.Schedule"]) == 0
    (folder,) = (tmp_path / "runs" / "digits" / "resnet8").iterdir()
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["model"]["init_args"]["optimizer"]["init_args"]["lr"] == 0.003
    rates = [json.loads(line).get("lr-SGD/all") for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {rate for rate in rates if rate is not None} == {0.003}
    assert "lr of group all is 0.003, as asked; the checkpoint had 0.1" in caplog.text


def test_a_width_that_the_checkpoint_lacks_is_refused_with_both_values(run, tmp_path, capsys):
    words = ["fit", "--ckpt_path", str(run), "--trainer.max_epochs", "3", "--trainer.default_root_dir", str(tmp_path)]
    assert main([*words, "--model.network.shortcut", "B"]) == 2
    assert "network argument 'shortcut' is 'B' here and 'A' in the checkpoint" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_two_runs_of_one_second_get_two_folders(tmp_path):
    from reszoo.cli._run_folder import RunFolder

    first, second = RunFolder(tmp_path, "r"), RunFolder(tmp_path, "r")
    second.path = first.path
    for run in (first, second):
        run.make("a: 1\n", 0, None)
    assert first.path != second.path


@pytest.mark.filterwarnings("ignore:.*could not find the monitored key")
@pytest.mark.parametrize(
    "words", [["--trainer.check_val_every_n_epoch", "5"], ["--trainer.max_epochs", "-1", "--trainer.max_steps", "2"]]
)
def test_the_last_step_is_kept_whether_or_not_it_was_validated(tmp_path, words):
    options = ["fit", "--config", "digits/resnet8", "--trainer.default_root_dir", str(tmp_path)]
    assert main([*options, *SHORT, *words]) == 0
    (folder,) = (tmp_path / "runs" / "digits" / "resnet8").iterdir()
    assert json.loads((folder / "results.json").read_text())["checkpoint"] == "last.ckpt"


@pytest.mark.parametrize(
    ("stop", "code", "message"),
    [(KeyboardInterrupt, 130, "reszoo: interrupted\n"), (SIGTERMException, 143, "reszoo: terminated\n")],
)
def test_a_training_stopped_by_a_signal_says_so(tmp_path, monkeypatch, capsys, stop, code, message):
    def stopped(*args):
        raise stop

    monkeypatch.setattr("reszoo.tasks.ImageClassification.training_step", stopped)
    handler = signal.getsignal(signal.SIGINT)
    words = ["fit", "--config", "digits/resnet8", "--trainer.default_root_dir", str(tmp_path), *SHORT]
    assert main(words) == code
    signal.signal(signal.SIGINT, handler)  # Lightning ignores a second one
    assert capsys.readouterr().err.endswith(message)


def test_predicting_on_a_picture_warns_of_nothing(run, tmp_path):
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    words = [sys.executable, "-m", "reszoo", "predict", "--ckpt_path", str(run), str(tmp_path / "a.png")]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stderr == ""
    shutil.rmtree(run / "predict")


@pytest.mark.slow
def test_two_processes_make_one_run_and_count_every_test_sample_once(tmp_path):
    words = [sys.executable, "-m", "reszoo", "fit", "--config", "digits/resnet8", *SHORT]
    words += ["--trainer.devices", "2", "--trainer.accelerator", "cpu", "--trainer.strategy", "ddp"]
    subprocess.run([*words, "--trainer.default_root_dir", str(tmp_path)], check=True)
    (folder,) = (tmp_path / "runs" / "digits" / "resnet8").iterdir()
    results = json.loads((folder / "results.json").read_text())
    assert results["metrics"]["test/accuracy"]["n"] == sum(row["n"] for row in results["per_class"].values()) == 360


def test_testing_on_another_split_is_said_aloud(run, caplog):
    assert main(["test", "--ckpt_path", str(run), "--data.seed", "1"]) == 0
    assert "the data are not those of the run" in caplog.text


def test_a_network_of_timm_follows_the_data(tmp_path):
    (tmp_path / "timm.yaml").write_text(
        "model:\n  init_args:\n    network: {class_path: timm.create_model, init_args: {model_name: resnet10t}}\n"
    )
    words = ["fit", "--config", "digits/resnet8", "--config", str(tmp_path / "timm.yaml"), "--trainer.max_steps", "3"]
    words += ["--model.schedule.warmup_steps", "0", "--trainer.default_root_dir", str(tmp_path)]
    assert main(words) == 0
    (folder,) = (tmp_path / "runs" / "digits" / "resnet8").iterdir()
    assert json.loads((folder / "results.json").read_text())["status"] == "finished"
    assert not (folder / "bundle").exists()
    assert main(["test", "--ckpt_path", str(folder)]) == 0
