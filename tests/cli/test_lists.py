import json

import pytest
import yaml

from reszoo.__main__ import main
from reszoo.cli.evidence import evidence_of, measured_lines
from reszoo.cli.recipes import find_recipe, headline, recipe_names


def test_list_prints_exact_counts(capsys):
    assert main(["list", "resnet20"]) == 0
    assert capsys.readouterr().out.split()[:2] == ["resnet20", "269,722"]


def test_recipes_lists_and_shows(capsys):
    assert main(["recipes", "digits/*"]) == 0
    assert "digits/resnet26" in capsys.readouterr().out
    assert main(["recipes", "--show", "digits/resnet26"]) == 0
    assert capsys.readouterr().out == find_recipe("digits/resnet26").read_text()


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_opens_with_its_four_lines(name):
    lines = find_recipe(name).read_text().splitlines()[:4]
    assert all(line.startswith("# ") for line in lines)
    assert [line.split(":")[0] for line in lines[1:]] == ["# Expected", "# Cost", "# Command"]
    assert lines[3] == f"# Command: reszoo fit --config {name}"


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipes_first_line_names_the_network_that_it_trains(name):
    network = yaml.safe_load(find_recipe(name).read_text())["model"]["init_args"]["network"]["class_path"]
    assert headline(find_recipe(name)).split()[0].lower().replace("-", "") == network.rpartition(".")[2]


@pytest.mark.parametrize("name", recipe_names())
def test_a_headers_numbers_are_those_of_its_stored_runs(name):
    recipe = find_recipe(name)
    runs = json.loads(evidence_of(recipe).read_text())
    assert recipe.read_text().splitlines()[1:3] == list(measured_lines(runs))
    assert len({run["data"]["sha256"] for run in runs}) == 1
    assert all(run["commit"] for run in runs)
