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
from actcalc.search.choices import NO_POLICY, Tried
from actcalc.search.family import SECONDS, Floats, Ints
from actcalc.search.lanes import Lanes
from actcalc.search.layouts import Held, Layouts
from actcalc.search.space import Cut
from actcalc.search.stages import Chunk, Stage, fullest_of

Numbers = Ints | int
_BLOCK_ROWS = 1 << 18
"""Rows that are evaluated at a time, which bounds memory."""


class Picked(NamedTuple):
    """Some rows of a cut: numbers of their batch, ZeRO stage and policy, and their peaks."""

    batch: Ints
    zero: Ints
    policy: Ints
    peak: Ints


class Sizes(NamedTuple):
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


class _Piped(NamedTuple):
    """Runs of a cut's schedule."""

    table: list[list[Durations]]
    """By stage and chunk."""
    counts: Ints
    """Micro-batches of each run."""
    which: Ints
    """The place of its durations in the table."""
    of: Ints
    """The run of each row."""


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
        self._sized: dict[Chunk, Sizes] = {}

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
            base, step = self._states(held)
            found = np.maximum(
                working.table[working.of[some]][:, None, :], step[layout][:, :, None]
            )
            beside = (base + held.outside)[layout] + self._passing(index)[some, None]
            found += beside[:, :, None]
            result = found if result is None else np.maximum(result, found)
        assert result is not None
        highest: Ints = result
        return highest

    def _states(self, held: Held) -> tuple[Ints, Ints]:
        """Bytes at all times, and more than these in the optimizer step, by [layout, ZeRO stage].

        Gradients are there at all times.
        """
        return held.base, held.step

    def _waits(self, index: int) -> Ints | int:
        """Bytes between backward and weight gradients beside what is there at all times."""
        return 0

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
        sizes = self._stage_sizes(index, kinds)
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
            between = self._waits(index)
            waits = between if isinstance(between, int) else between[lane[here]]
            own = [Sizes(*(column[lane[here]] for column in each)) for each in sizes]
            moments = fullest(cut.schedule, cut.pp, count, cut.vpp, stage=index, alike=alike)
            for work, kind, held in moments:
                now: Any = sum(
                    n * size.stored for n, size in zip(held.activations, own, strict=True) if n
                )
                if work == "W":
                    now = now + waits
                else:
                    size = own[kind]
                    now = now - size.stored + (size.forward if work == "F" else size.backward)
                result[here] = np.maximum(result[here], now)
        return result

    def _given(self, index: int) -> Ints:
        """What a stage holds once for all layers; block policies leave some of them plain."""
        policy = self.tried.policy
        kinds = tuple(sorted({kind for chunk in self.stages[index] for kind in chunk.kinds}))
        plain: Ints = self.lanes.shared(kinds, mixed=False)[self.used][:, policy]
        partial = self.tried.partial
        if not partial.any():
            return plain
        mixed = self.lanes.shared(kinds, mixed=True)[self.used][:, policy]
        return np.where(partial, mixed, plain)

    def _stage_sizes(self, index: int, chunks: Sequence[Chunk]) -> list[Sizes]:
        """Bytes of different chunks of a stage."""
        return [self._sizes(chunk) for chunk in chunks]

    def _sizes(self, chunk: Chunk) -> Sizes:
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
            self._sized[chunk] = Sizes(stored, forward, backward)
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
        _, policy, block, nth = self.tried
        if (nth > 1).any():
            for kind, at in zip(chunk.each, range(1, chunk.depth + 1), strict=True):
                yield kind, np.where(self._reruns(at), policy, NO_POLICY), np.ones_like(policy)
            return
        before, every, partly = 0, block == 0, block.any()
        for kind, count in chunk.layers:
            many = np.where(every, count, np.clip(block - before, 0, count))
            yield kind, policy, many
            if partly:
                yield kind, np.full_like(policy, NO_POLICY), count - many
            before += count

    def _reruns(self, at: int) -> NDArray[np.bool_]:
        """Which policies hold for the layer of a chunk at this place, counted from 1."""
        _, _, block, nth = self.tried
        found: NDArray[np.bool_] = ((block == 0) | (at <= block)) & (at % nth == 0)
        return found

    # --- time -------------------------------------------------------------------------------------

    def seconds(self, rows: Picked) -> Floats:
        """Seconds of one step of every row."""
        (found,) = seconds_of([(self, rows)])
        return found

    @cached_property
    def _times(self) -> dict[Chunk, LayerTime]:
        """Seconds of each different chunk by [lane, policy]."""
        chunks = dict.fromkeys(chunk for stage in self.stages for chunk in stage)
        return {chunk: self._chunk(chunk).paced() for chunk in chunks}

    def _chunk(self, chunk: Chunk) -> LayerTime:
        lanes, used, total = self.lanes, self.used, NOTHING
        for kind, policy, count in self._tally(chunk):
            one = _time(lanes.seconds(kind)[used][:, policy])
            total = total + self._layer(kind, one) * count
        if chunk.first:
            total = total + _time(lanes.end_seconds(EMBEDDING)[used][:, None]) + self._first()
        if chunk.last:
            total = total + _time(lanes.end_seconds(HEAD)[used][:, None])
            if lanes.predictions:
                ahead = lanes.end_seconds(PREDICTION)[used][:, None]
                total = total + _time(ahead) * lanes.predictions
        return total

    def _tally(self, chunk: Chunk) -> Iterator[tuple[int, Ints, Ints]]:
        """How many layers of a chunk there are of each kind, by policy."""
        policy = self.tried.policy
        places = np.arange(1, chunk.depth + 1)
        again = np.stack([self._reruns(at) for at in places.tolist()]) if chunk.depth else None
        kinds = np.array(list(chunk.each))
        for kind in chunk.kinds:
            assert again is not None
            own = again[kinds == kind]
            many = own.sum(axis=0)
            yield kind, policy, many
            if (many < len(own)).any():
                yield kind, np.full_like(policy, NO_POLICY), len(own) - many

    def _layer(self, kind: int, time: LayerTime) -> LayerTime:
        """Seconds of one layer of a kind, with what its weights need."""
        return time

    def _first(self) -> LayerTime:
        """Seconds of what the first stage alone waits for."""
        return NOTHING

    def _alone(self, rows: Picked) -> Floats:
        """Seconds of the micro-batches of a whole model on one stage."""
        (one,) = self._times.values()
        whole: Any = one.later_forward + one.backward
        found: Floats = self.batches.rounds[rows.batch] * whole[self.own[rows.batch], rows.policy]
        return found

    def piped(self, rows: Picked) -> _Piped:
        """What the pipeline is run for: once for what its seconds depend on."""
        policies = len(self.tried.policy)
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
        place = np.zeros(wanted.shape, np.int64)
        place[wanted] = np.arange(len(run))
        return _Piped(
            table, counts[keys[run] % len(counts)], which, place[of[rows.batch], rows.policy]
        )

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
        different = list(dict.fromkeys(self.stages))
        layout = self.batches.layout[rows.batch]
        piped = self.cut.pp > 1
        optimizer = [self.layouts.held(stage, piped=piped).optimizer for stage in different]
        stages = [sum((self._times[c] for c in stage), NOTHING) for stage in different]
        lane = self.own[rows.batch]
        forward, backward, lead = (way[lane, rows.policy] for way in _busiest(stages))
        busiest = LayerTime(forward, 0.0, backward, 0.0)
        total: Floats = lead + self._exposed(rows, different, busiest)
        total += np.maximum.reduce(optimizer)[layout, rows.zero]
        return total + self._after[rows.batch]

    def _exposed(self, rows: Picked, different: Sequence[Stage], busiest: LayerTime) -> Any:
        """Seconds of the replicas' collectives that nothing hides."""
        run, layout = self.lanes.run, self.batches.layout[rows.batch]
        whole: Any = self.layouts.exchange(different)
        exchange = Reduction(*(one[layout, rows.zero] for one in whole))
        each = self.layouts.reduced_each(piped=self.cut.pp > 1)[rows.zero]
        times: Any = each * self.batches.rounds[rows.batch]
        overlaps = run.framework.overlaps_reduction
        return exchange.exposed(run.training, busiest, self.lanes.rates, times, overlaps=overlaps)

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


