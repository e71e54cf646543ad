"""Reading a training checkpoint without running anything in it."""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reszoo.errors import ReszooError
from reszoo.hub.bundle import Description, describe

KEY, PREFIX = "reszoo", "network."


def read_checkpoint(path: Path) -> tuple[Description, dict[str, Tensor]]:
    """The description and the network's weights in a checkpoint that reszoo's tasks wrote.

    Raises:
        ReszooError: The file is missing, truncated, holds code, or was written by something else.
    """
    return network_in(open_checkpoint(path), str(path))


def network_in(values: dict[str, Any], where: str) -> tuple[Description, dict[str, Tensor]]:
    """The description and the network's weights in an opened checkpoint; `where` names it in an error."""
    state = {key.removeprefix(PREFIX): value for key, value in values["state_dict"].items() if key.startswith(PREFIX)}
    return describe(values[KEY], where), state


def open_checkpoint(path: Path) -> dict[str, Any]:
    """The checkpoint's plain values; a file with anything else in it is refused unread."""
    if not path.is_file():
        raise ReszooError(f"checkpoint {str(path)!r}: no such file")
    with path.open("rb") as file:
        head = file.read(64)
    if head.startswith(b"version https://git-lfs"):
        raise ReszooError(f"checkpoint {str(path)!r} is a Git LFS pointer, not the weights; run `git lfs pull`")
    if not zipfile.is_zipfile(path):
        raise ReszooError(
            f"checkpoint {str(path)!r} is truncated or no checkpoint: {path.stat().st_size:,} bytes without the index "
            "at the end; copy it again, or use another checkpoint of the run"
        )
    try:
        values = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ReszooError(
            f"checkpoint {str(path)!r} holds Python objects, which could run code; refused unread; "
            "write its weights again as safetensors, or train with reszoo"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise ReszooError(f"checkpoint {str(path)!r} is damaged: {str(error).splitlines()[0]}") from error
    with zipfile.ZipFile(path) as archive:  # torch does not check the sums that it writes
        damaged = archive.testzip()
    if damaged:
        raise ReszooError(f"checkpoint {str(path)!r} is damaged: {damaged!r} does not match its sum; copy it again")
    if not isinstance(values, dict) or "state_dict" not in values or not isinstance(values.get(KEY), dict):
        raise ReszooError(
            f"checkpoint {str(path)!r} was not written by reszoo: it does not say what network it holds; "
            "for foreign weights, build the architecture and load its state dict yourself"
        )
    state, stored = values["state_dict"], values[KEY]
    if not isinstance(state, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items()):
        raise ReszooError(f"checkpoint {str(path)!r}: state_dict must map names to tensors; use another checkpoint")
    if not {"architecture", "arguments"} <= set(stored) or not isinstance(stored["arguments"], dict | None):
        raise ReszooError(
            f"checkpoint {str(path)!r}: {KEY!r} must name `architecture` and `arguments`; use another checkpoint"
        )
    return values
