"""Hybrids of state-space, attention and feed-forward layers: bytes, FLOPs, patterns, refusals."""

from __future__ import annotations

from typing import Any

import pytest

from actcalc.answers.memory import memory_run
from actcalc.errors import SpecError
from actcalc.io.megatron import read_arguments
from actcalc.io.runs import load_framework, load_run
from actcalc.layers.core.context import whole
from actcalc.layers.core.graph import Graph
from actcalc.layers.model import ModelGraph, model_graph, parameters
from actcalc.specs import Layout, Mamba, Model, Moe, Workload

BASE: dict[str, Any] = {
    "name": "hybrid", "layers": 4, "hidden": 1024, "heads": 16, "kv_heads": 8, "vocab": 50304,
    "position": "none", "norm": "rmsnorm", "pattern": "M-M*", "mamba": Mamba(),
}  # fmt: skip
ARGUMENTS: dict[str, Any] = {
    "hidden-size": 1024, "num-attention-heads": 16, "micro-batch-size": 2, "seq-length": 1024,
    "max-position-embeddings": 1024, "vocab-size": 50257, "bf16": True,
}  # fmt: skip


def built(work: dict[str, Any], layout: dict[str, Any], **model: Any) -> ModelGraph:
    workload = Workload(**{"seq": 1024, "micro_batch": 2, "attention": "flash", **work})
    spec = Model(**{**BASE, **model})
    return model_graph(spec, Layout(**layout), workload, load_framework("megatron"))


def saved(graph: Graph, sizes: dict[str, Any]) -> int:
    return sum(int(graph.tensors[name].bytes.value(sizes)) for name in graph.saved)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "layout", [{}, {"tp": 2}, {"tp": 4, "sp": True}, {"cp": 4}, {"tp": 2, "sp": True, "cp": 4}]
)
def test_a_mixer_keeps_its_projection_and_three_tensors_of_its_width(
    batch: int, layout: dict[str, Any]
) -> None:
    """Norm input and output; z, x, B, C and dt; the scan before its gate; around the last norm."""
    model = built({"micro_batch": batch}, layout)
    graph = model.runs[0].graph
    tp, cp = layout.get("tp", 1), layout.get("cp", 1)
    c = tp if layout.get("sp") else 1
    tokens = 1024 * batch // cp
    h, inner, heads, groups, state = 1024, 2048, 32, 8, 128
    outer = tokens * (4 * h + 4) // c
    packed = 2 * tokens * (2 * inner + 2 * groups * state + heads) // tp
    own = tokens * (3 * 2 * inner + 4 * groups) // tp
    assert saved(graph, dict(model.sizes)) == outer + packed + own


def test_flops_of_the_mixer_are_its_matrix_products() -> None:
    model = built({"micro_batch": 1}, {})
    ops = {op.name: op for op in model.runs[0].graph.ops}
    s, h, inner, heads, groups, state, chunk = 1024, 1024, 2048, 32, 8, 128, 128
    packed = 2 * inner + 2 * groups * state + heads
    expected = {
        "in_proj": 2 * s * h * packed,
        "out_proj": 2 * s * inner * h,
        "scan": 2 * s * (groups * state * chunk + inner * chunk + 2 * inner * state),
    }
    assert {n: int(ops[n].flops.value(model.sizes)) for n in expected} == expected


def test_the_scan_s_states_are_working_memory_only() -> None:
    """Its chunk states grow with the state's width; what is kept grows with B and C alone."""
    narrow, wide = (
        memory_run(
            load_run(
                "mamba2-130m", model={"mamba": {"groups": 1, "state": state}, "vocab": 16}
            )
        ).stages[0]
        for state in (64, 1024)
    )  # fmt: skip
    tokens = 2048
    assert wide.activations_bytes - narrow.activations_bytes == 24 * 2 * tokens * 2 * 960
    assert wide.transient_bytes > narrow.transient_bytes


def test_layers_of_a_pattern_are_halves_of_ordinary_ones() -> None:
    plain = built({}, {}, layers=2, pattern="", mamba=None)
    halves = built({}, {}, layers=4, pattern="*-*-", mamba=None)
    sizes = whole(dict(plain.sizes))
    assert parameters(plain, sizes) == parameters(halves, whole(dict(halves.sizes)))
    layer = saved(plain.runs[0].graph, dict(plain.sizes))
    assert layer == sum(saved(run.graph, dict(halves.sizes)) for run in halves.kinds)


