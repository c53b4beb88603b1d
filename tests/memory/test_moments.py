"""The moments of a step: the peak is their highest, and each kind of them as its source has it."""

from __future__ import annotations

from typing import Any

import pytest

from actcalc.answers.memory import MemoryReport, memory_run
from actcalc.errors import SpecError
from actcalc.io.runs import load_run
from actcalc.memory.moments import layers_of, stage_gpu
from actcalc.memory.stage import StageMemory
from actcalc.policy.rules import NONE
from actcalc.run.staged import StagedRun
from actcalc.solve.stage import peak

TITAN = {"framework": "torchtitan", "layout": {"dp": 8, "zero": 3}}
RUNS: tuple[dict[str, Any], ...] = (
    {"framework": "transformers", "workload": {"seq": 1024}},
    {"framework": "transformers", "workload": {"seq": 1024, "precision": "amp-bf16"},
     "policies": ("full",)},
    {"framework": "transformers", "workload": {"seq": 1024, "global_batch": 4}},
    {**TITAN, "policies": ("full",)},
    {**TITAN, "layout": {"dp": 8, "zero": 2}},
    {"framework": "torchtitan", "policies": ("full",), "workload": {"global_batch": 64},
     "layout": {"tp": 2, "sp": True, "pp": 4, "dp": 8, "zero": 3}},
    {"framework": "torchtitan", "workload": {"global_batch": 64},
     "layout": {"pp": 2, "vpp": 2, "dp": 8, "zero": 3, "schedule": "interleaved-zb"}},
    {"framework": "megatron", "layout": {"tp": 2, "sp": True, "pp": 4}},
)  # fmt: skip


def report(name: str, *, timeline: bool = False, **changes: Any) -> MemoryReport:
    return memory_run(load_run(name, **changes), timeline=timeline)


@pytest.mark.parametrize("changes", RUNS)
def test_the_peak_is_the_highest_of_the_moments(changes: dict[str, Any]) -> None:
    for stage in report("llama-3-8b", timeline=True, **changes).stages:
        later = [m for m in stage.moments if m.step == "later"]
        top = max(later, key=lambda m: m.total_bytes)
        assert (top.total_bytes, top.at) == (stage.peak_bytes, stage.peak_at)
        for moment in stage.moments:
            document = vars(moment)
            parts = [v for k, v in document.items() if k.endswith("_bytes")]
            assert sum(parts) == 2 * moment.total_bytes
            assert min(parts) >= 0


@pytest.mark.parametrize("changes", RUNS)
def test_the_planner_s_gpu_has_the_same_peak(changes: dict[str, Any]) -> None:
    work = StageMemory.of(load_run("llama-3-8b", **changes))
    for stage in range(work.run.layout.pp):
        gpu = stage_gpu(work, stage)
        assert peak(gpu, layers_of(work, stage)) == work.figure(stage).total_bytes


def test_adam_s_moments_come_at_the_end_of_the_first_step() -> None:
    (stage,) = report("llama-3.2-1b", timeline=True, framework="transformers").stages
    first = [m for m in stage.moments if m.step == "first"]
    assert {m.optimizer_bytes for m in first[:-1]} == {0}
    assert first[-1].at == "in the optimizer step"
    assert first[-1].optimizer_bytes == stage.optimizer_bytes
    (stage,) = report("llama-3.2-1b", timeline=True, framework="megatron").stages
    masters = {m.optimizer_bytes for m in stage.moments if m.step == "first"}
    assert masters == {4 * stage.parameters, 12 * stage.parameters}


def test_fp32_shards_and_a_gathered_copy_under_zero_2() -> None:
    """fully_shard with reshard_after_forward false: 4 B / dp and 2 B of every parameter."""
    (stage,) = report("llama-3-8b", framework="torchtitan", layout={"dp": 8, "zero": 2}).stages
    assert stage.weights_bytes == pytest.approx(stage.parameters * (4 / 8 + 2), rel=1e-6)
    assert round(stage.weights_bytes / 1e9, 1) == 20.1


