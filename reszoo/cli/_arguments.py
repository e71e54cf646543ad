"""What the command line says before the parser sees it: recipes by name, runs as checkpoints, and who said what."""

import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from reszoo.cli.recipes import find_recipe, short_name
from reszoo.errors import ReszooError

CHECKPOINTS = {
    "fit": ("last", "best"),
    "validate": ("best", "last"),
    "test": ("best", "last"),
    "predict": ("best", "last"),
}
"""Which checkpoint of a run each command takes, first choice first."""
MAX_RECIPE_BYTES = 1_000_000


@dataclass
class Arguments:
    """A command line made ready for the parser.

    Args:
        command: fit, validate, test or predict.
        argv: What the parser gets.
        configs: The configuration files, in order; later ones win.
        recipe: Short name of the first configuration that is no hardware overlay, if there is one.
        run: The run folder that `--ckpt_path` names, if it names one.
        checkpoint: The checkpoint file, if one was given.
    """

    command: str
    argv: list[str]
    configs: list[Path] = field(default_factory=list)
    recipe: str | None = None
    run: Path | None = None
    checkpoint: Path | None = None

    def says(self, *keys: str) -> Any:
        """The value that a file or the line gives for `model.…` keys, written in full; None if neither does."""
        found = None
        for config in self.configs:
            value: Any = read_yaml(config)
            for key in keys:
                value = value.get(key) if isinstance(value, dict) else None
            found = value if value is not None else found
        wanted = [key for key in keys if key != "init_args"]
        for name, value in _options(self.argv):
            if [key for key in name.split(".") if key != "init_args"] == wanted:
                found = value
        return found


def read_yaml(path: Path) -> dict[str, Any]:
    """A configuration file as a mapping."""
    if path.stat().st_size > MAX_RECIPE_BYTES:
        raise ReszooError(f"recipe {str(path)!r} is larger than {MAX_RECIPE_BYTES:,} bytes; name a YAML file")
    try:
        values = yaml.load(path.read_text("utf-8"), _StrictLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ReszooError(f"recipe {str(path)!r} is not YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ReszooError(f"recipe {str(path)!r} is nested too deeply, or holds itself by an alias") from error
    if not isinstance(values, dict):
        raise ReszooError(
            f"recipe {str(path)!r} must hold a mapping with model, data and trainer; it holds {reprlib.repr(values)}"
        )
    for section in ("model", "data", "trainer"):
        if section in values and not isinstance(values[section], dict | str | None):
            raise ReszooError(
                f"recipe {str(path)!r}: {section} must be a mapping, got {reprlib.repr(values[section])}; "
                "`reszoo recipes --show digits/resnet26` is an example"
            )
    return values


class _StrictLoader(yaml.SafeLoader):
    """YAML in which a key that stands twice, or a value that holds itself, is an error, not a surprise."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        mark = self.peek_event().start_mark if self.check_event(yaml.AliasEvent) else None
        node = super().compose_node(parent, index)
        if mark is not None and node is not None and node.end_mark is None:
            raise yaml.composer.ComposerError(None, None, "found a value that holds itself", mark)
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise yaml.composer.ComposerError(
                    None, None, f"the key {key.value!r} stands there twice", key.start_mark
                )
            seen.add(str(key.value))
        return node


def prepare(command: str, argv: Sequence[str]) -> Arguments:
    """Resolve recipe names and run folders in the words after `command`.

    A run's own configuration comes first, so that whatever the user says explicitly, in a file or on the line, wins.

    Raises:
        ReszooError: A recipe, a run or a checkpoint is not there, or a command lacks one.
    """
    ready = Arguments(command, [])
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if name not in ("--config", "-c", "--ckpt_path"):
            ready.argv.append(word)
            continue
        if not equals:
            value = next(words, "")
        if name == "--ckpt_path":
            ready.run, ready.checkpoint = _find_checkpoint(command, value)
        else:
            ready.configs.append(find_recipe(value))
    named = [short_name(path) for path in ready.configs]
    ready.recipe = next((name for name in named if not name.startswith("hardware/")), None)
    if ready.run is not None:
        ready.configs.insert(0, ready.run / "config.yaml")
    _refuse_incomplete(ready)
    for config in ready.configs:
        read_yaml(config)
    ready.argv = [word for config in ready.configs for word in ("--config", str(config))] + ready.argv
    if ready.checkpoint is not None:
        ready.argv += ["--ckpt_path", str(ready.checkpoint)]
    return ready


def _refuse_incomplete(ready: Arguments) -> None:
    if {"--help", "-h", "--print_config"} & {word.partition("=")[0] for word in ready.argv}:
        return
    if ready.command != "fit" and ready.checkpoint is None:
        raise ReszooError(
            f"`reszoo {ready.command}` needs a trained network: add --ckpt_path with a run folder or a checkpoint"
        )
    if not ready.configs and not any(name.split(".")[0] == "model" for name, _ in _options(ready.argv)):
        missing = "a recipe: add --config, for example `--config digits/resnet26`"
        if ready.checkpoint is not None:
            missing = f"the recipe of {str(ready.checkpoint)!r}, which lies in no run folder: add --config"
        raise ReszooError(f"`reszoo {ready.command}` needs {missing}")


def _find_checkpoint(command: str, text: str) -> tuple[Path | None, Path]:
    """The run folder (None for a lone file) and the checkpoint that `--ckpt_path` means."""
    path = Path(text)
    if path.is_dir():
        if not (path / "config.yaml").is_file():
            raise ReszooError(
                f"--ckpt_path {text!r} is no run folder: it has no config.yaml; name a run or a .ckpt file"
            )
        for kind in CHECKPOINTS[command]:
            if (path / "checkpoints" / f"{kind}.ckpt").is_file():
                return path, path / "checkpoints" / f"{kind}.ckpt"
        raise ReszooError(f"run {text!r} has no checkpoint; it stopped before its first one, so train it again")
    if not path.is_file():
        raise ReszooError(f"--ckpt_path {text!r}: no such run folder or checkpoint file")
    run = path.parent.parent
    return (run if path.parent.name == "checkpoints" and (run / "config.yaml").is_file() else None), path


def _options(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(name, value) of each `--name value` or `--name=value`."""
    for index, word in enumerate(argv):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            yield name, value if equals else next(iter(argv[index + 1 : index + 2]), "")
