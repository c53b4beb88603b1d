"""Vision-language models: tower, projector and language model keep what the real classes keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actcalc.errors import SpecError
from actcalc.io.hf import read_config
from actcalc.io.runs import load_framework
from actcalc.layers.adapters import adapted
from actcalc.layers.core.context import whole
from actcalc.layers.model import ModelGraph, model_graph, parameters
from actcalc.specs import Layout, Model, Workload
from actcalc.specs.training import Training
from actcalc.specs.validate import build
from tests.published.test_transformers import graph_of, predicted

DATA = Path(__file__).parent.parent / "data"
TRACED: list[dict[str, Any]] = json.loads((DATA / "towers_traced.json").read_text())["models"]
CASES = [(model, case) for model in TRACED for case in model["cases"]]
BY_NAME = {model["name"]: model for model in TRACED}


def graph(model: dict[str, Any], case: dict[str, Any]) -> ModelGraph:
    run = {key: case[key] for key in ("seq", "precision", "attention")}
    each = model["tokens_per_image"]
    spec = build(Model, read_config(model["config"]).fields, "model")
    assert spec.tower is not None
    if spec.tower.packed:
        spec = spec.model_copy(update={"tower": spec.tower.model_copy(update={"tokens": each})})
    workload = Workload(micro_batch=case["batch"], image_tokens=case["images"] * each, **run)
    return model_graph(spec, Layout(), workload, load_framework("transformers"))


@pytest.mark.parametrize(
    ("model", "case"),
    CASES,
    ids=lambda value: (
        value.get("name")
        or "-".join(str(value[key]) for key in ("batch", "seq", "precision", "attention", "images"))
    ),
)
def test_bytes_of_the_real_class(model: dict[str, Any], case: dict[str, Any]) -> None:
    found = predicted(graph(model, case))
    assert found.layers == case["layers_bytes"]
    assert found.head == case["head_bytes"]
    assert found.embedding == case["embedding_bytes"]
    assert found.parameters == model["params"]


def test_a_frozen_tower_keeps_nothing_and_its_projector_does():
    model = BY_NAME["llava"]
    built = graph(model, model["cases"][1])
    still = adapted(built, Training(tower="frozen"))
    kept = {op.group for op in still.embedding.ops if op.saves}
    assert kept == {"projector", "embedding"}
    tower = [w for op in built.embedding.ops if op.group == "tower" for w in op.weights]
    frozen = [w for graph, _ in still.graphs() for w in graph.weights if w.frozen]
    # Before, layers that nobody reads had no gradient either.
    assert {w.name for w in tower} == {w.name for w in frozen}
    assert parameters(still, whole(still.sizes)) == parameters(built, whole(built.sizes))
    assert predicted(still).layers == predicted(built).layers


def test_llama_4s_adapter_stays_with_its_tower():
    model = BY_NAME["llama4"]
    still = adapted(graph(model, model["cases"][1]), Training(tower="frozen"))
    kept = {op.name for op in still.embedding.ops if op.saves}
    assert kept == {"project_out", "place_images"}
    trained = {w.name for op in still.embedding.ops for w in op.weights if not w.frozen}
    assert {name for name in trained if "adapt" in name} == set()


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 108_641_793_536),
        (
            {"num_local_experts": 128, "interleave_moe_layer_step": 2, "use_qk_norm": False},
            401_583_781_376,
        ),
    ],
    ids=["scout", "maverick"],
)
def test_llama_4s_parameters_with_its_tower(changes, count):
    """As transformers 5.24 counts Llama4ForConditionalGeneration on the meta device."""
    name = "meta-llama--Llama-4-Scout-17B-16E-Instruct.json"
    config = json.loads((DATA / "configs" / name).read_text())
    config["text_config"] |= changes
    # As in aiconfigurator 64c5ddb697, aic-core/src/aiconfigurator_core/model_configs.
    config["vision_config"] = {
        "model_type": "llama4_vision_model", "hidden_size": 1408, "image_size": 336,
        "intermediate_size": 5632, "num_attention_heads": 16, "num_hidden_layers": 34,
        "patch_size": 14, "pixel_shuffle_ratio": 0.5, "projector_input_dim": 4096,
        "projector_output_dim": 4096, "vision_output_dim": 4096,
    }  # fmt: skip
    built = graph_of(config, seq=1024, image_tokens=2 * 144)
    assert int(parameters(built, whole(built.sizes))) == count


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("intermediate_size", 640, "not the width 1024 of 2x2 patches"),
        ("vision_output_dim", 512, "not one width with the projector's"),
        ("projector_dropout", 0.1, "dropout is not described"),
        ("pixel_shuffle_ratio", 0.3, "does not divide 4 patches"),
    ],
)
def test_llama_4s_towers_that_are_refused(key, value, message):
    config = BY_NAME["llama4"]["config"]
    config = {**config, "vision_config": {**config["vision_config"], key: value}}
    with pytest.raises(SpecError, match=message):
        graph_of(config, seq=128)


def test_adapters_leave_the_tower_frozen():
    model = BY_NAME["gemma3"]
    built = graph(model, model["cases"][0])
    found = adapted(built, Training(lora_rank=4))
    trained = [w.name for w in found.embedding.weights if not w.frozen]
    assert trained == []
    assert not any(op.saves for op in found.embedding.ops if op.group == "tower")


def test_without_images_the_tower_is_there_and_gets_no_gradient():
    model = BY_NAME["llava"]
    built = graph(model, {**model["cases"][0], "images": 0})
    assert int(parameters(built, whole(built.sizes))) == model["params"]
    ops = [op for op in built.embedding.ops if op.group in ("tower", "projector")]
    assert all(w.frozen for op in ops for w in op.weights)
    assert not any(op.saves or op.flops for op in ops)


def test_image_tokens_are_whole_images():
    config = BY_NAME["llava"]["config"]
    with pytest.raises(SpecError, match="no whole images of 16 tokens"):
        graph_of(config, seq=128, image_tokens=20)


def test_two_layers_of_features_are_refused():
    config = {**BY_NAME["llava"]["config"], "vision_feature_layer": [-2, -1]}
    with pytest.raises(SpecError, match="only one layer's features"):
        graph_of(config, seq=128)


def test_megatron_has_no_tower():
    config = BY_NAME["llava"]["config"]
    with pytest.raises(SpecError, match="does not model a vision tower"):
        graph_of(config, "megatron", seq=128, image_tokens=16)


def test_megatron_leaves_a_tower_out_that_no_image_needs(cli):
    done = cli("memory", "qwen2.5-vl-7b", "--framework", "megatron")
    assert done.code == 0
    assert "The vision tower of qwen2.5-vl-7b is left out" in " ".join(done.out.split())
    assert "7.616 B parameters" in done.out


def test_an_image_of_any_size_is_a_square_of_tokens(cli):
    done = cli("memory", "qwen2.5-vl-7b", "--image-tokens", 1000)
    assert done.code == 2
    assert "--set tower.tokens=N" in done.err
    words = ("memory", "qwen2.5-vl-7b", "--image-tokens", 1024, "--set", "tower.tokens=1024")
    assert cli(*words).code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tower", "frozen"), "has no vision tower"),
        (("--image-tokens", 16), "need a vision tower"),
    ],
)
def test_a_model_without_a_tower_is_told_so(cli, words, message):
    done = cli("memory", "llama-3-8b", *words)
    assert done.code == 2
    assert message in done.err
