"""Checkpoints of timm, torchvision and transformers as our networks, and our weights in their layouts.

Every tensor is matched by an explicit table of names, one file per family. Nothing is guessed and nothing passed over:
what a table has no place for, and what is missing or of another shape, is refused in one report.
"""

import logging
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from os import PathLike
from typing import Any, cast

import torch
from torch import Tensor, nn

from reszoo.errors import ReszooError, nearest
from reszoo.hub import adopt
from reszoo.hub.adopt import StateDict, Weights
from reszoo.hub.convert._layout import Layout, ending
from reszoo.hub.convert._names import pick, unwrap
from reszoo.models import factory_of

__all__ = ["Report", "check_value", "convert", "export_state", "layouts_of"]

_log = logging.getLogger(__name__)
_HEAD = ("head.weight", "head.bias")
OURS = Layout(libraries=("reszoo",), table={})
"""Our own names."""
_ADAPTABLE = ("num_classes", "in_chans", "image_size")


@dataclass(frozen=True)
class Report:
    """What a conversion did; it stands on the network as `.conversion`.

    Attributes:
        layout: Whose names the checkpoint had.
        weights: "raw" or "averaged".
        options: Options of the factory that the checkpoint settled.
        loaded: Tensors of the network that were filled.
        total: Tensors of the network.
        fresh: Tensors of the network that were initialised anew, such as those of a new head.
        dropped: Stored tensors that the network has no place for, such as those of an old head.
        resized: Tensors that were brought to another image size.
    """

    layout: str
    weights: str
    options: Mapping[str, Any]
    loaded: int
    total: int
    fresh: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    resized: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [f"{self.loaded} of {self.total} tensors from {self.weights} weights in the layout of {self.layout}"]
        parts += [f"{key}={value!r} as stored" for key, value in self.options.items()]
        for word, names in (("new", self.fresh), ("dropped", self.dropped), ("resized", self.resized)):
            if names:
                parts.append(f"{word}: {', '.join(names)}")
        return "; ".join(parts)


def convert(
    source: Mapping[str, Any] | str | PathLike[str],
    architecture: str,
    *,
    ema: bool | None = None,
    strict: bool = True,
    least_share: float = 0.5,
    mapped: bool = True,
    **options: Any,
) -> nn.Module:
    """One of our networks with the weights of a checkpoint, whoever wrote it.

    Options that the checkpoint settles need not be given: the classes, the channels of the images, the kind of
    shortcut, the place of the stride. Given ones win: another `num_classes` replaces the head and nothing else, and 0
    drops it.

    Args:
        source: A loaded checkpoint (a state dict, or a dictionary that holds one), or the path of a safetensors file.
        architecture: Our name of the network, one of `list_models()`.
        ema: Which weights, if the checkpoint holds raw and averaged ones.
        strict: Whether every tensor must be found and used. Otherwise what is missing keeps its initial value and is
            reported, with the head and all.
        least_share: Without `strict`, the share of the network's tensors, BatchNorm's buffers among them, that must be
            found.
        mapped: Whether parameters may be the mapped file. See `reszoo.hub.adopt`.
        options: Options of the factory.

    Returns:
        The network in training mode, with a `Report` as `.conversion`; the report is logged too.

    Raises:
        ReszooError: Something is missing, left over or of another shape, or the checkpoint holds no such weights.
    """
    factory = factory_of(architecture)
    if isinstance(source, Mapping):
        tensors, kind = pick(source, ema)
        weights: Weights = StateDict(tensors)
    else:
        if ema:
            raise ReszooError(f"averaged weights were asked for (ema=True); {source} is a single set of weights")
        weights, kind = adopt.SafetensorsFile(source, mapped), "raw"
    layout = _recognise(weights, architecture)
    parameters = signature(factory).parameters
    recorded = adopt.recorded_arguments(weights.metadata)
    fixed_by_user = {key: value for key, value in options.items() if key not in _ADAPTABLE}
    adopt.check_recorded(weights.metadata, architecture, fixed_by_user)
    settled = {**_settled(layout, weights), **recorded}
    settled = {key: value for key, value in settled.items() if key in parameters and key not in options}
    _check_heads(layout, architecture, settled, options)
    plan = _Plan(layout, weights, architecture, {**settled, **options})
    network = plan.network(strict, least_share)
    report = plan.report(kind, settled)
    network.conversion = report  # type: ignore[assignment]
    _log.info("%s: %s", architecture, report)
    if layout is OURS and not recorded:
        _warn_of_what_no_tensor_shows(network, options)
    return network


