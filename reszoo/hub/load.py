"""`load`: a trained network from a name, a run folder, a bundle folder or a checkpoint file."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from reszoo.errors import ReszooError, nearest
from reszoo.hub.adopt import absent, bare
from reszoo.hub.bundle import CARD, CONFIG, RECIPE, Description, check_finite, read
from reszoo.hub.checkpoint import read_checkpoint
from reszoo.hub.convert import Report
from reszoo.hub.foreign import from_timm_hub
from reszoo.models import create, factory_of
from reszoo.preprocessing import ImageTransform

BUNDLED = Path(__file__).parents[1] / "weights"
OVERRIDES = ("num_classes", "in_chans")


@dataclass(frozen=True)
class LoadReport:
    """What `load` did: where from, and which tensors are fresh because an override changed their shape."""

    source: str
    architecture: str
    loaded: int
    fresh: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        text = f"{self.architecture} from {self.source}: {self.loaded} tensors loaded"
        for word, keys in (("freshly initialised", self.fresh), ("left out", self.dropped)):
            text += f", {len(keys)} {word} ({', '.join(keys)})" if keys else ""
        return text


def load(source: str | Path, *, num_classes: int | None = None, in_chans: int | None = None) -> nn.Module:
    """Load a trained network.

    Args:
        source: A bundled name (`architecture.dataset`), a run folder, a bundle folder, a checkpoint file, or one of
            timm's repositories on the Hub, such as "timm/resnet50.a1_in1k".
        num_classes: Another number of outputs: the head is freshly initialised; 0 takes it off.
        in_chans: Another number of image channels: the first layer is freshly initialised.

    Returns:
        The network in eval mode. It carries `.transform` (picture -> input tensor), `.labels` (class names), `.card`
        and `.recipe` (texts, or None), and `.load_report`.

    Raises:
        ReszooError: Nothing is there, a file is damaged or foreign, or the weights do not fit exactly.
    """
    if str(source).startswith("timm/") and not Path(source).exists():
        return _load_timm(str(source), num_classes, in_chans)
    description, state, folder = _find(source)
    arguments = dict(description.arguments)
    for name, value in zip(OVERRIDES, (num_classes, in_chans), strict=True):
        if value is None:
            continue
        if name not in arguments:
            raise ReszooError(f"{description.architecture} has no option {name!r}; valid: {', '.join(arguments)}")
        arguments[name] = value
    network = _build(description, state, arguments, str(source))
    report = _fit_in(network, state, description, arguments, str(source))
    same_classes = arguments.get("num_classes") == description.arguments.get("num_classes")
    same_channels = arguments.get("in_chans") == description.arguments.get("in_chans")
    return _with(
        network,
        labels=description.labels if same_classes else None,
        transform=description.transform if same_channels else None,
        card=_text(folder / CARD),
        recipe=_text(folder / RECIPE),
        load_report=report,
    )


def _with(network: nn.Module, **extras: Any) -> nn.Module:
    """The network in eval mode with what travels with it, kept out of its modules and parameters."""
    for name, value in extras.items():
        object.__setattr__(network, name, value)
    return network.eval()


def _load_timm(repository: str, num_classes: int | None, in_chans: int | None) -> nn.Module:
    """Weights that timm publishes, in our network of the same function."""
    chosen: dict[str, Any] = {
        name: value for name, value in zip(OVERRIDES, (num_classes, in_chans), strict=True) if value is not None
    }
    network = from_timm_hub(repository, **chosen)
    settings = cast(dict[str, Any], network.pretrained_cfg)
    wanted = {
        "size": settings["input_size"][1:],
        "mean": settings["mean"],
        "std": settings["std"],
        "crop": settings["crop_pct"],
        "interpolation": settings["interpolation"],
    }
    done = cast(Report, network.conversion)
    report = LoadReport(repository, str(network.architecture), done.loaded, list(done.fresh), list(done.dropped))
    transform = ImageTransform.from_dict(wanted)
    return _with(network, labels=None, transform=transform, card=None, recipe=None, load_report=report)


def _find(source: str | Path) -> tuple[Description, dict[str, Tensor], Path]:
    """Description, weights, and the folder whose texts belong to them."""
    path = Path(source)
    if path.is_file():
        folder = path.parent.parent if path.parent.name == "checkpoints" else path.parent
        return *read_checkpoint(path), folder / "bundle"
    for folder in (path, path / "bundle", BUNDLED / str(source)):
        if (folder / CONFIG).is_file():
            return *read(folder), folder
    if path.is_dir():
        raise ReszooError(_what_is_missing(path))
    names = sorted(folder.name for folder in BUNDLED.iterdir()) if BUNDLED.is_dir() else []
    raise ReszooError(
        f"nothing to load at {str(source)!r}: it is no run folder, bundle folder or checkpoint file, and no bundled "
        f"name{nearest(str(source), names)} (bundled: {', '.join(names) or 'none'})"
    )


def _what_is_missing(folder: Path) -> str:
    """Why a folder cannot be loaded, and what can."""
    results = folder / "results.json"
    if results.is_file():
        status = json.loads(results.read_text("utf-8")).get("status")
        rest = (
            "load one of its checkpoints by file" if list(folder.glob("checkpoints/*.ckpt")) else "it has no checkpoint"
        )
        return f"run {str(folder)!r} ended as {status!r} and has no bundle; {rest}"
    checkpoints = sorted(folder.glob("checkpoints/*.ckpt"))
    if checkpoints:
        return f"run {str(folder)!r} has no bundle yet; load one of its checkpoints: {str(checkpoints[0])!r}"
    return f"folder {str(folder)!r} is no run and no bundle: it holds neither bundle/{CONFIG} nor {CONFIG}"


def _build(description: Description, state: dict[str, Tensor], arguments: dict[str, Any], source: str) -> nn.Module:
    """The network; first without memory, so that no argument can ask for more than the stored weights fill."""
    try:
        with torch.device("meta"):
            plan = bare(factory_of(description.architecture), **description.arguments).state_dict()
        if sum(tensor.numel() for tensor in plan.values()) > 2 * sum(tensor.numel() for tensor in state.values()):
            raise ReszooError(
                f"the arguments of {source!r} describe a network far larger than the weights beside them; "
                "copy the bundle again, whole"
            )
        if arguments == description.arguments:
            return bare(factory_of(description.architecture), **arguments)
        return create(description.architecture, **arguments)  # what an override changes keeps its initialisation
    except ReszooError:
        raise
    except (TypeError, ValueError, RuntimeError, OverflowError, MemoryError) as error:
        raise ReszooError(
            f"{source!r}: {description.architecture} cannot be built with {arguments!r}: {str(error).splitlines()[0]}"
        ) from error


def _fit_in(
    network: nn.Module, state: dict[str, Tensor], description: Description, arguments: dict[str, Any], source: str
) -> LoadReport:
    """Copy the weights; whatever an override did not change must match by name, shape and type."""
    own = network.state_dict()
    changed = _changed_by_overrides(description, arguments)
    fresh = sorted(key for key in own if key in changed)
    dropped = sorted(key for key in state if key in changed and key not in own)
    missing = sorted(set(own) - set(state) - changed)
    wrong = absent(own, set(own) - set(missing), fresh=changed)
    wrong += [name for name in missing if name.endswith("num_batches_tracked")]
    wrong += sorted(set(state) - set(own) - changed)
    wrong += [
        f"{key}: {tuple(state[key].shape)} {state[key].dtype} for {tuple(own[key].shape)} {own[key].dtype}"
        for key in own
        if key in state
        and key not in changed
        and (state[key].shape != own[key].shape or state[key].dtype != own[key].dtype)
    ]
    if wrong:
        raise ReszooError(
            f"the weights of {source!r} do not fit {description.architecture}: {len(wrong)} tensors are missing, too "
            f"many or of another shape or type, first {', '.join(wrong[:3])}"
        )
    check_finite(state, source)
    kept = {key: state.get(key, own[key]) if key not in changed else own[key] for key in own}
    network.load_state_dict(kept)
    return LoadReport(source, description.architecture, len(own) - len(fresh), fresh, dropped)


def _changed_by_overrides(description: Description, arguments: dict[str, Any]) -> set[str]:
    """The tensors whose presence or shape depends on the overridden arguments."""
    if arguments == description.arguments:
        return set()
    with torch.device("meta"):
        before, after = (
            create(description.architecture, **options).state_dict() for options in (description.arguments, arguments)
        )
    return {
        key
        for key in set(before) | set(after)
        if key not in before or key not in after or before[key].shape != after[key].shape
    }


def _text(path: Path) -> str | None:
    try:
        return path.read_text("utf-8") if path.is_file() else None
    except UnicodeDecodeError as error:
        raise ReszooError(f"{str(path)!r} is not text: {error}; copy the bundle again") from error
