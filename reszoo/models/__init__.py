"""The architectures, one file per paper; importing this package fills the registry."""

from importlib import import_module
from pkgutil import iter_modules

from reszoo.models._registry import create, factory_of, list_models, register

for _module in iter_modules(__path__):
    if not _module.name.startswith("_"):
        import_module(f"{__name__}.{_module.name}")

globals().update({name: factory_of(name) for name in list_models()})

__all__ = ["create", "factory_of", "list_models", "register"]
