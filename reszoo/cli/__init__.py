"""The `reszoo` command."""
