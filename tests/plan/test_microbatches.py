"""Micro-batches that keep everything beside others that re-run, and outputs that stay when sent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actcalc.answers.memory import memory_run
from actcalc.errors import SpecError
from actcalc.io.runs import load_run
from actcalc.plan.microbatches import by_microbatch
from actcalc.run.staged import StagedRun

RUN = load_run(
    "gpt3-175b", layout={"tp": 8, "sp": True, "pp": 8}, workload={"global_batch": 32},
    device="a100-80gb",
)  # fmt: skip
STAGED = StagedRun(RUN)


def totals(policy: str) -> list[int]:
    return [s.total_bytes for s in memory_run(replace(RUN, policies=(policy,))).stages]


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("budget", [66_000_000_000, 72_000_000_000, 80_000_000_000])
def test_as_many_as_fit_keep_everything(policy, budget):
    low, high = totals(policy), totals("none")
    layers, each = 12, 358_612_992
    kept = {"full": 2 * 2048 * 12288, "selective": 106_954_752}[policy]
    for mix in by_microbatch(STAGED, STAGED.policy(policy), budget):
        assert mix.in_flight == 8 - mix.stage
        assert mix.more_bytes == layers * (each - kept)
        assert mix.peak_bytes <= budget
        if high[mix.stage] <= budget:
            assert (mix.whole, mix.peak_bytes) == (mix.in_flight, high[mix.stage])
        else:
            assert mix.peak_bytes == low[mix.stage] + mix.whole * mix.more_bytes
            more = mix.peak_bytes + mix.more_bytes
            assert more > budget or mix.whole == mix.in_flight - 1
            assert mix.rerun_ratio == 1 - mix.whole / mix.in_flight


def test_it_lies_between_the_policy_and_keeping_everything():
    low, high = totals("full"), totals("none")
    for mix in by_microbatch(STAGED, STAGED.full, 75_000_000_000):
        assert low[mix.stage] <= mix.peak_bytes <= max(high[mix.stage], 75_000_000_000)


def test_what_cannot_be_planned_is_refused():
    with pytest.raises(SpecError, match="stage 0 needs"):
        by_microbatch(STAGED, STAGED.full, 1_000_000_000)
    chunked = StagedRun(
        load_run("gpt3-175b", layout={"tp": 8, "sp": True, "pp": 8, "vpp": 3}, device="a100-80gb")
    )
    with pytest.raises(SpecError, match="one chunk"):
        by_microbatch(chunked, chunked.full, 80_000_000_000)


# --- sent outputs ---------------------------------------------------------------------------------


def sent(**layout: object) -> list[int]:
    """What keeping sent outputs adds to each stage, and the buffers it is in."""
    both = [
        memory_run(load_run("gpt-530b", layout={**layout, "keep_sent_outputs": keep})).stages
        for keep in (False, True)
    ]
    return [after.total_bytes - before.total_bytes for before, after in zip(*both, strict=True)]


def test_sent_outputs_are_2sbhp():
    """The paper's 530B model: 2.73 GB on the first of 35 stages (powers of 1024)."""
    added = sent(tp=8, pp=35)
    one = 2 * 2048 * 20480
    assert added == [one * (35 - stage) for stage in range(34)] + [0]
    assert round(added[0] / 2**30, 2) == 2.73


def test_sequence_parallelism_splits_them():
    assert sent(tp=8, sp=True, pp=35)[0] * 8 == sent(tp=8, pp=35)[0]


def test_every_chunk_but_the_last_sends():
    run = load_run(
        "gpt3-175b", layout={"tp": 8, "sp": True, "pp": 4, "vpp": 2, "keep_sent_outputs": True},
        workload={"global_batch": 16},
    )  # fmt: skip
    stages = memory_run(run).stages
    found = [sum(b.bytes for b in stage.buffers if b.name == "sent outputs") for stage in stages]
    one = 2 * 2048 * 12288 // 8
    assert all(size % one == 0 and size for size in found)
    assert found[0] == stages[0].in_flight * one
    assert found[3] <= stages[3].in_flight * one


def test_an_output_that_is_saved_is_not_counted_twice():
    """BERT's last norm saves its output's input, and the next stage has its own copy of it."""
    base = {"tp": 2, "pp": 2}
    run = load_run("bert-large", layout={**base, "keep_sent_outputs": True})
    graph = StagedRun(run).main.graph
    names = {b.name for b in memory_run(run).stages[0].buffers}
    assert ("sent outputs" in names) == (graph.output not in graph.saved)


def test_without_a_pipeline_it_is_refused(cli):
    code, _, err = cli("memory", "gpt2", "--set", "keep_sent_outputs=true")
    assert code == 2
    assert "pp is 1" in err


def test_plan_counts_them_as_memory_does(cli):
    line = ["gpt-530b", "--tp", 8, "--sp", "--pp", 35, "--set", "keep_sent_outputs=true"]
    rivals = cli("plan", *line, "--memory", "400GB", "--json").json["rivals"]
    peaks = {rival["name"]: rival["peak_bytes"] for rival in rivals}
    for name in ("none", "full"):
        document = cli("memory", *line, "--policy", name, "--json").json
        assert peaks[name] == max(stage["total_bytes"] for stage in document["stages"])
