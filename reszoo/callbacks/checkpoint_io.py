"""Checkpoints that are whole or absent: written beside their place, flushed to the disk, then renamed."""

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from reszoo.errors import ReszooError


class AtomicCheckpointIO(TorchCheckpointIO):
    """Saves through a temporary file in the same folder; a full disk or a kill leaves the previous checkpoint."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write `checkpoint` to `path`, replacing what is there in one step.

        Raises:
            ReszooError: The file could not be written; the previous one is untouched.
        """
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        try:
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
        except (OSError, RuntimeError) as error:  # torch's zip writer turns a full disk into a RuntimeError
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            kept = "the previous checkpoint is untouched" if target.exists() else "no checkpoint was there before"
            raise ReszooError(
                f"checkpoint {str(target)!r} could not be written: {error}; {kept}; free space, or set another "
                "--trainer.default_root_dir"
            ) from error
