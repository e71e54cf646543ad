"""`reszoo` and `python -m reszoo`: pick the command, and import only what it needs."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from reszoo.errors import ReszooError, nearest

COMMANDS = {
    "fit": ("reszoo.cli.train", "train by a recipe, test once, and write the run folder"),
    "validate": ("reszoo.cli.train", "measure a run on the validation split"),
    "test": ("reszoo.cli.train", "measure a run on the test split"),
    "predict": ("reszoo.cli.train", "classify pictures, or the test split, with a run"),
    "list": ("reszoo.cli.list_models", "architectures with their exact parameter counts"),
    "recipes": ("reszoo.cli.list_recipes", "the trainings that ship with the package"),
    "reproduce": ("reszoo.cli.reproduce", "repeat a published experiment and compare"),
    "record": ("reszoo.cli.evidence", "store finished runs as a recipe's evidence"),
    "benchmark": ("reszoo.cli.benchmark", "measure speed and memory beside other libraries"),
}
"""Each module has `main(command, argv)`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The words after `reszoo`; the process's own if None.

    Returns:
        The exit code: 0, or 2 for bad input, with one line on standard error.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return 0
    if words[0] == "--version":
        from reszoo import __version__

        print(f"reszoo {__version__}")
        return 0
    command, *rest = words
    # Threads that spin while they wait slow small networks down many times over as soon as another process needs the
    # cores; sleeping ones cost microseconds. Read once, when torch starts its threads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        if command not in COMMANDS:
            hint = nearest(command, COMMANDS, 1) or "; `reszoo --help` lists them"
            raise ReszooError(f"unknown command {command!r}{hint}")
        code: int = import_module(COMMANDS[command][0]).main(command, rest)
    except ReszooError as error:
        print(f"reszoo: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("reszoo: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of a pipe has gone; there is nobody to tell
        return 0
    except OSError as error:  # a full or read-only disk, a name too long: the system's own words name the file
        print(f"reszoo: error: {str(error)[:1000]}", file=sys.stderr)
        return 2
    return code


def _help() -> str:
    lines = ["usage: reszoo COMMAND ...", "", "Residual networks: train, measure, reproduce.", "", "commands:"]
    lines += [f"  {name:<10} {text}" for name, (_, text) in COMMANDS.items()]
    lines += [
        "",
        "Start with:  reszoo fit --config digits/resnet26",
        "Each command explains itself:  reszoo COMMAND --help",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
