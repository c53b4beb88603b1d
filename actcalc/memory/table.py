"""The moments of a step of one stage: bytes by kind at each. The peak is the highest row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from actcalc.memory.buffers import Buffer
from actcalc.memory.peaks import Moment, Moments
from actcalc.memory.states import States
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


@dataclass(frozen=True, eq=False)
class Table:
    """The rows of one stage: what is there at all times, and the moments of its chunks."""

    held: States
    buffers: tuple[Buffer, ...]
    works: Sequence[Work]
    chunks: Sequence[Moments]
    shared: int
    """Tensors that exist once for all layers."""
    step: int
    """Temporaries of the optimizer step."""
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

    @property
    def optimizer_step(self) -> Row:
        """The step of the optimizer."""
        return self._row("in the optimizer step", gradients=self.held.gradients, working=self.step)

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
        rows = [self._highest(work) for work in self.works]
        return max([*rows, self.optimizer_step], key=lambda row: row.total)

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Every moment in its order, of first step and later ones, the fullest of each kind.

        Pairs of ``first`` or ``later`` and a row; of equal work with other micro-batches held the
        one that holds most is listed.
        """
        fullest: dict[tuple[str, int], Work] = {}
        for work in self.works:
            key = (work.kind, work.chunk)
            if key not in fullest or self.stored(work) > self.stored(fullest[key]):
                fullest[key] = work
        for step in ("first", "later"):
            gone = self.made_at_first if step == "first" else 0
            kept = self.kept if step == "later" else 0
            rows = [self._row("between steps", gradients=kept)]
            for work in fullest.values():
                rows += self._of(work)
            yield from ((step, row._replace(optimizer=row.optimizer - gone)) for row in rows)
            yield step, self.optimizer_step

    def _of(self, work: Work) -> list[Row]:
        if work.kind == "W":
            return [self._waits(work)]
        chunk, stored = self.chunks[work.chunk], self.stored(work)
        if work.kind == "F":
            return [self._moment(work, stored, moment) for moment in chunk.forward]
        return [self._moment(work, stored, moment) for moment in reversed(chunk.backward)]
