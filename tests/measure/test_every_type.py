"""Every text model type that transformers holds: described as its class is built, or refused."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from actcalc.errors import SpecError
from actcalc.io.hf import read_config
from actcalc.io.hub.transformers_types import TRANSFORMERS_TYPES
from actcalc.io.runs import load_framework
from actcalc.layers.core.context import whole
from actcalc.layers.model import ModelGraph, model_graph, parameters
from actcalc.measure.hf import build_model, model_class, text_part
from actcalc.specs import Layout, Model, Workload
from actcalc.specs.validate import build
from tests.sweeps import sampled

transformers = pytest.importorskip("transformers")

TASKS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM")
SAMPLE = (
    "falcon_h1", "zamba2", "minimax", "lfm2", "megatron-bert", "qwen3_next", "gpt_oss",
    "eurobert", "rwkv", "chameleon",
)  # fmt: skip
BROKEN = {
    "gemma4_assistant": "its default configuration is refused by its own class",
    "gemma4_unified_assistant": "its default configuration names no class",
}
"""Types whose defaults are no model."""
ELSEWHERE = {
    "dbrx": "its class reads a base of rotary angles from a section that its defaults lack",
    "dots1": "its class asks for a number that its defaults leave out",
    "hunyuan_v1_dense": "as above", "hunyuan_v1_moe": "as above", "ministral": "as above",
    "nemotron": "as above",
    "emu3": "its text model alone has no head, which its checkpoints have",
}  # fmt: skip
"""Types whose class cannot be built from its defaults; others of their tests build them."""


def text_types() -> list[str]:
    auto = transformers.models.auto.modeling_auto
    tables = (getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in TASKS)
    return sorted({name for table in tables for name in table} - set(BROKEN))


@cache
def default_config(model_type: str) -> Any:
    return transformers.AutoConfig.for_model(model_type)


def described(model_type: str) -> dict[str, Any]:
    return json.loads(default_config(model_type).to_json_string(use_diff=False))


def graph_or_refusal(config: dict[str, Any]) -> ModelGraph | SpecError:
    try:
        imported = read_config(config)
        model = build(Model, {**imported.fields, "mtp_layers": 0}, "model")
        workload = build(Workload, {**imported.workload, "seq": 32}, "workload")
        return model_graph(model, Layout(), workload, load_framework("transformers"))
    except SpecError as error:
        return error


@pytest.mark.parametrize("model_type", sampled([*text_types(), "chameleon"], SAMPLE))
def test_a_type_is_described_as_its_class_is_built_or_refused(model_type: str) -> None:
    """Priced as something else it would have other parameters."""
    import torch

    graph = graph_or_refusal(described(model_type))
    if isinstance(graph, SpecError):
        assert graph.hint
        return
    if model_type in ELSEWHERE:
        return
    config = text_part(default_config(model_type))
    try:
        cls = model_class(config)
    except SpecError:
        config = default_config(model_type)
        cls = model_class(config)
    with torch.device("meta"):
        real = build_model(config, cls, dtype=None, attention=None, checkpointing=False)
    assert parameters(graph, whole(graph.sizes)) == sum(p.numel() for p in real.parameters())


@pytest.mark.sweep
def test_most_types_are_described() -> None:
    """How many of the text types are priced from their defaults; the rest say why not."""
    found = {name: graph_or_refusal(described(name)) for name in text_types()}
    refused = {name: error for name, error in found.items() if isinstance(error, SpecError)}
    assert all(error.hint for error in refused.values())
    assert len(found) - len(refused) >= 127


def test_no_type_of_the_library_is_taken_for_a_llama() -> None:
    for model_type in sorted(TRANSFORMERS_TYPES):
        config = {
            "model_type": model_type, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 9,
            "num_hidden_layers": 2, "num_attention_heads": 4,
        }  # fmt: skip
        try:
            notes = read_config(config).warnings
        except SpecError:
            continue
        assert not any("read as a Llama" in note for note in notes), model_type
