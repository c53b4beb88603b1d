"""Megatron's fine-grained activation offloading: what leaves, what comes back when, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actcalc.answers.memory import memory_run
from actcalc.errors import SpecError
from actcalc.io.megatron import read_arguments
from actcalc.io.runs import load_run, resolve
from actcalc.io.sources import arguments_source
from actcalc.layers.core.graph import Graph
from actcalc.memory.parts import Part
from actcalc.memory.stage import StageMemory
from actcalc.policy.offload import Away, region
from actcalc.specs.run import Run
from actcalc.specs.training import OFFLOADABLE

# Latent attention and experts, 4 layers: every tensor named below is 2·tokens·width bytes.
LATENT: dict[str, Any] = {
    "transformer-impl": "transformer_engine", "bf16": True, "multi-latent-attention": True,
    "q-lora-rank": 768, "kv-lora-rank": 512, "qk-head-dim": 128, "qk-pos-emb-head-dim": 64,
    "v-head-dim": 128, "qk-layernorm": True, "num-experts": 8, "moe-router-topk": 2,
    "moe-ffn-hidden-size": 512, "moe-grouped-gemm": True, "moe-token-dispatcher-type": "alltoall",
    "moe-permute-fusion": True, "attention-backend": "unfused", "disable-bias-linear": True,
    "seq-length": 2048, "hidden-size": 1024, "ffn-hidden-size": 2048, "num-attention-heads": 16,
    "kv-channels": 128, "max-position-embeddings": 2048, "position-embedding-type": "rope",
    "vocab-size": 32000, "normalization": "RMSNorm", "swiglu": True,
    "untie-embeddings-and-output-weights": True, "attention-dropout": 0.0, "hidden-dropout": 0.0,
    "micro-batch-size": 1, "global-batch-size": 8, "num-layers": 4,
    "recompute-granularity": "selective",
    "recompute-modules": "[layernorm mla_up_proj moe_act]",
}  # fmt: skip
DENSE: dict[str, Any] = {
    "num-layers": 4, "hidden-size": 1024, "num-attention-heads": 16, "seq-length": 2048,
    "max-position-embeddings": 2048, "micro-batch-size": 1, "vocab-size": 32000, "bf16": True,
    "attention-dropout": 0.0, "hidden-dropout": 0.0, "attention-backend": "unfused",
}  # fmt: skip
TOKENS = 2048
SCORES = 16 * TOKENS * TOKENS * 2


def run(arguments: dict[str, Any], *modules: str, **more: Any) -> Run:
    options = {**arguments, **{name.replace("_", "-"): value for name, value in more.items()}}
    if modules:
        options["fine-grained-activation-offloading"] = True
        options["offload-modules"] = list(modules)
    return resolve(arguments_source(read_arguments(options), "run"))


def away(one: Run) -> Away:
    work = StageMemory.of(one)
    return work.timeline.away(1, work.places[0][0])


def peak(one: Run) -> int:
    return memory_run(one).stages[-1].peak_bytes


@pytest.mark.parametrize(
    ("module", "leaving"),
    [
        ("attn_norm", {"input"}),
        ("mlp_norm", {"middle"}),
        ("qkv_linear", {"q_down_out", "kv_down_out"}),
        ("core_attn", {"probs"}),
        ("expert_fc1", {"expert_input"}),
        ("moe_act", {"expert_fc1_out"}),
    ],
)
def test_a_module_sends_what_it_alone_saved(module: str, leaving: set[str]) -> None:
    assert away(run(LATENT, module)).leaving == leaving


def test_a_tensor_leaves_only_if_every_op_that_saved_it_is_in_a_module() -> None:
    """Without its re-run, positions are turned in qkv_linear, and q, k and v saved by the core."""
    plain = {**LATENT, "recompute-granularity": None, "recompute-modules": None}
    assert {"q", "k", "v", "probs"} <= away(run(plain, "core_attn")).leaving
    # norm1's output is saved by the projections alone, the expert's input by fc1 alone
    assert "norm1_out" in away(run(plain, "qkv_linear")).leaving
    assert "expert_activation_out" not in away(run(plain, *OFFLOADABLE)).leaving
    # the router and the dispatcher, in no module, keep the norm's output on the device
    assert "norm2_out" not in away(run(plain, *OFFLOADABLE)).leaving


def test_every_op_has_a_copy_of_its_own_on_the_host() -> None:
    """The hooks see each save: the probabilities that softmax and product keep go twice."""
    found = away(run(LATENT, "core_attn"))
    assert [name for name in found.copied if name == "probs"] == ["probs", "probs"]
    work = StageMemory.of(run(LATENT, "core_attn"))
    # two scores, and q, k of 192 and v of 128 per head, made again but saved inside the module
    qkv = TOKENS * 16 * (192 + 192 + 128) * 2
    # the last of the 4 layers stays
    assert work.host_bytes(0) == 3 * (2 * SCORES + qkv)


def test_tensors_below_the_least_size_stay() -> None:
    elements = TOKENS * (512 + 64)
    assert (
        "kv_down_out" in away(run(LATENT, "qkv_linear", min_offloaded_tensor_size=elements)).leaving
    )
    found = away(run(LATENT, "qkv_linear", min_offloaded_tensor_size=elements + 1))
    assert found.leaving == {"q_down_out"}


def test_a_norm_fused_into_the_linear_layer_is_no_module() -> None:
    one = run(DENSE, "attn_norm", "mlp_norm", "expert_fc1", "moe_act")
    assert not any(region(kind.graph, "attn_norm") for kind in StageMemory.of(one).graph.runs)
    assert peak(one) == peak(run(DENSE))
    assert any("moves nothing" in note for note in memory_run(one).notes)
    assert "input" in away(run(DENSE, "qkv_linear")).leaving


def test_experts_one_after_another_have_no_hooks() -> None:
    single = {**LATENT, "moe-grouped-gemm": None}
    assert not away(run(single, "expert_fc1", "moe_act")).copied


def test_cross_attention_projects_in_its_own_modules() -> None:
    kinds = StageMemory.of(load_run("t5-large", framework="megatron")).graph.kinds
    (graph,) = [kind.graph for kind in kinds if _crosses(kind.graph)]
    assert {op.name for op in region(graph, "attn_proj")} == {"out_proj", "cross_out_proj"}
    assert {"qkv", "cross_q", "cross_kv"} <= {op.name for op in region(graph, "qkv_linear")}


def _crosses(graph: Graph) -> bool:
    return any(op.name == "cross_q" for op in graph.ops)


def test_the_last_layer_of_a_backward_that_follows_at_once_stays() -> None:
    layers = [p for p in StageMemory.of(run(LATENT, "core_attn")).parts(0)[0] if p.first >= 0]
    assert [(p.count, p.host > 0) for p in layers] == [(3, True), (1, False)]
    assert layers[1].stored - layers[0].stored == SCORES


def test_between_backwards_of_a_pipeline_a_layer_is_back_already() -> None:
    """Stage 0 of 2 holds it in forward; the last, whose backward follows at once, does not."""
    plain, off = (
        run(LATENT, pipeline_model_parallel_size=2),
        run(LATENT, "attn_norm", pipeline_model_parallel_size=2),
    )
    size = TOKENS * 1024 * 2

    def forward(one: Run, stage: int) -> int:
        return next(p.forward for p in StageMemory.of(one).parts(stage)[0] if p.first >= 0)

    assert forward(off, 0) - forward(plain, 0) == size
    assert forward(off, 1) == forward(plain, 1)


@given(st.sets(st.sampled_from(sorted(set(OFFLOADABLE) - {"attn_proj"})), min_size=1))
@settings(max_examples=25, deadline=None)
def test_more_modules_store_no_more(modules: set[str]) -> None:
    """Stored bytes fall with every module, by no more than what is in host memory."""
    work, plain = StageMemory.of(run(LATENT, *sorted(modules))), StageMemory.of(run(LATENT))
    every = StageMemory.of(run(LATENT, *OFFLOADABLE))

    def stored(one: StageMemory) -> int:
        return sum(p.stored * p.count for p in one.parts(0)[0])

    assert stored(every) <= stored(work) < stored(plain)
    assert stored(plain) - stored(work) <= work.host_bytes(0) <= every.host_bytes(0)


def test_host_memory_is_said() -> None:
    (note,) = [n for n in memory_run(run(LATENT, "expert_fc1")).notes if "host memory" in n]
    assert f"{3 * TOKENS * 2 * 1024 * 2:,} B" in note


def test_a_stage_whose_last_chunk_has_no_layers_is_asked_for_its_tensors() -> None:
    pipeline = {
        "pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|t|tt|L",
    }  # fmt: skip
    one = run(LATENT, *OFFLOADABLE, **pipeline)
    work = StageMemory.of(one)
    assert [work.ahead(stage) for stage in (0, 1)] == [True, False]
    assert any("asks for it" in note for note in memory_run(one).notes)
    # asked for, only one copy of the scores is there beside their gradient
    asked = next(p.backward for p in work.parts(1)[0] if p.first >= 0)
    ahead = next(p.backward for p in work.timeline.parts(work.places[1][0], (False, False)))
    assert 2 * SCORES <= asked < 3 * SCORES <= ahead


def test_a_module_that_ends_lets_a_group_of_the_layer_before_come() -> None:
    """When attention's backward is highest, the group of the norm behind it has come."""

    def highest(*modules: str) -> int:
        return next(p.backward for p in StageMemory.of(run(LATENT, *modules)).parts(0)[0] if p.host)

    assert highest("core_attn", "mlp_norm") - highest("core_attn") == TOKENS * 1024 * 2
    assert highest("core_attn", "attn_norm") == highest("core_attn")


