"""What must hold for every policy on every legal run."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from actcalc.io.runs import load_framework
from actcalc.layers.model import model_graph
from actcalc.policy.checkpoints import checkpoint_optimum, segment_memory
from actcalc.policy.leaves import leaves
from actcalc.policy.outcome import layer_outcome
from actcalc.policy.rules import NONE, parse_policy
from actcalc.policy.stage import StagePolicy
from actcalc.run.placement import placement
from actcalc.specs import Layout
from tests.properties.strategies import gpt_runs

PAPER = load_framework("paper")
NAMES = ["none", "selective", "full", "full-sharded", "ffn", "attention", "norm", "ffn+norm"]


@settings(max_examples=80, deadline=None)
@given(gpt_runs(), st.sampled_from(NAMES))
def test_leaves_sum_to_the_total(run, name):
    graph = model_graph(*run, PAPER)
    layer = graph.runs[0].graph
    outcome = layer_outcome(graph, layer, parse_policy(name))
    found = leaves(graph, "layer", outcome)
    assert sum(leaf.bytes for leaf in found) == outcome.sizes(graph).stored
    assert len({leaf.tensor for leaf in found}) == len(found)


@settings(max_examples=80, deadline=None)
@given(gpt_runs())
def test_none_stores_most_and_full_least(run):
    graph = model_graph(*run, PAPER)
    layer = graph.runs[0].graph

    def stored(name: str) -> int:
        policy = parse_policy(name)
        return layer_outcome(graph, layer, policy).sizes(graph).stored

    assert stored("none") >= stored("selective") >= stored("full-sharded")
    assert stored("none") >= stored("ffn") >= stored("full-sharded")
    assert stored("none") > stored("attention") >= stored("full-sharded")
    assert stored("ffn") >= stored("ffn+norm")


@settings(max_examples=80, deadline=None)
@given(gpt_runs(), st.sampled_from(NAMES))
def test_kept_and_restored_make_the_whole(run, name):
    graph = model_graph(*run, PAPER)
    layer = graph.runs[0].graph
    outcome = layer_outcome(graph, layer, parse_policy(name))
    size = outcome.sizes(graph)
    assert size.kept + size.restored == size.saved
    assert outcome.rerun or size.restored == 0


@settings(max_examples=50, deadline=None)
@given(gpt_runs(), st.integers(2, 7), st.sampled_from(NAMES))
def test_linear_in_the_micro_batch(run, factor, name):
    model, layout, workload = run
    policy = parse_policy(name)

    def stored(batch: int) -> int:
        more = workload.model_copy(update={"micro_batch": batch})
        graph = model_graph(model, layout, more, PAPER)
        return layer_outcome(graph, graph.runs[0].graph, policy).sizes(graph).stored

    assert stored(factor * workload.micro_batch) == factor * stored(workload.micro_batch)


@settings(max_examples=50, deadline=None)
@given(gpt_runs(), st.integers(1, 40))
def test_segments_cover_each_layer_once(run, length):
    model = run[0]
    graph = model_graph(*run, PAPER)
    length = min(length, model.layers)
    stage = StagePolicy(graph, parse_policy(f"uniform:{length}"))
    (chunks,) = placement(model.layers, Layout())
    segments = list(stage.segments(chunks[0]))
    assert [layer for segment in segments for layer in segment.layers] == list(range(model.layers))
    assert len(segments) == -(-model.layers // length)
    one = layer_outcome(graph, graph.runs[0].graph, NONE).sizes(graph).saved
    longest = max(segments, key=lambda segment: len(segment.layers))
    assert longest.restored_bytes < len(longest.layers) * one


@given(st.integers(1, 200), st.integers(1, 10**9), st.integers(1, 10**9), st.integers(1, 64))
def test_checkpoint_optimum_is_least(layers, a_in, a_int, m):
    best = checkpoint_optimum(layers=layers, input_bytes=a_in, layer_bytes=a_int, in_flight=m)
    every = [
        segment_memory(c, layers=layers, input_bytes=a_in, layer_bytes=a_int, in_flight=m)
        for c in range(1, layers + 1)
    ]
    assert best.total_bytes == min(every)
    # No split into whole layers beats the continuous bound.
    assert best.continuous_bytes <= min(every) * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(gpt_runs())
def test_arrays_give_the_same_as_integers(run):
    """The same definitions evaluate over NumPy arrays: many layouts at once."""
    import numpy as np

    model, layout, workload = run
    graph = model_graph(model, layout, workload, PAPER)
    layer = graph.runs[0].graph
    expr = layer_outcome(graph, layer, NONE).stored_size
    batches = np.arange(1, 9, dtype=np.int64)
    many = expr.value({**graph.sizes, "b": batches})
    one = [expr.value({**graph.sizes, "b": int(batch)}) for batch in batches]
    assert many.tolist() == one