def seconds_of(every: Sequence[tuple[CutRows, Picked]]) -> list[Floats]:
    """Seconds of one step of every row of one cut: its schedule is run for all of them at once."""
    cut = every[0][0].cut
    if cut.pp == 1:
        return [rows._alone(some) + rows._replicas(some) for rows, some in every]
    piped = [rows.piped(some) for rows, some in every]
    offsets = np.cumsum([0, *(one.table[0][0].forward.shape[0] for one in piped)])
    spans = makespans(
        cut.schedule, cut.pp, np.concatenate([one.counts for one in piped]), cut.vpp,
        _side_by_side([one.table for one in piped]),
        np.concatenate([one.which + at for one, at in zip(piped, offsets, strict=False)]),
    )  # fmt: skip
    found = []
    for (rows, some), one in zip(every, piped, strict=True):
        found.append(spans[: len(one.which)][one.of] + rows._replicas(some))
        spans = spans[len(one.which) :]
    return found


def _side_by_side(tables: Sequence[list[list[Durations]]]) -> list[list[Durations]]:
    """Tables of durations as one; what is one object in all of them stays one."""
    if len(tables) == 1:
        return tables[0]
    known: dict[tuple[int, ...], Durations] = {}

    def joined(*same: Durations) -> Durations:
        key = tuple(map(id, same))
        if key not in known:
            columns = zip(*same, strict=True)
            known[key] = Durations(*(np.concatenate(column) for column in columns))
        return known[key]

    return [
        [joined(*same) for same in zip(*stages, strict=True)]
        for stages in zip(*tables, strict=True)
    ]


def _time(fields: Floats) -> LayerTime:
    """Seconds of one layer, re-run and exchange inside the others."""
    columns = np.moveaxis(fields, -1, 0)
    return LayerTime(rerun=0.0, **dict(zip(SECONDS, columns, strict=True)))


def _busiest(stages: Sequence[LayerTime]) -> list[Any]:
    """Forward, backward and lead of the stage with the longest forward, then backward."""
    rows: list[list[Any]] = [[one.forward, one.backward, one.lead] for one in stages]
    chosen = rows[0]
    for other in rows[1:]:
        longer = (other[0] > chosen[0]) | ((other[0] == chosen[0]) & (other[1] > chosen[1]))
        chosen = [np.where(longer, new, old) for new, old in zip(other, chosen, strict=True)]
    return chosen