@pytest.mark.parametrize("shared", [False, True])
def test_prediction_layers_may_share_their_weights(shared: bool) -> None:
    extra = {"mtp_layers": 3, "mtp_pattern": "*-", "tied": False}
    model = built({}, {}, **extra, mtp_shared=shared)
    sizes = whole(dict(model.sizes))
    once = parameters(built({}, {}, **{**extra, "mtp_layers": 1}), sizes, mtp=True)
    none = parameters(model, sizes)
    count = 1 if shared else 3
    assert parameters(model, sizes, mtp=True) - none == count * (once - none)


def test_latent_experts_read_a_narrower_width() -> None:
    moe = {"experts": 8, "topk": 2, "ffn": 512, "latent": 256}
    model = built({}, {}, layers=1, pattern="E", mamba=None, moe=Moe(**moe), mlp_bias=False)
    plain = {**moe, "latent": 0}
    wide = built({}, {}, layers=1, pattern="E", mamba=None, moe=Moe(**plain), mlp_bias=False)
    sizes = whole(dict(model.sizes))
    difference = parameters(wide, sizes) - parameters(model, sizes)
    assert difference == 8 * 2 * 512 * (1024 - 256) - 2 * 1024 * 256


def test_arguments_of_a_hybrid() -> None:
    found = read_arguments(
        {
            **ARGUMENTS,
            "hybrid-layer-pattern": "M-M*|MEM-/*E/*E",
            "pipeline-model-parallel-size": 2,
            "num-experts": 8,
            "mamba-num-heads": 64,
            "mtp-use-repeated-layer": True,
        }
    )
    assert found.model["pattern"] == "M-M*MEM-"
    assert found.model["layers"] == 8
    assert (found.model["mtp_layers"], found.model["mtp_pattern"]) == (2, "*E")
    assert found.model["mtp_shared"]
    assert found.model["mamba"]["heads"] == 64
    assert found.layout["layers_per_stage"] == (4, 4)


def test_shares_of_layers_are_spread_evenly() -> None:
    older = {
        **ARGUMENTS, "num-layers": 12, "is-hybrid-model": True, "hybrid-attention-ratio": 0.25,
        "hybrid-mlp-ratio": 0.5, "mtp-num-layers": 2, "mtp-hybrid-override-pattern": "*-",
    }  # fmt: skip
    model = read_arguments(older).model
    assert len(model["pattern"]) == 12
    assert [model["pattern"].count(letter) for letter in "M*-"] == [3, 3, 6]
    assert (model["mtp_layers"], model["mtp_pattern"]) == (2, "*-")
    with pytest.raises(SpecError, match="shares"):
        read_arguments({**older, "hybrid-mlp-ratio": 0.9})


@pytest.mark.parametrize("pattern", ["MGM", "M-|M", "M*/M/M*"])
def test_patterns_that_cannot_be_meant(pattern: str) -> None:
    pp = 3 if "|" in pattern else 1
    options = {"hybrid-layer-pattern": pattern, "pipeline-model-parallel-size": pp}
    with pytest.raises(SpecError) as caught:
        read_arguments({**ARGUMENTS, **options})
    assert caught.value.hint


@pytest.mark.parametrize(
    "changes",
    [{"pattern": "M-M"}, {"pattern": "M-Mx"}, {"pattern": "M-ME"}, {"mamba": None}],
)
def test_models_that_contradict_themselves(changes: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        Model(**{**BASE, **changes})
    assert caught.value.hint


@pytest.mark.parametrize("framework", ["megatron-local", "torchtitan", "paper"])
def test_other_frameworks_have_no_mixer(framework: str) -> None:
    with pytest.raises(SpecError) as caught:
        model_graph(Model(**BASE), Layout(), Workload(), load_framework(framework))
    assert caught.value.hint


def test_a_mixer_s_heads_are_split() -> None:
    with pytest.raises(SpecError, match="groups"):
        built({}, {"tp": 16})
