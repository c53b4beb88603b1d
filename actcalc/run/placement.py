"""Which layers live on which pipeline stage, and how many microbatches each stage holds."""

from __future__ import annotations

from collections.abc import Iterator

from actcalc.errors import SpecError
from actcalc.specs import Layout, Workload
from actcalc.specs.schedules import SCHEDULES

Chunks = tuple[range, ...]
Ends = tuple[bool, bool]
"""Whether a chunk holds the embedding, and whether it holds the head."""


def placement(layers: int, layout: Layout) -> tuple[Chunks, ...]:
    """For each stage its chunks, each a range of layer indices in model order.

    Chunk j of stage r is virtual stage j·pp + r (Narayanan et al. 2021 §2.2); in V shapes the
    second chunk runs back through the stages, and DualPipe keeps each slice twice. An explicit
    ``layers_per_stage`` lists virtual stages in model order; else layers are split evenly.
    Raises ``SpecError`` where that leaves layers without a place.
    """
    stages = layout.slices
    counts = layout.layers_per_stage or (layers // stages,) * stages
    if sum(counts) != layers:
        raise SpecError(
            f"{layout.cut} does not divide {layers} layers", "say how with layers_per_stage"
        )
    starts = [sum(counts[:index]) for index in range(stages)]
    virtual = [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
    return tuple(tuple(virtual[index] for index in stage) for stage in _slices(layout))


def ends(layout: Layout) -> tuple[tuple[Ends, ...], ...]:
    """For each stage and each of its chunks which ends of the model it holds.

    The embedding lives on the first slice and the head on the last, whatever layers they have:
    none at all where each counts as a layer of its own (Megatron's
    --account-for-embedding-in-pipeline-split, or ``E|...|L`` of --pipeline-model-parallel-layout).
    """
    last = layout.slices - 1
    return tuple(tuple((index == 0, index == last) for index in stage) for stage in _slices(layout))


def _slices(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """For each stage the slices of the model that its chunks hold, counted in model order."""
    schedule, chunks = SCHEDULES[layout.pipeline], range(layout.chunks)
    return tuple(
        tuple(schedule.place(layout.pp, stage, chunk) for chunk in chunks)
        for stage in range(layout.pp)
    )


def microbatches(layout: Layout, workload: Workload) -> int:
    """Micro-batches each replica runs per step; without a global batch enough to fill the pipeline.

    ``pp`` fill every schedule but those that need more (2·pp: DualPipe). An interleaved pipeline's
    first stage holds 2(p - 1) + (v - 1)g + 1 chunks when it is full: as many micro-batches as that
    takes, in whole groups of g (Megatron-Core ``schedules.py`` get_pp_rank_microbatches).
    """
    if workload.global_batch:
        return workload.global_batch // (workload.micro_batch * layout.dp)
    pp, schedule = layout.pp, SCHEDULES[layout.pipeline]
    if schedule.grouped:
        group = layout.microbatch_group or pp
        chunks = 2 * (pp - 1) + (layout.vpp - 1) * group + 1
        return group * -(-chunks // (layout.vpp * group))
    return pp * max(1, schedule.least)


def plain_order(schedule: str, pp: int, count: int, stage: int) -> Iterator[tuple[str, int]]:
    """The work of a stage with one chunk in order, each with the micro-batches held meanwhile.

    Runs the order of 1F1B (warm-up forwards, one forward and one backward in turn, the rest of
    the backwards) or GPipe (all forwards, then all backwards); the same as
    :func:`actcalc.run.schedule.sequence` yields for them, without loading NumPy.
    """
    ahead = count if schedule == "gpipe" else min(pp - stage - 1, count)
    alive = 0
    for kind in "F" * ahead + "FB" * (count - ahead) + "B" * ahead:
        alive += kind == "F"
        yield kind, alive
        alive -= kind == "B"


def plain_work(schedule: str, pp: int, count: int, stage: int) -> Iterator[tuple[str, int]]:
    """The distinct kinds of work of :func:`plain_order`, in order of occurrence.

    Of GPipe's only the fullest of each are told: every other holds less. Any number of
    micro-batches beyond the pipeline's depth only repeats the middle of 1F1B.
    """
    if schedule == "gpipe":
        yield "F", count
        yield "B", count
        return
    yield from dict.fromkeys(plain_order(schedule, pp, min(count, pp + 1), stage))
