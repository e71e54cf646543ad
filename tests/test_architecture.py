"""Who may import whom: the table of the design, walked over every file of the package."""

import ast
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

import pytest

import reszoo

PACKAGE = Path(reszoo.__file__).parent
LEAVES = {"errors", "preprocessing"}  # anyone may use them; they use no room
STANDARD = set(sys.stdlib_module_names)

ROOMS = {
    "layers": ({"layers"}, {"torch"}),
    "models": ({"models", "layers"}, {"torch"}),
    "analysis": ({"analysis", "models", "layers"}, {"torch"}),
    "data": ({"data"}, {"torch", "torchvision", "datasets", "lightning", "sklearn", "PIL"}),
    "tasks": ({"tasks"}, {"torch", "lightning", "torchmetrics", "torchvision"}),
    "callbacks": ({"callbacks", "analysis"}, {"torch", "lightning"}),
    "hub": ({"hub", "models"}, {"torch", "huggingface_hub", "safetensors", "timm"}),
}
ALSO = {
    "analysis/plots.py": {"matplotlib"},
    "models/_detection_parts.py": {"torchvision"},
    "models/faster_rcnn.py": {"torchvision"},
}
FREE = {"cli", "__main__.py", "timm_plugin.py"}  # may import everything
FILES = [path for room in ROOMS for path in sorted((PACKAGE / room).rglob("*.py"))]
EVERY_FILE = sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    """The dotted name of a file of the package."""
    return ".".join(("reszoo", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {module_of(path) for path in EVERY_FILE}


def imports(path: Path) -> set[str]:
    """Modules that a file imports anywhere; of `from package import module`, the module."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & MODULES or {node.module}
    return found


def test_every_file_has_a_place_in_the_table():
    places = {path.relative_to(PACKAGE).parts[0] for path in EVERY_FILE}
    assert places == set(ROOMS) | {f"{leaf}.py" for leaf in LEAVES} | FREE | {"__init__.py"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_only_what_its_room_may(path):
    name = path.relative_to(PACKAGE).as_posix()
    own, foreign = ROOMS[name.partition("/")[0]]
    foreign = foreign | ALSO.get(name, set()) | STANDARD
    for module in imports(path):
        top, _, rest = module.partition(".")
        if top == "reszoo":
            assert rest.partition(".")[0] in own | LEAVES, f"{name} imports {module}"
        else:
            assert top in foreign, f"{name} imports {module}"


def test_a_room_imports_no_other_rooms_private_module():
    private = {
        (module_of(path), module)
        for path in FILES
        for module in imports(path) & MODULES
        if re.search(r"\._(?!_)", module) and module.split(".")[1] != module_of(path).split(".")[1]
    }
    assert private == set()


def test_no_modules_import_each_other_in_a_circle():
    graph = {module_of(path): imports(path) & MODULES - {module_of(path)} for path in EVERY_FILE}
    assert set(TopologicalSorter(graph).static_order()) == MODULES


def test_every_import_is_of_a_declared_dependency():
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = [*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())]
    declared = {plain(re.split(r"[^\w.-]", requirement)[0]) for requirement in wanted}
    names = packages_distributions()
    tops = {module.partition(".")[0] for path in EVERY_FILE for module in imports(path)} - STANDARD - {"reszoo"}
    assert [top for top in sorted(tops) if not declared & {plain(name) for name in names.get(top, [top])}] == []


def plain(name: str) -> str:
    """A distribution's name as it is compared."""
    return name.lower().replace("_", "-")


@pytest.mark.parametrize("leaf", sorted(LEAVES))
def test_a_leaf_imports_no_room(leaf):
    own = {module for module in imports(PACKAGE / f"{leaf}.py") if module.startswith("reszoo")}
    assert own <= {"reszoo.errors"}


def loaded_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_importing_the_package_and_all_its_names_leaves_heavy_libraries_unloaded():
    heavy = {
        "lightning",
        "timm",
        "datasets",
        "matplotlib",
        "torchvision",
        "transformers",
        "torchmetrics",
        "sklearn",
        "PIL",
    }
    assert loaded_after("import reszoo; [getattr(reszoo, name) for name in reszoo.__all__]") & heavy == set()


def test_help_starts_without_torch_and_list_without_lightning():
    assert "torch" not in loaded_after("from reszoo.__main__ import main; main(['--help'])")
    assert "lightning" not in loaded_after("from reszoo.__main__ import main; main(['list', 'resnet20'])")
