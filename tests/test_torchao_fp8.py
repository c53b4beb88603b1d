"""Products in fp8 as torchao runs them: what is kept, with and without tensor parallelism."""

from __future__ import annotations

from typing import Any

from actcalc.io.runs import load_run
from actcalc.layers.core.graph import DType, Graph
from actcalc.run.staged import StagedRun


def graph(precision: str, **layout: Any) -> tuple[Graph, dict[str, int]]:
    run = load_run(
        "llama-3-8b", framework="torchtitan", workload={"precision": precision}, layout=layout
    )
    model = StagedRun(run).graph
    layer = model.runs[0].graph
    return layer, model.tensor_bytes[layer]


def test_inputs_stay_as_they_are_on_one_rank() -> None:
    wide, sizes = graph("bf16")
    narrow, known = graph("fp8")
    assert narrow.saved == wide.saved
    assert known == sizes
    more = [op.name for op in narrow.ops if op.kind == "linear"]
    assert len(more) == 7
    before = {op.name: op.forward_scratch for op in wide.ops}
    for op in narrow.ops:
        assert (op.forward_scratch != before[op.name]) is (op.name in more)


def test_inputs_are_gathered_and_kept_in_fp8_over_ranks() -> None:
    wide, sizes = graph("bf16", tp=4, sp=True)
    narrow, known = graph("fp8", tp=4, sp=True)
    gathered = [op for op in narrow.ops if op.kind == "gather"]
    assert len(gathered) == 2
    messages = {op.name: op.comm[0].bytes for op in wide.ops if op.kind == "gather"}
    for op in gathered:
        (out,) = op.outputs
        assert narrow.tensors[out].dtype is DType.FP8
        assert known[out] * 2 == sizes[out]
        assert op.comm[0].bytes * 2 == messages[op.name]
    products = [op for op in narrow.ops if op.kind == "linear"]
    kept = {name for op in products for name in op.saves}
    assert {narrow.tensors[name].dtype for name in kept} == {DType.FP8}
