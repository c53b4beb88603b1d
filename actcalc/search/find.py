"""The search itself: rows of every cut, evaluated; what fits, with its time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from actcalc.cost.rates import Rates, peak_flops, rates_of
from actcalc.cost.roofline import Roofline
from actcalc.cost.step import check_timed, step_time
from actcalc.errors import SpecError
from actcalc.memory.stage import total_bytes
from actcalc.memory.states import in_units, recipe
from actcalc.policy.rules import Policy
from actcalc.run.schedule.shape import shape_of
from actcalc.run.staged import StagedRun
from actcalc.search.choices import Choices
from actcalc.search.lanes import Floats, Ints, Lane, Lanes, Measured
from actcalc.search.rows import Bools, CutRows, Rows
from actcalc.search.space import (
    Cut,
    Space,
    Split,
    cuts,
    micro_batches,
    splits,
    zero_stages,
)
from actcalc.search.stages import stages_of
from actcalc.specs.layout import Layout
from actcalc.specs.run import Run
from actcalc.specs.schedules import SCHEDULES
from actcalc.specs.workload import Workload

Progress = Callable[[int, int], None]
"""Told how many of how many cuts have been looked at."""
BLOCK_ROWS = 1 << 17
"""Rows that are evaluated at a time, which bounds memory."""
_SPLITS = 16  # splits whose lanes are measured before any is evaluated
_KEPT_RUNS = 256
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
    cut: Ints
    """Which cut each row has."""
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
        found: Ints = inside[self.rows.lane] * stages[self.cut] * self.rows.dp
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
        cut = self.cuts[int(self.cut[row])]
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


class _Batch(NamedTuple):
    """One split and micro-batch of a cut, with its replicas."""

    lane: int
    dp: int
    rounds: int
    sharded: bool
    """There are replicas over which ZeRO can shard."""


class _Part(NamedTuple):
    """What fits of the layouts of one cut and some splits."""

    cut: int
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
) -> Found:
    """Every legal layout of the space that fits the run's device, with the time of its step.

    ``everything``: also what does not fit. Stopped by the user (``KeyboardInterrupt``), it returns
    what it has. Raises ``SpecError`` without a device or a global batch.
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
    return _Search(run, space, rates, everything=everything).found(progress)


