"""Pipeline schedules: the order of work on every stage, what it keeps alive, how long it takes.

A schedule is data: per stage, an ordered list of actions. Everything else is read off that list
by running it: how many chunk activations a stage holds (:func:`in_flight`), of which chunks
(:func:`in_flight_by_chunk`), at which moments (:func:`moments`), and the time of one step with
its bubble (:func:`makespan`). No closed form is used for an answer, except that a periodic
middle is run once instead of thousands of times.

Sources of the orders:

- ``gpipe``: Huang et al. 2019 (arXiv:1811.06965), all forwards, then all backwards.
- ``1f1b``: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2 (PipeDream-Flush).
- ``interleaved``: the same, section 2.2.2, with the order of Megatron-Core's
  ``pipeline_parallel/schedules.py`` (``get_pp_rank_microbatches``, ``get_schedule_table``).
- ``zb-h1``: Qi et al. 2023 (arXiv:2401.10241), section 2: 1F1B whose weight gradients lag behind
  by the rank of the stage, so that every stage holds what the first one holds.
- ``zb-v``: the same paper, section 6, in the order for equal times of forward, input gradient and
  weight gradient that ``torch.distributed.pipelining`` runs as ``ScheduleZBVZeroBubble``.
- ``dualpipe``: DeepSeek-V3 (arXiv:2412.19437), section 3.2.1, in the eight steps of the published
  ``dualpipe.py``; ``dualpipe-v`` is its half that puts both directions on one V-shaped model
  (``dualpipev.py``, and ``ScheduleDualPipeV`` in ``torch.distributed.pipelining``).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from actcalc.errors import SpecError
from actcalc.specs.layout import TWO_CHUNKS, slice_count

Kind = Literal["F", "B", "I", "W"]
"""Forward; whole backward; input gradient alone; weight gradient alone."""

Seconds = float | Sequence[float] | Sequence[Sequence[float]]
"""One duration for all, one per stage, or one per stage and chunk."""

SCHEDULES = ("1f1b", "interleaved", "gpipe", "zb-h1", "zb-v", "dualpipe", "dualpipe-v")

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]

_F, _B, _I, _W = range(4)
_KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")
# what an action completes: forward, input gradient (also by a whole backward), weight gradient
_COLUMN = np.array([0, 1, 1, 2])
_JOINED = 4  # flag of a forward that runs together with the backward after it
_ROUNDING = 1e-12  # relative; sums of floats that are equal in exact arithmetic differ by less
_MOST_FORWARDS = 10**6  # on one stage in one step; far above any real step, and still in memory
_CHUNK = 8  # a symbol is chunk * _CHUNK + flag + kind


class Action(NamedTuple):
    """One piece of work of one stage."""

    kind: Kind
    """F forward, B whole backward, I input gradient alone, W weight gradient alone."""
    microbatch: int
    """Index of the microbatch in the step, from 0."""
    chunk: int
    """Index of the model chunk on this stage, from 0."""
    joined: bool = False
    """A forward overlapped with the backward that follows it (DualPipe): both start and end
    together, and take the sum of their compute times."""


class Held(NamedTuple):
    """What one stage holds at one moment, counted in microbatches per chunk."""

    activations: tuple[int, ...]
    """Per chunk: forwards run (or running) whose input gradient has not been computed."""
    stashes: tuple[int, ...]
    """Per chunk: input gradients computed whose weight gradient has not: the inputs and output
    gradients of linear layers are kept until then (zero-bubble schedules)."""

    @property
    def total(self) -> int:
        """Chunk activations held, an input kept only for its weight gradient counted whole."""
        return sum(self.activations) + sum(self.stashes)


class Moment(NamedTuple):
    """One kind of work a stage does, with what it holds meanwhile."""

    kind: Kind
    chunk: int
    held: Held


class Makespan(NamedTuple):
    """How long one step takes."""

    total_seconds: float
    """From the first forward to the last action of any stage."""
    bubble_ratio: float
    """Idle share of the devices' time: 1 - sum(busy) / (stages * total)."""
    busy_seconds: tuple[float, ...]
    """Per stage: the sum of the durations of its actions."""

    @property
    def overhead_ratio(self) -> float:
        """Time lost over the busiest stage: total / max(busy) - 1.

        For equal stages this is the bubble of Narayanan et al. 2021: (p - 1)/m under 1F1B and
        GPipe, (p - 1)/(m v) interleaved.
        """
        return self.total_seconds / max(self.busy_seconds) - 1


