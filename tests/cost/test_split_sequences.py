"""Collectives of sequence parallelism: copies that put sequences in order, and 8-bit gathers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actcalc.cost.collective import collective_seconds
from actcalc.cost.roofline import roofline_of
from actcalc.cost.sequences import in_order, stacked
from actcalc.io.runs import load_run
from actcalc.layers.core.graph import Collective, Comm
from actcalc.run.staged import StagedRun

WHOLE = 2 * 8192 * 2 * 4096
"""Bytes of two sequences of 8,192 tokens of width 4,096 in 16 bits."""


def roofline(framework="megatron", micro_batch=2, recipe="auto", precision="bf16", **kernels):
    run = load_run(
        "llama-3-8b",
        framework=framework,
        device="h100-80gb",
        layout={"tp": 8, "sp": True},
        workload={
            "seq": 8192,
            "micro_batch": micro_batch,
            "precision": precision,
            "attention": "sdpa" if framework == "torchtitan" else "flash",
            "kernels": {"fp8_recipe": recipe, **kernels},
        },
    )
    return roofline_of(StagedRun(run))


def torch_like(**kernels):
    """The same with tensors that torch's collectives have to put in order."""
    staged = roofline(**kernels).staged
    framework = staged.run.framework.model_copy(update={"sequence_first": False})
    return roofline_of(StagedRun(replace(staged.run, framework=framework)))


def gathered(found, name):
    """Seconds in which one op of a layer waits for its collective, forward."""
    graph = found.model.runs[0].graph
    return next(one.forward_comm for one in found.ops(graph) if one.name == name)


def moved(found, size):
    return collective_seconds(Collective.ALL_GATHER, size, 8, 1, found.rates)


def test_megatron_gathers_sequences_in_order():
    found = roofline()
    assert gathered(found, "qkv") == moved(found, WHOLE)


@pytest.mark.parametrize(("micro_batch", "copies"), [(1, 0), (2, 1)])
def test_torch_copies_several_sequences_into_order(micro_batch, copies):
    """Read and written once more; a single one is in order as it comes."""
    found = roofline("torchtitan", micro_batch)
    size = WHOLE * micro_batch / 2
    graph = found.model.runs[0].graph
    waits = [op.name for op in graph.ops if op.comm]
    extra = copies * (2 * size / found.rates.memory + found.rates.shares.kernel_seconds)
    assert waits
    for name in waits:
        assert gathered(found, name) == pytest.approx(moved(found, size) + extra)


def test_pieces_beside_a_product_are_summed_where_torch_stacks_them():
    """Read whole, an eighth written, with nothing beside it; nothing where sequences lie first."""
    found = roofline(tp_comm_overlap=True)
    context, sizes = found.model.context, found.model.sizes
    scatter = Comm(Collective.REDUCE_SCATTER, "tp", found.model.runs[0].graph.ops[1].comm[0].bytes)
    assert stacked(scatter, WHOLE, context, sizes) == 0
    framework = context.framework.model_copy(update={"sequence_first": False})
    other = replace(context, framework=framework)
    assert stacked(scatter, WHOLE, other, sizes) == WHOLE * 9 / 8
    assert in_order(scatter, WHOLE, other, sizes) == (0, 0)
    assert gathered(torch_like(tp_comm_overlap=True), "out_proj") == pytest.approx(
        gathered(found, "out_proj")
        + WHOLE * 9 / 8 / found.rates.memory
        + found.rates.shares.kernel_seconds
    )


@pytest.mark.parametrize(("recipe", "size"), [("tensorwise", 1), ("mxfp8", 1), ("rowwise", 2)])
def test_what_a_product_in_fp8_reads_is_gathered_in_8_bits(recipe, size):
    """Except under scales by row. What a product made is scattered in 16 bits all the same."""
    found = roofline(precision="fp8", recipe=recipe)
    assert gathered(found, "qkv") == moved(found, WHOLE * size / 2)
    assert gathered(found, "out_proj") == moved(found, WHOLE)


def test_the_head_gathers_16_bits():
    found = roofline(precision="fp8")
    times = {one.name: one for one in found.ops(found.model.head)}
    assert times["head"].forward_comm == moved(found, WHOLE)
