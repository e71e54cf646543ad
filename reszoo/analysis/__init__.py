"""Measurements on any network, as pure functions."""