@dataclass(frozen=True)
class _Order:
    """The actions of one stage as parallel arrays; microbatches are counted per direction."""

    kind: _Ints
    chunk: _Ints
    microbatch: _Ints
    joined: NDArray[np.bool_]


@dataclass(frozen=True)
class _Shape:
    """A checked question: which schedule, and its sizes."""

    schedule: str
    pp: int
    microbatches: int
    chunks: int
    group: int

    @property
    def lane(self) -> int:
        """Microbatches that pass one chunk: DualPipe sends half of them each way."""
        return self.microbatches // 2 if self.schedule == "dualpipe" else self.microbatches

    @property
    def unit(self) -> int:
        """Microbatches by which the order can be lengthened without changing its ends."""
        return {"interleaved": self.group, "dualpipe": 2}.get(self.schedule, 1)

    @property
    def span(self) -> int:
        """An upper bound of the microbatches, per direction, in the warm-up or in the cool-down."""
        if self.schedule == "interleaved":
            # warm-up: 2(p - r - 1) + (v - 1)g chunks are less than two groups of v chunks
            return 2 * self.group + self.lane % self.group
        return self.pp if self.schedule == "1f1b" else 2 * self.pp

    def shortened(self, limit: int) -> _Shape:
        """The same schedule with at most ``limit`` + unit microbatches, equal to it modulo unit."""
        if self.schedule == "gpipe" or self.microbatches <= limit + self.unit:
            return self
        microbatches = limit + (self.microbatches - limit) % self.unit
        return self.resized(microbatches)

    def resized(self, microbatches: int) -> _Shape:
        """The same schedule with another number of microbatches."""
        return _Shape(self.schedule, self.pp, microbatches, self.chunks, self.group)


def chunks_per_stage(schedule: str, vpp: int = 1) -> int:
    """Model chunks that one stage runs: v when interleaved, 2 in V shapes and DualPipe, else 1.

    Raises ``SpecError`` for an unknown schedule, or a ``vpp`` the schedule cannot have. The
    schedules with two chunks by nature take ``vpp`` 1 (unset) or 2.
    """
    if schedule not in SCHEDULES:
        close = difflib.get_close_matches(str(schedule).lower(), SCHEDULES, n=1)
        known = "the schedules are " + ", ".join(SCHEDULES)
        raise SpecError(
            f"unknown pipeline schedule {schedule!r}",
            f"did you mean {close[0]}?" if close else known,
        )
    if vpp < 1:
        raise SpecError(f"vpp {vpp} is not a number of model chunks", "use vpp 1 or more")
    if schedule == "interleaved":
        if vpp == 1:
            raise SpecError(
                "the interleaved schedule needs more than one model chunk per stage, but vpp is 1",
                "add --vpp 2 or more, or use the 1f1b schedule",
            )
        return vpp
    if schedule in TWO_CHUNKS:
        if vpp > 2:
            raise SpecError(
                f"the {schedule} schedule runs 2 model chunks per stage, but vpp is {vpp}",
                "leave vpp out, or use the interleaved schedule",
            )
        return 2
    if vpp > 1:
        raise SpecError(
            f"the {schedule} schedule runs 1 model chunk per stage, but vpp is {vpp}",
            "leave vpp out, or use the interleaved schedule",
        )
    return 1


def slices(schedule: str, pp: int, vpp: int = 1) -> int:
    """Consecutive slices the model is cut into (:func:`actcalc.specs.layout.slice_count`).

    Raises ``SpecError`` as :func:`chunks_per_stage` does.
    """
    chunks_per_stage(schedule, vpp)
    return slice_count(schedule, pp, vpp)


def slice_of(schedule: str, pp: int, stage: int, chunk: int, vpp: int = 1) -> int:
    """Which slice of the model (from 0, in the order of the layers) a stage's chunk holds."""
    chunks = chunks_per_stage(schedule, vpp)
    if not (0 <= stage < pp and 0 <= chunk < chunks):
        raise SpecError(
            f"no chunk {chunk} on stage {stage} of {pp} stages with {chunks} chunks each",
            "stages and chunks count from 0",
        )
    return _position(schedule, pp, stage, chunk)


