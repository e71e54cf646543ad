import pytest
import torch

from reszoo.__main__ import main


def refused(capsys, *words):
    """The one line that a command ends with."""
    assert main(list(words)) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("reszoo: error: ")
    return line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--config", "digits/resnet27"],
            "recipe 'digits/resnet27': no such file, and no recipe of that name; did you mean",
        ),
        ([], "needs a recipe: add --config"),
        (["--config", "digits/resnet8", "--trainer.max_epoch", "1"], "did you mean --trainer.max_epochs?"),
        (["--config", "digits/resnet8", "--trainer.max_epochs", "x"], "trainer.max_epochs: expected an integer, got x"),
        (["--config", "digits/resnet8", "--model.label_smothing", "1"], "did you mean label_smoothing?"),
        (
            ["--config", "digits/resnet8", "--model.l", "1"],
            "model: unknown key 'l' of reszoo.tasks.ImageClassification",
        ),
        (["--config", "digits/resnet8", "--model.network.num_clases", "3"], "did you mean num_classes?"),
        (
            ["--config", "digits/resnet8", "--model.network.num_classes", "7"],
            "num_classes is 7, but the data Digits has 10",
        ),
        (
            ["--config", "digits/resnet8", "--model.network", "reszoo.models.resnet9"],
            "reszoo.models has no 'resnet9'; did you mean",
        ),
        (["--config", "digits/resnet8", "--model.network.shortcut", "D"], "expected one of ['A', 'B', 'C'], got D"),
        (
            ["--config", "digits/resnet8", "--model.optimizer.lrr", "1"],
            "unknown key 'lrr' of torch.optim.SGD; did you mean lr?",
        ),
        (["--config", "digits/resnet8", "--data.batch_size", "1"], "batch_size must be at least 2, got 1"),
        (["--config", "digits/resnet8", "--trainer.accelerator", "tpu"], "torch_xla"),
        (["--config", "x" * 5000], "File name too long"),
        (
            ["--config", "digits/resnet8", "--model.optimizer.lr", "-1"],
            "the optimizer cannot be built: Invalid learning",
        ),
        (["--config", "digits/resnet8", "--model.mixup", ".nan"], "mixup must be 0 (off) or positive, got nan"),
        (["--config", "digits/resnet8", "--seed_everything", "-1"], "seed_everything must be between 0 and 4294967295"),
        (["--config", "digits/resnet8", "--data.seed", "-1"], "seed must be between 0 and 4294967295, got -1"),
        (["--config", "digits/resnet8", "--trainer.max_epochs", "0"], "trainer.max_epochs is 0"),
        (["--config", "digits/resnet8", "--trainer.limit_train_batches", "0"], "trainer.limit_train_batches is 0"),
        (["--config", "digits/resnet8", "--trainer.fast_dev_run", "2"], "keeps no checkpoint to test"),
        (["--config", "digits/resnet8", "--trainer.logger", "false"], "trainer.logger: every run logs to its folder's"),
        (["--ckpt_path", "nowhere"], "--ckpt_path 'nowhere': no such run folder or checkpoint file"),
    ],
)
def test_fit_ends_in_one_line_and_no_folder(capsys, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, "fit", *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [", "is not YAML"),
        ("", "must hold a mapping"),
        ("trainer: {}\nmodel: 1\ntrainer: {}\n", "the key 'trainer' stands there twice"),
        ("trainer: {max_epochs: 1, max_epochs: 2}\n", "the key 'max_epochs' stands there twice"),
        ("model: &a {x: *a}\n", "found a value that holds itself"),
        ("[" * 100_000, "nested too deeply"),
        ("# x\n" * 300_000, "larger than 1,000,000 bytes"),
        ("trainer: [1, 2]\n", "trainer must be a mapping, got [1, 2]"),
        ("traner: {max_epochs: 1}\n", "did you mean trainer.max_epochs?"),
        (
            "model: {class_path: reszoo.tasks.ImageClasification}\n",
            "reszoo.tasks has no 'ImageClasification'; did you mean ImageClassification",
        ),
        ("trainer: {max_epochs: 1}\n", "the recipe names no model"),
    ],
)
def test_a_recipe_that_cannot_be_read_is_refused(capsys, tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(text)
    assert message in refused(capsys, "fit", "--config", "r.yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["r.yaml"]


def test_a_loss_that_is_not_finite_says_its_step_and_leaves_no_half_made_folder(capsys, tmp_path):
    words = [
        "fit",
        "--config",
        "digits/resnet8",
        "--model.optimizer.lr",
        "1e30",
        "--trainer.default_root_dir",
        str(tmp_path),
    ]
    assert main([*words, "--model.schedule.warmup_steps", "0"]) == 2
    assert "the training loss is nan at step 2 (epoch 0)" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_commands_that_need_a_trained_network_say_so(capsys):
    for command in ("test", "validate", "predict"):
        assert f"`reszoo {command}` needs a trained network" in refused(capsys, command)


def test_a_damaged_checkpoint_is_refused_before_any_data_is_read(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("reszoo.data.Digits.prepare", lambda self: pytest.fail("data read"))
    path = tmp_path / "x.ckpt"
    torch.save({"state_dict": {}}, path)
    path.write_bytes(path.read_bytes()[:100])
    assert "truncated or no checkpoint" in refused(
        capsys, "test", "--config", "digits/resnet8", "--ckpt_path", str(path)
    )


def test_predict_names_the_picture_that_is_not_there(capsys, run):
    assert "image 'nobody.png': no such file or folder" in refused(
        capsys, "predict", "--ckpt_path", str(run), "nobody.png"
    )


def test_an_unknown_command_names_the_nearest(capsys):
    assert "unknown command 'tset'; did you mean test?" in refused(capsys, "tset")


def test_list_and_recipes_name_the_nearest(capsys):
    assert "no architecture matches 'resent20'; did you mean" in refused(capsys, "list", "resent20")
    assert "no recipe matches 'digit/resnet8'; did you mean digits/resnet8" in refused(
        capsys, "recipes", "digit/resnet8"
    )


@pytest.mark.parametrize("change", ["pytorch-lightning_version", "optimizer_states", "nan"])
def test_a_checkpoint_that_cannot_be_trained_on_is_refused_before_any_data_is_read(
    capsys, tmp_path, monkeypatch, run, change
):
    monkeypatch.setattr("reszoo.data.Digits.prepare", lambda self: pytest.fail("data read"))
    values = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    if change == "nan":
        values["state_dict"]["network.head.bias"][0] = torch.nan
    else:
        del values[change]
    torch.save(values, tmp_path / "x.ckpt")
    words = ["fit", "--config", "digits/resnet8", "--ckpt_path", str(tmp_path / "x.ckpt")]
    assert ("holds NaN" if change == "nan" else f"lacks {change!r}") in refused(capsys, *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "digits/resnet26"], "the network is 'resnet26' here and 'resnet8' in the checkpoint"),
        (["--model.optimizer", "torch.optim.AdamW"], "the optimizer is AdamW with 1 parameter groups here and SGD"),
        (["--model.decay_norm_and_bias", "false"], "SGD with 2 parameter groups here and SGD with 1 in the checkpoint"),
        (["--trainer.max_steps", "10"], "has 42 of 10 steps done"),
    ],
)
def test_a_training_that_does_not_fit_its_checkpoint_is_refused(capsys, tmp_path, run, words, message):
    options = ["--ckpt_path", str(run), "--trainer.max_epochs", "3", "--trainer.default_root_dir", str(tmp_path)]
    assert message in refused(capsys, "fit", *options, *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../../x", "", "/abs", "a/" + "b" * 300])
def test_a_recipe_name_that_leaves_its_folder_is_refused(capsys, tmp_path, name):
    words = ["fit", "--config", "digits/resnet8", "--recipe", name, "--trainer.default_root_dir", str(tmp_path)]
    assert "cannot name a folder under runs/" in refused(capsys, *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words", [["list", "--foo"], ["recipes", "--show"], ["reproduce", "nothing"], ["benchmark", "nothing"], ["record"]]
)
def test_the_small_commands_refuse_in_one_line(capsys, words):
    assert refused(capsys, *words).startswith(f"reszoo: error: reszoo {words[0]}: ")
