"""Recipes: whole trainings as YAML files, found by short name (`digits/resnet26`) or by path."""

from pathlib import Path

from reszoo.errors import ReszooError, nearest

_PACKAGE = Path(__file__).parents[1]
ROOT = next((folder for folder in (_PACKAGE / "recipes", _PACKAGE.parent / "recipes") if folder.is_dir()), _PACKAGE)
"""The recipes' folder: inside the installed package, or beside it in a checkout."""


def recipe_names() -> list[str]:
    """Every shipped recipe's short name, sorted."""
    return sorted(path.relative_to(ROOT).with_suffix("").as_posix() for path in ROOT.glob("*/*.yaml"))


def find_recipe(name: str) -> Path:
    """The file of a recipe.

    Args:
        name: A path to a YAML file, or a shipped recipe's short name, with or without `.yaml`.

    Raises:
        ReszooError: There is neither; the nearest names are listed.
    """
    path = Path(name)
    if path.is_file():
        return path
    if name.removesuffix(".yaml") in recipe_names():
        return ROOT / f"{name.removesuffix('.yaml')}.yaml"
    raise ReszooError(
        f"recipe {name!r}: no such file, and no recipe of that name{nearest(name, recipe_names())} "
        "(`reszoo recipes` lists them)"
    )


def short_name(path: Path) -> str:
    """`dataset/model` for a shipped recipe, else the file's own name without its ending."""
    resolved = path.resolve()
    if resolved.is_relative_to(ROOT.resolve()):
        return resolved.relative_to(ROOT.resolve()).with_suffix("").as_posix()
    return path.stem


def headline(path: Path) -> str:
    """The first comment line of a recipe: what it trains."""
    first = path.read_text("utf-8").splitlines()[:1]
    return first[0].lstrip("# ") if first and first[0].startswith("#") else ""