def actions(
    schedule: str, pp: int, microbatches: int, vpp: int = 1, *, group: int | None = None
) -> tuple[tuple[Action, ...], ...]:
    """The ordered actions of every stage for one training step.

    ``group`` is Megatron-Core's ``microbatch_group_size_per_vp_stage`` (default: pp). Under
    DualPipe the first half of the microbatches enters at stage 0 (chunk 0), the second half at
    the last stage (chunk 1). Raises ``SpecError`` for sizes the schedule cannot run.
    """
    shape = _shape(schedule, pp, microbatches, vpp, group)
    result = []
    for order in _orders(shape):
        microbatch = order.microbatch
        if schedule == "dualpipe":
            microbatch = microbatch + order.chunk * shape.lane
        result.append(
            tuple(
                Action(_KINDS[kind], index, chunk, joined)
                for kind, index, chunk, joined in zip(
                    order.kind.tolist(),
                    microbatch.tolist(),
                    order.chunk.tolist(),
                    order.joined.tolist(),
                    strict=True,
                )
            )
        )
    return tuple(result)


def in_flight(
    schedule: str, pp: int, microbatches: int, vpp: int = 1, *, group: int | None = None
) -> tuple[int, ...]:
    """Per stage: the most chunk activations held at once, by running the schedule.

    A chunk counts from the start of its forward to the end of its backward; where the backward
    is split, to the end of its weight gradient. Under 1F1B this is min(p - r, m); interleaved,
    min(2(p - r - 1) + (v - 1)g + 1, m·v) chunks. Raises ``SpecError`` as :func:`actions` does.
    """
    held = in_flight_by_chunk(schedule, pp, microbatches, vpp, group=group)
    return tuple(stage.total for stage in held)


def in_flight_by_chunk(
    schedule: str,
    pp: int,
    microbatches: int,
    vpp: int = 1,
    *,
    group: int | None = None,
    activation_bytes: Sequence[Sequence[int]] | None = None,
    stash_bytes: Sequence[Sequence[int]] | None = None,
) -> tuple[Held, ...]:
    """Per stage: what is held at its fullest moment (the first of equals).

    Fullest is by bytes where ``activation_bytes[stage][chunk]`` and ``stash_bytes[stage][chunk]``
    give the size of one chunk's activations and of what is kept from input gradient to weight
    gradient; by default each counts one. Raises ``SpecError`` as :func:`actions` does.
    """
    shape = _shape(schedule, pp, microbatches, vpp, group)
    ones = [[1] * shape.chunks] * pp
    activation = _table(activation_bytes if activation_bytes is not None else ones, shape, "bytes")
    stash = _table(stash_bytes if stash_bytes is not None else ones, shape, "bytes")
    result = []
    for stage, order in enumerate(_orders(_memory_shape(shape))):
        size = np.array(activation[stage])[order.chunk]
        kept = np.array(stash[stage])[order.chunk]
        after = np.select(
            [order.kind == _F, order.kind == _B, order.kind == _I],
            [size, -size, kept - size],
            -kept,
        )
        total = np.cumsum(after)
        running = np.where(order.kind == _F, total, total - after)
        result.append(_held(order, shape.chunks, int(np.argmax(running))))
    return tuple(result)


@lru_cache(maxsize=512)
def moments(
    schedule: str,
    pp: int,
    microbatches: int,
    vpp: int = 1,
    *,
    stage: int,
    group: int | None = None,
) -> tuple[Moment, ...]:
    """The distinct (work, held) pairs that occur on ``stage`` in one step, in order of occurrence.

    What is held includes the microbatch being worked on. A peak that depends on the work (the
    loss at the end of a forward, a re-run layer in a backward) is a maximum over these. Raises
    ``SpecError`` as :func:`actions` does.
    """
    shape = _shape(schedule, pp, microbatches, vpp, group)
    if not 0 <= stage < pp:
        raise SpecError(f"no stage {stage} in a pipeline of {pp}", "stages count from 0")
    order = _order(_memory_shape(shape), stage)
    columns = np.arange(shape.chunks)
    own = order.chunk[:, None] == columns
    kind = order.kind[:, None]
    activation_step = own * ((kind == _F).astype(np.int64) - (_COLUMN[kind] == 1))
    stash_step = own * ((kind == _I).astype(np.int64) - (kind == _W))
    forward = own & (kind == _F)
    activation = np.cumsum(activation_step, axis=0) - np.where(forward, 0, activation_step)
    stash = np.cumsum(stash_step, axis=0) - stash_step
    rows = np.concatenate([kind, order.chunk[:, None], activation, stash], axis=1).tolist()
    return tuple(
        Moment(
            _KINDS[row[0]],
            row[1],
            Held(tuple(row[2 : 2 + shape.chunks]), tuple(row[2 + shape.chunks :])),
        )
        for row in dict.fromkeys(map(tuple, rows))
    )


