"""Measurements against peers: each file here has `measure()`, which compares outputs first and times after."""
