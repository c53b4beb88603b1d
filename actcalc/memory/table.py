"""The moments of a step of one stage: bytes by kind at each. The peak is the highest row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from actcalc.memory.buffers import Buffer
from actcalc.memory.peaks import Moment, Moments
from actcalc.memory.states import States
from actcalc.memory.update import StepMoment
from actcalc.run.staged import Work


class Row(NamedTuple):
    """One moment: bytes by kind in the framework's allocator, on one rank."""

    at: str
    """In words: in backward of layer 11."""
    weights: int
    gathered: int
    """Weights gathered from their shards."""
    gradients: int
    """Summed gradients that exist."""
    unreduced: int
    """Gradients that are to be added to those, or reduced, and messages with them."""
    optimizer: int
    activations: int
    """Stored by what is not at work."""
    working: int
    """Of the part at work, what it stores included; temporaries of the optimizer step."""
    loss: int
    """The same of head and loss."""
    buffers: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self[1:])

    @property
    def live(self) -> int:
        """What activations and the part at work hold."""
        return self.activations + self.working + self.loss


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MomentFigure:
    """One moment of a stage's step: bytes by kind in the framework's allocator, on one rank."""

    step: Literal["first", "later"]
    """In the first step, which ends with making the optimizer's states, or in a later one."""
    at: str
    """When, in words."""
    weights_bytes: int
    """Weights, as they are between steps."""
    gathered_bytes: int
    """Weights gathered from their shards, and 16-bit copies that autocast keeps."""
    gradients_bytes: int
    """Summed gradients that exist."""
    unreduced_bytes: int
    """Gradients that are to be added to those or reduced, and messages with them."""
    optimizer_bytes: int
    """Optimizer states, fp32 master weights included."""
    activations_bytes: int
    """Activations stored by what is not at work."""
    working_bytes: int
    """The layer (or the embedding) at work, with what it stores; in the optimizer step its
    temporaries."""
    loss_bytes: int
    """The same of the head and the loss."""
    buffers_bytes: int
    """Workspaces, buckets, messages, the batch."""
    total_bytes: int
    """All of it."""

    @classmethod
    def of(cls, step: Literal["first", "later"], row: Row) -> MomentFigure:
        """A row of the table as a figure."""
        parts = {f"{kind}_bytes": size for kind, size in row._asdict().items() if kind != "at"}
        return cls(step=step, at=row.at, total_bytes=row.total, **parts)


@dataclass(frozen=True, eq=False)
class Table:
    """The rows of one stage: what is there at all times, and the moments of its chunks."""

    held: States
    buffers: tuple[Buffer, ...]
    works: Sequence[Work]
    chunks: Sequence[Moments]
    shared: int
    """Tensors that exist once for all layers."""
    steps: tuple[StepMoment, ...]
    """The moments of the optimizer step."""
    kept: int
    """Gradients that stay between steps."""
    made_at_first: int
    """Bytes of optimizer states that the first optimizer step makes."""

    def _row(self, at: str, **bytes_: int) -> Row:
        inside = sum(buffer.bytes for buffer in self.buffers if buffer.inside)
        rest = {"gathered": 0, "gradients": 0, "unreduced": 0, "activations": 0, "working": 0}
        found = {**rest, "loss": 0, "buffers": inside, **bytes_}
        return Row(at=at, weights=self.held.weights, optimizer=self.held.optimizer, **found)

    def _moment(self, work: Work, stored: int, moment: Moment) -> Row:
        own = self.chunks[work.chunk].stored if moment.at else 0
        around = moment.around
        alive = {"loss" if moment.loss else "working": moment.alive}
        return self._row(
            moment.at,
            **around._asdict(),
            **alive,
            activations=stored - own + moment.prefix + self.shared,
        )

    def stored(self, work: Work) -> int:
        """Stored bytes of all micro-batches held while there is this work."""
        return sum(n * chunk.stored for n, chunk in zip(work.held, self.chunks, strict=True))

    @cached_property
    def every_stored(self) -> tuple[int, ...]:
        """Stored bytes at each work."""
        return tuple(self.stored(work) for work in self.works)

    @cached_property
    def fullest(self) -> dict[tuple[str, int], int]:
        """Of each kind of work on each chunk, the place of the one that holds most."""
        found: dict[tuple[str, int], int] = {}
        for at, work in enumerate(self.works):
            key = (work.kind, work.chunk)
            if self.every_stored[at] > self.every_stored[found.setdefault(key, at)]:
                found[key] = at
        return found

    @property
    def optimizer_step(self) -> Row:
        """The highest moment of the optimizer's step."""
        each = (
            self._row("in the optimizer step", gradients=one.gradients, working=sum(one.blocks))
            for one in self.steps
        )
        return max(each, key=lambda row: row.total)

    def _waits(self, work: Work) -> Row:
        return self._row(
            "between backward and weight gradients",
            gradients=self.held.gradients,
            activations=self.stored(work) + self.shared,
        )

    def _highest(self, work: Work) -> Row:
        if work.kind == "W":
            return self._waits(work)
        forward, backward = self.chunks[work.chunk].highest
        return self._moment(work, self.stored(work), forward if work.kind == "F" else backward)

    def peak(self) -> Row:
        """The highest row, the first of equals."""
        # of equal work with other micro-batches held, the one that holds most is the highest
        found = sorted(self.fullest.values())
        rows = [self._highest(self.works[at]) for at in found]
        return max([*rows, self.optimizer_step], key=lambda row: row.total)

    def figures(self) -> Iterator[MomentFigure]:
        """Every moment in its order, of the first step and of later ones.

        Of equal work with other micro-batches held the one that holds most is listed.
        """
        steps: tuple[Literal["first", "later"], ...] = ("first", "later")
        for step in steps:
            gone = self.made_at_first if step == "first" else 0
            rows = [self._row("between steps", gradients=self.kept if step == "later" else 0)]
            for at in self.fullest.values():
                rows += self.moments_of(self.works[at])
            for row in rows:
                yield MomentFigure.of(step, row._replace(optimizer=row.optimizer - gone))
            yield MomentFigure.of(step, self.optimizer_step)

    def moments_of(self, work: Work) -> list[Row]:
        """The moments of one work in their order."""
        if work.kind == "W":
            return [self._waits(work)]
        chunk, stored = self.chunks[work.chunk], self.stored(work)
        if work.kind == "F":
            return [self._moment(work, stored, moment) for moment in chunk.forward]
        return [self._moment(work, stored, moment) for moment in reversed(chunk.backward)]