def makespan(
    schedule: str,
    pp: int,
    microbatches: int,
    vpp: int = 1,
    *,
    forward_seconds: Seconds,
    backward_seconds: Seconds,
    weight_seconds: Seconds = 0.0,
    p2p_seconds: float = 0.0,
    group: int | None = None,
) -> Makespan:
    """Time of one step by event simulation, without the optimizer step.

    Durations are those of one microbatch through one chunk: a number, one per stage, or one per
    stage and chunk. ``backward_seconds`` is the whole backward, of which ``weight_seconds`` is
    spent on weight gradients; only schedules that split the backward use the latter.
    ``p2p_seconds`` is the delay of a message between neighbouring stages; it delays the receiver
    and occupies nobody (add it to the durations where sends block). Raises ``SpecError`` as
    :func:`actions` does, or for durations that are negative, not finite or of the wrong shape.

    A long run is not simulated whole: once the finish times of a window of microbatches, as wide
    as any dependence reaches, repeat with a constant shift, every later one does too, and the
    rest is that shift times a count. If they never do, the whole run is simulated.
    """
    shape = _shape(schedule, pp, microbatches, vpp, group)
    durations = _durations(shape, forward_seconds, backward_seconds, weight_seconds, p2p_seconds)
    total = _total_seconds(shape, durations, p2p_seconds)
    busy = tuple(float(shape.lane * (row[:, _F] + row[:, _B]).sum()) for row in durations)
    if total <= 0.0:
        raise SpecError("a step in which nothing takes time", "give durations above 0 seconds")
    return Makespan(total, max(0.0, 1.0 - sum(busy) / (pp * total)), busy)


# --- the question, checked -----------------------------------------------------------------------


def _shape(schedule: str, pp: int, microbatches: int, vpp: int, group: int | None) -> _Shape:
    chunks = chunks_per_stage(schedule, vpp)
    if pp < 1:
        raise SpecError(f"pp {pp} is not a number of pipeline stages", "use pp 1 or more")
    if microbatches < 1:
        raise SpecError(
            f"{microbatches} microbatches per step", "use a global batch of one microbatch or more"
        )
    if group is not None and schedule != "interleaved":
        raise SpecError(
            f"the {schedule} schedule has no microbatch groups, but the group size is {group}",
            "leave the group size out, or use the interleaved schedule",
        )
    shape = _Shape(schedule, pp, microbatches, chunks, pp if group is None else group)
    if schedule == "interleaved":
        _check_interleaved(shape)
    elif schedule == "dualpipe":
        _check_dualpipe(shape)
    elif schedule == "dualpipe-v" and microbatches < 2 * pp:
        raise SpecError(
            f"dualpipe-v needs at least 2·pp = {2 * pp} microbatches, but a step has "
            f"{microbatches}",
            "raise the global batch, or use the zb-v schedule",
        )
    return shape


def _check_interleaved(shape: _Shape) -> None:
    """What Megatron-Core's ``forward_backward_pipelining_with_interleaving`` refuses."""
    pp, count, group = shape.pp, shape.microbatches, shape.group
    if pp == 1:
        raise SpecError(
            "the interleaved schedule needs more than one pipeline stage, but pp is 1",
            "add --pp 2 or more, or drop --vpp",
        )
    if count < pp:
        raise SpecError(
            f"the interleaved schedule needs at least pp = {pp} microbatches, but a step has "
            f"{count}",
            "raise the global batch, or use the 1f1b schedule",
        )
    if not pp <= group <= count:
        raise SpecError(
            f"the microbatch group size {group} is outside [pp, microbatches] = [{pp}, {count}]",
            f"use a group size of {pp}",
        )
    rest = count % group
    if 0 < rest < pp:
        fitting = next(size for size in range(group, count + 1) if not 0 < count % size < pp)
        raise SpecError(
            f"{count} microbatches in groups of {group} leave a last group of {rest}, smaller "
            f"than the {pp} pipeline stages",
            f"use {count - rest} or {count - rest + group} microbatches, or a microbatch group "
            f"size of {fitting}",
        )


