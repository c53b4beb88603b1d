"""Pipelines: what each schedule holds, and how long it idles, by running it.

Every number is computed by what computes the answer itself; a closed form is printed beside it,
never instead of it.
"""

from __future__ import annotations

from collections.abc import Mapping

from actcalc.answers.explain.term import (
    DEEPSEEK,
    KORTHIKANTI,
    NARAYANAN,
    QI,
    Body,
    Term,
    size_text,
)
from actcalc.errors import SpecError
from actcalc.memory.buffers import sent_outputs
from actcalc.memory.stage import total_bytes
from actcalc.policy.rules import NONE
from actcalc.run.placement import microbatches
from actcalc.run.staged import StagedRun
from actcalc.specs.layout import Layout
from actcalc.specs.numbers import percent
from actcalc.specs.run import Run
from actcalc.specs.schedules import SCHEDULES


def _pipeline(staged: StagedRun, schedule: str, vpp: int = 1) -> tuple[StagedRun, list[str]]:
    """The run under ``schedule``, and what was assumed for it.

    Without a global batch a run's own pipeline keeps its micro-batches (or what fills ``schedule``,
    if that is more); a run without one gets four a stage.
    """
    run, said = staged.run, []
    pp, depth = run.layout.pp, run.model.depth
    if pp == 1:
        pp = next((n for n in (8, 4, 2) if depth % n == 0), 8 if depth > 16 else 2)
        if depth < 2:
            raise SpecError(f"{depth} layer makes no pipeline", "name a model with more layers")
        said.append(f"No --pp given: p = {pp} stages.")
    layout, work = _cut(run, pp, schedule, vpp), run.workload
    if not work.global_batch:
        many, why = 4 * pp, "four a stage"
        if run.layout.pp > 1:
            many = max(staged.microbatches, microbatches(layout, work))
            why = "enough to fill the pipeline"
        batch = many * work.micro_batch * layout.dp
        work = work.model_copy(update={"global_batch": batch})
        said.append(f"No --global-batch given: m = {many} micro-batches, {why}.")
    return staged.changed(layout=layout, workload=work), said


def _cut(run: Run, pp: int, schedule: str, vpp: int) -> Layout:
    """The layout of that pipeline: split as asked for, else as evenly as the layers allow."""
    layout = run.layout
    bare = {"pp": pp, "vpp": vpp, "schedule": schedule, "microbatch_group": None}
    slices = layout.model_copy(update={**bare, "layers_per_stage": ()}).slices
    counts = layout.layers_per_stage
    if len(counts) != slices:
        each, more = divmod(run.model.depth, slices)
        counts = (each + 1,) * more + (each,) * (slices - more) if more else ()
    return layout.model_copy(update={**bare, "layers_per_stage": counts})


def _chunk_sizes(staged: StagedRun, stage: int = 0) -> tuple[int, ...]:
    return tuple(len(chunk) for chunk in staged.places[stage])


def _flights(staged: StagedRun) -> list[int]:
    """Chunk activations that each stage holds at its fullest moment."""
    return [sum(staged.held(stage)) for stage in range(staged.run.layout.pp)]


def _held_layers(staged: StagedRun) -> int:
    """Layers' activations that stage 0 holds at its fullest moment."""
    return sum(n * size for n, size in zip(staged.held(0), _chunk_sizes(staged), strict=True))


def _listed(counts: list[int]) -> str:
    return ", ".join(str(count) for count in counts)


def _stage_zero(staged: StagedRun) -> str:
    """What stage 0 holds: chunks in flight times their layers, in bytes."""
    layers, depth = _held_layers(staged), staged.run.model.depth
    each = staged.under(NONE).layer_bytes(staged.main.graph).stored
    return (
        f"stage 0: {layers} layers' activations x {each:,} B = {layers * each:,} B, "
        f"{layers / depth:.4g} times all {depth} layers of one micro-batch"
    )


