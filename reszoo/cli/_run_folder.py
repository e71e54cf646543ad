"""The folder of one run: `runs/<recipe>/<time>`, made once, never another run's, and never left half-made."""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import time
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import reszoo
from reszoo.errors import ReszooError

PACKAGES = ("reszoo", "torch", "torchvision", "lightning", "torchmetrics", "numpy", "scikit-learn")


class RunFolder:
    """A new run's folder and its record, `results.json`.

    Args:
        root: The folder that holds `runs`.
        recipe: Short name of the recipe.
    """

    def __init__(self, root: Path, recipe: str) -> None:
        self.path = _unused(root / "runs" / check_name(recipe))
        self.recipe = recipe
        self.results: dict[str, Any] = {"status": "running"}
        self._start = time.monotonic()

    def make(self, config: str, seed: int | None, data: dict[str, Any] | None) -> None:
        """Create the folder, the resolved configuration and the first record."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            while True:
                try:
                    self.path.mkdir()
                    break
                except FileExistsError:  # another training took the name since
                    self.path = _unused(self.path.parent)
            (self.path / "config.yaml").write_text(config, "utf-8")
        except OSError as error:
            raise ReszooError(
                f"run folder {str(self.path)!r} cannot be made: {error}; set --trainer.default_root_dir"
            ) from error
        self.results |= {
            "recipe": {"name": self.recipe, "sha256": hashlib.sha256(config.encode()).hexdigest()},
            "seed": seed,
            "data": data,
            "environment": environment(),
            "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        }
        self.write()

    def finish(self, status: str, **values: Any) -> None:
        """Record how the run ended."""
        self.results |= {"status": status, "wall_seconds": round(time.monotonic() - self._start, 1), **values}
        if self.path.is_dir():
            self.write()

    def write(self) -> None:
        """Write `results.json` in one step."""
        partial = self.path / ".results.json.partial"
        partial.write_text(json.dumps(self.results, indent=2) + "\n", "utf-8")
        partial.replace(self.path / "results.json")

    def remove_if_empty_handed(self) -> bool:
        """Delete the folder of a run that made no step, and the folders above that it alone had; whether it was so."""
        if (
            not self.path.is_dir()
            or (self.path / "metrics.jsonl").exists()
            or list(self.path.glob("checkpoints/*.ckpt"))
        ):
            return False
        shutil.rmtree(self.path)
        for parent in list(self.path.parents)[:3]:
            try:
                parent.rmdir()
            except OSError:
                break
            if parent.name == "runs":
                break
        return True


def environment() -> dict[str, Any]:
    """Versions, hardware and commit, as far as they bear on a result; no host or user names."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "versions": versions,
        "commit": _commit(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def check_name(recipe: str) -> str:
    """The recipe's name, if it can name a folder under `runs` and no other place."""
    parts = recipe.split("/")
    if not all(part.strip() and part not in (".", "..") and len(part.encode()) <= 200 for part in parts):
        raise ReszooError(
            f"--recipe {recipe[:60]!r} cannot name a folder under runs/; use a name such as 'digits/resnet26', "
            "without '..' and of at most 200 bytes a part"
        )
    return recipe


def _unused(parent: Path) -> Path:
    """A folder named by the second, with a number behind it if that is taken."""
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    names = [stamp, *(f"{stamp}_{number}" for number in range(2, 1000))]
    return next(parent / name for name in names if not (parent / name).exists())


def _commit() -> str | None:
    """The commit of the checkout this package runs from, with `+` if files differ; None for an installed wheel."""
    folder = Path(reszoo.__file__).parents[1]
    if not (folder / ".git").exists():
        return None
    try:
        git = ["git", "-C", str(folder)]
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "reszoo", "recipes"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed.stdout.strip() else "")


def _cpu() -> str:
    """The processor's own name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
