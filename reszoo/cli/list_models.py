"""`reszoo list`: architectures with exact parameter counts."""

from collections.abc import Sequence

import torch

from reszoo.cli._parser import Parser
from reszoo.errors import ReszooError, nearest
from reszoo.hub.adopt import without_initialization
from reszoo.models import create, factory_of, list_models


def main(command: str, argv: Sequence[str]) -> int:
    """Print one line an architecture: name, parameters, first line of its documentation."""
    parser = Parser("list", "Architectures with their exact parameter counts.")
    parser.add_argument("pattern", nargs="?", default="*", help="shell pattern, such as 'resnet*'")
    pattern = parser.parse_args(argv).pattern
    names = list_models(pattern)
    if not names:
        raise ReszooError(f"no architecture matches {pattern!r}{nearest(pattern, list_models())}")
    width = max(map(len, names))
    for name in names:
        about = (factory_of(name).__doc__ or "").strip().splitlines()[0]
        print(f"{name:<{width}}  {count_parameters(name):>13,}  {about}")
    return 0


def count_parameters(name: str) -> int:
    """Parameters of an architecture with its default options, built without memory or initialisation."""
    with torch.device("meta"), without_initialization():
        return sum(parameter.numel() for parameter in create(name).parameters())
