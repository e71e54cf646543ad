"""The registry of architectures: the names that recipes, cards and the Hub use.

A factory is a function that returns a network. Its own parameters come first; where it ends in `**options`, these are
the keyword-only parameters of the class it is annotated to return. `register` turns both into one plain signature, so
that an editor, the command's parser and `create` all know every option by name.
"""

import inspect
import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast, get_type_hints

from torch import nn

from reszoo.errors import ReszooError, nearest

P = ParamSpec("P")
M = TypeVar("M", bound=nn.Module)

_FACTORIES: dict[str, Callable[..., nn.Module]] = {}


def register(factory: Callable[P, M]) -> Callable[P, M]:
    """Make `factory` known under its own name; the networks it builds carry `.architecture` and `.arguments`.

    Args:
        factory: A function annotated to return a network. Every option must have a default and be a plain value (text,
            number, truth value, None, or a list of these), because a bundle's `config.json` stores them.

    Returns:
        The factory, with its full signature.

    Raises:
        ReszooError: The name is taken, or an option has no default.
    """
    name = factory.__name__
    if name in _FACTORIES:
        raise ReszooError(
            f"architecture {name!r} is already registered, by {_FACTORIES[name].__module__}; choose another name"
        )
    signature = _full_signature(factory)

    @wraps(factory)
    def build(*args: P.args, **kwargs: P.kwargs) -> M:
        unknown = set(kwargs) - set(signature.parameters)
        if unknown:
            wrong = min(unknown)
            valid = ", ".join(signature.parameters)
            raise ReszooError(
                f"{name}: unknown argument {wrong!r}{nearest(wrong, signature.parameters, 1)} (valid: {valid})"
            )
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        network = cast(Callable[..., M], factory)(**bound.arguments)
        network.architecture = name  # type: ignore[assignment]
        network.arguments = {key: _plain(name, key, value) for key, value in bound.arguments.items()}  # type: ignore[assignment]
        return network

    build.__signature__ = signature  # type: ignore[attr-defined]
    build.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()} | {
        "return": signature.return_annotation
    }
    del build.__wrapped__
    _FACTORIES[name] = build
    return cast(Callable[P, M], build)


def create(name: str, **arguments: Any) -> nn.Module:
    """Build the registered architecture `name` with fresh weights.

    Args:
        name: A name of `list_models()`.
        arguments: Options of the factory, such as `num_classes=5` or `in_chans=1`.

    Returns:
        The network in training mode, with `.architecture` and `.arguments`.

    Raises:
        ReszooError: The name or an argument is unknown; the message names the nearest.
    """
    return factory_of(name)(**arguments)


def factory_of(name: str) -> Callable[..., nn.Module]:
    """The registered factory called `name`; an unknown name raises a `ReszooError` with the nearest ones."""
    if name not in _FACTORIES:
        hint = nearest(name, _FACTORIES) or "; `reszoo list` shows every name"
        raise ReszooError(f"unknown architecture {name!r}{hint}")
    return _FACTORIES[name]


def list_models(pattern: str = "*") -> list[str]:
    """The registered names that match a shell pattern such as `'resnet*'`, in natural order (20 before 110)."""
    return sorted((name for name in _FACTORIES if fnmatchcase(name, pattern)), key=_natural)


def _full_signature(factory: Callable[..., nn.Module]) -> inspect.Signature:
    """The factory's own parameters, then the keyword-only ones of the class it returns; all with types resolved."""
    signature = inspect.signature(factory)
    hints = get_type_hints(factory)
    own = [p.replace(annotation=hints[p.name]) for p in signature.parameters.values() if p.kind != p.VAR_KEYWORD]
    inherited: list[inspect.Parameter] = []
    if any(p.kind == p.VAR_KEYWORD for p in signature.parameters.values()):
        network = hints["return"]
        types = get_type_hints(network.__init__)
        taken = {p.name for p in own}
        for p in inspect.signature(network).parameters.values():
            if p.kind == p.KEYWORD_ONLY and p.name not in taken:
                inherited.append(p.replace(annotation=types[p.name]))
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *inherited)]
    bare = [p.name for p in parameters if p.default is p.empty]
    if bare:
        raise ReszooError(f"factory {factory.__name__!r}: option {bare[0]!r} has no default; give it one")
    return inspect.Signature(parameters, return_annotation=hints["return"])


def _plain(name: str, key: str, value: Any) -> Any:
    """`value` if it can stand in a `config.json`; sequences become lists."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(name, key, item) for item in value]
    raise ReszooError(
        f"{name}: argument {key!r} must be text, a number, a truth value, None or a list of these; "
        f"got {type(value).__name__}"
    )


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that reads digits as numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