def _check_dualpipe(shape: _Shape) -> None:
    """What the published ``dualpipe.py`` asserts."""
    if shape.pp % 2:
        raise SpecError(
            f"dualpipe pairs the stages of two directions, but pp is {shape.pp}", "use an even pp"
        )
    if shape.microbatches % 2 or shape.microbatches < 2 * shape.pp:
        raise SpecError(
            f"dualpipe needs an even number of at least 2·pp = {2 * shape.pp} microbatches, but a "
            f"step has {shape.microbatches}",
            "change the global batch, or use the zb-h1 schedule",
        )


def _table(
    values: Sequence[Sequence[float]], shape: _Shape, what: str
) -> tuple[tuple[float, ...], ...]:
    table = tuple(tuple(row) for row in values)
    if len(table) != shape.pp or any(len(row) != shape.chunks for row in table):
        raise SpecError(
            f"{what} for {len(table)} stages of {sorted({len(row) for row in table})} chunks, but "
            f"the {shape.schedule} schedule has {shape.pp} stages of {shape.chunks}",
            f"give {shape.pp} rows of {shape.chunks}",
        )
    return table


# --- the order of work on one stage --------------------------------------------------------------


def _orders(shape: _Shape) -> tuple[_Order, ...]:
    return tuple(_order(shape, stage) for stage in range(shape.pp))


@lru_cache(maxsize=256)
def _order(shape: _Shape, stage: int) -> _Order:
    if shape.lane * shape.chunks > _MOST_FORWARDS:
        raise SpecError(
            f"{shape.microbatches} microbatches per step are too many to run the "
            f"{shape.schedule} schedule",
            "use a smaller global batch or a larger microbatch",
        )
    symbols = _BUILDERS[shape.schedule](shape, stage)
    kind = symbols % _JOINED
    joined = symbols // _JOINED % 2 == 1
    chunk = symbols // _CHUNK
    if shape.schedule in ("dualpipe", "dualpipe-v"):
        # weight gradients leave a queue in the order in which their input gradients entered it
        chunk[kind == _W] = chunk[kind == _I]
    microbatch = _rank(chunk * 3 + _COLUMN[kind])
    # weight gradients follow their own input gradients in order
    for index in range(shape.chunks) if _W in kind else ():
        here = chunk == index
        microbatch[here & (kind == _W)] = microbatch[here & (kind == _I)]
    if shape.schedule == "zb-v":
        real = microbatch < shape.lane
        kind, chunk, microbatch, joined = kind[real], chunk[real], microbatch[real], joined[real]
    return _Order(kind, chunk, microbatch, joined)


def _rank(key: _Ints) -> _Ints:
    """For each entry, how many equal entries stand before it."""
    sequence = np.argsort(key.astype(np.min_scalar_type(int(key.max()))), kind="stable")
    counts = np.bincount(key)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    rank = np.empty_like(key)
    rank[sequence] = np.arange(len(key)) - starts
    return rank


def _symbol(kind: int, chunk: int = 0, joined: bool = False) -> int:
    return chunk * _CHUNK + joined * _JOINED + kind


def _phases(*phases: tuple[Sequence[int], int]) -> _Ints:
    """Each pattern repeated its number of times, one after another."""
    return np.concatenate([np.tile(np.array(row, np.int64), times) for row, times in phases])


def _gpipe(shape: _Shape, stage: int) -> _Ints:
    return _phases(([_F], shape.lane), ([_B], shape.lane))


def _one_f_one_b(shape: _Shape, stage: int) -> _Ints:
    warm = min(shape.pp - stage - 1, shape.lane)
    return _phases(([_F], warm), ([_F, _B], shape.lane - warm), ([_B], warm))


