"""The best number of checkpoints."""

from __future__ import annotations

from fractions import Fraction

from actcalc.answers.compare import optimum
from actcalc.answers.explain.activations import size_text
from actcalc.answers.explain.term import CHEN, NARAYANAN, Body, Term
from actcalc.policy.checkpoints import segment_memory
from actcalc.run.staged import StagedRun


def _optimum(staged: StagedRun) -> Body:
    graph = staged.graph
    layer = staged.main.graph
    own = [name for name in layer.saved if name not in layer.shared]
    best = optimum(staged)
    count, held = best.layers, best.in_flight
    near = min(count, max(1, round(best.continuous)))
    counted = best.input_bytes if layer.input in layer.saved else 0

    def memory(segments: int) -> int:
        return segment_memory(
            segments,
            layers=count,
            input_bytes=best.input_bytes,
            layer_bytes=best.layer_bytes,
            counted_bytes=counted,
            in_flight=Fraction(held).limit_denominator(10**6),
        )

    inside = f"√({count}·{best.layer_bytes_per_input_bytes_ratio:.4g}"
    inside += f"/{held:.4g})" if held != 1 else ")"
    lines = [
        "memory(c) = m·c·A_in + (l/c)·A_int - A_in: c checkpoints stay for each of m micro-batches "
        "in flight, one segment of l/c layers works, whose first input is its checkpoint.",
        f"A_in = {size_text(layer.tensors[layer.input].bytes, graph)}",
        f"A_int = {size_text(layer.bytes_of(own), graph)}",
        f"A_int/A_in = {best.layer_bytes_per_input_bytes_ratio:.4g}",
        f"l = {count} layers on the first pipeline stage, m = {held:.4g} in flight",
        f"d/dc = 0 at c* = √(l·A_int/(m·A_in)) = {inside} = {best.continuous:.2f}, "
        f"{best.continuous_bytes:,.0f} B",
        f"c* is no plan: {near} checkpoints over {count} whole layers leave segments of "
        f"{-(-count // near)}, {memory(near):,} B.",
        f"Best realisable: {best.integer} checkpoints, {best.layers_per_segment} layer(s) each, "
        f"{best.total_bytes:,} B.",
        "With A_in = A_int it is the √n scheme: 96 equal layers in 10 segments keep "
        "10 + 9.6 = 19.6 layers' worth.",
    ]
    source = f"{CHEN}, section 4.3; {NARAYANAN}, section 3.5"
    return "the best number of checkpoints", tuple(lines), source


TERMS = (
    Term(
        "c*",
        "the best number of checkpoints",
        _optimum,
        words=("cstar", "c", "checkpoints", "sqrt"),
        heeds=("schedule", "vpp", "global_batch", "layers_per_stage"),
    ),
)
"""The terms of this module."""
