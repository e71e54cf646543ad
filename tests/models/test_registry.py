import inspect

import pytest
import torch

import reszoo
from reszoo.errors import ReszooError
from reszoo.models import register
from reszoo.models.resnet import ResNet, resnet20


def test_a_duplicate_name_raises():
    with pytest.raises(ReszooError, match="'resnet20' is already registered"):

        @register
        def resnet20(**options) -> ResNet:
            """Taken."""


def test_an_unknown_name_lists_the_nearest():
    with pytest.raises(ReszooError, match=r"did you mean .*resnet20"):
        reszoo.create("resent20")


def test_an_unknown_argument_names_the_nearest_and_the_valid_ones():
    with pytest.raises(ReszooError, match=r"'num_clases'; did you mean num_classes\? \(valid: num_classes, in_chans"):
        reszoo.create("resnet20", num_clases=3)


def test_the_network_remembers_name_and_arguments():
    network = reszoo.create("resnet20", num_classes=3)
    assert network.architecture == "resnet20"
    assert network.arguments["num_classes"] == 3
    assert network.arguments["shortcut"] == "A"


def test_the_signature_shows_every_option_with_its_type():
    parameters = inspect.signature(resnet20).parameters
    assert list(parameters)[:5] == ["num_classes", "in_chans", "shortcut", "zero_padding", "zero_gamma"]
    assert parameters["num_classes"].annotation is int


def test_a_pattern_selects_names_in_natural_order():
    assert reszoo.list_models("plain[0-9]*")[:4] == ["plain8", "plain14", "plain18", "plain20"]


def test_an_argument_that_json_cannot_hold_is_refused():
    with pytest.raises(ReszooError, match="'num_classes' must be text, a number"):
        reszoo.create("resnet8", num_classes=torch.tensor(3))
