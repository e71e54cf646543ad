"""The bundle: a trained network as a folder of data, with nothing in it that runs.

model.safetensors   the state dict
config.json         architecture, arguments, transform, labels, sha256 of the weights, format version
README.md           the card, where there is one
recipe.yaml         how it was trained, where that is known
results.json        what was measured, where it was
"""

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from reszoo.errors import ReszooError
from reszoo.hub.adopt import save_weights
from reszoo.preprocessing import ImageTransform

FORMAT_VERSION = 1
WEIGHTS, CONFIG, CARD, RECIPE, RESULTS = "model.safetensors", "config.json", "README.md", "recipe.yaml", "results.json"
MAX_CONFIG_BYTES = 1_000_000


@dataclass(frozen=True)
class Description:
    """What a bundle or a checkpoint says of its network; all plain values.

    Args:
        architecture: A registered name.
        arguments: The factory's arguments.
        labels: Names of the classes in output order, if the network has classes.
        transform: Preprocessing of the input, if it takes images.
    """

    architecture: str
    arguments: dict[str, Any]
    labels: list[str] | None = None
    transform: ImageTransform | None = None


def save(
    network: nn.Module,
    folder: str | Path,
    *,
    labels: list[str] | None = None,
    transform: ImageTransform | None = None,
    recipe: str | None = None,
    card: str | None = None,
    results: dict[str, Any] | None = None,
) -> Path:
    """Write `network` as a bundle.

    Args:
        network: A network that a registered factory built.
        folder: Where to; it must not exist, or hold only an earlier bundle's files.
        labels: Names of the classes.
        transform: Preprocessing of the input.
        recipe: Text of the recipe, YAML.
        card: Text of the card, Markdown.
        results: What was measured.

    Returns:
        The folder.

    Raises:
        ReszooError: The network was not built by a registered factory, its weights are not finite, or the folder holds
            other files.
    """
    folder = Path(folder)
    architecture, arguments = getattr(network, "architecture", None), getattr(network, "arguments", None)
    if architecture is None or arguments is None:
        raise ReszooError(
            f"a bundle names a registered architecture, and this {type(network).__name__} was not built by one; "
            "put its factory under @reszoo.register"
        )
    foreign = (
        [p.name for p in folder.iterdir() if p.name not in (WEIGHTS, CONFIG, CARD, RECIPE, RESULTS)]
        if folder.exists()
        else []
    )
    if foreign:
        raise ReszooError(
            f"folder {str(folder)!r} holds {foreign[0]!r}, which is no part of a bundle; choose another folder"
        )
    check_finite(network.state_dict(), "this network")
    plain = transform.as_dict() if transform else None
    describe(
        {"architecture": architecture, "arguments": arguments, "labels": labels, "transform": plain}, "this bundle"
    )
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        save_weights(network, partial / WEIGHTS)
        config = {
            "format_version": FORMAT_VERSION,
            "library_name": "reszoo",
            "architecture": architecture,
            "arguments": arguments,
            "labels": labels,
            "transform": plain,
            "sha256": sha256_of(partial / WEIGHTS),
        }
        write_json(config, partial / CONFIG)
        shutil.copymode(partial / CONFIG, partial / WEIGHTS)  # safetensors' own files are for the owner alone
        for name, text in ((CARD, card), (RECIPE, recipe)):
            if text is not None:
                (partial / name).write_text(text, "utf-8")
        if results is not None:
            write_json(results, partial / RESULTS)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ReszooError(f"bundle {str(folder)!r} could not be written: {error}") from error
    return folder


def read(folder: Path) -> tuple[Description, dict[str, Tensor]]:
    """A bundle's description and weights, checked against its hash.

    Raises:
        ReszooError: A file is missing, damaged, of a newer format, or not a bundle's; the message names it.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    config = _read_config(folder / CONFIG)
    weights = folder / WEIGHTS
    if not weights.is_file():
        raise ReszooError(f"bundle {str(folder)!r} has no {WEIGHTS}; copy it again, whole")
    found = sha256_of(weights)
    if found != config.get("sha256"):
        raise ReszooError(
            f"{str(weights)!r} is damaged or another file: sha256 {found[:12]}… where {CONFIG} says "
            f"{str(config.get('sha256'))[:12]}…; copy the bundle again"
        )
    try:
        state = load_file(weights)
    except SafetensorError as error:
        raise ReszooError(f"{str(weights)!r} is not a safetensors file: {error}") from error
    return describe(config, str(folder / CONFIG)), state


def describe(values: dict[str, Any], where: str) -> Description:
    """The description in a bundle's config or a checkpoint, checked value by value."""
    architecture, arguments = values.get("architecture"), values.get("arguments")
    labels, transform = values.get("labels"), values.get("transform")
    if not isinstance(architecture, str) or not isinstance(arguments, dict):
        raise ReszooError(f"{where}: names no architecture; expected `architecture` (text) and `arguments` (a mapping)")
    if labels is not None and not (isinstance(labels, list) and all(isinstance(label, str) for label in labels)):
        raise ReszooError(f"{where}: `labels` must be a list of texts, got {labels!r}")
    prepared = None if transform is None else ImageTransform.from_dict(transform)
    classes, channels = arguments.get("num_classes"), arguments.get("in_chans")
    if labels is not None and classes and len(labels) != classes:
        raise ReszooError(f"{where}: {len(labels)} `labels` for num_classes={classes!r}; one of them is wrong")
    if prepared is not None and channels is not None and len(prepared.mean) != channels:
        raise ReszooError(f"{where}: the transform has {len(prepared.mean)} channels, in_chans is {channels!r}")
    return Description(architecture, arguments, labels, prepared)


def check_finite(state: dict[str, Tensor], where: str) -> None:
    """Refuse weights that hold NaN or infinite values."""
    for key, tensor in state.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ReszooError(f"{where}: {key!r} holds NaN or infinite values")


def write_json(values: dict[str, Any], path: Path) -> None:
    """Write plain values as indented JSON; NaN and infinity are refused, since JSON has none."""
    path.write_text(json.dumps(values, indent=2, allow_nan=False) + "\n", "utf-8")


def sha256_of(path: Path) -> str:
    """The file's SHA-256 as 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ReszooError(f"no bundle in {str(path.parent)!r}: it has no {path.name}")
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ReszooError(f"{str(path)!r} is larger than {MAX_CONFIG_BYTES:,} bytes; a bundle's config is small")
    try:
        config = json.loads(path.read_text("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ReszooError(f"{str(path)!r} is not JSON: {error}") from error
    if not isinstance(config, dict) or config.get("library_name") != "reszoo":
        raise ReszooError(f"{str(path)!r} was not written by reszoo: it lacks library_name 'reszoo'")
    version = config.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        newer = type(version) is int and version > FORMAT_VERSION
        todo = "update reszoo" if newer else "write the bundle again"
        raise ReszooError(f"{str(path)!r} has format version {version!r}, this reszoo reads {FORMAT_VERSION}; {todo}")
    return config


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")
