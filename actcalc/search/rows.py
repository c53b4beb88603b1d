"""The rows of one cut as arrays: batches by ZeRO stages by policies, their bytes and seconds.

What a chunk needs depends on its lane and policy alone, what a stage holds meanwhile also on how
many micro-batches there are, states on the layout: each is worked out once for what it depends on,
and rows are put together from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from actcalc.cost.makespans import Durations, makespans
from actcalc.cost.replicas import Reduction, logged_seconds
from actcalc.cost.roofline import NOTHING, LayerTime
from actcalc.cost.step import hides_messages
from actcalc.layers.core.algebra import most
from actcalc.memory.parts import EMBEDDING, HEAD, PREDICTION
from actcalc.run.schedule.held import fullest, steady_length
from actcalc.search.batches import Batches
from actcalc.search.choices import NO_POLICY
from actcalc.search.family import SECONDS, Floats, Ints
from actcalc.search.lanes import Lanes
from actcalc.search.layouts import Layouts
from actcalc.search.space import Cut
from actcalc.search.stages import Chunk, Stage, fullest_of

Numbers = Ints | int
_BLOCK_ROWS = 1 << 18
"""Rows that are evaluated at a time, which bounds memory."""


class Tried(NamedTuple):
    """The policies of a cut's rows, and for how many first layers of a chunk each is (0: all)."""

    policy: Ints
    block: Ints


class Picked(NamedTuple):
    """Some rows of a cut: numbers of their batch, ZeRO stage and policy, and their peaks."""

    batch: Ints
    zero: Ints
    policy: Ints
    peak: Ints


class _Sizes(NamedTuple):
    """Bytes of one chunk by [lane, policy]."""

    stored: Ints
    forward: Ints
    """The highest moment in forward, beside other micro-batches."""
    backward: Ints


class _Shared(NamedTuple):
    """A figure that several batches have in common."""

    table: NDArray[Any]
    """By [what it depends on, policy]."""
    of: Ints
    """The row of each batch."""


