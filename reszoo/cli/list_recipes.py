"""`reszoo recipes`: the trainings that ship with the package."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from reszoo.cli._parser import Parser
from reszoo.cli.recipes import find_recipe, headline, recipe_names
from reszoo.errors import ReszooError, nearest


def main(command: str, argv: Sequence[str]) -> int:
    """Print one line a recipe: short name and what it trains; with `--show`, the whole file."""
    parser = Parser("recipes", "The trainings that ship with the package.")
    parser.add_argument("pattern", nargs="?", default="*", help="shell pattern, such as 'digits/*'")
    parser.add_argument("--show", metavar="NAME", help="print this recipe")
    options = parser.parse_args(argv)
    if options.show:
        print(find_recipe(options.show).read_text("utf-8"), end="")
        return 0
    names = [name for name in recipe_names() if fnmatchcase(name, options.pattern)]
    if not names:
        raise ReszooError(f"no recipe matches {options.pattern!r}{nearest(options.pattern, recipe_names())}")
    width = max(map(len, names))
    for name in names:
        print(f"{name:<{width}}  {headline(find_recipe(name))}")
    return 0