def _in_16_bit(one: Run) -> StageMemory:
    kernels = one.workload.kernels.model_copy(update={"attention_softmax_in_fp32": False})
    return StageMemory.of(
        replace(one, workload=one.workload.model_copy(update={"kernels": kernels}))
    )


def test_what_an_op_asked_for_goes_with_it() -> None:
    """The product's copy of v is gone when PyTorch's softmax, the highest moment, runs backward."""
    pipeline = {
        "pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|t|tt|L",
        "no_masked_softmax_fusion": True,
    }  # fmt: skip

    def highest(*modules: str) -> Part:
        return next(p for p in _in_16_bit(run(DENSE, *modules, **pipeline)).parts(1)[0])

    plain, asked = highest(), highest("core_attn")
    assert plain.backward_at == asked.backward_at == "softmax"
    assert plain.backward - asked.backward == TOKENS * 3 * 1024 * 2


def test_the_fused_softmax_writes_its_gradient_over_that_of_its_output() -> None:
    """Scores twice in backward; PyTorch's own softmax makes a third."""
    fused = max(p.backward for p in StageMemory.of(run(LATENT)).parts(0)[0] if p.first >= 0)
    plain = run(LATENT, no_masked_softmax_fusion=True)
    unfused = max(p.backward for p in StageMemory.of(plain).parts(0)[0] if p.first >= 0)
    assert 2 * SCORES <= fused < 3 * SCORES <= unfused


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"offload-modules": None}, "names no modules"),
        ({"cpu-offloading": True}, "exclude each other"),
        ({"transformer-impl": "local"}, "Transformer Engine"),
        ({"offload-modules": "layer_input"}, "layer_input"),
        ({"offload-modules": "attn_proj"}, "without core_attn"),
        ({"recompute-granularity": "full", "recompute-modules": None}, "re-runs whole"),
    ],
)
def test_refused(changes: dict[str, Any], word: str) -> None:
    options = {
        **LATENT, "fine-grained-activation-offloading": True, "offload-modules": "core_attn",
        **changes,
    }  # fmt: skip
    with pytest.raises(SpecError, match=word):
        memory_run(run(options))


