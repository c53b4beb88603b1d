"""Rows of one cut (split, micro-batch, policy, ZeRO stage) as arrays: their bytes and seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from actcalc.cost.makespans import Durations, makespans
from actcalc.cost.roofline import NOTHING, LayerTime
from actcalc.cost.step import Reduction, hides_messages, reduction
from actcalc.layers.core.algebra import most
from actcalc.memory.parts import EMBEDDING, HEAD, PREDICTION
from actcalc.run.schedule.held import fullest, steady_length
from actcalc.search.choices import NO_POLICY
from actcalc.search.lanes import SECONDS, Floats, Ints, Lanes
from actcalc.search.space import Cut
from actcalc.search.stages import Chunk, Held, Stage, fullest_of, held, needs, parameters_of

_MOST_REPLICAS = 1 << 24

Bools = NDArray[np.bool_]
Numbers = Ints | int


class Rows(NamedTuple):
    """Layouts of one cut, one entry each."""

    lane: Ints
    """Split and micro-batch."""
    policy: Ints
    block: Ints
    """The policy is for the first so many layers of a chunk alone; 0: for all."""
    dp: Ints
    zero: Ints
    rounds: Ints
    """Micro-batches of a replica in a step."""

    def take(self, chosen: Bools | Ints) -> Rows:
        """Some of the rows."""
        return Rows(*(column[chosen] for column in self))

    def __bool__(self) -> bool:
        return bool(len(self.lane))


class _Sizes(NamedTuple):
    """Bytes of one chunk of every row."""

    stored: Ints
    forward: Ints
    """The highest moment in forward, beside other micro-batches."""
    backward: Ints


class CutRows:
    """Evaluates the rows of one cut."""

    def __init__(self, lanes: Lanes, cut: Cut, stages: Sequence[Stage]) -> None:
        self.lanes, self.cut, self.stages = lanes, cut, stages
        self._known: tuple[Rows, tuple[list[tuple[int, int, int]], Ints]] | None = None
        self._needs = {stage: needs(stage) for stage in stages}

    # --- memory -----------------------------------------------------------------------------------

    def peaks(self, rows: Rows) -> Ints:
        """Bytes that the fullest stage of every row needs."""
        result = np.zeros(len(rows.lane), np.int64)
        chunks: dict[Chunk, _Sizes] = {}
        for index in fullest_of(self.cut, self.stages):
            stage = self.stages[index]
            for chunk in stage:
                if chunk not in chunks:
                    chunks[chunk] = self._sizes(rows, chunk)
            np.maximum(result, self._stage(rows, index, chunks), out=result)
        return result

    def _stage(self, rows: Rows, index: int, chunks: dict[Chunk, _Sizes]) -> Ints:
        stage = self.stages[index]
        base, step, outside = self._of_layout(rows, stage)
        kinds = tuple(sorted({kind for chunk in stage for kind in chunk.kinds}))
        at_work = self._at_work(rows, index, chunks) + self._shared(rows, stage, kinds)
        head = any(chunk.last for chunk in stage)
        interleaved = self.cut.pp > 1 and self.cut.vpp > 1
        passing = self.lanes.passing(head=head, interleaved=interleaved)[rows.lane]
        total: Ints = base + passing + np.maximum(at_work, step) + outside
        return total

    def _shared(self, rows: Rows, stage: Stage, kinds: tuple[int, ...]) -> Ints:
        """What a stage holds once for all layers; block policies leave some of them plain."""
        plain: Ints = self.lanes.shared(kinds, mixed=False)[rows.lane, rows.policy]
        if not rows.block.any():
            return plain
        mixed = self.lanes.shared(kinds, mixed=True)[rows.lane, rows.policy]
        return np.where(rows.block > 0, mixed, plain)

    def _at_work(self, rows: Rows, index: int, chunks: dict[Chunk, _Sizes]) -> Ints:
        """The most that activations and the part at work have at once."""
        stage, cut = self.stages[index], self.cut
        kinds = list(dict.fromkeys(stage))
        if cut.pp == 1:
            (one,) = (chunks[chunk] for chunk in stage)
            return np.maximum(one.forward, one.backward)
        alike = tuple(kinds.index(chunk) for chunk in stage)
        result = np.zeros(len(rows.lane), np.int64)
        if cut.schedule == "1f1b":
            one = chunks[kinds[0]]
            many = np.minimum(cut.pp - index, rows.rounds)
            found: Ints = (many - 1) * one.stored + np.maximum(one.forward, one.backward)
            return found
        lengths = {
            count: steady_length(cut.schedule, cut.pp, count, cut.vpp)
            for count in _values(rows.rounds)
        }
        for count in sorted(set(lengths.values())):
            here = np.isin(rows.rounds, [m for m, length in lengths.items() if length == count])
            sizes = [_Sizes(*(column[here] for column in chunks[kind])) for kind in kinds]
            highest = np.zeros(int(here.sum()), np.int64)
            for work, kind, held_ in fullest(
                cut.schedule, cut.pp, count, cut.vpp, stage=index, alike=alike
            ):
                now: Any = sum(
                    n * size.stored for n, size in zip(held_.activations, sizes, strict=True)
                )
                own = sizes[kind]
                if work != "W":
                    now = now - own.stored + (own.forward if work == "F" else own.backward)
                np.maximum(highest, now, out=highest)
            result[here] = highest
        return result

    def _sizes(self, rows: Rows, chunk: Chunk) -> _Sizes:
        """Bytes of a chunk: each run of equal parts is highest at its last one."""
        nothing = np.zeros(len(rows.lane), np.int64)
        waiting: Numbers = self.lanes.waiting()[rows.lane] if self.cut.pp == 1 else 0
        stored, cast, forward, backward = nothing, nothing, nothing.copy(), nothing.copy()
        for bytes_, count, beside in self._parts(rows, chunk, waiting):
            own, ahead, back, casts = bytes_.T
            before = stored + (count - 1) * own
            cast = cast + count * casts
            there = count > 0
            np.maximum(forward, np.where(there, before + ahead + cast, 0), out=forward)
            np.maximum(backward, np.where(there, before + back + beside, 0), out=backward)
            stored = stored + count * own
        return _Sizes(stored, forward, backward)

    def _parts(
        self, rows: Rows, chunk: Chunk, waiting: Numbers
    ) -> Iterator[tuple[Ints, Numbers, Numbers]]:
        """The parts of a chunk in order: bytes by row, how many in a row, what waits beside."""
        lanes = self.lanes
        if chunk.first:
            yield lanes.end(EMBEDDING)[rows.lane], 1, waiting
        for kind, policy, count in self._runs(rows, chunk):
            yield lanes.part(kind)[rows.lane, policy], count, waiting
        if chunk.last:
            for _ in range(self._predictions):
                yield lanes.end(PREDICTION)[rows.lane], 1, waiting
            yield lanes.end(HEAD)[rows.lane], 1, 0

    @property
    def _predictions(self) -> int:
        mtp = self.lanes.measured[0].model.mtp
        return mtp.count if mtp else 0

    def _runs(self, rows: Rows, chunk: Chunk) -> Iterator[tuple[int, Ints, Ints]]:
        """Layers of a chunk in order: kind, policy, and how many, by row."""
        before = 0
        every, partly = rows.block == 0, rows.block.any()
        for kind, count in chunk.layers:
            many = np.where(every, count, np.clip(rows.block - before, 0, count))
            yield kind, rows.policy, many
            if partly:
                yield kind, np.full_like(rows.policy, NO_POLICY), count - many
            before += count

    # --- what depends on the layout alone ---------------------------------------------------------

    def _layouts(self, rows: Rows) -> tuple[list[tuple[int, int, int]], Ints]:
        """The different layouts of the rows (a lane of the split, dp, ZeRO stage); each row's."""
        if self._known is not None and self._known[0] is rows:
            return self._known[1]
        key = (self.lanes.splits[rows.lane] * _MOST_REPLICAS + rows.dp) * 4 + rows.zero
        found, own = np.unique(key, return_inverse=True)
        pairs = [divmod(value // 4, _MOST_REPLICAS) for value in found.tolist()]
        stages = (found % 4).tolist()
        layouts = [(lane, dp, zero) for (lane, dp), zero in zip(pairs, stages, strict=True)]
        self._known = rows, (layouts, own)
        return layouts, own

    def _held_by(self, lane: int, dp: int, zero: int, stage: Stage) -> Held:
        measured = self.lanes.measured[lane]
        # Sequence parallelism splits no weight; of pipelines it only matters that there is one.
        layout = (measured.weights, dp, zero, self.cut.pp > 1)
        key = (layout, self._needs[stage])
        if key not in self.lanes.held:
            parts = (measured.weights, self._needs[stage])
            if parts not in self.lanes.parameters:
                self.lanes.parameters[parts] = parameters_of(measured, stage)
            self.lanes.held[key] = held(
                measured, self.lanes.layout(*layout), stage, self.lanes.parameters[parts]
            )
        found: Held = self.lanes.held[key]
        return found

    def _exchange_of(self, layout: tuple[int, int, int], each: Sequence[Held]) -> Reduction:
        """The collectives of a layout's replicas."""
        lane, dp, zero = layout
        measured = self.lanes.measured[lane]
        busiest = max(((0, 0), *(one.trained for one in each)), key=sum)
        key = (measured.weights, dp, zero, busiest)
        if key not in self.lanes.held:
            model = measured.of(self.lanes.layout(measured.weights, dp, zero, False))
            training = measured.staged.run.training
            self.lanes.held[key] = reduction(model, training, busiest, measured.rates)
        found: Reduction = self.lanes.held[key]
        return found

    def _of_layout(self, rows: Rows, stage: Stage) -> tuple[Ints, Ints, Ints]:
        """Bytes of a stage by row: base, optimizer step, outside the allocator."""
        layouts, own = self._layouts(rows)
        every = [self._held_by(*layout, stage) for layout in layouts]
        base, step, outside = np.array([one[:3] for one in every], np.int64)[own].T
        return base, step, outside

    # --- time -------------------------------------------------------------------------------------

    def seconds(self, rows: Rows) -> Floats:
        """Seconds of one step of every row."""
        times: dict[Chunk, LayerTime] = {}
        for stage in self.stages:
            for chunk in stage:
                if chunk not in times:
                    times[chunk] = self._chunk(rows, chunk).paced()
        total: Floats = self._pipeline(rows, times) + self._replicas(rows, times)
        return total

    def _chunk(self, rows: Rows, chunk: Chunk) -> LayerTime:
        """Seconds of one chunk, in the order in which a single run adds them up."""
        total = NOTHING
        for kind, policy, count in self._runs(rows, chunk):
            total = total + _time(self.lanes.seconds(kind)[rows.lane, policy], count)
        if chunk.first:
            total = total + _time(self.lanes.end_seconds(EMBEDDING)[rows.lane])
        if chunk.last:
            total = total + _time(self.lanes.end_seconds(HEAD)[rows.lane])
            if self._predictions:
                time = self.lanes.end_seconds(PREDICTION)[rows.lane]
                total = total + _time(time, self._predictions)
        return total

    def _pipeline(self, rows: Rows, times: dict[Chunk, LayerTime]) -> Floats:
        cut = self.cut
        if cut.pp == 1:
            (one,) = times.values()
            whole: Any = rows.rounds * (one.forward + one.backward)
            return np.asarray(whole)
        splits = [one.lane.split for one in self.lanes.measured]
        inside = np.array([split.tp * split.cp for split in splits])[rows.lane] * rows.dp
        far = inside >= self.lanes.rates.node
        near, away = (self.lanes.handover(far=place)[rows.lane] for place in (False, True))
        send = np.where(far, away, near).astype(np.float64)
        hidden = cut.vpp > 1 and hides_messages(self.lanes.run)

        def occupied(seconds: Floats) -> Floats:
            found: Any = most(seconds, send) if hidden else seconds + send
            return np.asarray(found)

        busy = {
            chunk: Durations(
                occupied(_full(time.forward, rows)),
                occupied(_full(time.backward, rows)),
                _full(time.weight_gradient, rows),
            )
            for chunk, time in times.items()
        }
        result = np.zeros(len(rows.lane))
        for count in _values(rows.rounds):
            here = rows.rounds == count
            own = {
                chunk: Durations(*(column[here] for column in every))
                for chunk, every in busy.items()
            }
            table = [[own[chunk] for chunk in stage] for stage in self.stages]
            result[here] = makespans(cut.schedule, cut.pp, count, cut.vpp, table)
        return result

    def _replicas(self, rows: Rows, times: dict[Chunk, LayerTime]) -> Floats:
        """Exposed seconds of the replicas' collectives, and the optimizer's."""
        run, different = self.lanes.run, list(dict.fromkeys(self.stages))
        layouts, own = self._layouts(rows)
        exchange, optimizer = [], []
        for layout in layouts:
            each = [self._held_by(*layout, stage) for stage in different]
            exchange.append(self._exchange_of(layout, each))
            optimizer.append(max(one.optimizer for one in each))
        busiest = _busiest([sum((times[c] for c in stage), NOTHING) for stage in different])
        exposed: Any = Reduction(*np.array(exchange)[own].T).exposed(
            run.training, busiest, self.lanes.rates, overlaps=run.framework.overlaps_reduction
        )
        total: Floats = exposed + np.array(optimizer)[own]
        return total


def _values(numbers: Ints) -> list[int]:
    """The different numbers, ascending (asked so, NumPy loads nothing for masked arrays)."""
    found: list[int] = np.unique(numbers, return_counts=True)[0].tolist()
    return found


def _full(value: Floats | float, rows: Rows) -> Floats:
    found: Floats = np.broadcast_to(np.asarray(value, np.float64), rows.lane.shape)
    return found


def _time(fields: Floats, count: Ints | int = 1) -> LayerTime:
    """Seconds of ``count`` layers by row as one time, re-run and exchange inside the others."""
    columns = dict(zip(SECONDS, (fields * np.asarray(count)[..., None]).T, strict=True))
    return LayerTime(rerun=0.0, **columns)


def _busiest(stages: Sequence[LayerTime]) -> LayerTime:
    """Of every row the stage with the longest forward, then backward."""
    forward: Any = stages[0].forward
    backward: Any = stages[0].backward
    for other in stages[1:]:
        longer = (other.forward > forward) | (
            (other.forward == forward) & (other.backward > backward)
        )
        forward = np.where(longer, other.forward, forward)
        backward = np.where(longer, other.backward, backward)
    return LayerTime(forward, 0.0, backward, 0.0)
