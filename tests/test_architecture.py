"""Who may import whom: the table of the design, walked over every file of the package."""

import ast
import subprocess
import sys
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
    "data": ({"data"}, {"torch", "torchvision", "datasets", "lightning", "sklearn"}),
    "tasks": ({"tasks"}, {"torch", "lightning", "torchmetrics", "torchvision"}),
    "callbacks": ({"callbacks", "analysis"}, {"torch", "lightning"}),
    "hub": ({"hub", "models"}, {"torch", "huggingface_hub", "safetensors", "timm"}),
}
ALSO = {
    "analysis/plots.py": {"matplotlib"},
    "models/faster_rcnn.py": {"torchvision"},
}
FILES = [path for room in ROOMS for path in sorted((PACKAGE / room).rglob("*.py"))]


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module)
    return found


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


@pytest.mark.parametrize("leaf", sorted(LEAVES))
def test_a_leaf_imports_no_room(leaf):
    own = {module for module in imports(PACKAGE / f"{leaf}.py") if module.startswith("reszoo")}
    assert own <= {"reszoo.errors"}


def loaded_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_importing_the_package_leaves_heavy_libraries_unloaded():
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
    assert loaded_after("import reszoo") & heavy == set()


def test_help_starts_without_torch_and_list_without_lightning():
    assert "torch" not in loaded_after("from reszoo.__main__ import main; main(['--help'])")
    assert "lightning" not in loaded_after("from reszoo.__main__ import main; main(['list', 'resnet20'])")
