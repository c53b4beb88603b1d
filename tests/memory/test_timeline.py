"""The highest moment of a step: which it is, and that it obeys the schedule that runs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actcalc.answers.memory import MemoryReport, memory_run
from actcalc.io.runs import load_run
from actcalc.memory.peaks import first_gradients
from actcalc.memory.stage import StageMemory
from actcalc.run.placement import plain_work
from actcalc.run.schedule import moments


def report(name: str, **changes: Any) -> MemoryReport:
    return memory_run(load_run(name, **changes))


@pytest.mark.parametrize("count", [1, 3, 8, 40])
def test_one_forward_one_backward_holds_min_of_depth_and_batches(count: int) -> None:
    result = report("gpt3-175b", layout={"tp": 8, "pp": 8}, workload={"global_batch": count})
    assert [s.in_flight for s in result.stages] == [min(8 - r, count) for r in range(8)]


@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (8, 1), (8, 3), (8, 12), (4, 2)])
def test_first_stage_holds_the_paper_s_formula(pp: int, vpp: int) -> None:
    """L·sbh(34/t)·(1 + (p-1)/(p·v)): Korthikanti et al. 2022, section 4.2.3 and equation 5."""
    layout = {"tp": 8, "sp": True, "pp": pp, "vpp": vpp}
    result = report(
        "gpt3-175b", layout=layout, workload={"global_batch": 64}, policies=("selective",)
    )
    s, h, layers, t = 2048, 12288, 96, 8
    expected = layers * s * h * 34 // t
    if vpp > 1:
        assert result.stages[0].layers_activations_bytes * pp * vpp == expected * (
            pp * vpp + pp - 1
        )
    else:
        assert result.stages[0].layers_activations_bytes == expected


@given(st.integers(1, 9), st.integers(1, 24), st.sampled_from(["1f1b", "gpipe"]), st.data())
@settings(max_examples=60, deadline=None)
def test_plain_orders_agree_with_the_schedules(
    pp: int, count: int, schedule: str, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, pp - 1))
    simulated = {(m.kind, m.held.total) for m in moments(schedule, pp, count, stage=stage)}
    plain = set(plain_work(schedule, pp, count, stage))
    assert {max(n for k, n in plain if k == kind) for kind in "FB"} == {
        max(n for k, n in simulated if k == kind) for kind in "FB"
    }
    assert plain <= simulated


def test_full_recompute_of_the_last_stage_peaks_in_the_loss() -> None:
    work = {"seq": 8192, "global_batch": 4}
    result = report("llama-3-8b", policies=("full",), workload=work)
    assert "logits" in result.stages[0].peak_at


def test_full_recompute_of_a_first_stage_peaks_while_a_layer_re_runs() -> None:
    result = report("gpt3-175b", layout={"tp": 8, "pp": 8, "sp": True}, policies=("full",))
    assert result.stages[0].peak_at == "in backward of layer 11: re-running one whole layer"


def test_re_running_needs_at_least_what_the_layer_saves() -> None:
    """Transient of full recomputation: all that one layer keeps without it."""
    layout = {"tp": 8, "pp": 8, "sp": True}
    none = StageMemory.of(load_run("gpt3-175b", layout=layout))
    full = StageMemory.of(load_run("gpt3-175b", layout=layout, policies=("full-sharded",)))
    layer = none.parts(0)[0][1]
    again = full.parts(0)[0][1]
    assert again.backward >= layer.stored > again.stored


def test_segments_trade_stored_inputs_for_working_memory() -> None:
    """Larger groups store fewer inputs and re-run more at once."""
    layout = {"tp": 8, "sp": True, "pp": 8}
    found = [
        report("gpt3-175b", layout=layout, policies=(f"uniform:{n}",)).stages[0]
        for n in (1, 2, 4, 12)
    ]
    stored = [stage.layers_activations_bytes for stage in found]
    transient = [stage.transient_bytes for stage in found]
    assert stored == sorted(stored, reverse=True)
    assert len(set(stored)) == 4
    assert transient == sorted(transient)
    assert len(set(transient)) == 4


@pytest.mark.parametrize(("loss", "kept"), [("chunked", 5), ("fused", 8)])
def test_the_loss_in_parts_lowers_the_peak(loss: str, kept: int) -> None:
    """With gradients accumulated over micro-batches, so that the loss is the highest moment."""
    run = {"policies": ("full",), "workload": {"global_batch": 4}}
    whole = report("llama-3-8b", **run)
    parts = report("llama-3-8b", **run, training={"loss": loss})
    logits = 8192 * 128256
    assert "logits" in whole.peak_at
    assert whole.peak_bytes - parts.peak_bytes > kept * logits


def test_gathered_layers_of_fsdp_are_a_line_of_their_own() -> None:
    result = report("llama-3-8b", layout={"dp": 8, "zero": 3})
    lines = {line.name: line.bytes for line in result.stages[0].buffers}
    layer = 218_112_000
    table = 128256 * 4096
    assert lines["gathered weights"] >= 2 * (layer + table)
    ahead = report("llama-3-8b", layout={"dp": 8, "zero": 3}, training={"prefetch": False})
    less = {line.name: line.bytes for line in ahead.stages[0].buffers}
    assert less["gathered weights"] < lines["gathered weights"]


@given(
    st.sampled_from(["gpt3-175b", "llama-3.1-70b", "mixtral-8x7b"]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["none", "selective", "full", "uniform:2", "block:3"]),
)
@settings(max_examples=25, deadline=None)
def test_parts_add_up_to_the_total(name: str, pp: int, dp: int, policy: str) -> None:
    layout = {"tp": 4, "sp": True, "pp": pp, "dp": dp, "zero": 1}
    result = report(name, layout=layout, policies=(policy,), framework="megatron")
    for stage in result.stages:
        parts = (
            stage.weights_bytes + stage.gradients_bytes + stage.optimizer_bytes
            + stage.activations_bytes + stage.transient_bytes + stage.buffers_bytes
        )  # fmt: skip
        assert parts == stage.peak_bytes
        assert stage.peak_bytes >= stage.static_bytes
        assert min(stage.activations_bytes, stage.transient_bytes) >= 0
    assert sum(s.layers for s in result.stages) == result.model["layers"]
    assert result.peak_bytes == max(s.peak_bytes for s in result.stages)


def test_context_is_outside_the_allocator_and_only_with_a_device() -> None:
    layout = {"tp": 8, "pp": 8, "sp": True}
    bare = report("gpt3-175b", layout=layout)
    on = report("gpt3-175b", layout=layout, device="h100-80gb")
    assert {s.overhead_bytes for s in bare.stages} == {0}
    assert bare.fits is None
    assert on.fits is False
    assert on.device is not None
    for stage in on.stages:
        assert stage.total_bytes == stage.peak_bytes + stage.overhead_bytes > stage.peak_bytes
        assert stage.margin_bytes == int(on.device["memory_bytes"] * 0.95) - stage.total_bytes


@given(
    st.fixed_dictionaries(
        {
            "recipe": st.sampled_from(["auto", "mixed", "fsdp", "pure", "deepspeed"]),
            "optimizer": st.sampled_from(["adamw", "adam8bit", "lion", "adafactor", "none"]),
            "offload": st.sampled_from(["none", "optimizer", "weights", "activations"]),
            "loss": st.sampled_from(["auto", "full", "chunked", "fused"]),
            "lora_rank": st.sampled_from([0, 8]),
            "step_in_backward": st.booleans(),
            "compiled_loss": st.booleans(),
            "fused_optimizer": st.booleans(),
        }
    ),
    st.sampled_from(["none", "full", "every:2", "attention+ffn"]),
    st.sampled_from([None, 8]),
)
@settings(max_examples=60, deadline=None)
def test_parts_add_up_whatever_is_trained_and_how(
    training: dict[str, Any], policy: str, batch: int | None
) -> None:
    """Also where gradients come and go, and where backward frees before the highest moment."""
    workload = {"seq": 512, "global_batch": batch}
    result = report("gpt2", policies=(policy,), workload=workload, training=training)
    stage = result.stages[0]
    parts = (
        stage.weights_bytes + stage.gradients_bytes + stage.optimizer_bytes
        + stage.activations_bytes + stage.transient_bytes + stage.buffers_bytes
    )  # fmt: skip
    assert parts == stage.peak_bytes
    assert stage.peak_bytes >= (stage.weights_bytes + stage.gradients_bytes + stage.optimizer_bytes)
    assert min(stage.activations_bytes, stage.transient_bytes) >= 0
    assert stage.peak_at


LEAVES = (
    "weights_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes", "transient_bytes",
    "buffers_bytes", "overhead_bytes",
)  # fmt: skip


@given(
    st.sampled_from(["gemma-2-2b", "gpt2", "llama-3-8b", "t5-base", "mixtral-8x7b", "bert-base"]),
    st.booleans(),
    st.sampled_from([0, 1, 2, 3]),
    st.sampled_from(["none", "full", "every:2"]),
    st.sampled_from(["auto", "mixed", "pure"]),
    st.sampled_from(["adamw", "adafactor", "muon", "sgd"]),
    st.sampled_from([None, "h100-80gb"]),
)
@settings(max_examples=60, deadline=None)
def test_leaves_sum_to_the_total_and_gradients_are_never_negative(
    name: str, tied: bool, zero: int, policy: str, recipe: str, optimizer: str, device: str | None
) -> None:
    """A tied table has one gradient, which the head's backward makes."""
    if name == "bert-base":
        tied = True  # its head shares the table
    result = report(
        name,
        model={"tied": tied},
        layout={"dp": 8, "zero": zero},
        policies=(policy,),
        training={"recipe": recipe, "optimizer": optimizer},
        framework="transformers",
        device=device,
    )
    for stage in result.document()["stages"]:
        assert sum(stage[leaf] for leaf in LEAVES) == stage["total_bytes"]
        assert 0 <= stage["gradients_absent_bytes"] <= stage["gradients_full_bytes"]
        lacking = stage["gradients_full_bytes"] - stage["gradients_bytes"]
        assert lacking == stage["gradients_absent_bytes"]
        assert stage["peak_bytes"] == stage["total_bytes"] - stage["overhead_bytes"]
        assert min(stage[leaf] for leaf in LEAVES) >= 0