class _Search:
    def __init__(self, run: Run, space: Space, rates: Rates, *, everything: bool) -> None:
        alone = run.layout.model_copy(update=_ALONE)
        self.run: Run = replace(run, layout=alone)
        self.space, self.rates, self.everything = space, rates, everything
        self.budget = run.budget_bytes or 0
        self.plain = StagedRun(self.run)
        self.rules = recipe(self.plain.graph, run.training)
        self.choices = Choices.of(self.plain, space.policies or Choices.usual(self.plain))
        self.kinds = [
            [kind.graph for kind in self.plain.kinds].index(graph) for graph in self.plain.layers
        ]
        self.overlapped: bool = run.workload.kernels.overlap_moe_expert_parallel_comm
        self.op_by_op: bool = run.framework.op_by_op
        self.considered = 0
        self.lanes = Lanes(self.run, rates, self.choices.measured)
        self.every: list[Lane] = []
        self.flops: list[float] = []
        self._flops_of: dict[Split, float] = {}
        self._singles: dict[tuple[Layout, int], StagedRun] = {}

    def found(self, progress: Progress | None) -> Found:
        """Goes through the splits, a few at a time, and every cut of each."""
        every = cuts(self.run, self.space)
        legal = splits(self.run, self.space)
        parts: list[_Part] = []
        complete = True
        try:
            for start in range(0, len(legal), _SPLITS):
                if progress is not None:
                    progress(start, len(legal))
                parts += self._slice(every, legal[start : start + _SPLITS])
        except KeyboardInterrupt:
            complete = False
        return self._joined(every, parts, complete=complete)

    def _slice(self, every: Sequence[Cut], legal: Sequence[Split]) -> Iterator[_Part]:
        """What fits of some splits under every cut."""
        self.lanes = Lanes(self.run, self.rates, self.choices.measured)
        batches = [list(self._batches(cut, legal)) for cut in every]
        offset = len(self.every)
        self.every += [one.lane for one in self.lanes.measured]
        self.flops += [self._flops(one) for one in self.lanes.measured]
        for index, (cut, batch) in enumerate(zip(every, batches, strict=True)):
            for part in self._cut(index, cut, batch) if batch else ():
                lanes = part.rows.lane + offset
                yield part._replace(rows=part.rows._replace(lane=lanes))

    def _batches(self, cut: Cut, legal: Sequence[Split]) -> Iterator[_Batch]:
        """The splits, replicas and micro-batches that a cut can run."""
        steps = {(self.space.gpus, self.run.workload.global_batch or 0), *self.space.more}
        for split in legal:
            inside = split.tp * split.cp * cut.pp
            experts = split.ep * (split.etp or split.tp)
            for gpus, batch in sorted(steps):
                dp, rest = divmod(gpus, inside)
                if rest or batch % dp or (split.tp * split.cp * dp) % experts:
                    continue
                if self.space.dp is None or dp in self.space.dp:
                    yield from self._sized(cut, split, dp, batch // dp)

    def _sized(self, cut: Cut, split: Split, dp: int, sequences: int) -> Iterator[_Batch]:
        """Every micro-batch of one replica's sequences."""
        for size in micro_batches(self.space, sequences):
            rounds = sequences // size
            if cut.pp > 1 and not _runs(cut.schedule, cut.pp, cut.vpp, rounds):
                continue
            place = self.lanes.place(self._lane(cut, split, size, rounds))
            if place is not None:
                yield _Batch(place, dp, rounds, dp * split.cp > 1)

    def _lane(self, cut: Cut, split: Split, size: int, rounds: int) -> Lane:
        alone = cut.pp == 1 or not self.op_by_op
        return Lane(split, size, rounds if self.overlapped else min(rounds, 2), alone)

    def _cut(self, index: int, cut: Cut, batches: Sequence[_Batch]) -> Iterator[_Part]:
        evaluate = CutRows(self.lanes, cut, stages_of(cut, self.kinds))
        deepest = max(chunk.depth for stage in evaluate.stages for chunk in stage)
        chosen = np.array(self.choices.for_chunks(deepest), np.int64)
        for rows in self._rows(batches, chosen):
            self.considered += len(rows.lane)
            known = self._known(rows)
            for some, arrays in ((rows.take(known), True), (rows.take(~known), False)):
                if not len(some.lane):
                    continue
                peak = evaluate.peaks(some) if arrays else self._peaks(cut, some)
                fits = np.full(len(peak), True) if self.everything else peak <= self.budget
                some, peak = some.take(fits), peak[fits]
                if len(peak):
                    timed = evaluate.seconds(some) if arrays else self._seconds(cut, some)
                    yield _Part(index, some, peak, timed)

    def _rows(self, batches: Sequence[_Batch], chosen: Ints) -> Iterator[Rows]:
        """Every batch with every policy and ZeRO stage, a block at a time."""
        stages = zero_stages(self.run, self.space)
        pairs = [(b, z) for b in batches for z in (stages if b.sharded else stages[:1])]
        each = max(1, BLOCK_ROWS // max(1, len(chosen)))
        for start in range(0, len(pairs), each):
            some = pairs[start : start + each]
            table = np.array([(b.lane, b.dp, z, b.rounds) for b, z in some], np.int64)
            lane, dp, zero, rounds = np.repeat(table, len(chosen), axis=0).T
            policy, block = np.tile(chosen, (len(some), 1)).T
            yield Rows(lane=lane, policy=policy, block=block, dp=dp, zero=zero, rounds=rounds)

    def _flops(self, measured: Measured) -> float:
        split, size = measured.lane.split, measured.lane.micro_batch
        if split not in self._flops_of:
            self._flops_of[split] = measured.flops / size
        return self._flops_of[split]

    # --- rows that are evaluated one by one -------------------------------------------------------

    def _known(self, rows: Rows) -> Bools:
        """The rows that arrays know: not what FSDP gathers, nor what is re-run in segments."""
        training = self.run.training
        special = (
            training.step_in_backward
            or training.zero_redundancy
            or training.whole_weights != "none"
        )
        plain = [zero for zero in range(3) if not special and not self._in_units(zero)]
        known: Bools = np.isin(rows.zero, plain) & (rows.policy < len(self.choices.measured))
        return known & (self.rules.persistent | (rows.rounds > 1))

    def _in_units(self, zero: int) -> bool:
        model = self.plain.graph
        layout = self.run.layout.model_copy(update={"zero": zero})
        sharded = replace(model, context=replace(model.context, layout=layout))
        return in_units(sharded, recipe(sharded, self.run.training))

    def _single(self, cut: Cut, rows: Rows, row: int) -> tuple[StagedRun, Policy]:
        """One row as a run of its own."""
        lane = self.lanes.measured[int(rows.lane[row])].lane
        more = {"dp": int(rows.dp[row]), "zero": int(rows.zero[row]), **cut.fields()}
        layout = lane.split.layout(**more)
        key = layout, lane.micro_batch
        if key not in self._singles:
            if len(self._singles) > _KEPT_RUNS:
                self._singles.clear()
            workload = self.run.workload.model_copy(update={"micro_batch": lane.micro_batch})
            self._singles[key] = StagedRun(replace(self.run, layout=layout, workload=workload))
        staged = self._singles[key]
        return staged, staged.policy(self.choices.name(rows, row))

    def _peaks(self, cut: Cut, rows: Rows) -> Ints:
        every = (self._single(cut, rows, row) for row in range(len(rows.lane)))
        return np.array([total_bytes(*one) for one in every], np.int64)

    def _seconds(self, cut: Cut, rows: Rows) -> Floats:
        every = (self._single(cut, rows, row) for row in range(len(rows.lane)))
        return np.array(
            [step_time(policy, Roofline(staged, self.rates)).total for staged, policy in every]
        )

    def _joined(self, every: Sequence[Cut], parts: Sequence[_Part], *, complete: bool) -> Found:
        empty = np.zeros(0, np.int64)
        rows = [part.rows for part in parts] or [Rows(*[empty] * len(Rows._fields))]
        return Found(
            run=self.run,
            gpus=self.space.gpus,
            considered=self.considered,
            cuts=tuple(every),
            lanes=tuple(self.every),
            flops=tuple(self.flops),
            choices=self.choices,
            rows=Rows(*(np.concatenate(columns) for columns in zip(*rows, strict=True))),
            cut=np.concatenate([empty, *(np.full(len(p.peak), p.cut) for p in parts)]),
            peak=np.concatenate([empty, *(part.peak for part in parts)]),
            seconds=np.concatenate([np.zeros(0), *(part.seconds for part in parts)]),
            complete=complete,
        )


@lru_cache(maxsize=65536)
def _runs(schedule: str, pp: int, vpp: int, rounds: int) -> bool:
    """Whether a schedule can run so many micro-batches."""
    row = SCHEDULES[schedule]
    if not (row.grouped or row.least or row.directions > 1):
        return True
    try:
        shape_of(schedule, pp, rounds, vpp, None)
    except SpecError:
        return False
    return True