def _zb_h1(shape: _Shape, stage: int) -> _Ints:
    count = shape.lane
    warm = min(shape.pp - stage - 1, count)
    lag = min(stage, count)
    silent = min(lag, count - warm)  # steady rounds before the first weight gradient
    late = lag - silent  # cool-down rounds before it, in steps shorter than the pipeline
    return _phases(
        ([_F], warm),
        ([_F, _I], silent),
        ([_F, _I, _W], count - warm - silent),
        ([_I], late),
        ([_I, _W], warm - late),
        ([_W], lag),
    )


def _interleaved(shape: _Shape, stage: int) -> _Ints:
    count, chunks, group = shape.lane, shape.chunks, shape.group
    whole, rest = divmod(count, group)
    table = np.tile(np.repeat(np.arange(chunks), group), whole)
    table = np.concatenate([table, np.repeat(np.arange(chunks), rest)])
    forward = table * _CHUNK + _F
    backward = (chunks - 1 - table) * _CHUNK + _B
    warm = min(2 * (shape.pp - stage - 1) + (chunks - 1) * group, count * chunks)
    steady = count * chunks - warm
    pairs = np.stack([forward[warm:], backward[:steady]], axis=1).reshape(-1)
    return np.concatenate([forward[:warm], pairs, backward[steady:]])


def _zb_v(shape: _Shape, stage: int) -> _Ints:
    p, r = shape.pp, stage
    # shorter steps run the order of 2p - 1 microbatches with the missing ones left out
    count = max(shape.lane, 2 * p - 1)
    f0, i0, w0 = _symbol(_F, 0), _symbol(_I, 0), _symbol(_W, 0)
    f1, i1, w1 = _symbol(_F, 1), _symbol(_I, 1), _symbol(_W, 1)
    return _phases(
        ([f0], 2 * (p - r) - 1),
        ([f1, f0], r),
        ([f1, i1, w1], p - r),
        ([f0, i0, w0, f1, i1, w1], count - 2 * p + r + 1),
        ([i0, w0, f1, i1, w1], p - r - 1),
        ([i0, i1], r),
        ([i0, w0], p - r),
        ([w1], r),
        ([w0], r),
    )