@pytest.mark.parametrize(
    ("schedule", "layers", "vpp", "gib", "measured"),
    [
        ("1f1b", (15, *[16] * 6, 15), 1, 64.4, 82.5),
        ("interleaved", (7, *[8] * 14, 7), 2, 66.35, 72.7),
        ("interleaved-zb", (7, *[8] * 14, 7), 2, 89.18, 89.7),
    ],
)
def test_torchtitan_s_405b_in_a_pipeline(
    schedule: str, layers: tuple[int, ...], vpp: int, gib: float, measured: float
) -> None:
    """torchtitan benchmarks/llama3_h100_202412: reserved, which lies above what is allocated.

    The local batch of 32 in as many micro-batches as stages (its default then).
    """
    result = report(
        "llama-3.1-405b", framework="torchtitan", policies=("full",),
        layout={"tp": 8, "sp": True, "pp": 8, "dp": 8, "zero": 3, "vpp": vpp,
                "schedule": schedule, "layers_per_stage": layers},
        workload={"seq": 8192, "micro_batch": 4, "global_batch": 256},
    )  # fmt: skip
    peak = result.peak_bytes / 2**30
    assert peak == pytest.approx(gib, abs=0.01)
    assert 0.75 * measured < peak <= measured


def test_adapters_over_a_16_bit_base_under_autocast() -> None:
    """Qwen2.5 7B with LoRA and bf16=True: the base stays in 16 bits, adapters are fp32."""
    changes = {"framework": "transformers", "policies": ("full",)}
    work = {"precision": "amp-bf16", "seq": 2048}
    (stage,) = report("qwen2.5-7b", workload=work, training={"lora_rank": 16}, **changes).stages
    assert stage.peak_bytes == pytest.approx(20e9, rel=0.02)
    base = stage.parameters - stage.gradients_full_bytes // 4
    assert stage.weights_bytes == 2 * base + stage.gradients_full_bytes


def test_experts_as_one_parameter_are_not_quantised() -> None:
    """Qwen3 30B-A3B: bitsandbytes packs torch.nn.Linear alone, about 60 GB stay."""
    training = {"lora_rank": 16, "base_bits": 4}
    (stage,) = report("qwen3-30b-a3b", framework="transformers", training=training).stages
    assert stage.weights_bytes == pytest.approx(60e9, rel=0.02)


@pytest.mark.parametrize(("loss", "gb"), [("fused", 22.8), ("recomputed", 22.8)])
def test_losses_that_keep_no_logits(loss: str, gb: float) -> None:
    """Qwen3 0.6B at 131,072 tokens: Liger's parts leave a layer's re-run as the peak."""
    (stage,) = report(
        "qwen3-0.6b", framework="transformers", policies=("full",), training={"loss": loss},
        workload={"seq": 8192, "micro_batch": 16},
    ).stages  # fmt: skip
    assert stage.peak_bytes / 1e9 == pytest.approx(gb, abs=0.1)
    assert "layer 27" in stage.peak_at


def temporaries(work: StageMemory, held: Any) -> int:
    """What the one moment of an optimizer step makes."""
    (moment,) = work.optimizer_step(0, held)
    assert moment.gradients == held.gradients
    return sum(moment.blocks)


