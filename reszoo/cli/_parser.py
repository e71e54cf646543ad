"""The small commands' parser: exact options, and a refusal in one line."""

import argparse
from typing import Any, NoReturn

from reszoo.errors import ReszooError


class Parser(argparse.ArgumentParser):
    """An argument parser without abbreviations whose errors are the package's own.

    Args:
        command: The command's name behind `reszoo`.
        description: What it does.
        options: Further options of `argparse.ArgumentParser`.
    """

    def __init__(self, command: str, description: str, **options: Any) -> None:
        super().__init__(f"reszoo {command}", description=description, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Refuse the words of the command line."""
        raise ReszooError(f"{self.prog}: {message}; `{self.prog} --help` explains it")
