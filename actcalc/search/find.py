"""The search itself: rows of every cut, evaluated; what fits, with its time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from time import monotonic
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from actcalc.cost.rates import Rates, peak_flops, rates_of
from actcalc.cost.step import check_timed
from actcalc.errors import SpecError
from actcalc.run.staged import StagedRun
from actcalc.search.batches import Batches, Sized, runnable, sized
from actcalc.search.choices import Choices, Tried
from actcalc.search.family import Floats, Ints, Lane
from actcalc.search.lanes import Lanes
from actcalc.search.listed import Rows
from actcalc.search.rows import CutRows, Picked, seconds_of
from actcalc.search.singles import Singles, alike
from actcalc.search.space import Cut, Space, Split, cuts, splits, zero_stages
from actcalc.search.stages import stages_of
from actcalc.search.ways import Tables, ways_of
from actcalc.specs.layout import Layout
from actcalc.specs.run import Run
from actcalc.specs.workload import Workload

Progress = Callable[[int, int], None]
"""Told how many of how many cuts have been looked at."""
_SPLITS = 512  # splits whose lanes are worked out before any row is
_TIMED_TOGETHER = 1 << 16  # rows of a cut that wait for each other before they are timed
_SINGLE_BATCHES = 4  # batches whose rows are evaluated one by one before any is handed on
_ALONE = {
    "tp": 1, "sp": False, "pp": 1, "vpp": 1, "cp": 1, "ep": 1, "etp": None, "dp": 1, "zero": 0,
    "schedule": None, "layers_per_stage": (), "microbatch_group": None,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Found:
    """What a search has found: every layout that fits, in no order."""

    run: Run
    gpus: int
    considered: int
    """Layouts that were looked at."""
    cuts: tuple[Cut, ...]
    lanes: tuple[Lane, ...]
    flops: tuple[float, ...]
    """Model FLOPs of one sequence, over all ranks, by lane."""
    choices: Choices
    """The policies, by the rows' numbers."""
    rows: Rows
    peak: Ints
    """Bytes that its fullest stage needs."""
    seconds: Floats
    """Of one step."""
    complete: bool
    """False where the search was stopped before its end."""

    @cached_property
    def tokens_per_second_per_gpu(self) -> Floats:
        """By row."""
        found: Floats = self._sequences * self.run.workload.seq / (self.seconds * self._devices)
        return found

    @cached_property
    def _sequences(self) -> Ints:
        """Sequences of a step by row."""
        sizes = np.array([lane.micro_batch for lane in self.lanes], np.int64)
        found: Ints = sizes[self.rows.lane] * self.rows.dp * self.rows.rounds
        return found

    @cached_property
    def _devices(self) -> Ints:
        """Devices by row."""
        inside = np.array([lane.split.tp * lane.split.cp for lane in self.lanes], np.int64)
        stages = np.array([cut.pp for cut in self.cuts], np.int64)
        found: Ints = inside[self.rows.lane] * stages[self.rows.cut] * self.rows.dp
        return found

    @cached_property
    def mfu(self) -> Floats:
        """Model FLOPs over what the devices could do in the step, by row."""
        device = self.run.device
        assert device is not None
        peak = peak_flops(device, self.run.workload.arithmetic)
        useful = np.array(self.flops)[self.rows.lane] * self._sequences
        found: Floats = useful / (self.seconds * self._devices * peak)
        return found

    def layout(self, row: int) -> Layout:
        """The layout of one row."""
        cut = self.cuts[int(self.rows.cut[row])]
        split = self.lanes[int(self.rows.lane[row])].split
        return split.layout(
            dp=int(self.rows.dp[row]), zero=int(self.rows.zero[row]), **cut.fields()
        )

    def workload(self, row: int) -> Workload:
        """The workload of one row."""
        return self.run.workload.model_copy(update={"micro_batch": self.micro_batch(row)})

    def micro_batch(self, row: int) -> int:
        """Sequences in a micro-batch of one row."""
        return self.lanes[int(self.rows.lane[row])].micro_batch

    def policy(self, row: int) -> str:
        """The policy's name of one row."""
        return self.choices.name(self.rows, row)

    def one(self, row: int) -> Run:
        """The whole run of one row, as a command of one run would be asked for it."""
        return replace(
            self.run,
            layout=self.layout(row),
            workload=self.workload(row),
            policies=(self.policy(row),),
        )