def _overhead(staged: StagedRun) -> float:
    """Idle over busy time of a step: equal layers, backward twice forward, half of it weights'."""
    from actcalc.cost.pipeline import makespan

    layout = staged.run.layout
    rows = [[float(size) for size in _chunk_sizes(staged, stage)] for stage in range(layout.pp)]
    return makespan(
        layout.pipeline,
        layout.pp,
        staged.microbatches,
        layout.vpp,
        forward_seconds=rows,
        backward_seconds=[[2 * size for size in row] for row in rows],
        weight_seconds=rows,
    ).overhead_ratio


def _one_f_one_b(staged: StagedRun) -> Body:
    piped, lines = _pipeline(staged, "1f1b")
    p, count = piped.run.layout.pp, piped.microbatches
    gpipe = piped.changed(layout=piped.run.layout.model_copy(update={"schedule": "gpipe"}))
    lines += [
        "One forward, one backward in turn: stage r starts with min(p - r - 1, m) forwards and "
        "then frees a micro-batch for each new one. It holds min(p - r, m).",
        f"p = {p}, m = {count}, counted by running the schedule: stages 0 to {p - 1} hold "
        f"{_listed(_flights(piped))}",
        _stage_zero(piped),
        f"p stages deep x l/p layers each: stage 0 holds as much as all l = "
        f"{staged.run.model.depth} layers, whatever p is. Only later stages hold less."
        if count >= p
        else f"With fewer micro-batches than stages the first {p - count + 1} stages hold all "
        f"{count}: the pipeline never fills.",
        f"GPipe, all forwards first, holds m = {sum(gpipe.held(0))} on every stage.",
        f"idle (p-1)/m = {p - 1}/{count} = {(p - 1) / count:.4g} of the busy time; run: "
        f"{_overhead(piped):.4g}",
    ]
    return Body(
        title="1F1B: micro-batches in flight, min(p - r, m)",
        result=f"Stages 0 to {p - 1} hold {_listed(_flights(piped))} micro-batches at their "
        "fullest moments.",
        lines=tuple(lines),
        source=f"{NARAYANAN}, section 2.2; {KORTHIKANTI}, section 4.2.3",
    )


def _chunks(run: Run, pp: int) -> int:
    """Chunks a stage as asked for, else the first of 3, 2, 4, ... that divides its layers."""
    if run.layout.vpp > 1:
        return run.layout.vpp
    return next((v for v in (3, 2, 4, 5, 6, 7) if run.model.depth % (pp * v) == 0), 2)


def _interleaved(staged: StagedRun) -> Body:
    plain, _ = _pipeline(staged, "1f1b")
    chunks = _chunks(staged.run, plain.run.layout.pp)
    piped, lines = _pipeline(staged, "interleaved", chunks)
    layout, count, depth = piped.run.layout, piped.microbatches, staged.run.model.depth
    p, v = layout.pp, layout.vpp
    if staged.run.layout.vpp == 1:
        lines.append(f"No --vpp given: v = {v} chunks a stage.")
    lines += [
        f"Each stage has v = {v} chunks of l/(pv) = {depth / (p * v):.4g} layers and runs p "
        "micro-batches of one chunk before the next chunk.",
        "It holds min(2(p - r - 1) + (v - 1)p + 1, mv) chunks at its fullest moment.",
        f"counted by running the schedule: stages 0 to {p - 1} hold {_listed(_flights(piped))}",
        f"stage 0: pv + p - 1 chunks of l/(pv) layers = l(1 + (p-1)/(pv)) = "
        f"{depth}·(1 + {p - 1}/{p * v}) = {depth * (1 + (p - 1) / (p * v)):.4g} layers"
        if count >= 2 * p
        else "With so few micro-batches it never fills.",
        _stage_zero(piped),
        f"1F1B there: {depth} layers. The price of a bubble v times smaller: (p-1)/(mv) = "
        f"{(p - 1) / (count * v):.4g}; run: {_overhead(piped):.4g}",
    ]
    return Body(
        title="interleaved pipeline: l(1 + (p-1)/(pv))",
        result=f"Stage 0 holds {_held_layers(piped)} layers' activations at its fullest moment, of "
        f"{depth} layers; 1F1B holds {_held_layers(plain)}.",
        lines=tuple(lines),
        source=f"{NARAYANAN}, section 2.2.2; {KORTHIKANTI}, section 4.2.3",
    )


