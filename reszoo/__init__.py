"""reszoo: residual networks as published, their trained weights, recipes and measurements."""

from reszoo.models import create, list_models, register

__version__ = "0.1.0"
__all__ = ["create", "list_models", "register"]
