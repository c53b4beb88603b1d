"""The search itself: rows of every cut, evaluated; what fits, with its time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from time import monotonic
from typing import NamedTuple

import numpy as np

from actcalc.cost.rates import Rates, peak_flops, rates_of
from actcalc.cost.step import check_timed
from actcalc.errors import SpecError
from actcalc.run.staged import StagedRun
from actcalc.search.batches import Batches, Sized, columns, runnable, sized
from actcalc.search.choices import Choices
from actcalc.search.family import Floats, Ints, Lane
from actcalc.search.lanes import Lanes
from actcalc.search.layouts import Layouts
from actcalc.search.listed import Rows
from actcalc.search.rows import CutRows, Picked, Tried
from actcalc.search.singles import Singles, alike
from actcalc.search.space import Cut, Space, Split, cuts, splits, zero_stages
from actcalc.search.stages import stages_of
from actcalc.specs.layout import Layout
from actcalc.specs.run import Run
from actcalc.specs.workload import Workload

Progress = Callable[[int, int], None]
"""Told how many of how many cuts have been looked at."""
_SPLITS = 512  # splits whose lanes are worked out before any row is
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
        self.arrays = [at for at, zero in enumerate(self.zeros) if self.singles.arrays_know(zero)]
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
        flat = [one for some in batches.values() for one in some]
        wanted = dict.fromkeys(one.lane for one in flat)
        lanes = Lanes(self.run, self.rates, self.choices.measured, wanted, together=self.together)
        if not lanes.lanes:
            return
        known = [one.layout for one in flat if one.lane in lanes.places]
        places = {layout: at for at, layout in enumerate(dict.fromkeys(known))}
        zeros = [self.zeros[at] for at in self.arrays]
        layouts = Layouts(lanes, tuple(places), zeros, together=self.together)
        offset = len(self.lanes)
        self.lanes += lanes.lanes
        self.flops += lanes.flops().tolist()
        tables = {pp: columns(some, lanes, places) for pp, some in batches.items()}
        yield 0, []
        for index, cut in enumerate(every):
            some = runnable(cut, tables[cut.pp])
            for one in self._cut(index, cut, some, lanes, layouts) if len(some) else ():
                yield index, [one._replace(rows=one.rows._replace(lane=one.rows.lane + offset))]
            yield index + 1, []

    def _cut(
        self, index: int, cut: Cut, batches: Batches, lanes: Lanes, layouts: Layouts
    ) -> Iterator[_Part]:
        stages = stages_of(cut, self.kinds)
        deepest = max(chunk.depth for stage in stages for chunk in stage)
        policy, block = np.array(self.choices.for_chunks(deepest), np.int64).reshape(-1, 2).T
        measured = policy < len(self.choices.measured)
        tried = Tried(policy[measured], block[measured])
        known = batches.take(np.flatnonzero(self.singles.persistent | (batches.rounds > 1)))
        if self.arrays and len(known) and measured.any():
            rows = CutRows(lanes, layouts, cut, stages, known, tried)
            self.considered += rows.count
            for some in rows.picked(self.budget):
                if len(some.peak):
                    listed = self._rows(index, known, some, tried, layouts.zeros)
                    yield _Part(listed, some.peak, rows.seconds(some))
        yield from self._alone(index, cut, batches, Tried(policy, block), lanes)

    def _rows(
        self, index: int, batches: Batches, some: Picked, tried: Tried, zeros: Sequence[int]
    ) -> Rows:
        return Rows(
            cut=np.full(len(some.peak), index),
            lane=batches.lane[some.batch],
            policy=tried.policy[some.policy],
            block=tried.block[some.policy],
            dp=batches.dp[some.batch],
            zero=np.array(zeros, np.int64)[some.zero],
            rounds=batches.rounds[some.batch],
        ).narrow()

    def _alone(
        self, index: int, cut: Cut, batches: Batches, tried: Tried, lanes: Lanes
    ) -> Iterator[_Part]:
        """The rows that arrays do not know, each evaluated as a run of its own."""
        for start in range(0, len(batches), _SINGLE_BATCHES):
            some = batches.take(np.arange(start, min(start + _SINGLE_BATCHES, len(batches))))
            batch, zero, policy = (
                column.ravel()
                for column in np.indices((len(some), len(self.zeros), len(tried.policy)))
            )
            unknown = ~np.isin(zero, self.arrays)
            unknown |= tried.policy[policy] >= len(self.choices.measured)
            unknown |= (some.rounds[batch] == 1) & (not self.singles.persistent)
            here = np.flatnonzero(unknown & ((zero == 0) | (some.sharded[batch] > 0)))
            if not len(here):
                continue
            picked = Picked(batch[here], zero[here], policy[here], here)
            rows = self._rows(index, some, picked, tried, self.zeros)
            self.considered += len(here)
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
