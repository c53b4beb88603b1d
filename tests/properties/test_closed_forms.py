"""The paper's closed forms fall out of the graph, as exact integers, for any legal sizes."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from actcalc.cost.flops import model_flops, paper_model_flops
from actcalc.io.runs import load_framework
from actcalc.layers.model import model_graph
from actcalc.policy.outcome import layer_outcome
from actcalc.policy.rules import NONE, parse_policy
from actcalc.specs import Layout, Model, Workload
from tests.properties.strategies import gpt_runs

PAPER = load_framework("paper")
ATTENTION = parse_policy("selective")
FULL = parse_policy("full", full_boundary="replicated")


def paper_bytes(model: Model, layout: Layout, workload: Workload, *, selective: bool) -> Fraction:
    """Korthikanti et al. 2022, table 2, written for any feed-forward width and without dropout."""
    s, b, h = workload.seq, workload.micro_batch, model.hidden
    t = layout.tp
    masks = bool(workload.dropout and model.hidden_dropout)
    split = 2 + 6 + 2 + 2 + Fraction(4 * model.ffn, h) - 2 - 2  # qkv 6, context 2, fc1 and fc2
    region = 2 + 2 + 2 + 2 + (2 if masks else 0)  # two norms in and out, two masks
    if workload.attention == "eager":
        dropped = bool(workload.dropout and model.attention_dropout)
        scores = Fraction((5 if dropped else 2) * model.heads * s, h)
    else:
        scores = Fraction(4 * model.heads, h)
    scores = Fraction(0) if selective else scores
    return s * b * h * (Fraction(region, t if layout.sp else 1) + (split + scores) / t)


@settings(max_examples=150, deadline=None)
@given(gpt_runs())
def test_stored_bytes(run):
    model, layout, workload = run
    graph = model_graph(model, layout, workload, PAPER)
    layer = graph.runs[0].graph
    none = layer_outcome(graph, layer, NONE).sizes(graph)
    selective = layer_outcome(graph, layer, ATTENTION).sizes(graph)
    full = layer_outcome(graph, layer, FULL).sizes(graph)
    assert none.stored == paper_bytes(model, layout, workload, selective=False)
    assert selective.stored == paper_bytes(model, layout, workload, selective=True)
    assert full.stored == 2 * workload.tokens * model.hidden


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.integers(1, 16), st.integers(1, 500), st.integers(1, 8))
def test_model_flops(layers, heads, seq, batch):
    model = Model(layers=layers, hidden=64 * heads, heads=heads, vocab=1000)
    workload = Workload(seq=seq, micro_batch=batch)
    graph = model_graph(model, Layout(), workload, PAPER)
    assert model_flops(graph) == paper_model_flops(model, seq, batch)


@settings(max_examples=60, deadline=None)
@given(gpt_runs())
def test_flops_do_not_depend_on_the_layout(run):
    model, layout, workload = run
    split = model_graph(model, layout, workload, PAPER)
    alone = model_graph(model, Layout(), workload, PAPER)
    assert model_flops(split) == model_flops(alone)


@settings(max_examples=60, deadline=None)
@given(gpt_runs())
def test_formula_evaluates_to_the_bytes(run):
    """The printed formula is read back and evaluated: it must give the printed bytes."""
    model, layout, workload = run
    graph = model_graph(model, layout, workload, PAPER)
    layer = graph.runs[0].graph
    outcome = layer_outcome(graph, layer, NONE)
    value = evaluate(outcome.stored_size.formula(), graph.sizes)
    assert value == outcome.sizes(graph).stored


def evaluate(formula: str, sizes: dict[str, int]) -> Fraction:
    """A small reader of the formula notation: juxtaposition multiplies, ² squares."""
    position = 0

    def peek() -> str:
        return formula[position] if position < len(formula) else ""

    def atom() -> Fraction:
        nonlocal position
        char = peek()
        if char == "(":
            position += 1
            value = total()
            assert peek() == ")"
            position += 1
        elif char.isdigit():
            start = position
            while peek().isdigit() and peek() not in "⁰¹²³⁴⁵⁶⁷⁸⁹":
                position += 1
            value = Fraction(int(formula[start:position]))
        else:
            position += 1
            value = Fraction(sizes[char])
        if peek() and peek() in "²³⁴":
            value = value ** {"²": 2, "³": 3, "⁴": 4}[peek()]
            position += 1
        return value

    def term() -> Fraction:
        nonlocal position
        value = atom()
        while peek() and peek() not in "+-)":
            if peek() == "/":
                position += 1
                value /= atom()
            else:
                value *= atom()
        return value

    def total() -> Fraction:
        nonlocal position
        value = term()
        while peek() in ("+", "-") and peek():
            sign = 1 if peek() == "+" else -1
            position += 1
            value += sign * term()
        return value

    result = total()
    assert position == len(formula)
    return result
