"""reszoo: residual networks as published, their trained weights, recipes and measurements.

The names below are imported when they are first used, so that `reszoo --help` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from reszoo.errors import ReszooError

if TYPE_CHECKING:
    from reszoo.hub._create import create
    from reszoo.hub.load import load
    from reszoo.models import list_models, register

__version__ = "0.1.0"
__all__ = ["ReszooError", "create", "list_models", "load", "register"]

_HOME = {"load": "reszoo.hub", "create": "reszoo.hub", "list_models": "reszoo.models", "register": "reszoo.models"}


def __getattr__(name: str) -> Any:
    """Import a public name from its room at its first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'reszoo' has no attribute {name!r}; it has {', '.join(sorted(__all__))}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
