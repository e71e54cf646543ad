import pytest

from reszoo.__main__ import main


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A finished run of two epochs, shared by the tests that only read it."""
    root = tmp_path_factory.mktemp("root")
    words = ["fit", "--config", "digits/resnet8", "--trainer.max_epochs", "2", "--model.schedule.warmup_steps", "5"]
    assert main([*words, "--trainer.default_root_dir", str(root)]) == 0
    (folder,) = (root / "runs" / "digits" / "resnet8").iterdir()
    return folder
