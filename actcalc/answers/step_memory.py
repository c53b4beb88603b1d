"""A stage's memory through one step, moment by moment: the data of memory's chart of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from actcalc.answers.header import RunAnswer, header
from actcalc.memory.stage import memory_of
from actcalc.memory.table import Row, Table
from actcalc.run.staged import StagedRun, Work
from actcalc.specs.check import check_sharding
from actcalc.specs.run import Run

MOST = 1500
"""Moments of a step that is told layer by layer; a longer one has the highest of each work."""


@dataclass(frozen=True, kw_only=True)
class StepMoment:
    """One moment of a step on one stage; bytes of one rank."""

    work: int
    """Which forward or backward of the stage, from 0; after the last comes the optimizer step."""
    start: float
    """When it begins, counted in works: 2.5 is in the middle of the third."""
    at: str
    """What happens, in words."""
    held: int
    """Activations in flight, of one micro-batch on one chunk each."""
    states_bytes: int
    """Weights, gradients that exist and optimizer states; gathered and unreduced ones too."""
    activations_bytes: int
    """Activations stored by what is not at work."""
    working_bytes: int
    """What the part at work holds, head and loss included."""
    buffers_bytes: int
    """Workspaces, buckets, messages."""

    @property
    def total_bytes(self) -> int:
        """All of it, in the framework's allocator."""
        return self.states_bytes + self.activations_bytes + self.working_bytes + self.buffers_bytes


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class StepMemory(RunAnswer):
    """The memory of one stage through a step."""

    policy: str
    """The recompute policy."""
    schedule: str
    """The pipeline schedule; none without a pipeline."""
    stage: int
    """The stage, the fullest one."""
    microbatches_shown: int
    """Micro-batches the moments are of: fewer than a step has where its middle repeats itself."""
    overhead_bytes: int
    """What the driver and libraries take beside the allocator."""
    moments: tuple[StepMoment, ...]
    """Every moment in order, the optimizer step last."""


def step_memory(run: Run | StagedRun) -> StepMemory:
    """The memory of the fullest stage through one step, under the run's first policy."""
    staged = StagedRun.of(run)
    run = staged.asked
    check_sharding(run.layout, run.training)
    memory = memory_of(staged)
    top = memory.top
    works, shown = staged.work_in_order(top.stage)
    return StepMemory(
        **header(staged),
        policy=memory.policy.name,
        schedule=run.layout.pipeline if run.layout.pp > 1 else "none",
        stage=top.stage,
        microbatches_shown=shown,
        overhead_bytes=top.overhead_bytes,
        moments=tuple(_moments(memory.table(top.stage), works)),
    )


def _moments(table: Table, works: tuple[Work, ...]) -> Iterator[StepMoment]:
    rows = {work: table.moments_of(work) for work in set(works)}
    fine = sum(len(rows[work]) for work in works) <= MOST
    for index, work in enumerate(works):
        found = rows[work] if fine else [max(rows[work], key=lambda row: row.total)]
        for at, row in enumerate(found):
            yield _moment(index, index + at / len(found), row, sum(work.held))
    yield _moment(len(works), len(works), table.optimizer_step, 0)


def _moment(work: int, start: float, row: Row, held: int) -> StepMoment:
    return StepMoment(
        work=work,
        start=start,
        at=row.at,
        held=held,
        states_bytes=row.weights + row.gathered + row.gradients + row.unreduced + row.optimizer,
        activations_bytes=row.activations,
        working_bytes=row.working + row.loss,
        buffers_bytes=row.buffers,
    )
