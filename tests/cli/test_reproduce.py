import json

import pytest
import torch

from reszoo.__main__ import main
from reszoo.cli.reproduce import degradation_digits as degradation
from reszoo.cli.reproduce._report import within
from reszoo.models.plain import PlainBlock
from reszoo.models.resnet import BasicBlock


def test_gradient_identity_stores_its_claims_and_draws_them(tmp_path, capsys):
    assert main(["reproduce", "gradient-identity", "--seeds", "3", "--root", str(tmp_path)]) in (0, 1)
    (folder,) = (tmp_path / "runs" / "reproduce" / "gradient-identity").iterdir()
    results = json.loads((folder / "results.json").read_text())
    assert results["claims"][0]["holds"]
    assert [o["seed"] for o in results["outcomes"]] == [0, 1, 2]
    assert (folder / "gradient_identity.png").stat().st_size > 10_000
    assert "equals I + dF/dx: True (published: True)" in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "block"), [("plain", PlainBlock), ("residual", BasicBlock)])
@pytest.mark.parametrize("layers", [8, 26])
def test_the_networks_have_the_stated_weight_layers(kind, block, layers):
    network = degradation.build(kind, layers)
    weights = [m for m in network.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    assert len(weights) == layers
    assert sum(isinstance(m, block) for m in network.modules()) == (layers - 2) // 2


def test_the_experiment_trains_on_1437_digits():
    images, labels = degradation.training_digits()
    assert images.shape == (1437, 1, 8, 8)
    assert (images.min(), images.max()) == (0, 1)
    assert len(labels) == 1437


def test_one_epoch_of_the_experiment_repeats_to_the_bit(monkeypatch):
    monkeypatch.setattr(degradation, "EPOCHS", 1)
    images, labels = degradation.training_digits()
    first, second = (degradation.train("residual", 8, 0, images[:256], labels[:256]) for _ in range(2))
    assert first == second


def test_a_median_outside_the_published_range_is_told():
    assert within("x", [1.0, 2.0, 3.0], 1.5, 2.5).holds
    claim = within("x", [3.0, 4.0, 2.0], 1.5, 2.5)
    assert not claim.holds
    assert "1 of 3 seeds inside" in claim.ours


def test_no_seed_is_refused(capsys):
    assert main(["reproduce", "gradient-identity", "--seeds", "0"]) == 2
    assert "reszoo: error: reszoo reproduce: --seeds must be at least 1" in capsys.readouterr().err