@given(
    st.sampled_from(["1f1b", "gpipe", "zb-h1", "zb-v", "dualpipe-v"]),
    st.sampled_from(["mixed", "megatron", "pure"]),
    st.sampled_from([1, 4, 8]),
    st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_leaves_sum_to_the_total_on_every_stage_of_every_schedule(
    schedule: str, recipe: str, batch: int, tied: bool
) -> None:
    if schedule == "dualpipe-v":
        batch = 8
    layout = {"pp": 4, "schedule": schedule}
    result = report(
        "llama-3-8b", model={"tied": tied}, layout=layout, training={"recipe": recipe},
        workload={"global_batch": batch, "seq": 1024}, device="h100-80gb",
    )  # fmt: skip
    for stage in result.document()["stages"]:
        assert sum(stage[leaf] for leaf in LEAVES) == stage["total_bytes"]
        assert min(stage[leaf] for leaf in LEAVES) >= 0


@pytest.mark.parametrize("name", ["gemma-2-2b", "t5-base", "gpt2", "llama-3-8b"])
def test_first_gradients_are_those_of_all_parameters_once(name: str) -> None:
    work = StageMemory.of(load_run(name, framework="transformers"))
    (parts,) = work.parts(0)
    made = sum(
        each * part.count + last
        for part, (each, last) in zip(parts, first_gradients(parts), strict=True)
    )
    assert made == work.parameters(0).total


def test_the_head_s_backward_makes_a_tied_table_s_gradient() -> None:
    """Gemma 2 2B: in backward of the loss no gradient exists yet, and none is owed twice."""
    run = {"policies": ("full",), "workload": {"seq": 2304}}
    stage = report("gemma-2-2b", **run).stages[0]
    assert "head and loss" in stage.peak_at
    assert stage.gradients_bytes == 0
    assert stage.gradients_absent_bytes == stage.gradients_full_bytes == 2 * stage.parameters


def test_only_gradients_that_keep_their_buffers_stay_between_steps() -> None:
    dropped = report("llama-3-8b").stages[0]
    resident = sum(b.bytes for b in dropped.buffers if b.resident and b.allocated)
    assert dropped.static_bytes == dropped.weights_bytes + dropped.optimizer_bytes + resident
    kept = report("llama-3-8b", layout={"tp": 2}).stages[0]
    resident = sum(b.bytes for b in kept.buffers if b.resident and b.allocated)
    states = kept.weights_bytes + kept.gradients_full_bytes + kept.optimizer_bytes
    assert kept.static_bytes == states + resident


def test_a_note_says_which_gradients_the_total_is_without() -> None:
    none = report("llama-3-8b")
    assert none.stages[0].gradients_bytes == 0
    assert any("no gradient is made yet" in note for note in none.notes)
    part = report("llama-3-8b", policies=("full",), workload={"seq": 2048})
    assert 0 < part.stages[0].gradients_bytes < part.stages[0].gradients_full_bytes
    assert any("part of the gradients is not made yet" in note for note in part.notes)
    assert not any("no gradient is made" in note for note in part.notes)
    kept = report("llama-3-8b", workload={"global_batch": 4})
    assert not any("not made yet" in note or "no gradient" in note for note in kept.notes)


def test_no_activation_is_left_in_the_optimizer_step() -> None:
    run = {"policies": ("full",), "workload": {"seq": 128}, "training": {"recipe": "mixed"}}
    stage = report("llama-3-8b", **run).stages[0]
    assert stage.peak_at == "in the optimizer step"
    assert stage.activations_bytes == 0 < stage.layers_activations_bytes
    # DeepSpeed's fp16 optimizer: fp32 copies of the gradients, and those flattened
    assert stage.transient_bytes == 8 * stage.parameters
    assert stage.gradients_bytes == stage.gradients_full_bytes
