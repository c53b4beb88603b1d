"""Each model type, small: the graph has as many parameters as the library's own class."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from actcalc.errors import SpecError
from actcalc.io.hf import known_types, read_config, refused_types
from actcalc.io.hub.adjust import ADJUST
from actcalc.io.hub.families import ALIASES, FAMILIES
from actcalc.io.hub.family import ACTIVATIONS, SIZES
from actcalc.io.hub.patterns import MLP_RULES, ROPE_RULES, WINDOW_RULES
from actcalc.io.runs import load_framework
from actcalc.layers.core.context import whole
from actcalc.layers.model import model_graph, parameters
from actcalc.specs import Layout, Mla, Model, Moe, Workload
from actcalc.specs.validate import build

pytestmark = pytest.mark.each

CASES = json.loads((Path(__file__).parent.parent / "data" / "hub_types.json").read_text())["cases"]


def case_id(case: dict[str, Any]) -> str:
    return f"{case['config']['model_type']}-{CASES.index(case)}"


def test_at_least_sixty_types():
    assert len({case["config"]["model_type"] for case in CASES}) >= 60
    assert len(known_types()) >= 60
    assert not set(known_types()) & set(refused_types())


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_parameters_of_the_librarys_class(case):
    imported = read_config(case["config"])
    spec = build(Model, imported.fields, "model")
    workload = build(Workload, {**imported.workload, "seq": 32}, "workload")
    # The library builds no prediction layers.
    spec = spec.model_copy(update={"mtp_layers": 0})
    graph = model_graph(spec, Layout(), workload, load_framework("transformers"))
    assert parameters(graph, whole(graph.sizes)) == case["parameters"]


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_reading_changes_nothing_and_is_repeatable(case):
    before = copy.deepcopy(case["config"])
    assert read_config(case["config"]) == read_config(case["config"])
    assert case["config"] == before


def test_table_names_only_what_exists():
    for name, family in FAMILIES.items():
        assert family.code, name
        assert set(family.facts) | set(family.flags) | set(family.rates) <= set(Model.field_names())
        assert set(family.keys) <= set(SIZES), name
        assert set(family.defaults) <= set(SIZES), name
        assert family.windows in WINDOW_RULES, name
        assert family.no_rope in ("", *ROPE_RULES), name
        assert set(family.adjust) <= set(ADJUST), name
        assert family.activation[1] in ("", "swiglu_oai", *ACTIVATIONS), name
        if family.experts:
            assert family.experts.layers in MLP_RULES, name
            assert set(family.experts.facts) <= set(Moe.field_names()), name
    assert set(ALIASES.values()) <= set(FAMILIES)
    used = {name for family in FAMILIES.values() for name in family.adjust}
    assert set(ADJUST) == used


def test_fields_are_those_of_the_specs():
    for case in CASES:
        fields = read_config(case["config"]).fields
        assert set(fields) <= set(Model.field_names())
        assert set(fields.get("moe", {})) <= set(Moe.field_names())
        assert set(fields.get("mla", {})) <= set(Mla.field_names())


@pytest.mark.parametrize("model_type", refused_types())
def test_refused_even_with_every_llama_key(model_type):
    config = {
        "model_type": model_type,
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": 9,
    }
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "rms_norm_eps": 1e-6}
    with pytest.raises(SpecError, match="cannot be described"):
        read_config(config)


@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "SD3Transformer2DModel"])
def test_diffusion_transformers_are_measured_as_modules(name):
    config = {"_class_name": name, "num_layers": 2, "num_attention_heads": 4}
    with pytest.raises(SpecError, match="class of diffusers") as caught:
        read_config(config)
    assert "measure --module" in (caught.value.hint or "")
