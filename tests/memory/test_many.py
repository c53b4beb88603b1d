"""Many ways to run one layer, measured at once, are what each is alone."""

from __future__ import annotations

import random

import numpy as np
import pytest

from actcalc.io import presets
from actcalc.io.runs import load_run
from actcalc.memory.known import Known
from actcalc.memory.many import Choices, many_working
from actcalc.memory.working import working
from actcalc.plan.laying import RunStages
from actcalc.plan.options import outcome_of
from actcalc.solve.frontier import layer_frontier, layer_option
from tests.sweeps import sampled

TRIED = 40
OFTEN = ("gpt2", "deepseek-v4-flash", "mixtral-8x7b", "deberta-v3-base", "jamba-1.5-mini")
SPLIT = {"tp": 2, "sp": True, "dp": 2, "zero": 1}


def kinds(name, **changes):
    planner = RunStages(load_run(name, **changes))
    for kind in planner.staged.kinds:
        yield planner, kind.graph, planner.layer(kind.graph)


def alone(planner, graph, options):
    """Forward and backward of each option, one at a time."""
    known, asked = Known(planner.model, graph), planner.memory.timeline.options
    for option in options:
        kept = {planner.layer(graph).input, *option.kept}
        outcome = outcome_of(graph, kept, option.recompute)
        work = working(planner.model, outcome, asked, known=known)
        yield work.forward, work.backward


def together(planner, graph, stored, again, count):
    choices = Choices({n: stored[n] for n in graph.tensors if n in stored}, again, count)
    known = Known(planner.model, graph)
    found = many_working(planner.model, graph, planner.memory.timeline.options, known, choices)
    return list(zip(*(column.tolist() for column in found), strict=True))


def tables(layer, options):
    stored, again = {}, {}
    for index, option in enumerate(options):
        for names, found in (
            ((layer.input, *option.kept), stored),
            (option.recompute, again),
        ):
            for name in names:
                found.setdefault(name, np.zeros(len(options), dtype=bool))[index] = True
    return stored, again


def random_options(layer, seed):
    """Any ops re-run, not those alone that are worth it."""
    rng = random.Random(seed)
    allowed = [i for i, op in enumerate(layer.ops) if op.name not in layer.forbid_recompute]
    for _ in range(TRIED):
        share = rng.random()
        yield layer_option(layer, sum(1 << i for i in allowed if rng.random() < share))


@pytest.mark.parametrize("name", sampled(presets.names("models"), OFTEN))
def test_any_choice_of_ops(name):
    for planner, graph, layer in kinds(name):
        options = list(random_options(layer, name))
        found = together(planner, graph, *tables(layer, options), len(options))
        assert found == list(alone(planner, graph, options))


@pytest.mark.parametrize("name", ["gpt2", "mixtral-8x7b", "gemma-2-2b"])
def test_under_megatron_s_layouts(name):
    layout = SPLIT if name != "gemma-2-2b" else {}
    framework = "transformers" if name == "gemma-2-2b" else "megatron"
    for planner, graph, layer in kinds(name, framework=framework, layout=layout):
        options = list(random_options(layer, name))
        found = together(planner, graph, *tables(layer, options), len(options))
        assert found == list(alone(planner, graph, options))


@pytest.mark.parametrize("name", ["gpt2", "llama-4-scout", "kimi-k2"])
def test_a_frontier_as_tables(name):
    """The tables of a frontier say what its options say one by one."""
    for _, _, layer in kinds(name):
        frontier = layer_frontier(layer)
        again = frontier.rerun()
        stored = frontier.kept(again)
        for index, option in enumerate(frontier):
            assert {n for n, where in again.items() if where[index]} == set(option.recompute)
            kept = {n for n, where in stored.items() if where[index]}
            assert kept == {layer.input, *option.kept}


def test_sizes_beyond_64_bits_are_exact():
    run = load_run("gpt2", workload={"seq": 1024, "micro_batch": 2**32})
    planner = RunStages(run)
    graph = planner.staged.main.graph
    huge = {name: size * 2**20 for name, size in planner.model.tensor_bytes[graph].items()}
    known = Known(planner.model, graph)
    known.sizes = huge
    known.own = {name: 0 if name in graph.shared else size for name, size in huge.items()}
    none = Choices({name: np.ones(1, dtype=bool) for name in graph.saved}, {}, 1)
    asked = planner.memory.timeline.options
    forward, _ = many_working(planner.model, graph, asked, known, none)
    assert forward[0] > 2**63
    assert forward[0] >= sum(known.own[name] for name in graph.saved)