class _Part(NamedTuple):
    """Rows of one cut, with their peaks and seconds."""

    rows: Rows
    peak: Ints
    seconds: Floats


def find(
    run: Run,
    space: Space,
    efficiency: Mapping[str, float] | None = None,
    *,
    progress: Progress | None = None,
    everything: bool = False,
    seconds: float = inf,
) -> Found:
    """Every legal layout of the space that fits the run's device, with the time of its step.

    ``everything``: also what does not fit. Stopped by the user (``KeyboardInterrupt``), or after so
    many ``seconds``, it returns what it has. Raises ``SpecError`` without a device or a global
    batch.
    """
    if run.device is None:
        raise SpecError("a search ranks layouts by their time on a device", "add --device")
    if run.workload.global_batch is None:
        raise SpecError(
            "a search compares steps of one size, and no global batch is given",
            "add --global-batch",
        )
    check_timed(run.training)
    rates = rates_of(run.device, run.workload.arithmetic, efficiency, devices=max(space.counts))
    return _Search(run, space, rates, everything=everything).found(progress, seconds)


def _timed(waiting: list[tuple[CutRows, Picked, Rows]]) -> Iterator[_Part]:
    """Rows of a cut with their seconds; none wait afterwards."""
    if waiting:
        seconds = seconds_of([(rows, some) for rows, some, _ in waiting])
        for (_, some, listed), each in zip(waiting, seconds, strict=True):
            yield _Part(listed, some.peak, each)
        waiting.clear()


class _OutOfTime(Exception):  # noqa: N818
    """The seconds that a search has are over."""