def test_both_kinds_of_offload_are_refused() -> None:
    one = run(LATENT, "core_attn")
    with pytest.raises(SpecError, match="exclude each other"):
        one.training.model_copy(update={"offload": "activations"})


@pytest.mark.parametrize("count", [1, 2, 3])
def test_offloaded_layers_leave_the_rest_at_any_time(count: int) -> None:
    """L - n layers are saved at the highest moment (Transformer Engine cpu_offload.py)."""

    def layers(one: Run) -> list[Part]:
        return [p for p in StageMemory.of(one).parts(0)[0] if p.first >= 0]

    plain = layers(run(DENSE))[0]
    off = run(DENSE, cpu_offloading=True, cpu_offloading_num_layers=count)
    gone, rest = layers(off)
    assert (gone.count, rest.count, rest.first) == (count, 4 - count, count)
    assert gone.stored + gone.host == rest.stored == plain.stored
    assert 0.9 * plain.stored < gone.host
    # in backward of the first layer those that came back are held as in that of the last
    last = gone.stored * count + rest.stored * (rest.count - 1) + rest.backward
    assert gone.backward - rest.backward == gone.host * (rest.count - 1)
    assert gone.stored * (count - 1) + gone.backward <= last
    assert peak(run(DENSE)) - peak(off) == count * gone.host
    assert any(f"{count * gone.host:,} B in host memory" in n for n in memory_run(off).notes)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"cpu-offloading-num-layers": 4}, "never offloaded"),
        ({"pipeline-model-parallel-size": 2}, "without pipeline"),
        ({"recompute-granularity": "selective"}, "recomputation only"),
        ({"transformer-impl": "local"}, "Transformer Engine"),
        ({"cuda-graph-impl": "local"}, "CUDA graphs"),
    ],
)
def test_offloaded_layers_are_refused(changes: dict[str, Any], word: str) -> None:
    options = {**DENSE, "cpu-offloading": True, "cpu-offloading-num-layers": 2, **changes}
    with pytest.raises(SpecError, match=word):
        memory_run(run(options))


def test_layers_offload_nothing_where_activations_are_left_out() -> None:
    off = {"cpu_offloading": True, "cpu_offloading_num_layers": 2}
    assert peak(run(DENSE, cpu_offloading_activations=False, **off)) == peak(run(DENSE))
