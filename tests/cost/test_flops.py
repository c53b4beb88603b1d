"""FLOPs against recorded counts, and the two ways of counting attention."""

from __future__ import annotations

import pytest

from actcalc.cost.flops import (
    forward_flops,
    hardware_flops,
    layers_forward_flops,
    model_flops,
    rerun_flops,
)
from actcalc.io.runs import load_run
from actcalc.run.staged import StagedRun

# Forward FLOPs by PyTorch's FLOP counter over the models of transformers 5.24, eager attention.
RECORDED = [
    ("gpt2-medium", 8, 1024, 6_615_608_590_336),
    ("bert-base", 32, 512, 3_879_815_086_080),
    ("llama-3-8b", 1, 4096, 70_274_254_897_152),
]


def staged_of(name, framework="paper", model=None, layout=None, **workload):
    return StagedRun(
        load_run(
            name, framework=framework, model=model or {}, workload=workload, layout=layout or {}
        )
    )


def graph_of(*args, **changes):
    return staged_of(*args, **changes).graph


@pytest.mark.parametrize(("name", "batch", "seq", "flops"), RECORDED)
@pytest.mark.parametrize("framework", ["paper", "transformers"])
def test_recorded(name, batch, seq, flops, framework):
    graph = graph_of(name, framework, micro_batch=batch, seq=seq)
    assert forward_flops(graph) == flops
    assert model_flops(graph) == 3 * flops


@pytest.mark.parametrize("layout", [{"tp": 8}, {"tp": 4, "sp": True}, {"pp": 4}])
def test_independent_of_layout(layout):
    assert model_flops(graph_of("gpt-22b", layout=layout)) == model_flops(graph_of("gpt-22b"))


def test_causal_halves_scores_only():
    graph = graph_of("gpt2-medium", micro_batch=1, seq=1024)
    model = graph.context.model
    scores = 4 * model.layers * 1024 * 1024 * model.hidden
    assert forward_flops(graph, "full") - forward_flops(graph, "causal") == scores // 2


def test_bidirectional_attention_has_no_causal_count():
    graph = graph_of("bert-base", micro_batch=1, seq=512)
    assert forward_flops(graph, "causal") == forward_flops(graph, "full")


def test_window_counts_its_keys():
    """Full counting takes the window's y keys a token, causal counting y - y²/2s of them."""
    whole = graph_of("mistral-7b", seq=8192, model={"window": 0})
    cut = graph_of("mistral-7b", seq=8192, model={"window": 2048})
    model = whole.context.model
    per_key = 4 * model.layers * 8192 * model.heads * model.head_dim
    assert forward_flops(whole) - forward_flops(cut) == per_key * (8192 - 2048)
    causal = forward_flops(cut) - forward_flops(cut, "causal")
    assert causal == per_key * 2048 * 2048 // (2 * 8192)


def test_moe_counts_active_experts():
    graph = graph_of("mixtral-8x7b", seq=4096)
    dense = graph_of("mixtral-8x7b", seq=4096, model={"moe": None, "ffn": 2 * 14336})
    model = graph.context.model
    router = 2 * 4096 * model.hidden * model.moe.experts * model.layers
    assert layers_forward_flops(graph) == layers_forward_flops(dense) + router


def test_hardware_flops_of_full_recompute():
    staged = staged_of("gpt-22b")
    graph, full = staged.graph, staged.full
    assert rerun_flops(staged, full) == layers_forward_flops(graph)
    hardware = hardware_flops(staged, full)
    assert hardware.flops == hardware.op_flops == model_flops(graph) + layers_forward_flops(graph)
    assert hardware.convention == "ops"


def test_selective_uses_the_papers_equation_only_when_counting_in_full():
    staged = staged_of("gpt-22b")
    policy = staged.policy("selective")
    paper = hardware_flops(staged, policy)
    assert paper.convention == "paper"
    assert paper.flops > paper.op_flops
    causal = hardware_flops(staged, policy, "causal")
    assert causal.convention == "ops"
    core = 4 * 2048 * 2048 * 6144 * 48 * staged.run.workload.micro_batch
    assert rerun_flops(staged, policy) == core
    assert rerun_flops(staged, policy, "causal") == core // 2


# README of the data: torch's non-reentrant checkpoint leaves out each layer's last product.
@pytest.mark.parametrize(
    ("name", "batch", "seq", "extra"),
    [("llama-3-8b", 1, 4096, 0.240), ("gpt2-medium", 8, 1024, 0.291)],
)
def test_rerun_with_early_stop(name, batch, seq, extra):
    staged = staged_of(name, "transformers", micro_batch=batch, seq=seq)
    again = rerun_flops(staged, staged.full)
    assert again / model_flops(staged.graph) == pytest.approx(extra, abs=0.0005)