class _Plan:
    """Which stored tensor goes where.

    Args:
        layout: Whose names the stored tensors have.
        weights: The stored tensors.
        architecture: Our name of the network.
        arguments: All that is known of the factory's options.
    """

    def __init__(self, layout: Layout, weights: Weights, architecture: str, arguments: dict[str, Any]) -> None:
        self.layout, self.weights, self.architecture, self.arguments = layout, weights, architecture, arguments
        self.bare_network = adopt.bare(factory_of(architecture), **arguments)
        self.state = self.bare_network.state_dict()
        self.grid: tuple[int, int] | None = getattr(self.bare_network, "grid", None)
        names, head = layout.names(self.state), layout.names(_HEAD)
        expected = {t for theirs in (*names.values(), *head.values()) for t in theirs}
        self.bare = bare = unwrap(
            weights.names(),
            lambda name: name in expected or layout.is_unused(name),
            (*layout.wrappers, architecture),
            layout.modern,
        )
        self.dropped = [stored for name, stored in bare.items() if layout.is_unused(name) and name not in expected]
        new_head = self._replaces_head(head)
        self.fresh = [name for name in _HEAD if new_head and name in self.state]
        used = {name: theirs for name, theirs in names.items() if name not in self.fresh}
        self.filled = {n: tuple(bare[t] for t in ts) for n, ts in used.items() if all(t in bare for t in ts)}
        self.resized = [name for name in self.filled if name == "positions" and self._old_grid() != self.grid]
        if new_head:
            self.dropped += [bare[t] for ts in head.values() for t in ts if t in bare]
        taken = {stored for stored_names in self.filled.values() for stored in stored_names} | set(self.dropped)
        self.unexpected = [stored for stored in bare.values() if stored not in taken]

    def _replaces_head(self, head: Mapping[str, tuple[str, ...]]) -> bool:
        """Whether the stored head is of another number of classes than the network's, or one of them has none."""
        ours = self.state[_HEAD[0]].shape[0] if _HEAD[0] in self.state else 0
        stored = [self.bare[t] for t in head[_HEAD[0]] if t in self.bare]
        return ours != (self.weights.shape(stored[0])[0] if stored else 0)

    def _old_grid(self) -> tuple[int, int]:
        """Patches down and across of the stored table, which came from square images."""
        side = math.isqrt(self.weights.shape(self.filled["positions"][0])[1] - 1)
        return side, side

    def _differing(self) -> list[str]:
        """Stored tensors whose shape is not the network's, apart from trailing dimensions of one element."""
        wrong = []
        for name, stored_names in self.filled.items():
            shape = tuple(self.state[name].shape)
            if len(stored_names) > 1:
                shape = (shape[0] // len(stored_names), *shape[1:])
            ones = (1,) * self.layout.ones.get(name, 0)
            for stored in stored_names:
                found = self.weights.shape(stored)
                if name not in self.resized and found not in (shape, shape + ones):
                    wrong.append(f"{stored} {found} instead of {shape + ones}")
        return wrong

    def network(self, strict: bool, least_share: float) -> nn.Module:
        """The network, built and filled; what does not fit raises one report."""
        missing = [" + ".join(self.layout.names([n])[n]) for n in adopt.absent(self.state, self.filled, self.fresh)]
        what = f"these weights ({self.layout.libraries[0]} layout) do not fit {self.architecture}"
        adopt.refuse(what, missing if strict else [], self.unexpected if strict else [], self._differing())
        share = len(self.filled) / len(self.state)
        if not strict and share < least_share:
            found = f"{what}: only {len(self.filled)} of {len(self.state)} tensors were found"
            adopt.refuse(found, missing, self.unexpected, [])
        self.fresh += adopt.absent(self.state, self.filled, self.fresh)
        self.dropped += self.unexpected
        network = factory_of(self.architecture)(**self.arguments) if self.fresh else self.bare_network
        adopt.fill(network, self.weights, {n: t for n, t in self.filled.items() if n not in self.resized})
        for name in self.resized:
            self._resize(network, name)
        self.layout.check(network.state_dict())
        return network

    @torch.no_grad()
    def _resize(self, network: nn.Module, name: str) -> None:
        """Bring a stored position table to the network's grid of patches."""
        from reszoo.models.vit import resize_position_table

        stored = self.filled[name][0]
        table = torch.empty(self.weights.shape(stored))
        self.weights.fill(stored, table)
        grid = cast(tuple[int, int], self.grid)  # only a network with a grid has `positions`
        network.get_parameter(name).copy_(resize_position_table(table, self._old_grid(), grid))

    def report(self, kind: str, settled: Mapping[str, Any]) -> Report:
        """What was done, once it is done."""
        return Report(
            layout=self.layout.libraries[0],
            weights=kind,
            options=dict(settled),
            loaded=len(self.filled),
            total=len(self.state),
            fresh=tuple(self.fresh),
            dropped=tuple(self.dropped),
            resized=tuple(self.resized),
        )


def layouts_of(architecture: str) -> tuple[Layout, ...]:
    """The layouts known for a network: those of its file's family, and our own."""
    return (OURS, *getattr(_family(architecture), "LAYOUTS", ()))


def _family(architecture: str) -> object:
    """The module here that has the name of the model's file, None where there is none."""
    name = f"{__name__}.{factory_of(architecture).__module__.rpartition('.')[2]}"
    return import_module(name) if find_spec(name) else None


def _recognise(weights: Weights, architecture: str) -> Layout:
    """The layout whose names the stored ones look like most."""
    names, known = list(weights.names()), layouts_of(architecture)
    ours = Layout(("reszoo",), {key: key for layout in known for key in layout.table})
    shares = {layout: (ours if layout is OURS else layout).share(names) for layout in known}
    if len(known) == 1:
        return OURS
    best = max(shares, key=lambda layout: shares[layout])
    if not shares[best]:
        libraries = ", ".join(dict.fromkeys(name for layout in known for name in layout.libraries))
        raise ReszooError(
            f"none of the {len(names)} stored names looks like one of {architecture} in the layouts of {libraries}; "
            f"the first is {names[0] if names else 'absent'}"
        )
    return best


def _settled(layout: Layout, weights: Weights) -> dict[str, Any]:
    """What the layout and the stored shapes say of the factory's options."""
    settled = {**layout.fixed, **layout.implied(weights)}
    first = ending(weights, *layout.names([layout.first])[layout.first]) if _has(layout, layout.first) else None
    if first:
        settled["in_chans"] = weights.shape(first)[1]
    head = ending(weights, *layout.names(_HEAD)[_HEAD[0]])
    settled["num_classes"] = weights.shape(head)[0] if head else 0
    return settled


def _has(layout: Layout, name: str) -> bool:
    """Whether the layout has a counterpart of one of our names."""
    try:
        return bool(layout.names([name]))
    except ReszooError:
        return False


def _check_heads(layout: Layout, architecture: str, settled: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Refuse to guess the number of attention heads of a network of another width than the named one's."""
    width = layout.heads_from
    if not width or width not in settled or "num_heads" in options or "num_heads" in settled:
        return
    usual = signature(factory_of(architecture)).parameters[width].default
    if settled[width] != usual:
        raise ReszooError(
            f"the stored {width} is {settled[width]}, {architecture} has {usual}, and no tensor shows the number of "
            "heads; pass num_heads (in a transformers config.json: num_attention_heads)"
        )


def _warn_of_what_no_tensor_shows(network: nn.Module, options: Mapping[str, Any]) -> None:
    """Warn where an unlabelled file of ours leaves open how the network computes."""
    arguments: Mapping[str, Any] = network.arguments  # type: ignore[assignment]
    invisible = getattr(_family(str(network.architecture)), "INVISIBLE", ())
    assumed = {k: arguments[k] for k in invisible if k in arguments and k not in options}
    if assumed:
        taken = ", ".join(f"{key}={value!r}" for key, value in assumed.items())
        warnings.warn(
            f"the weights do not record how {network.architecture} was built; assuming {taken}. Its check value is "
            f"{check_value(network):.6g}; compare it with that of the network the weights came from",
            stacklevel=3,
        )


@torch.no_grad()
def check_value(network: nn.Module) -> float:
    """The mean size of the outputs for one fixed input: two networks that compute alike have the same.

    Args:
        network: A network with `example_inputs`; its mode is left as it was.
    """
    training = network.training
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        inputs = network.example_inputs(1)  # type: ignore[operator]
    outputs = network.eval()(*inputs)
    network.train(training)
    return float(outputs.abs().mean())


def export_state(network: nn.Module, library: str) -> dict[str, Tensor]:
    """Our network's weights under another library's names and shapes, ready for its `load_state_dict`.

    Args:
        network: A network built by a registered factory.
        library: "timm", "torchvision", "transformers" or "akamaster", as far as the family is known there.

    Returns:
        Copies of the tensors, contiguous and on the CPU.

    Raises:
        ReszooError: The library does not have this network, or computes it otherwise.
    """
    architecture, arguments = str(network.architecture), network.arguments
    found = [layout for layout in layouts_of(architecture) if library in layout.libraries]
    if not found:
        known = [name for layout in layouts_of(architecture) for name in layout.libraries]
        raise ReszooError(
            f"no layout of {library!r} is known for {architecture}{nearest(library, known, 1)} "
            f"(known: {', '.join(known)})"
        )
    layout, state = found[0], network.state_dict()
    for key, value in {**layout.fixed, **layout.exports}.items():
        if key in arguments and arguments[key] != value:  # type: ignore[operator, index]
            raise ReszooError(
                f"{library} computes {architecture} with {key}={value!r}, and this network has "
                f"{key}={arguments[key]!r}; its outputs would differ"  # type: ignore[index]
            )
    layout.check(state)
    exported: dict[str, Tensor] = {}
    for name, theirs in layout.names(state).items():
        tensor = state[name].detach().cpu()
        tensor = tensor.reshape((*tensor.shape, *(1,) * layout.ones.get(name, 0)))
        base = layout.base if _HEAD[0] in state and name not in _HEAD else ""
        for stored, piece in zip(theirs, tensor.chunk(len(theirs)) if len(theirs) > 1 else (tensor,), strict=True):
            exported[base + stored] = piece.clone().contiguous()
    return exported
