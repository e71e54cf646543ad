"""Networks built straight from stored weights: no initialisation, one copy of every tensor.

Drawing random weights only to overwrite them is most of the time that building a large network takes. Here the
constructor runs with initialisation skipped. A safetensors file is then mapped into memory and its tensors become the
network's own: nothing is read before it is used, and what training writes stays in this process. Only a file that
is cut or overwritten in place while the network lives needs `mapped=False`, which reads every tensor into memory of its
own; replacing a file by renaming, as safetensors and the Hub's cache do, needs nothing.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from reszoo.errors import ReszooError
from reszoo.models import factory_of

M = TypeVar("M", bound=nn.Module)

_DRAWS = frozenset({torch.Tensor.uniform_, torch.Tensor.normal_, torch.Tensor.fill_, torch.Tensor.zero_})
RECORD = "reszoo"
"""The metadata key under which a weights file says what network it is of."""
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Weights(Protocol):
    """Named tensors that can be copied into a network."""

    metadata: Mapping[str, str]

    def names(self) -> Iterable[str]:
        """Every name."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor, without reading it."""

    def fill(self, name: str, target: Tensor) -> None:
        """Copy one tensor into a tensor with as many elements."""

    def mapped(self, name: str, like: Tensor) -> Tensor | None:
        """The tensor itself, if it may be a network's, with the shape and type of `like`; None if it must be copied."""


