"""The highest moments of a chunk of parts, forward and backward, with their names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from actcalc.layers.core.either import greatest, nothing
from actcalc.memory.around import Around, Both
from actcalc.memory.parts import HEAD, TILES, Part


def first_gradients(parts: Sequence[Part]) -> tuple[tuple[int, int], ...]:
    """For each part the parameters whose gradients its backward is the first to make.

    A pair: those of each occurrence, and those that its last occurrence makes for all (weights
    that occurrences share). Backward runs from the last part to the first, and a weight that
    several parts have (a tied table) has its gradient from the first backward on.
    """
    known: set[str] = set()
    found = []
    for part in reversed(parts):
        fresh = {scope: count for scope, count in part.trained.shared if scope not in known}
        known |= set(fresh)
        found.append((part.trained.own, sum(fresh.values())))
    return tuple(reversed(found))


def made_by_chunk(
    chunks: Sequence[Sequence[Part]], order: Sequence[int]
) -> tuple[Sequence[tuple[int, int]], ...]:
    """The same for each chunk of a stage; ``order`` has their numbers in model order."""
    every = first_gradients([part for index in order for part in chunks[index]])
    found: dict[int, Sequence[tuple[int, int]]] = {}
    start = 0
    for index in order:
        stop = start + len(chunks[index])
        found[index] = every[start:stop]
        start = stop
    return tuple(found[index] for index in range(len(chunks)))


class Moment(NamedTuple):
    """One occurrence of a part at work; bytes beside other micro-batches of its chunk."""

    at: str
    """In words."""
    prefix: int
    """What parts before it store."""
    alive: int
    """The most that the part itself has, stored and at work."""
    around: Around
    loss: bool
    """The loss is at work, and no layer."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.prefix + self.alive + self.around.total


@dataclass(frozen=True)
class Moments:
    """The moments of one chunk, and the highest of either way."""

    stored: int
    """What the chunk stores whole."""
    forward: tuple[Moment, ...]
    backward: tuple[Moment, ...]

    @cached_property
    def highest(self) -> tuple[Moment, Moment]:
        """The highest moment of forward, and of backward: the first of equals."""
        return _highest(self.forward), _highest(self.backward)

    @property
    def most(self) -> tuple[int, int]:
        """Bytes of these: of one run, or of many."""
        forward, backward = ([one.total for one in way] for way in (self.forward, self.backward))
        return greatest(forward), greatest(backward)


_NOTHING = Moment("", 0, 0, Around(), False)


def _highest(moments: Sequence[Moment]) -> Moment:
    return max(moments, key=lambda moment: moment.total, default=_NOTHING)


def chunk_moments(parts: Sequence[Part], around: Sequence[Both]) -> Moments:
    """Every moment of a chunk; ``around`` has what is there beside each occurrence of the parts."""
    forward, backward = [], []
    prefix, at = 0, 0
    for part in parts:
        loss = part.name == HEAD
        for index in range(part.count):
            beside = around[at]
            name = _name(part, index, "forward")
            forward.append(Moment(name, prefix, part.forward, beside.forward, loss))
            if not nothing(part.backward):
                name = _name(part, index, "backward")
                backward.append(Moment(name, prefix, part.backward, beside.backward, loss))
            prefix, at = prefix + part.stored, at + 1
    return Moments(prefix, tuple(forward), tuple(backward))


def _name(part: Part, index: int, way: str) -> str:
    name = part.name
    if part.first >= 0 and part.layers == 1:
        name = f"layer {part.first + index}"
    if way == "forward":
        if part.first < 0:
            made = ": a tile of logits" if part.backward_at == TILES else ": all logits at once"
            what = made if name == HEAD else ""
            return f"at the end of forward, in {name}{what}"
        return f"in forward of {name}"
    if part.first < 0:
        made = ": a tile of logits" if part.backward_at == TILES else ": logits and their gradient"
        what = made if name == HEAD else ""
        return f"in backward of {name}{what}"
    if not part.reruns:
        return f"in backward of {name}"
    if part.layers > 1:
        return f"in backward of {name}: re-running {part.layers} whole layers"
    what = "one whole layer" if part.backward_at == "re-run" else "its modules"
    return f"in backward of {name}: re-running {what}"