@pytest.mark.parametrize(
    ("layout", "each"),
    [
        # bytes of a parameter: gradients that are left, and temporaries
        ({}, [(2, (4, 4)), (0, (4, 0))]),
        ({"dp": 4, "zero": 1}, [None, (1 / 2, (1 / 2, 1)), (0, (1, 0))]),
        ({"dp": 4, "zero": 2}, [None, (1 / 2, (1 / 2, 1)), (0, (1, 0))]),
        ({"dp": 16, "zero": 3}, [None, (1 / 8, (1 / 8, 1 / 4)), (1 / 8, (1 / 4, 0))]),
    ],
)
def test_deepspeed_flattens_gradients_of_a_shard(
    layout: dict[str, int], each: list[tuple[float, tuple[float, float]] | None]
) -> None:
    """runtime/fp16/fused_optimizer.py, zero/stage_1_and_2.py, stage3.py: step."""
    run = load_run(
        "llama-3-8b", framework="transformers", training={"recipe": "mixed"}, layout=layout,
        workload={"seq": 64},
    )  # fmt: skip
    work = StageMemory.of(run)
    held, count = work.beside(0)[0], work.parameters(0).total
    found = work.optimizer_step(0, held)
    assert len(found) == len(each)
    for moment, wanted in zip(found, each, strict=True):
        if wanted is None:  # the norm, in double, of the largest weight
            assert moment == (held.gradients, (8 * 128256 * 4096,))
            continue
        assert moment.gradients == pytest.approx(wanted[0] * count)
        assert moment.blocks == pytest.approx([size * count for size in wanted[1]])


def test_deepspeed_reduces_a_pipelines_gradients_after_its_last_backward() -> None:
    """stage_1_and_2.py reduce_gradients; engine.py buffered_allreduce_fallback (BF16_Optimizer)."""
    for recipe, bucket in (("mixed", 2 * 500_000_000), ("deepspeed", 4 * 128256 * 4096)):
        run = load_run(
            "llama-3-8b", framework="megatron", training={"recipe": recipe},
            layout={"dp": 4, "zero": 1, "pp": 2}, workload={"seq": 64, "global_batch": 16},
        )  # fmt: skip
        work = StageMemory.of(run)
        held = work.beside(0)[0]
        first = work.optimizer_step(0, held)[0]
        assert first == (held.gradients, (bucket,))


def test_a_loop_over_tensors_makes_two_temporaries_of_the_largest() -> None:
    run = {"framework": "transformers", "policies": ("full",), "workload": {"seq": 64}}
    step = {"fused_optimizer": False}
    loop = StageMemory.of(
        load_run("llama-3-8b", **run, training={**step, "foreach_optimizer": False})
    )
    held = loop.beside(0)[0]
    assert temporaries(loop, held) == 2 * 2 * 128256 * 4096
    whole = StageMemory.of(load_run("llama-3-8b", **run, training=step))
    assert temporaries(whole, held) == 2 * whole.parameters(0).total


def test_zero_redundancy_gives_whole_weights_to_ranks() -> None:
    """Llama 3.2 1B on 8 ranks: the one with the table has 2·V·h of 16-bit moments, and no more."""
    run: dict[str, Any] = {"framework": "transformers", "layout": {"dp": 8, "zero": 1}}
    even = report("llama-3.2-1b", **run).stages[0]
    whole = report("llama-3.2-1b", **run, training={"zero_redundancy": True}).stages[0]
    assert even.optimizer_bytes == pytest.approx(4 * even.parameters / 8, rel=1e-6)
    assert whole.optimizer_bytes == pytest.approx(4 * 128256 * 2048, rel=1e-6)
    buckets = {line.name: line.bytes for line in whole.buffers}["gradient buckets"]
    assert buckets == 2 * whole.parameters