class StateDict:
    """Weights in memory; filling copies, so that training the network leaves the given tensors alone."""

    def __init__(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
        self.tensors = tensors
        self.metadata = metadata or {}

    def names(self) -> Iterable[str]:
        """Every name."""
        return self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor."""
        return tuple(self.tensors[name].shape)

    def fill(self, name: str, target: Tensor) -> None:
        """Copy one tensor into `target`, to its type and device."""
        target.copy_(self.tensors[name].detach().reshape(target.shape))

    def mapped(self, name: str, like: Tensor) -> Tensor | None:
        """Never: the tensors belong to whoever gave them."""
        return None


class SafetensorsFile:
    """Weights in a safetensors file: the header is read at once, each tensor when it is asked for.

    Args:
        path: The file.
        mapped: Whether parameters may be the mapped file itself.

    Raises:
        ReszooError: There is no such file, or it is not a whole safetensors file.
    """

    def __init__(self, path: str | PathLike[str], mapped: bool = True) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = Path(path)
        if not self.path.is_file():
            raise ReszooError(f"no weights file at {self.path}; give the path of a .safetensors file")
        try:
            # The library checks sizes, offsets and overlaps.
            self._open = safe_open(self.path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ReszooError(
                f"{self.path}, {self.path.stat().st_size} bytes, is not a whole safetensors file: {error}; "
                "fetch it again"
            ) from error
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        self.metadata: Mapping[str, str] = header.pop("__metadata__", {})
        self._entries: dict[str, Any] = header
        self._start = 8 + length
        self._may_map = mapped

    def names(self) -> Iterable[str]:
        """Every name, in the order of the file's bytes."""
        return sorted(self._entries, key=lambda name: self._entries[name]["data_offsets"][0])

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor, from the header."""
        return tuple(self._entries[name]["shape"])

    def fill(self, name: str, target: Tensor) -> None:
        """Read one tensor into `target`, converted if its type differs."""
        entry = self._entries[name]
        if entry["dtype"] not in _DTYPES:
            raise ReszooError(f"{self.path}: {name} is stored as {entry['dtype']}; known are {', '.join(_DTYPES)}")
        direct = target.dtype == _DTYPES[entry["dtype"]] and target.is_contiguous() and target.device.type == "cpu"
        memory = target if direct else torch.empty(target.shape, dtype=_DTYPES[entry["dtype"]], device="cpu")
        if memory.numel():
            with self.path.open("rb", buffering=0) as file:
                file.seek(self._start + entry["data_offsets"][0])
                _read_all(file, memory.detach().reshape(-1).view(torch.uint8).numpy().data)
        if not direct:
            target.copy_(memory)

    def mapped(self, name: str, like: Tensor) -> Tensor | None:
        """The tensor as it lies in the file, read page by page when it is used; writing to it leaves the file alone."""
        if not self._may_map or _DTYPES.get(self._entries[name]["dtype"]) != like.dtype or like.device.type != "cpu":
            return None
        return self._open.get_tensor(name).reshape(like.shape)


def _read_all(file: Any, memory: memoryview) -> None:
    """Fill `memory` from a raw file, which may give less than asked for in one go."""
    while memory:
        count = file.readinto(memory)
        if not count:
            raise ReszooError(f"{file.name} ended early: it was cut short after it had been opened")
        memory = memory[count:]


def weights_of(source: Mapping[str, Tensor] | str | PathLike[str], mapped: bool = True) -> Weights:
    """The source as `Weights`: a state dict as it is, anything else as the path of a safetensors file."""
    return StateDict(source) if isinstance(source, Mapping) else SafetensorsFile(source, mapped)


class _SkipInitialization(TorchFunctionMode):
    """Leaves parameters as they were allocated; buffers are computed as always, for no file may hold them.

    A torch function mode belongs to one thread and ends with its `with` block, so nothing global is patched.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _DRAWS or getattr(func, "__module__", None) == "torch.nn.init":
            tensor = args[0] if args else (kwargs or {}).get("tensor")
            if isinstance(tensor, nn.Parameter):
                return tensor
        return func(*args, **(kwargs or {}))


@contextmanager
def without_initialization() -> Iterator[None]:
    """Within this block, and on this thread alone, new parameters hold whatever their memory held."""
    with _SkipInitialization():
        yield


def bare(build: Callable[..., M], **arguments: Any) -> M:
    """What `build(**arguments)` returns, with parameters that must still be filled."""
    with without_initialization():
        return build(**arguments)


@torch.no_grad()
def fill(network: nn.Module, weights: Weights, names: Mapping[str, tuple[str, ...]]) -> None:
    """Give a network stored tensors: its own become them where they may be mapped, all else is copied.

    Args:
        network: The network; its parameters and buffers stay the same objects.
        weights: The stored tensors.
        names: For a name of the network the stored names, joined along the first dimension.
    """
    parameters = network.named_parameters(remove_duplicate=False)
    tensors: dict[str, Tensor] = {**dict(parameters), **dict(network.named_buffers(remove_duplicate=False))}
    for ours, theirs in names.items():
        tensor = tensors[ours]
        mapped = weights.mapped(theirs[0], tensor) if len(theirs) == 1 else None
        if mapped is not None:
            tensor.data = mapped
        else:
            for stored, piece in zip(theirs, tensor.chunk(len(theirs)) if len(theirs) > 1 else (tensor,), strict=True):
                weights.fill(stored, piece)


def build_with(
    source: Mapping[str, Tensor] | str | PathLike[str],
    architecture: str,
    arguments: Mapping[str, Any] | None = None,
    mapped: bool = True,
) -> nn.Module:
    """A registered network that holds the given weights, under our own names and shapes, and is ready to train.

    Args:
        source: A state dict of reszoo, or the path of a safetensors file of one.
        architecture: A name of `list_models()`.
        arguments: Options of the factory.
        mapped: Whether the parameters may be the mapped file, which must then not be cut or overwritten in place.

    Returns:
        The network in training mode; its parameters are ordinary leaves, and training leaves the file alone.

    Raises:
        ReszooError: A tensor is missing, left over or of another shape; or the file records other options.
    """
    weights, arguments = weights_of(source, mapped), dict(arguments or {})
    check_recorded(weights.metadata, architecture, arguments)
    arguments = {**recorded_arguments(weights.metadata), **arguments}
    network = bare(factory_of(architecture), **arguments)
    found, state = set(weights.names()), network.state_dict()
    names = {name: (name,) for name in state if name in found}
    differing = [
        f"{name} {weights.shape(name)} instead of {tuple(tensor.shape)}"
        for name, tensor in state.items()
        if name in found and weights.shape(name) != tuple(tensor.shape)
    ]
    refuse(f"these weights do not fit {architecture}", absent(state, names), sorted(found - set(state)), differing)
    fill(network, weights, names)
    return network


def absent(state: Mapping[str, Tensor], filled: Iterable[str], fresh: Iterable[str] = ()) -> list[str]:
    """Names of a state dict that are neither filled, nor fresh, nor another name of a filled one, save counters.

    `num_batches_tracked`, which files older than PyTorch 0.4.1 lack, is read only where `momentum=None`.
    """
    filled = set(filled)
    memory = {_address(state[name]) for name in filled}
    rest = (name for name in state if name not in {*filled, *fresh} and not name.endswith("num_batches_tracked"))
    return [name for name in rest if _address(state[name]) not in memory]


def _address(tensor: Tensor) -> tuple[int, int, torch.Size]:
    """Equal for two names of one tensor, also of one without memory."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tensor.shape


def refuse(what: str, missing: list[str], unexpected: list[str], differing: list[str]) -> None:
    """Raise one readable report of all that does not fit, if anything does not."""
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape": differing}
    if any(kinds.values()):
        lines = [f"{len(names)} {kind}: {_first(names)}" for kind, names in kinds.items() if names]
        raise ReszooError(f"{what}: " + "; ".join(lines))


def _first(names: list[str], count: int = 3) -> str:
    """The first few names and how many more."""
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more


def save_weights(network: nn.Module, path: str | PathLike[str]) -> None:
    """Write a registered network's weights, with its architecture and arguments in the file's metadata.

    The arguments tell apart what no tensor shows: where the stride is, how zeros are padded.

    Args:
        network: A network built by a registered factory.
        path: The safetensors file to write.
    """
    from safetensors.torch import save_file

    state: dict[str, Tensor] = {}
    memory: set[tuple[int, int, torch.Size]] = set()
    for name, tensor in network.state_dict().items():
        if tensor.numel() and _address(tensor) in memory:
            continue  # a second name of one tensor; `build_with` finds it through the first
        memory.add(_address(tensor))
        state[name.replace("_orig_mod.", "")] = tensor.contiguous()
    # One key only: safetensors writes several in an order that changes from save to save.
    recorded = json.dumps({"architecture": network.architecture, "arguments": network.arguments})
    save_file(state, path, metadata={RECORD: recorded})


def recorded_arguments(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The factory's arguments that `save_weights` wrote into a file; empty for any other file."""
    return dict(_record(metadata).get("arguments", {}))


def _record(metadata: Mapping[str, str]) -> dict[str, Any]:
    """What `save_weights` wrote beside the tensors; empty for any other file."""
    if RECORD not in metadata:
        return {}
    try:
        record = json.loads(metadata[RECORD])
    except ValueError as error:
        raise ReszooError(f"the file's {RECORD!r} metadata is not JSON: {error}; fetch it again") from error
    if not isinstance(record, dict) or not isinstance(record.get("arguments"), dict):
        raise ReszooError(f"the file's {RECORD!r} metadata names no architecture and arguments; fetch it again")
    return record


def check_recorded(metadata: Mapping[str, str], architecture: str, arguments: Mapping[str, Any]) -> None:
    """Refuse an architecture or an argument other than the file records; the tensors alone would fit both."""
    record = _record(metadata)
    if record and record.get("architecture") != architecture:
        raise ReszooError(f"the weights are of {record.get('architecture')}, not of {architecture}")
    for key, value in recorded_arguments(metadata).items():
        if key in arguments and arguments[key] != value:
            raise ReszooError(
                f"the weights were trained with {key}={value!r}, and {key}={arguments[key]!r} was asked for; drop the "
                "argument"
            )
