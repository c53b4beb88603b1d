"""Objectives beside next tokens: pairs, reference models, scores, completions, generation."""

from __future__ import annotations

import pytest

from actcalc.answers.memory import memory_run
from actcalc.errors import SpecError
from actcalc.io.runs import load_run
from actcalc.memory.stage import StageMemory
from actcalc.run.staged import StagedRun
from actcalc.specs.objectives import OBJECTIVES

SEQ = 2048


def run_with(objective="sft", work=None, device=None, policies=("none",), **training):
    return load_run(
        "qwen3-0.6b", framework="transformers", device=device, policies=policies,
        workload={"seq": SEQ, "micro_batch": 2, "attention": "sdpa", **(work or {})},
        training={"objective": objective, **training},
    )  # fmt: skip


def line(run, name):
    (stage,) = memory_run(run).stages
    return next((b.bytes for b in stage.buffers if b.name == name), 0)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_layers_see_every_sequence_of_an_example(name):
    row = OBJECTIVES[name]
    pairs = StagedRun(run_with(name))
    single = StagedRun(run_with(work={"micro_batch": 2 * row.sequences}))
    policy = pairs.policy("none")
    assert pairs.stored_bytes(0, policy) == single.stored_bytes(0, single.policy("none"))
    assert pairs.microbatches == 1
    assert row.source


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_a_reference_is_a_second_model_unless_adapters_leave_the_base(name):
    weights = 2 * StagedRun(run_with()).parameters
    assert line(run_with(name), "reference model") == weights
    assert line(run_with(name, lora_rank=8), "reference model") == 0
    assert line(run_with(name, reference="none"), "reference model") == 0


def test_the_reference_runs_beside_what_the_model_keeps():
    def moments(**training):
        (stage,) = memory_run(run_with("dpo", **training), timeline=True).stages
        return {m.at: m.total_bytes for m in stage.moments if m.step == "later"}

    at = "at the end of forward, in the reference model"
    beside = moments()
    assert beside[at] > beside["in forward of layer 27"]
    assert at in moments(lora_rank=8)
    assert at not in moments(reference="none")


def test_grpo_has_a_reference_where_it_is_asked_for_and_its_forward_at_other_times():
    assert line(run_with("grpo"), "reference model") == 0
    asked = run_with("grpo", reference="model")
    assert line(asked, "reference model") > 0
    (stage,) = memory_run(asked, timeline=True).stages
    assert not any("reference" in moment.at for moment in stage.moments)


def test_generation_holds_its_share_of_the_device():
    run = run_with("grpo", device="h100-80gb", generation_share=0.3)
    assert line(run, "generation engine") == int(0.3 * run.device.memory_bytes)
    plain = memory_run(run_with("grpo", device="h100-80gb"))
    with_engine = memory_run(run)
    grown = with_engine.stages[0].total_bytes - plain.stages[0].total_bytes
    assert grown == int(0.3 * run.device.memory_bytes)


def test_scores_have_no_table_of_the_vocabulary():
    reward, lm = (StageMemory.of(run_with(name)).parameters(0).total for name in ("reward", "sft"))
    assert reward - lm == 1024  # the tied table stays, a row of the width is added


def test_completions_alone_are_scored():
    def head(**work):
        run = run_with("grpo", work=work)
        memory = StageMemory(StagedRun(run), StagedRun(run).policy("none"))
        return memory.parts(0)[0][-1]

    every, some = head(), head(completion=512)
    assert every.stored - some.stored == 2 * (SEQ - 1 - 512) * (2 * 1024 + 16)


def test_reference_and_mismatched_pairs_take_time():
    from actcalc.answers.mfu import utilisation

    def seconds(name, **training):
        run = run_with(name, device="h100-80gb", loss="tiled" if name == "sft" else "auto",
                       **training)  # fmt: skip
        found = utilisation(run, gpus=1).prediction
        assert found is not None
        return found.step_seconds

    assert seconds("dpo") > seconds("dpo", reference="none")
    assert seconds("kto") > seconds("kto", reference="none") > seconds("sft")


@pytest.mark.parametrize(
    ("objective", "changes", "words"),
    [
        ("reward", {"loss": "fused"}, "has no loss fused"),
        ("sft", {"reference": "none"}, "has no reference model"),
        ("dpo", {"generation_share": 0.3}, "beside grpo"),
        ("sft", {"work": {"completion": 10}}, "changes nothing"),
        ("grpo", {"work": {"completion": SEQ}}, "a prompt comes before it"),
    ],
)
def test_what_an_objective_has_not_is_refused(objective, changes, words):
    with pytest.raises(SpecError, match=words) as refused:
        run_with(objective, **changes)
    assert refused.value.hint


@pytest.mark.parametrize("changes", [{"framework": "megatron"}, {"layout": {"pp": 2}}])
def test_objectives_are_of_transformers_on_one_stage(changes):
    with pytest.raises(SpecError, match="objective dpo"):
        load_run("llama-3-8b", training={"objective": "dpo"}, **changes)


def test_a_vision_model_has_no_preferences():
    with pytest.raises(SpecError, match="of a language model"):
        load_run("bert-base", framework="transformers", training={"objective": "dpo"})