def _dualpipe(shape: _Shape, stage: int) -> _Ints:
    half = min(stage, shape.pp - 1 - stage)
    return _dual(shape.pp // 2, half, shape.lane, swapped=stage >= shape.pp // 2)


def _dualpipe_v(shape: _Shape, stage: int) -> _Ints:
    return _dual(shape.pp, stage, shape.lane, swapped=False)


def _dual(ranks: int, rank: int, count: int, swapped: bool) -> _Ints:
    """The eight steps of DualPipe on the ``rank``-th of ``ranks`` stages from the near end.

    Chunk ``near`` serves the microbatches that enter at the near end, ``far`` the others (in the
    V shape: the same ones, coming back).
    """
    near, far = (1, 0) if swapped else (0, 1)
    f0, f1 = _symbol(_F, near), _symbol(_F, far)
    b0, b1 = _symbol(_B, near), _symbol(_B, far)
    i0, i1 = _symbol(_I, near), _symbol(_I, far)
    j0, j1 = _symbol(_F, near, joined=True), _symbol(_F, far, joined=True)
    outer = ranks - rank - 1
    main = count - 2 * ranks + rank + 1
    innermost = rank == ranks - 1
    drain: list[int] = []
    for index in range(rank + 1):
        # from the middle of this step on, backwards are split; odd ranks one half-round earlier
        first_split = 2 * index + rank % 2 >= 2 * ((rank + 1) // 2) + 1
        second_split = index >= (rank + 1) // 2
        drain += [i1 if first_split else b1, i0 if second_split else b0]
    return _phases(
        ([f0], 2 * outer),
        ([f0, f1], rank + 1),
        ([i1, _W, f1], outer),
        ([f0 if innermost else j0, b1, j1, b0], 1),
        ([j0, b1, j1, b0], main - 1),
        ([b1, j1, b0], outer),
        (drain, 1),
        ([_W, i0], outer),
        ([_W], rank + 1),
    )


_BUILDERS: dict[str, Callable[[_Shape, int], _Ints]] = {
    "1f1b": _one_f_one_b,
    "interleaved": _interleaved,
    "gpipe": _gpipe,
    "zb-h1": _zb_h1,
    "zb-v": _zb_v,
    "dualpipe": _dualpipe,
    "dualpipe-v": _dualpipe_v,
}


# --- what is held --------------------------------------------------------------------------------


def _memory_shape(shape: _Shape) -> _Shape:
    """A run long enough for warm-up, every steady moment and cool-down, and no longer."""
    directions = shape.microbatches // shape.lane
    return shape.shortened(directions * (2 * shape.span + 2 * shape.unit))


def _held(order: _Order, chunks: int, index: int) -> Held:
    """What is held while action ``index`` runs."""

    def count(mask: NDArray[np.bool_], end: int) -> _Ints:
        return np.bincount(order.chunk[:end][mask[:end]], minlength=chunks)

    done = _COLUMN[order.kind] == 1
    activations = count(order.kind == _F, index + 1) - count(done, index)
    stashes = count(order.kind == _I, index) - count(order.kind == _W, index)
    return Held(tuple(activations.tolist()), tuple(stashes.tolist()))


# --- how long it takes ---------------------------------------------------------------------------


def _position(schedule: str, pp: int, stage: int, chunk: int) -> int:
    """Where on its way a microbatch meets this chunk, from 0."""
    if schedule in ("zb-v", "dualpipe-v"):
        return stage if chunk == 0 else 2 * pp - 1 - stage
    if schedule == "dualpipe":
        return stage if chunk == 0 else pp - 1 - stage
    return chunk * pp + stage


def _durations(
    shape: _Shape, forward: Seconds, backward: Seconds, weight: Seconds, p2p: float
) -> _Floats:
    """Seconds by [stage, chunk, kind]."""
    tables = []
    for name, value in (("forward", forward), ("backward", backward), ("weight", weight)):
        rows: Sequence[Sequence[float]]
        if isinstance(value, (int, float)):
            rows = [[value] * shape.chunks] * shape.pp
        else:
            rows = [[row] * shape.chunks if isinstance(row, (int, float)) else row for row in value]
        tables.append(np.array(_table(rows, shape, f"{name}_seconds"), float))
    whole, part = tables[1], tables[2]
    bad = not all(np.all(np.isfinite(table)) and np.all(table >= 0) for table in tables)
    if bad or not (np.isfinite(p2p) and p2p >= 0):
        raise SpecError("a duration that is negative or not finite", "give seconds of 0 or more")
    if np.any(part > whole):
        raise SpecError(
            f"weight gradients take {part.max():g} s of a backward of "
            f"{whole[np.unravel_index(part.argmax(), part.shape)]:g} s",
            "backward_seconds is the whole backward, weight_seconds a part of it",
        )
    return np.stack([tables[0], whole, whole - part, part], axis=-1)


def _total_seconds(shape: _Shape, durations: _Floats, p2p: float) -> float:
    if shape.schedule == "gpipe":
        # two flow shops of identical jobs, one after the other: linear in their number
        one = _last(_finish(shape.resized(1), durations, p2p))
        two = _last(_finish(shape.resized(2), durations, p2p))
        return one + (shape.microbatches - 1) * (two - one)
    directions = shape.microbatches // shape.lane
    limit = directions * (3 * shape.span + max(2 * shape.unit, shape.pp // 2))
    while True:
        short = shape.shortened(limit)
        finish = _finish(short, durations, p2p)
        if short == shape:
            return _last(finish)
        found = _period(short, finish)
        if found is not None:
            period, shift = found
            missing = shape.lane - short.lane
            extra = missing % period
            if extra:
                finish = _finish(short.resized(directions * (short.lane + extra)), durations, p2p)
            return _last(finish) + missing // period * shift
        limit *= 2


def _last(finish: _Floats) -> float:
    return float(finish.max())


def _period(shape: _Shape, finish: _Floats) -> tuple[int, float] | None:
    """Microbatches (per direction) and seconds of one steady period of a run, if it has settled.

    An action depends on actions at most ``reach`` microbatches older. If all finish times of
    ``reach`` consecutive microbatches equal those ``period`` earlier plus a constant, then by
    induction along the dependences so do all later ones, until the cool-down.
    """
    lane, span = shape.lane, shape.span
    unit = shape.unit if shape.schedule == "interleaved" else 1
    reach = max(
        int(np.max(np.abs(np.diff(order.microbatch)), initial=unit)) for order in _orders(shape)
    )
    end = lane - span
    tolerance = _ROUNDING * float(finish.max())
    for period in range(unit, end - span - reach + 1, unit):
        shifts = finish[..., end - reach : end] - finish[..., end - reach - period : end - period]
        shift = float(shifts.max())
        if shift - float(shifts.min()) <= tolerance:
            return period, shift
    return None


def _finish(shape: _Shape, durations: _Floats, p2p: float) -> _Floats:
    """Finish times by [stage, chunk, forward | input gradient | weight gradient, microbatch]."""
    pp, chunks, lane = shape.pp, shape.chunks, shape.lane
    size = pp * chunks * 3 * lane
    origin, nowhere = size, size + 1
    unset = -1.0
    ends = [unset] * size + [0.0, 0.0]
    programs = [
        _program(shape, stage, durations[stage], p2p, origin, nowhere) for stage in range(pp)
    ]
    position = [0] * pp
    free = [0.0] * pp
    waiting: dict[int, int] = {}
    ready = list(range(pp))
    while ready:
        stage = ready.pop()
        program = programs[stage]
        now = free[stage]
        for index in range(position[stage], len(program)):
            need, delay, other, other_delay, own, also, duration = program[index]
            arrival = ends[need]
            other_arrival = ends[other]
            if arrival < 0.0 or other_arrival < 0.0:
                waiting[need if arrival < 0.0 else other] = stage
                position[stage] = index
                break
            arrival += delay
            other_arrival += other_delay
            if arrival > now:
                now = arrival
            if other_arrival > now:
                now = other_arrival
            now += duration
            ends[own] = now
            ends[also] = now
            if own in waiting:
                ready.append(waiting.pop(own))
            if also in waiting:
                ready.append(waiting.pop(also))
        else:
            position[stage] = len(program)
        free[stage] = now
    if any(done < len(program) for done, program in zip(position, programs, strict=True)):
        raise RuntimeError(f"the order of {shape} cannot be executed")
    finish = np.array(ends[:size]).reshape(pp, chunks, 3, lane)
    whole = finish[:, :, 2] < 0
    finish[:, :, 2][whole] = finish[:, :, 1][whole]
    return finish


_Step = tuple[int, float, int, float, int, int, float]


def _program(
    shape: _Shape, stage: int, durations: _Floats, p2p: float, origin: int, nowhere: int
) -> list[_Step]:
    """The actions of a stage as (needs, delay, needs, delay, slot, slot, duration).

    A slot is an index into the table of finish times; ``origin`` is always done, ``nowhere`` is
    never waited for. A joined pair is one step that needs and fills two slots.
    """
    pp, chunks, lane = shape.pp, shape.chunks, shape.lane
    order = _order(shape, stage)
    slot = ((stage * chunks + order.chunk) * 3 + _COLUMN[order.kind]) * lane + order.microbatch
    need = np.full(slot.shape, origin)
    delay = np.zeros(slot.shape)
    owner = {
        (_lane_of(shape, at, chunk), _position(shape.schedule, pp, at, chunk)): (at, chunk)
        for at in range(pp)
        for chunk in range(chunks)
    }
    for chunk in range(chunks):
        way = _lane_of(shape, stage, chunk)
        here = _position(shape.schedule, pp, stage, chunk)
        for filled, before in ((0, here - 1), (1, here + 1)):
            source = owner.get((way, before))
            if source is None:
                continue
            chosen = (order.chunk == chunk) & (_COLUMN[order.kind] == filled)
            base = ((source[0] * chunks + source[1]) * 3 + filled) * lane
            need[chosen] = base + order.microbatch[chosen]
            delay[chosen] = p2p if source[0] != stage else 0.0
    duration = durations[order.chunk, order.kind]
    joined = order.joined
    columns = (
        need,
        delay,
        np.where(joined, np.roll(need, -1), origin),
        np.where(joined, np.roll(delay, -1), 0.0),
        slot,
        np.where(joined, np.roll(slot, -1), nowhere),
        duration + np.where(joined, np.roll(duration, -1), 0.0),
    )
    merged = np.roll(joined, 1)
    steps = zip(*(column[~merged].tolist() for column in columns), strict=True)
    return cast("list[_Step]", list(steps))


def _lane_of(shape: _Shape, stage: int, chunk: int) -> int:
    """Which direction of traffic a chunk serves: only DualPipe has two."""
    return chunk if shape.schedule == "dualpipe" else 0
