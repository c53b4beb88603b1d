"""What ranks do together once in a step: gradients over copies of shards, tied tables, metrics."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actcalc.cost.collective import collective_seconds, send_seconds
from actcalc.cost.replicas import (
    logged_seconds,
    reduces_each,
    reduction,
    scattered_seconds,
    tied_seconds,
)
from actcalc.cost.roofline import roofline_of
from actcalc.cost.step import step_time
from actcalc.io.runs import load_run
from actcalc.layers.core.graph import Collective
from actcalc.policy.rules import NONE
from actcalc.run.staged import StagedRun

TABLE = 51_200 * 6144
"""Elements of the embedding of the 22B GPT."""


def staged(**changes):
    values = {
        "framework": "megatron",
        "device": "a100-80gb",
        "workload": {"micro_batch": 1, "global_batch": 64},
        **changes,
    }
    return StagedRun(load_run("gpt-22b", **values))


def gradients(**changes):
    """Exposed seconds of a step's collectives."""
    one = staged(**changes)
    return step_time(NONE, roofline_of(one)).gradients


@pytest.mark.parametrize(("tp", "dp"), [(2, 2), (8, 1)])
def test_a_tied_table_is_summed_between_first_and_last_stage(tp, dp):
    """fp32 gradients of a rank's part, 3 stages away: across the network."""
    layout = {"tp": tp, "pp": 4, "dp": dp}
    one = staged(layout=layout)
    rates = roofline_of(one).rates
    size = 4 * TABLE / tp
    expected = size / rates.inter + rates.shares.collective_seconds
    assert tied_seconds(one.graph, one.run.training, rates, 3 * tp * dp) == pytest.approx(expected)
    untied = gradients(layout=layout, model={"tied": False})
    assert gradients(layout=layout) - untied == pytest.approx(expected, rel=0.05)


def test_in_a_node_it_goes_over_its_links():
    one = staged(layout={"tp": 2, "pp": 4})
    rates = roofline_of(one).rates
    found = tied_seconds(one.graph, one.run.training, rates, 6)
    assert found == send_seconds(4 * TABLE / 2, 6, rates) < 4 * TABLE / 2 / rates.inter


def test_one_stage_has_nothing_to_sum():
    assert gradients(layout={"tp": 8}) == 0


def test_copies_of_shards_are_summed_apart():
    """16 ranks in two groups of 8: a reduce-scatter inside, an all-reduce of an eighth outside."""
    rates = roofline_of(staged()).rates
    inside = collective_seconds(Collective.REDUCE_SCATTER, 8e9, 8, 1, rates)
    outside = collective_seconds(Collective.ALL_REDUCE, 1e9, 2, 8, rates)
    assert scattered_seconds(8e9, 16, 8, 1, rates) == inside + outside
    assert scattered_seconds(8e9, 8, 8, 1, rates) == inside


def test_fewer_shards_are_gathered_in_the_node():
    """Weights that 8 ranks share come over links, those of 64 over the network."""
    one = staged(layout={"dp": 64, "zero": 1})
    rates, parameters = roofline_of(one).rates, (10**9, 0)
    training = one.run.training
    apart = training.model_copy(update={"shards": 8})
    far = reduction(one.graph, training, parameters, rates)
    near = reduction(one.graph, apart, parameters, rates)
    assert near.gathered == collective_seconds(Collective.ALL_GATHER, 2e9, 8, 1, rates)
    assert far.gathered == collective_seconds(Collective.ALL_GATHER, 2e9, 64, 1, rates)
    assert near.reduced == scattered_seconds(4e9, 64, 8, 1, rates)


def test_metrics_are_gathered_rank_by_rank():
    """Two states each, of which every rank's is made by the host and filled by a copy."""
    layout = {"dp": 64, "zero": 3}
    one = staged(framework="llm-foundry", layout=layout, model={"max_positions": 2048})
    rates, framework = roofline_of(one).rates, one.run.framework
    training = one.run.training.model_copy(update={"loss_metrics": 2})
    found = logged_seconds(training, framework, rates, 64)
    each = framework.kernel_host_seconds + rates.shares.launch_seconds
    assert found == pytest.approx(2 * 2 * 64 * each)
    assert logged_seconds(one.run.training, framework, rates, 64) == 0
    longer = StagedRun(replace(one.run, training=training))
    assert step_time(NONE, roofline_of(longer)).gradients == pytest.approx(found)


@pytest.mark.parametrize(("zero", "each"), [(1, False), (2, True)])
def test_sharded_gradients_are_reduced_after_every_microbatch(zero, each):
    """Nowhere are whole ones summed (ZeRO-2), beside each backward, which hides what it can."""
    layout = {"tp": 8, "dp": 64, "zero": zero}

    def of(batches, seq=64):
        work = {"micro_batch": 1, "seq": seq, "global_batch": 64 * batches}
        return gradients(layout=layout, workload=work)

    assert of(5) - of(1) == pytest.approx(4 * (of(2) - of(1)))
    assert (of(2) > of(1)) is each
    assert (of(1, seq=2048) < of(1)) is each


@pytest.mark.parametrize(("pp", "each"), [(1, True), (4, False)])
def test_units_in_a_pipeline_sum_whole_gradients(pp, each):
    """fully_shard's gradients are whole until a pipeline's last micro-batch."""
    layout = {"pp": pp, "dp": 8, "zero": 2}
    values = {"micro_batch": 1, "global_batch": 64}
    one = StagedRun(load_run("llama-3-8b", framework="torchtitan", layout=layout, workload=values))
    assert reduces_each(one.graph, one.run.training) is each