def _bubble(staged: StagedRun) -> Body:
    piped, lines = _pipeline(staged, "1f1b")
    p, count, depth = piped.run.layout.pp, piped.microbatches, staged.run.model.depth
    lines += [
        "Stages wait for the first micro-batch to arrive and for the last gradients to return.",
        f"Idle over busy time, p = {p}, m = {count}, equal layers, backward twice the forward:",
    ]
    plain = f"(p-1)/m = {(p - 1) / count:.4g}"
    closed: Mapping[str, str] = {"gpipe": plain, "1f1b": plain}
    chunks = staged.run.layout.vpp if staged.run.layout.vpp > 1 else 2
    for name, row in SCHEDULES.items():
        try:
            shape, _ = _pipeline(staged, name, 1 if row.chunks else chunks)
            idle, first = _overhead(shape), _held_layers(shape)
        except SpecError:
            continue
        m, form = shape.microbatches, closed.get(name, "")
        if not row.chunks:
            name = f"{name}, v = {chunks}"
            form = f"(p-1)/(mv) = {(p - 1) / (m * chunks):.4g}"
        if m != count:
            name = f"{name}, m = {m}"
        lines.append(
            f"{name}: {idle:.4g}{f', closed form {form}' if form else ''}; stage 0 holds "
            f"{first / depth:.4g} l layers"
        )
    lines.append("More micro-batches shrink it; memory under 1F1B does not grow with them.")
    return Body(
        title="pipeline bubble: (p-1)/m",
        result=f"Under 1F1B stages idle {_overhead(piped):.4g} of their busy time: p = {p}, m = "
        f"{count}.",
        lines=tuple(lines),
        source=f"{NARAYANAN}, section 2.2; {QI}, table 2",
    )


def _stash(staged: StagedRun) -> int:
    """What a layer needs for its weight gradients: inputs and output gradients of its matrices."""
    layer = staged.main.graph
    sizes = staged.graph.tensor_bytes[layer]
    linear = [op for op in layer.ops if op.kind == "linear"]
    inputs = {name for op in linear for name in op.saves}
    return sum(sizes[name] for name in inputs) + sum(sizes[n] for op in linear for n in op.outputs)


def _split(staged: StagedRun, name: str) -> list[str]:
    """A schedule that splits the backward: what each stage holds and how long it idles."""
    from actcalc.run.schedule import in_flight_by_chunk

    piped, _ = _pipeline(staged, name)
    layout = piped.run.layout
    moments = in_flight_by_chunk(name, layout.pp, piped.microbatches)
    stash = max(sum(moment.stashes) for moment in moments)
    lines = [
        f"{name}: chunks of {_chunk_sizes(piped)[0]} layers, {layout.chunks} a stage; stages "
        f"0 to {layout.pp - 1} hold {_listed(_flights(piped))}",
        f"{name}, " + _stage_zero(piped),
    ]
    if stash:
        whole = piped.under(NONE).layer_bytes(piped.main.graph).stored
        lines.append(
            f"Up to {stash} of them wait for their weight gradients alone: a layer needs "
            f"{_stash(piped):,} B for those, and is counted whole, {whole:,} B."
        )
    return [*lines, f"{name} idles {_overhead(piped):.4g} of its busy time"]


