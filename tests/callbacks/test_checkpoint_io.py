import errno
import resource
import signal

import pytest
import torch

from reszoo.callbacks import AtomicCheckpointIO
from reszoo.errors import ReszooError


class FullDisk:
    """Pickles some bytes, then fails as a full disk does."""

    def __reduce__(self):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_failed_save_leaves_the_previous_checkpoint_and_no_fragment(tmp_path):
    io, path = AtomicCheckpointIO(), tmp_path / "last.ckpt"
    io.save_checkpoint({"a": torch.ones(3)}, path)
    before = path.read_bytes()
    with pytest.raises(ReszooError, match=r"No space left on device; the previous checkpoint is untouched"):
        io.save_checkpoint({"a": torch.ones(100_000), "b": FullDisk()}, path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_really_full_disk_leaves_the_previous_checkpoint(tmp_path):
    io, path = AtomicCheckpointIO(), tmp_path / "last.ckpt"
    io.save_checkpoint({"a": torch.ones(3)}, path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(ReszooError, match="the previous checkpoint is untouched"):
            io.save_checkpoint({"a": torch.ones(100_000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert torch.equal(torch.load(path, weights_only=True)["a"], torch.ones(3))
