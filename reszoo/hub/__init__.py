"""Bundles: trained networks as folders, saved and loaded."""
