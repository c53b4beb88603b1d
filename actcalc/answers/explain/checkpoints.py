"""How many checkpoints, and checkpoints of checkpoints."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from math import log2

from actcalc.answers.compare import optimum
from actcalc.answers.explain.term import (
    CHEN,
    NARAYANAN,
    Body,
    Term,
    layer_words,
    own_saved,
    size_text,
)
from actcalc.cost.flops import layers_forward_flops, rerun_flops
from actcalc.policy.checkpoints import segment_memory
from actcalc.run.staged import StagedRun


def _optimum(staged: StagedRun) -> Body:
    graph, layer = staged.graph, staged.main.graph
    best = optimum(staged)
    count, held = best.layers, best.in_flight
    near = min(count, max(1, round(best.continuous)))
    counted = best.input_bytes if layer.input in layer.saved else 0

    def memory(segments: int, inside: int = best.layer_bytes, at_once: float = held) -> int:
        return segment_memory(
            segments,
            layers=count,
            input_bytes=best.input_bytes,
            layer_bytes=inside,
            counted_bytes=counted,
            in_flight=Fraction(at_once).limit_denominator(10**6),
        )

    chunks = len(staged.places[0])
    inside = f"√({count}·{best.layer_bytes_per_input_bytes_ratio:.4g}"
    inside += f"/{held:.4g})" if held != 1 else ")"
    root = max(1, round(count**0.5))
    lines = [
        "memory(c) = m·c·A_in + (l/c)·A_int - A_in: c checkpoints stay for each of m micro-batches "
        "in flight, one segment of l/c layers works, whose first input is its checkpoint."
        if counted
        else "memory(c) = m·c·A_in + (l/c)·A_int: c checkpoints stay for each of m micro-batches "
        "in flight, one segment of l/c layers works.",
        f"A_in = {size_text(layer.tensors[layer.input].bytes, graph)}, the input of "
        f"{layer_words(staged)} on each GPU",
        f"A_int = {size_text(layer.bytes_of(own_saved(layer)), graph)}, what it keeps",
        f"A_int/A_in = {best.layer_bytes_per_input_bytes_ratio:.4g}",
        f"l = {count} layers on the first pipeline stage, m = {held:.4g} in flight"
        + (f" (mean over the layers of its {chunks} chunks)" if chunks > 1 else ""),
        f"d/dc = 0 at c* = √(l·A_int/(m·A_in)) = {inside} = {best.continuous:.2f}, "
        f"{best.continuous_bytes:,.0f} B",
        f"c* is no plan: {near} checkpoints over {count} whole layers leave segments of "
        f"{-(-count // near)}, {memory(near):,} B.",
        f"Best realisable: {best.integer} checkpoints, {best.layers_per_segment} layer(s) each, "
        f"{best.total_bytes:,} B.",
        *(
            ("Segments are cut inside chunks, so that --policy sqrt may hold more.",)
            if chunks > 1
            else ()
        ),
        f"With A_in = A_int and one micro-batch it is the √n scheme: {count} equal layers in "
        f"{root} segments keep {root} + {count / root:.4g} = {root + count / root:.4g} layers' "
        "worth.",
    ]
    return Body(
        title="the best number of checkpoints",
        result=f"c* = {best.continuous:.2f} checkpoints for {count} layers; in whole layers "
        f"{best.integer} are best, {best.total_bytes:,} B on each GPU.",
        lines=tuple(lines),
        source=f"{CHEN}, section 4.3; {NARAYANAN}, section 3.5",
    )


def _recursive(staged: StagedRun) -> Body:
    graph, layer = staged.graph, staged.main.graph
    policy, root = staged.policy("recursive"), staged.policy("sqrt")
    chunk = staged.places[0][0]
    runs = Counter(step.layer for step in policy.backward(chunk) if step.kind == "re-run")
    ends = [step for step in policy.backward(chunk) if step.kind == "backward"]
    most = max(len({*step.beside, step.layer} - {chunk.start}) for step in ends)
    work = staged.under(policy)
    kept = work.layer_bytes(layer).stored
    again = rerun_flops(staged, policy) / layers_forward_flops(graph)
    other = staged.under(root)
    lines = [
        f"From forward only the first input of the chunk's {len(chunk)} layers stays. Backward "
        "runs the first half again to make the input of the second, does the second half's "
        "backward in the same way, drops that input, and then does the first half's.",
        f"At most {most} inputs wait beside it, one for every halving, {kept:,} B each on each "
        f"GPU: log2 {len(chunk)} = {log2(len(chunk)):.4g}.",
        f"Forwards run again: {sum(runs.values())} of layers, between {min(runs.values())} and "
        f"{max(runs.values())} times each; halves of halves make it n·(1 + log2(n)/2) for n a "
        "power of two.",
        "Where a re-run does not stop early, whole segments run again and it is n·log2(n).",
        f"recursive: {staged.stored_bytes(0, policy):,} B stored, "
        f"{work.transient_bytes(staged.places[0]):,} B brought back at most",
        f"sqrt: {staged.stored_bytes(0, root):,} B stored, "
        f"{other.transient_bytes(staged.places[0]):,} B brought back at most, "
        f"{rerun_flops(staged, root) / layers_forward_flops(graph):.4g} forwards",
    ]
    return Body(
        title="checkpoints of checkpoints",
        result=f"Memory grows with log2(n) layers' inputs, the forward runs {again:.4g} times "
        f"again for {len(chunk)} layers.",
        lines=tuple(lines),
        source=f"{CHEN}, section 4.4",
    )


TERMS = (
    Term(
        "c*",
        "the best number of checkpoints",
        _optimum,
        words=("cstar", "c", "checkpoints", "sqrt", "sqrt(n)", "√n", "sqrtn", "74", "73.97", "57"),
        flags=("recompute_method", "recompute_num_layers"),
        heeds=("schedule", "vpp", "global_batch", "layers_per_stage"),
    ),
    Term(
        "recursive",
        "checkpoints of checkpoints: log2(n) inputs, n·log2(n) forwards",
        _recursive,
        words=("recursive sqrt n", "recursive √n", "logn", "log2(n)", "nlogn", "nested"),
        heeds=("schedule", "vpp", "global_batch", "layers_per_stage"),
    ),
)
"""The terms of this module."""
