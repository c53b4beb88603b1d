"""Lanes that are worked out together have the graphs that each has alone."""

from __future__ import annotations

import random

import pytest

from actcalc.errors import SpecError
from actcalc.io.runs import load_run
from actcalc.layers.alike import signature, structure
from actcalc.search.family import Lane, laid
from actcalc.search.space import Space, splits

CASES = {
    "gpt-22b": {"framework": "paper"},
    "llama-3-8b": {"framework": "megatron"},
    "deepseek-v3": {"framework": "megatron"},
    "mixtral-8x7b": {"framework": "torchtitan"},
    "llama-3.1-405b": {"framework": "torchtitan", "workload": {"seq": 32768}},
    "gpt2": {"framework": "megatron", "workload": {"attention": "eager"}},
}


def lanes(model: str, more: dict) -> tuple[object, list[Lane]]:
    workload = {"global_batch": 1024, **more.get("workload", {})}
    run = load_run(model, device="h100-80gb", workload=workload, framework=more["framework"])
    every = [
        Lane(split, size, 2, True)
        for split in splits(run, Space(gpus=512))
        for size in (1, 2, 3, 4, 8)
    ]
    return run, random.Random(1).sample(every, min(len(every), 60))


@pytest.mark.parametrize("model", CASES)
def test_runs_of_one_structure_have_the_same_graphs(model):
    run, every = lanes(model, CASES[model])
    found: dict[object, set[object]] = {}
    for lane in every:
        workload = run.workload.model_copy(update={"micro_batch": lane.micro_batch})
        key = structure(run.model, lane.split.layout(), workload, run.framework)
        try:
            known = signature(laid(run, lane).graph)
        except SpecError:
            known = "refused"
        found.setdefault(key, set()).add(known)
    assert len(found) < 0.8 * len(every), "nothing is shared: the test says nothing"
    assert all(len(graphs) == 1 for graphs in found.values())