class _Search:
    def __init__(self, run: Run, space: Space, rates: Rates, *, everything: bool) -> None:
        alone = run.layout.model_copy(update=_ALONE)
        self.run: Run = replace(run, layout=alone)
        self.space, self.rates = space, rates
        self.budget: int | None = None if everything else run.budget_bytes or 0
        self.plain = StagedRun(self.run)
        self.choices = Choices.of(self.plain, space.policies or Choices.usual(self.plain))
        self.kinds = [
            [kind.graph for kind in self.plain.kinds].index(graph) for graph in self.plain.layers
        ]
        self.together = alike(self.run)
        self.singles = Singles(self.run, rates, self.choices)
        self.zeros = zero_stages(self.run, space)
        self.ways = ways_of(self.singles, self.zeros)
        self.considered = 0
        self.lanes: list[Lane] = []
        self.flops: list[float] = []

    def found(self, progress: Progress | None, seconds: float) -> Found:
        """Goes through the splits, a few at a time, and every cut of each."""
        every = cuts(self.run, self.space)
        legal = splits(self.run, self.space)
        parts: list[_Part] = []
        complete, end = True, monotonic() + seconds
        whole = -(-len(legal) // _SPLITS) * len(every)

        def told(done: int) -> None:
            if progress is not None:
                progress(done, whole)

        try:
            told(0)
            for number, start in enumerate(range(0, len(legal), _SPLITS)):
                began = number * len(every)
                for cut, some in self._slice(every, legal[start : start + _SPLITS]):
                    parts += some
                    told(began + cut)
                    if monotonic() > end:
                        raise _OutOfTime
        except (KeyboardInterrupt, _OutOfTime):
            complete = False
        return self._joined(every, parts, complete=complete)

    def _slice(
        self, every: Sequence[Cut], legal: Sequence[Split]
    ) -> Iterator[tuple[int, list[_Part]]]:
        """What fits of some splits, cut by cut: how many are done, and the last one's rows."""
        batches: dict[int, list[Sized]] = {}
        for pp in dict.fromkeys(cut.pp for cut in every):
            batches[pp] = sized(
                self.space, legal, self.run.workload.global_batch or 0, pp,
                by_rounds=self.run.workload.kernels.overlap_moe_expert_parallel_comm,
                alone=pp == 1 or not self.run.framework.op_by_op,
            )  # fmt: skip
        tables = Tables(
            self.run, self.rates, self.choices, self.ways, batches, together=self.together
        )
        if not tables.lanes:
            return
        offset = len(self.lanes)
        self.lanes += tables.every_lane
        self.flops += tables.flops
        yield 0, []
        for index, cut in enumerate(every):
            for one in self._cut(index, cut, tables):
                yield index, [one._replace(rows=one.rows._replace(lane=one.rows.lane + offset))]
            yield index + 1, []

    def _cut(self, index: int, cut: Cut, tables: Tables) -> Iterator[_Part]:
        stages = stages_of(cut, self.kinds)
        deepest = max(chunk.depth for stage in stages for chunk in stage)
        tried, alone = self.choices.for_chunks(deepest)
        waiting: list[tuple[CutRows, Picked, Rows]] = []
        for way, rows in tables.rows(cut, stages, tried):
            self.considered += rows.count
            lanes = tables.offset(way.gathers)
            for some in rows.picked(self.budget):
                if len(some.peak):
                    listed = self._rows(index, rows.batches, some, tried, way.zeros, lanes)
                    waiting.append((rows, some, listed))
                    if sum(len(one.peak) for _, one, _ in waiting) > _TIMED_TOGETHER:
                        yield from _timed(waiting)
        yield from _timed(waiting)
        batches = runnable(cut, tables.batches[0, cut.pp])
        for which, policies in ((~self._known(cut, batches), tried), (self._all(batches), alone)):
            yield from self._alone(index, cut, batches, which, policies, tables.lanes[0])

    def _rows(
        self, index: int, batches: Batches, some: Picked, tried: Tried, zeros: Sequence[int],
        lanes: int = 0,
    ) -> Rows:  # fmt: skip
        return Rows(
            cut=np.full(len(some.peak), index),
            lane=batches.lane[some.batch] + lanes,
            policy=tried.named[some.policy],
            block=tried.block[some.policy],
            dp=batches.dp[some.batch],
            zero=np.array(zeros, np.int64)[some.zero],
            rounds=batches.rounds[some.batch],
        ).narrow()

    def _all(self, batches: Batches) -> NDArray[np.bool_]:
        """Which ZeRO stages there are, by [batch, stage]."""
        found: NDArray[np.bool_] = (np.arange(len(self.zeros)) == 0) | (
            batches.sharded[:, None] > 0
        )
        return found

    def _known(self, cut: Cut, batches: Batches) -> NDArray[np.bool_]:
        """Which of them some way puts together, or are not there."""
        found = ~self._all(batches)
        for way in self.ways:
            here = np.isin(self.zeros, way.zeros)
            found |= here & way.here(cut, batches)[:, None]
        return found

    def _alone(
        self, index: int, cut: Cut, batches: Batches, which: NDArray[np.bool_], tried: Tried,
        lanes: Lanes,
    ) -> Iterator[_Part]:  # fmt: skip
        """Rows that arrays do not know, each evaluated as a run of its own."""
        for start in range(0, len(batches), _SINGLE_BATCHES):
            some = batches.take(np.arange(start, min(start + _SINGLE_BATCHES, len(batches))))
            kinds = np.nonzero(which[start : start + _SINGLE_BATCHES])
            each = len(tried.policy)
            batch, zero = (np.repeat(column, each) for column in kinds)
            policy = np.tile(np.arange(each), len(kinds[0]))
            if not len(batch):
                continue
            picked = Picked(batch, zero, policy, policy)
            rows = self._rows(index, some, picked, tried, self.zeros)
            self.considered += len(batch)
            peak = self.singles.peaks(cut, rows, lanes.lanes)
            if self.budget is not None:
                fits = np.flatnonzero(peak <= self.budget)
                rows, peak = rows.take(fits), peak[fits]
            if len(peak):
                yield _Part(rows, peak, self.singles.seconds(cut, rows, lanes.lanes))

    def _joined(self, every: Sequence[Cut], parts: list[_Part], *, complete: bool) -> Found:
        nothing = np.zeros(0, np.int64)
        found = [[nothing, *(part.peak for part in parts)],
                 [nothing.astype(float), *(part.seconds for part in parts)]]  # fmt: skip
        found += [
            [nothing.astype(kind), *(part.rows[at] for part in parts)]
            for at, kind in enumerate(Rows.kinds())
        ]
        parts.clear()  # a column is copied while its pieces go, so that all rows lie once in memory
        peak, seconds, *rows = (np.concatenate(found.pop(0)) for _ in range(len(found)))
        return Found(
            run=self.run,
            gpus=self.space.gpus,
            considered=self.considered,
            cuts=tuple(every),
            lanes=tuple(self.lanes),
            flops=tuple(self.flops),
            choices=self.choices,
            rows=Rows(*rows),
            peak=peak,
            seconds=seconds,
            complete=complete,
        )