def _zero_bubble(staged: StagedRun) -> Body:
    plain, lines = _pipeline(staged, "1f1b")
    idles = {"1f1b": _overhead(plain)}
    for name in ("zb-h1", "zb-v"):
        idles[name] = _overhead(_pipeline(staged, name)[0])
    lines += [
        "A backward is two products: the input's gradient, which the stage before waits for, and "
        "the weight's, which nobody does. The second fills what would be idle.",
        *_split(staged, "zb-h1"),
        *_split(staged, "zb-v"),
        f"1f1b idles {_overhead(plain):.4g} and holds {_listed(_flights(plain))}",
        "Until its weight gradient is made, a layer keeps the inputs of its matrices and the "
        "gradients of their outputs.",
        "Idle is counted from the step's first forward to its last action, on every stage. The "
        "paper's bubble is of each stage's own span: it leaves out the wait for the first "
        "micro-batch, which the optimizer's step need not wait for.",
    ]
    return Body(
        title="zero-bubble schedules",
        result="Splitting backward fills idle time: "
        + ", ".join(f"{name} idles {idle:.4g}" for name, idle in idles.items())
        + " of the busy time.",
        lines=tuple(lines),
        source=f"{QI}, sections 2 and 6",
    )


def _dualpipe(staged: StagedRun) -> Body:
    plain, lines = _pipeline(staged, "1f1b")
    double, _ = _pipeline(staged, "dualpipe")
    pp = double.run.layout.pp
    first, middle = double.held(0), double.held(pp // 2)
    lines += [
        "Micro-batches enter at both ends at once. Stage r has slice r for one direction and slice "
        f"p - 1 - r for the other: {double.run.layout.chunks} slices, weights and states twice.",
        f"p = {pp}, m = {double.microbatches}, counted by running the schedule: stage 0 holds "
        f"{' + '.join(str(n) for n in first)} = {sum(first)} micro-batches of a slice, "
        f"p + 1 = {pp + 1} at most; the middle "
        f"{' + '.join(str(n) for n in middle)}",
        _stage_zero(double),
        f"dualpipe idles {_overhead(double):.4g} of its busy time, 1F1B {_overhead(plain):.4g}",
        *_split(staged, "dualpipe-v"),
        "A forward and a backward run side by side, so that one's communication hides behind the "
        "other's products.",
    ]
    return Body(
        title="DualPipe: both ends at once",
        result=f"DualPipe idles {_overhead(double):.4g} of its busy time, 1F1B "
        f"{_overhead(plain):.4g}, and keeps weights and states twice.",
        lines=tuple(lines),
        source=f"{DEEPSEEK}, section 3.2.1 and table 2",
    )


def _sent(staged: StagedRun) -> Body:
    piped, lines = _pipeline(staged, "1f1b")
    kept = piped.changed(layout=piped.run.layout.model_copy(update={"keep_sent_outputs": True}))
    layer = piped.main.graph
    one = piped.graph.tensor_bytes[layer][layer.output]
    p, held = piped.run.layout.pp, piped.held(0)[0]
    more = sum(buffer.bytes for buffer in sent_outputs(kept, 0))
    lines += [
        f"The output of a stage is {size_text(layer.tensors[layer.output].bytes, piped.graph)} for "
        "one micro-batch on each GPU. The next stage has its own copy, and backward needs its "
        "values on this one only if an op saved them.",
        f"stage 0 holds min(p, m) = {held} micro-batches: {held} x {one:,} B = {held * one:,} B",
        f"memory --set keep_sent_outputs=true adds {more:,} B to stage 0 of {p}, and nothing to "
        "the last stage, which sends nothing.",
        "Autograd wants the output object itself: Megatron-Core puts one element in its place and "
        "calls backward on the engine (deallocate_output_tensor, custom_backward).",
    ]
    return Body(
        title="outputs that a pipeline stage has sent: 2sbhp",
        result=f"Dropping them frees {more:,} B on stage 0 of {p}.",
        lines=tuple(lines),
        source=f"{KORTHIKANTI}, appendix on output tensors; Megatron-Core "
        "pipeline_parallel/schedules.py",
    )


def _by_microbatch(staged: StagedRun) -> Body:
    from actcalc.plan.microbatches import by_microbatch

    piped, lines = _pipeline(staged, "1f1b")
    run = piped.run
    policy = piped.first_policy if run.policies else piped.full
    budget = run.budget_bytes
    if budget is None:
        ends = [total_bytes(piped, one) for one in (policy, NONE)]
        budget = max(ends[0], sum(ends) // 2)
        lines.append(
            f"No --device given: memory half-way between what {policy.name} and none need."
        )
    mixes = by_microbatch(piped, policy, budget)
    worst = max(mix.rerun_ratio for mix in mixes)
    shown = dict.fromkeys((mixes[0], mixes[len(mixes) // 2], mixes[-1]))
    lines += [
        f"Under {policy.name} alone every micro-batch runs again on every stage, although later "
        f"stages hold fewer. A GPU has {budget:,} B.",
        "Each stage lets as many of the micro-batches that it holds keep everything as fit:",
        f"{_listed([mix.whole for mix in mixes])} of {_listed([mix.in_flight for mix in mixes])}",
        *(
            f"stage {mix.stage}: {mix.whole} of {mix.in_flight} keep everything, "
            f"{mix.peak_bytes:,} B at most; each takes {mix.more_bytes:,} B more than under "
            f"{policy.name}"
            for mix in shown
        ),
        "The stage that runs most again sets the pace.",
    ]
    return Body(
        title="recomputation by micro-batch",
        result=f"The busiest stage runs {percent(worst, 1)} of its micro-batches again "
        "instead of all.",
        lines=tuple(lines),
        source=f"{KORTHIKANTI}, appendix on micro-batches; Megatron-Core "
        "pipeline_parallel/schedules.py",
    )


TERMS = (
    Term(
        "1f1b",
        "micro-batches in flight, min(p - r, m)",
        _one_f_one_b,
        words=(
            "in-flight",
            "in flight",
            "in_flight",
            "held",
            "pipeline",
            "gpipe",
            "pipeline parallel",
        ),
        flags=("pp", "global_batch", "grad_accum", "grad_accum", "layers_per_stage"),
        heeds=("global_batch", "layers_per_stage"),
    ),
    Term(
        "interleaved",
        "chunks in flight, l(1 + (p-1)/(pv))",
        _interleaved,
        words=("l(1+(p-1)/(pv))", "virtual pipeline"),
        flags=("vpp",),
        heeds=("global_batch", "layers_per_stage", "vpp"),
    ),
    Term(
        "bubble",
        "idle time of every schedule",
        _bubble,
        words=("(p-1)/m", "idle", "pipeline bubble"),
        flags=("schedule",),
        heeds=("global_batch", "layers_per_stage", "vpp"),
    ),
    Term(
        "zero-bubble",
        "schedules that split the backward",
        _zero_bubble,
        words=("zb-h1", "zb-v"),
        heeds=("global_batch", "layers_per_stage"),
    ),
    Term(
        "dualpipe",
        "both ends at once",
        _dualpipe,
        words=("dualpipe-v",),
        heeds=("global_batch", "layers_per_stage"),
    ),
    Term(
        "sent",
        "outputs that a stage has sent: 2sbhp, kept or dropped",
        _sent,
        words=("2sbhp", "deallocate", "deallocate_pipeline_outputs", "sent outputs"),
        heeds=("global_batch", "layers_per_stage"),
        model="gpt-530b",
        layout={"tp": 8, "pp": 35},
    ),
    Term(
        "microbatch",
        "recomputation by micro-batch, as a plan",
        _by_microbatch,
        words=("microbatch-level", "by microbatch", "partial activation checkpoints"),
        heeds=("global_batch", "layers_per_stage", "device", "device_memory", "headroom", "policy"),
        layout={"tp": 8, "sp": True, "pp": 8},
    ),
)
"""The terms of this module."""
