"""Bundles: trained networks as folders, saved and loaded."""

from reszoo.hub._create import create
from reszoo.hub.load import LoadReport, load

__all__ = ["LoadReport", "create", "load"]