class CutRows:
    """Evaluates the rows of one cut: some batches under every ZeRO stage and policy."""

    def __init__(
        self,
        lanes: Lanes,
        layouts: Layouts,
        cut: Cut,
        stages: Sequence[Stage],
        batches: Batches,
        tried: Tried,
    ) -> None:
        self.lanes, self.layouts, self.cut, self.stages = lanes, layouts, cut, stages
        self.batches, self.tried = batches, tried
        # asked for counts too, NumPy loads nothing for masked arrays
        self.used, self.own, _ = np.unique(batches.lane, return_inverse=True, return_counts=True)
        self._sized: dict[Chunk, _Sizes] = {}

    # --- memory -----------------------------------------------------------------------------------

    def picked(self, budget: int | None) -> Iterator[Picked]:
        """The rows whose fullest stage needs no more than ``budget`` (None: all), in blocks."""
        each = len(self.layouts.zeros) * len(self.tried.policy)
        step = max(1, _BLOCK_ROWS // max(1, each))
        for start in range(0, len(self.batches), step):
            peaks = self._peaks(slice(start, start + step))
            there = np.broadcast_to(self._there[start : start + step, :, None], peaks.shape)
            if budget is not None:
                there = there & (peaks <= budget)
            batch, zero, policy = np.nonzero(there)
            yield Picked(batch + start, zero, policy, peaks[batch, zero, policy])

    @cached_property
    def _there(self) -> NDArray[np.bool_]:
        """Which ZeRO stages each batch has: the first alone where there is nothing to shard."""
        stages = np.arange(len(self.layouts.zeros))
        found: NDArray[np.bool_] = (stages == 0) | (self.batches.sharded[:, None] > 0)
        return found

    @property
    def count(self) -> int:
        """How many rows there are."""
        return int(self._there.sum()) * len(self.tried.policy)

    def _peaks(self, some: slice) -> Ints:
        """Bytes that the fullest stage needs, of some batches: by [batch, ZeRO stage, policy]."""
        layout, result = self.batches.layout[some], None
        for index in fullest_of(self.cut, self.stages):
            held = self.layouts.held(self.stages[index], piped=self.cut.pp > 1)
            working = self._working[index]
            found = np.maximum(
                working.table[working.of[some]][:, None, :], held.step[layout][:, :, None]
            )
            beside = (held.base + held.outside)[layout] + self._passing(index)[some, None]
            found += beside[:, :, None]
            result = found if result is None else np.maximum(result, found)
        assert result is not None
        highest: Ints = result
        return highest

    def _passing(self, index: int) -> Ints:
        """Buffers of what passes through a stage, by batch."""
        head = any(chunk.last for chunk in self.stages[index])
        interleaved = self.cut.pp > 1 and self.cut.vpp > 1
        found: Ints = self.lanes.passing(head=head, interleaved=interleaved)[self.batches.lane]
        return found

    @cached_property
    def _working(self) -> dict[int, _Shared]:
        """For each stage the most that activations and the part at work have at once."""
        lengths, own = self._lengths
        many = len(lengths)
        keys, of, _ = np.unique(self.own * many + own, return_inverse=True, return_counts=True)
        lane, length = keys // many, np.array(lengths)[keys % many]
        found = {}
        for index in fullest_of(self.cut, self.stages):
            table = self._at_work(index, lane, length) + self._given(index)[lane]
            found[index] = _Shared(table, of)
        return found

    @cached_property
    def _lengths(self) -> tuple[list[int], Ints]:
        """Micro-batches of the shortest steps that hold what the batches' do; each batch's."""
        cut = self.cut
        counts, own, _ = np.unique(self.batches.rounds, return_inverse=True, return_counts=True)
        if cut.pp == 1:
            return [1], np.zeros_like(own)
        if cut.schedule == "1f1b":
            each = np.minimum(counts, cut.pp)
        else:
            each = np.array(
                [steady_length(cut.schedule, cut.pp, count, cut.vpp) for count in counts.tolist()]
            )
        lengths = sorted(set(each.tolist()))
        return lengths, np.searchsorted(lengths, each)[own]

    def _at_work(self, index: int, lane: Ints, length: Ints) -> Ints:
        stage, cut = self.stages[index], self.cut
        kinds = list(dict.fromkeys(stage))
        sizes = [self._sizes(chunk) for chunk in kinds]
        one = sizes[0]
        highest: Ints = np.maximum(one.forward, one.backward)
        if cut.pp == 1:
            return highest[lane]
        if cut.schedule == "1f1b":
            others = np.minimum(cut.pp - index, length) - 1
            whole: Ints = others[:, None] * one.stored[lane] + highest[lane]
            return whole
        alike = tuple(kinds.index(chunk) for chunk in stage)
        result = np.zeros((len(lane), len(self.tried.policy)), np.int64)
        for count in sorted(set(length.tolist())):
            here = np.flatnonzero(length == count)
            own = [_Sizes(*(column[lane[here]] for column in each)) for each in sizes]
            moments = fullest(cut.schedule, cut.pp, count, cut.vpp, stage=index, alike=alike)
            for work, kind, held in moments:
                now: Any = sum(
                    n * size.stored for n, size in zip(held.activations, own, strict=True) if n
                )
                if work != "W":
                    size = own[kind]
                    now = now - size.stored + (size.forward if work == "F" else size.backward)
                result[here] = np.maximum(result[here], now)
        return result

    def _given(self, index: int) -> Ints:
        """What a stage holds once for all layers; block policies leave some of them plain."""
        policy, block = self.tried
        kinds = tuple(sorted({kind for chunk in self.stages[index] for kind in chunk.kinds}))
        plain: Ints = self.lanes.shared(kinds, mixed=False)[self.used][:, policy]
        if not block.any():
            return plain
        mixed = self.lanes.shared(kinds, mixed=True)[self.used][:, policy]
        return np.where(block > 0, mixed, plain)

    def _sizes(self, chunk: Chunk) -> _Sizes:
        """Bytes of a chunk: each run of equal parts is highest at its last one."""
        if chunk not in self._sized:
            nothing = np.zeros((len(self.used), len(self.tried.policy)), np.int64)
            stored, cast, forward, backward = nothing, nothing, nothing.copy(), nothing.copy()
            for bytes_, count, beside in self._parts(chunk):
                own, ahead, back, casts = np.moveaxis(bytes_, -1, 0)
                before = stored + (count - 1) * own
                cast = cast + count * casts
                there = np.asarray(count) > 0
                np.maximum(forward, np.where(there, before + ahead + cast, 0), out=forward)
                np.maximum(backward, np.where(there, before + back + beside, 0), out=backward)
                stored = stored + count * own
            self._sized[chunk] = _Sizes(stored, forward, backward)
        return self._sized[chunk]

    def _parts(self, chunk: Chunk) -> Iterator[tuple[Ints, Numbers, Numbers]]:
        """The parts of a chunk in order: bytes, how many in a row, what waits beside."""
        lanes, used = self.lanes, self.used
        waiting: Numbers = lanes.waiting()[used][:, None] if self.cut.pp == 1 else 0
        if chunk.first:
            yield lanes.end(EMBEDDING)[used][:, None], 1, waiting
        for kind, policy, count in self._runs(chunk):
            yield lanes.part(kind)[used][:, policy], count, waiting
        if chunk.last:
            for _ in range(lanes.predictions):
                yield lanes.end(PREDICTION)[used][:, None], 1, waiting
            yield lanes.end(HEAD)[used][:, None], 1, 0

    def _runs(self, chunk: Chunk) -> Iterator[tuple[int, Ints, Ints]]:
        """Layers of a chunk in order: kind, and by policy which it is and of how many."""
        before, (policy, block) = 0, self.tried
        every, partly = block == 0, block.any()
        for kind, count in chunk.layers:
            many = np.where(every, count, np.clip(block - before, 0, count))
            yield kind, policy, many
            if partly:
                yield kind, np.full_like(policy, NO_POLICY), count - many
            before += count

    # --- time -------------------------------------------------------------------------------------

    def seconds(self, rows: Picked) -> Floats:
        """Seconds of one step of every row."""
        found: Floats = self._pipeline(rows) + self._replicas(rows)
        return found

    @cached_property
    def _times(self) -> dict[Chunk, LayerTime]:
        """Seconds of each different chunk by [lane, policy]."""
        chunks = dict.fromkeys(chunk for stage in self.stages for chunk in stage)
        return {chunk: self._chunk(chunk).paced() for chunk in chunks}

    def _chunk(self, chunk: Chunk) -> LayerTime:
        lanes, used, total = self.lanes, self.used, NOTHING
        for kind, policy, count in self._runs(chunk):
            total = total + _time(lanes.seconds(kind)[used][:, policy], count)
        if chunk.first:
            total = total + _time(lanes.end_seconds(EMBEDDING)[used][:, None])
        if chunk.last:
            total = total + _time(lanes.end_seconds(HEAD)[used][:, None])
            if lanes.predictions:
                ahead = lanes.end_seconds(PREDICTION)[used][:, None]
                total = total + _time(ahead, lanes.predictions)
        return total

    def _pipeline(self, rows: Picked) -> Floats:
        """Seconds from the first forward to the last backward: once for what they depend on."""
        policies = len(self.tried.policy)
        if self.cut.pp == 1:
            (one,) = self._times.values()
            whole: Any = one.later_forward + one.backward
            found: Floats = self.batches.rounds[rows.batch] * whole[self.own[rows.batch],
                                                                    rows.policy]  # fmt: skip
            return found
        far = self.batches.inside >= self.lanes.rates.node
        counts, count, _ = np.unique(self.batches.rounds, return_inverse=True, return_counts=True)
        place = self.own * 2 + far
        keys, of, _ = np.unique(place * len(counts) + count, return_inverse=True,
                                return_counts=True)  # fmt: skip
        wanted = np.zeros((len(keys), policies), bool)
        wanted[of[rows.batch], rows.policy] = True
        run, policy = np.nonzero(wanted)
        timed = keys[run] // len(counts) * policies + policy
        different, which, _ = np.unique(timed, return_inverse=True, return_counts=True)
        table = self._durations(different // policies, different % policies)
        result = np.zeros(wanted.shape)
        result[wanted] = makespans(
            self.cut.schedule, self.cut.pp, counts[keys[run] % len(counts)], self.cut.vpp, table,
            which,
        )  # fmt: skip
        piped: Floats = result[of[rows.batch], rows.policy]
        return piped

    def _durations(self, place: Ints, policy: Ints) -> list[list[Durations]]:
        """Durations by stage and chunk of lanes (twice each: sending near, and far)."""
        lane, far = place // 2, place % 2 > 0
        near, away = (self.lanes.handover(far=there)[self.used[lane]] for there in (False, True))
        send = np.where(far, away, near)
        hidden = self.cut.vpp > 1 and hides_messages(self.lanes.run)

        def of(value: Any) -> Floats:
            table = np.broadcast_to(value, (len(self.used), len(self.tried.policy)))
            return np.asarray(table[lane, policy], float)

        def occupied(value: Any) -> Floats:
            found: Any = most(of(value), send) if hidden else of(value) + send
            return np.asarray(found)

        each = {
            chunk: Durations(
                occupied(time.later_forward), occupied(time.backward), of(time.weight_gradient)
            )
            for chunk, time in self._times.items()
        }
        return [[each[chunk] for chunk in stage] for stage in self.stages]

    def _replicas(self, rows: Picked) -> Floats:
        """Seconds of a step that are not its pipeline's: what the host's first launches take, the
        exposed collectives of replicas, the optimizer."""
        run, different = self.lanes.run, list(dict.fromkeys(self.stages))
        layout = self.batches.layout[rows.batch]
        whole: Any = self.layouts.exchange(different)
        exchange = Reduction(*(one[layout, rows.zero] for one in whole))
        lane = self.own[rows.batch]
        stages = [sum((self._times[c] for c in stage), NOTHING) for stage in different]
        forward, backward, lead = (way[lane, rows.policy] for way in _busiest(stages))
        exposed: Any = exchange.exposed(
            run.training, LayerTime(forward, 0.0, backward, 0.0), self.lanes.rates,
            overlaps=run.framework.overlaps_reduction,
        )  # fmt: skip
        piped = self.cut.pp > 1
        optimizer = [self.layouts.held(stage, piped=piped).optimizer for stage in different]
        total: Floats = lead + exposed + np.maximum.reduce(optimizer)[layout, rows.zero]
        return total + self._after[rows.batch]

    @cached_property
    def _after(self) -> Floats:
        """Seconds of what all ranks do together when gradients are reduced, by batch."""
        run, rates, pp = self.lanes.run, self.lanes.rates, self.cut.pp
        inside = self.batches.inside
        found: Floats = np.zeros(len(self.batches)) + logged_seconds(
            run.training, run.framework, rates, inside * pp
        )
        if pp > 1:
            near, away = (self.lanes.tied(far=there)[self.batches.lane] for there in (False, True))
            found += np.where(inside * (pp - 1) >= rates.node, away, near)
        return found


def _time(fields: Floats, count: Ints | int = 1) -> LayerTime:
    """Seconds of ``count`` layers as one time, re-run and exchange inside the others."""
    columns = np.moveaxis(fields, -1, 0) * np.asarray(count)
    return LayerTime(rerun=0.0, **dict(zip(SECONDS, columns, strict=True)))


def _busiest(stages: Sequence[LayerTime]) -> list[Any]:
    """Forward, backward and lead of the stage with the longest forward, then backward."""
    rows: list[list[Any]] = [[one.forward, one.backward, one.lead] for one in stages]
    chosen = rows[0]
    for other in rows[1:]:
        longer = (other[0] > chosen[0]) | ((other[0] == chosen[0]) & (other[1] > chosen[1]))
        chosen = [np.where(longer, new, old) for new, old in zip(other, chosen, strict=True)]
    return chosen