@pytest.mark.parametrize(
    ("layout", "training"),
    [
        ({}, {"keeps_gathered": True}),
        ({"dp": 8}, {"zero_redundancy": True}),
        ({"dp": 8, "zero": 3}, {"bucket_view": True}),
        ({}, {"foreach_optimizer": False}),
        ({}, {"embedding_moments": "fp32"}),
        ({}, {"lora_dropout": True}),
        ({}, {"lora_rank": 8, "lora_targets": "q+x"}),
    ],
)
def test_what_changes_nothing_is_refused(layout: dict[str, Any], training: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        report("llama-3-8b", framework="transformers", layout=layout, training=training)


def test_embeddings_moments_in_fp32() -> None:
    """8-bit Adam under Trainer: tables' moments stay 8 B a parameter."""
    run: dict[str, Any] = {"framework": "transformers"}
    small = report("phi-3-mini", **run, training={"optimizer": "adam8bit"}).stages[0]
    tables = {"optimizer": "adam8bit", "embedding_moments": "fp32"}
    large = report("phi-3-mini", **run, training=tables).stages[0]
    table = 32064 * 3072
    assert large.optimizer_bytes - small.optimizer_bytes == pytest.approx(6 * table, rel=0.02)


def test_deepspeed_gathers_by_module_and_makes_gradients_in_backward() -> None:
    """ZeRO 3: no gradient at a forward peak; of weights what is used again soon, and a bucket.

    Llama 3 8B's head alone is used again after more than 1e9 elements, forward and backward: no
    layer waits for its backward. 5e7 elements are fetched ahead.
    """
    run: dict[str, Any] = {"framework": "transformers", "layout": {"dp": 8, "zero": 3}}
    recipe = {"recipe": "mixed"}
    (stage,) = report("llama-3-8b", timeline=True, **run, training=recipe).stages
    assert (stage.gradients_bytes, stage.gradients_absent_bytes) == (0, stage.gradients_full_bytes)
    lines = {line.name: line for line in stage.buffers}
    assert lines["reduction bucket"].bytes == 2 * 500_000_000
    head, layer = 128256 * 4096 + 4096, 218_112_000
    near = [m for m in stage.moments if m.step == "later" and "head" in m.at]
    assert near[0].gathered_bytes == 2 * head
    short = report(
        "llama-3-8b", timeline=True, **run, training={**recipe, "reuse_elements": 0}
    ).stages[0]
    first = next(m for m in short.moments if m.at == "in forward of layer 3")
    assert first.gathered_bytes == 2 * (layer + 50_000_000)


def test_sequential_experts_of_mixtral_without_expert_tensor_parallelism() -> None:
    """Mixtral 8x7B, tp 2 with sequence parallelism, all-to-all: 520,577,116 B recorded for a layer.

    With experts split over the tensor-parallel group each rank keeps the gathered tokens instead of
    its own: 4·tokens·h more, and two bytes of weight for each copy of a token.
    """
    found = []
    for etp in (1, None):
        layout = {"tp": 2, "sp": True, "etp": etp}
        staged = StagedRun(
            load_run(
                "mixtral-8x7b", framework="megatron-local", layout=layout, workload={"seq": 4096}
            )
        )
        found.append(staged.under(NONE).layer_bytes(staged.main.graph).stored)
    assert found[0] == 520_577_116
    assert found[1] - found[0] == 4 * 2048 * 4096 + 2 * 2 * 2048


@pytest.mark.parametrize(
    ("model", "changes", "groups", "ends"),
    [
        ("llama-3-8b", {"framework": "megatron"}, 0, 0),
        # all ranks, tensor parallelism, the norm
        ("llama-3-8b", {"framework": "megatron", "layout": {"tp": 8}}, 3, 0),
        # and a pipeline of two, whose ends share a table
        ("gpt2", {"framework": "megatron", "layout": {"tp": 2, "pp": 2, "dp": 4}}, 6, 1),
        ("llama-3-8b", {"framework": "transformers", "layout": {"dp": 8, "zero": 3}}, 1, 0),
        # shards, and the mesh over which the loss is summed
        ("llama-3-8b", {"framework": "torchtitan", "layout": {"dp": 8, "zero": 3}}, 2, 0),
    ],
)
def test_a_communicator_for_every_process_group(
    model: str, changes: dict[str, Any], groups: int, ends: int
) -> None:
    """NVIDIA/nccl issue 964: 688 MiB each, 544 for the two ends of a pipeline."""
    lines = {b.name: b for b in report(model, device="h100-80gb", **changes).stages[0].buffers}
    bytes_ = lines["communicators"].bytes if groups else 0
    assert bytes_ == ((groups - ends) * 688 + ends * 544) * 2**20
    assert ("communicators" in lines) == bool(groups)
