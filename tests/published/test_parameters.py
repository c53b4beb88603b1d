"""Every preset's graph has exactly as many parameters as the library's own model class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actcalc.io import presets
from actcalc.io.runs import load_framework
from actcalc.io.sources import source
from actcalc.layers.core.context import whole
from actcalc.layers.model import model_graph, parameters
from actcalc.specs import Layout, Model, Workload
from actcalc.specs.validate import build

pytestmark = pytest.mark.each

DATA = Path(__file__).parent.parent / "data"
COUNTED: dict[str, dict[str, Any]] = json.loads((DATA / "parameters.json").read_text())["models"]
STATED = {
    name: preset.values["parameters"]
    for name in presets.names("models")
    if "parameters" in (preset := presets.load("models", name)).values
}


def graph_parameters(name: str) -> int:
    origin = source(name)
    spec = build(Model, origin.model, name)
    # The library builds no prediction layers, and its counts hold none.
    spec = spec.model_copy(update={"mtp_layers": 0})
    workload = build(Workload, origin.workload, name)
    # Megatron's figures are of the same parameters, whichever framework a preset names.
    graph = model_graph(spec, Layout(), workload, load_framework("transformers"))
    return int(parameters(graph, whole(graph.sizes)))


def test_two_hundred_models_are_there_and_nearly_all_are_counted():
    assert len(presets.names("models")) >= 200
    assert len(COUNTED) >= 190
    assert set(COUNTED) <= set(STATED)


@pytest.mark.parametrize("name", sorted(COUNTED))
def test_preset_states_the_count(name):
    assert STATED[name] == COUNTED[name]["parameters"]


@pytest.mark.parametrize("name", sorted(STATED))
def test_graph_has_as_many(name):
    assert graph_parameters(name) == STATED[name]


def test_recorded_models():
    """The measured models' counts, recorded from the library, are those of the presets."""
    records = json.loads((DATA / "transformers_saved_bytes.json").read_text())["records"]
    names = {record["model"]: record["params"] for record in records}
    names["gpt2"] = names.pop("gpt2-small")
    assert {name: STATED[name] for name in names} == names
