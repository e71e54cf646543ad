"""Every network that ships in the package, measured again against the results that ship with it."""

import json
import re

import pytest
import torch

import reszoo
from reszoo.data import Digits
from reszoo.hub.load import BUNDLED

NAMES = sorted(folder.name for folder in BUNDLED.iterdir())
DATA = {"digits": Digits}


def test_some_network_ships():
    assert NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_bundled_network_measures_as_it_says(name):
    network, data = reszoo.load(name), DATA[name.partition(".")[2]]()
    stored = json.loads((BUNDLED / name / "results.json").read_text())
    assert data.describe() == stored["data"]
    split = data.splits["test"]
    with torch.no_grad():
        right = (network(network.transform.normalize(split.images)).argmax(1) == split.labels).sum().item()
    accuracy = stored["metrics"]["test/accuracy"]
    assert accuracy["n"] == len(split)
    assert right == round(accuracy["value"] * accuracy["n"])
    assert network.labels == data.labels


@pytest.mark.parametrize("name", NAMES)
def test_a_bundles_texts_name_no_absolute_path(name):
    for path in (BUNDLED / name).iterdir():
        if path.suffix != ".safetensors":
            assert re.findall(r"""["' ]/[a-z]+/""", path.read_text()) == []
