"""timm's names and timm's weights on the Hub, as our networks."""

import json
from collections.abc import Callable, Mapping
from inspect import signature
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from reszoo.errors import ReszooError, nearest
from reszoo.hub.convert import convert, layouts_of
from reszoo.models import factory_of

TIMM = {
    **{name: name for name in ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")},
    **{name: name for name in ("wide_resnet50_2", "wide_resnet101_2", "resnext50_32x4d", "resnext101_32x4d")},
    **{f"resnetv2_{depth}": f"preact_resnet{depth}" for depth in (50, 101)},
    **{name: name for name in ("densenet121", "densenet161", "densenet169", "densenet201")},
    "vit_tiny_patch16": "vit_ti16",
    "vit_small_patch16": "vit_s16",
    "vit_base_patch16": "vit_b16",
    "vit_base_patch32": "vit_b32",
    "vit_large_patch16": "vit_l16",
}
"""timm's name, a ViT's without its image size -> ours."""

_OPTIONS = {"num_classes": "num_classes", "in_chans": "in_chans", "img_size": "image_size"}
_ORDINARY = {"global_pool": ("avg", "token"), "drop_rate": (0, 0.0), "drop_path_rate": (0, 0.0)}


def from_timm(name: str, pretrained: bool = False, **overrides: Any) -> nn.Module:
    """Our network that computes what timm's `name` computes.

    Args:
        name: timm's name, such as "resnet50" or "vit_base_patch16_224.augreg_in1k".
        pretrained: Whether to fetch timm's weights from the Hub; a name without a tag takes timm's default one.
        overrides: Options of our factory, such as `num_classes=5`.

    Returns:
        The network in training mode; with weights it also carries `.conversion` and `.pretrained_cfg`.

    Raises:
        ReszooError: We have no such network, or the weights are not of it.
    """
    ours, options = _our_name(name)
    if not pretrained:
        fixed = next(layout.fixed for layout in layouts_of(ours) if "timm" in layout.libraries)
        known = signature(factory_of(ours)).parameters
        return factory_of(ours)(**{key: v for key, v in {**fixed, **options}.items() if key in known} | overrides)
    if "." not in name:
        import timm

        settings = timm.models.get_pretrained_cfg(name)
        if settings is None or not settings.tag:
            raise ReszooError(f"timm publishes no weights of {name!r}; build it with pretrained=False")
        name = f"{name}.{settings.tag}"
    return from_timm_hub(f"timm/{name}", **overrides)


def from_timm_hub(where: str | PathLike[str], revision: str | None = None, **overrides: Any) -> nn.Module:
    """Our network with the weights of a timm repository: `config.json` and `model.safetensors`, nothing pickled.

    Args:
        where: A local folder, or a repository of the Hub such as "timm/resnet50.a1_in1k".
        revision: Branch, tag or commit of the repository.
        overrides: Options of our factory.

    Returns:
        The network in training mode with `.conversion` and `.pretrained_cfg` (timm's sizes, means and crops).

    Raises:
        ReszooError: A file is missing, or the network is not one of ours.
    """
    fetch = _local(Path(where)) if Path(where).is_dir() else _remote(str(where), revision)
    config = json.loads(fetch("config.json").read_text())
    if "architecture" not in config:
        raise ReszooError(f"{where}: config.json names no architecture, so it is not timm's")
    ours, _ = _our_name(config["architecture"])
    options = _arguments(str(where), config.get("model_args") or {})
    # The file's own sizes win over what a name or an argument repeats.
    options.pop("num_classes", None)
    options.pop("image_size", None)
    network = convert(fetch("model.safetensors"), ours, **{**options, **overrides})
    network.pretrained_cfg = config.get("pretrained_cfg", {})
    return network


def _our_name(name: str) -> tuple[str, dict[str, Any]]:
    """Our name for timm's, and the options that timm's name implies."""
    stem = name.split(".")[0]
    base, _, size = stem.rpartition("_")
    if stem in TIMM:
        return TIMM[stem], {}
    if base in TIMM and size.isdigit():
        return TIMM[base], {"image_size": int(size)}
    raise ReszooError(
        f"timm's {stem!r} is none of the networks here{nearest(stem, TIMM)} (known: {', '.join(TIMM)}); "
        f"use timm.create_model({stem!r}) itself"
    )


def _arguments(where: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The recorded arguments of timm as ours; one that would change the function in a way we lack is refused."""
    for key, value in arguments.items():
        if key not in _OPTIONS and value not in _ORDINARY.get(key, ()):
            raise ReszooError(f"{where} was built with {key}={value!r}, which the network here does not have")
    return {_OPTIONS[key]: value for key, value in arguments.items() if key in _OPTIONS}


def _local(folder: Path) -> Callable[[str], Path]:
    """Files of a folder by name."""

    def fetch(name: str) -> Path:
        if not (folder / name).is_file():
            raise ReszooError(f"{folder} has no {name}; a timm folder holds config.json and model.safetensors")
        return folder / name

    return fetch


def _remote(repository: str, revision: str | None) -> Callable[[str], Path]:
    """Files of a repository of the Hub by name."""

    def fetch(name: str) -> Path:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

        try:
            return Path(hf_hub_download(repository, name, revision=revision))
        except LocalEntryNotFoundError as error:
            raise ReszooError(f"{repository}/{name} is not in the cache, and the Hub is out of reach") from error
        except (EntryNotFoundError, HfHubHTTPError) as error:
            raise ReszooError(f"the Hub has no {name} in {repository}: {str(error).splitlines()[0]}") from error

    return fetch
