"""What a GPU holds beside what its layers store and work with, moment by moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from actcalc.solve.problem import Problem, check_int


@dataclass(frozen=True, slots=True)
class Rest:
    """Bytes beside the layers', at the moments of a step that a plan must survive.

    ``head``: while all layers are stored and none works (end of forward, loss). ``work``: at most,
    while some layer runs backward with everything stored, as the unordered models count.
    ``layers``: while each layer runs backward, in order (empty: ``work`` for each). ``tail``: when
    all layers have run backward. ``floor``: with no activations at all (the optimizer step).
    ``chained``: ``work`` for plans with chains of layers or offload, which store less (None: the
    same). ``again``: what comes on top in backward where something runs again or comes back.

    Raises:
        SpecError: a number is not a whole number in range.
    """

    head: int = 0
    work: int = 0
    layers: tuple[int, ...] = ()
    tail: int = 0
    floor: int = 0
    chained: int | None = None
    again: int = 0

    def __post_init__(self) -> None:
        for name in ("head", "work", "tail", "floor", "again"):
            check_int(getattr(self, name), f"bytes of the rest ({name})")
        for bytes_ in self.layers:
            check_int(bytes_, "bytes of the rest in a layer's backward")

    @classmethod
    def of(cls, bytes_: int | Rest) -> Rest:
        """The same bytes at every moment, or a rest as it is."""
        if isinstance(bytes_, Rest):
            return bytes_
        check_int(bytes_, "const_bytes")
        return cls(head=bytes_, work=bytes_)

    def of_layers(self, count: int) -> tuple[int, ...]:
        """Bytes while each of ``count`` layers runs backward."""
        return self.layers or (self.work,) * count

    def of_chains(self) -> Rest:
        """The rest beside a plan with chains of layers, or with offload."""
        return self if self.chained is None else replace(self, work=self.chained)

    @property
    def most(self) -> int:
        """The most of it at any moment of forward or backward."""
        return max(self.head, self.again + max((self.work, *self.layers)), self.tail)

    def peak(self, stored: int, working: int | None) -> int:
        """The peak without order: all stored bytes, and the largest working set (None: ignored)."""
        high = max(self.floor, self.head + stored)
        if working is None:
            return high
        return max(high, self.work + stored + working + (self.again if working else 0))


def rest_of(problem: Problem) -> Rest:
    """What a problem holds beside its layers."""
    rest: Rest | None = problem.rest
    return Rest.of(problem.const_bytes) if rest is None else rest


def most_of(rests: Sequence[Rest]) -> Rest:
    """A rest that is no less than any of ``rests`` at any moment; all are of as many layers."""
    rows = [rest.of_layers(max(len(r.layers) for r in rests)) for rest in rests]
    return Rest(
        max(rest.head for rest in rests),
        max(rest.work for rest in rests),
        tuple(map(max, zip(*rows, strict=True))),
        max(rest.tail for rest in rests),
        max(rest.floor for rest in rests),
        max(rest.of_chains().work for rest in rests),
        max(rest.again for rest in rests),
    )


@dataclass(frozen=True, slots=True)
class Room:
    """How much GPUs that follow one plan leave for what it stores.

    ``holders`` are each GPU's rest and the micro-batches that a stored byte is held for.
    """

    holders: tuple[tuple[Rest, int], ...]

    def within(self, budget: int, *, working: bool = True) -> Callable[[int], int]:
        """Bytes that may be stored, by the largest working set; negative if nothing may."""
        floor = max(rest.floor for rest, _ in self.holders)

        def room(largest: int) -> int:
            if budget < floor:
                return -1
            least = min((budget - rest.head) // m for rest, m in self.holders)
            if not working:
                return least
            others = ((rest.work + (rest.again if largest else 0), m) for rest, m in self.holders)
            return min(least, *((budget - other - largest) // m for other, m in others))

        return room

    def peak(self, stored: int, working: int | None) -> int:
        """The memory of the fullest GPU."""
        return max(rest.peak(m * stored, working) for rest, m in self.holders)


def rest_within(
    layers: Sequence[int],
    least: Sequence[int],
    head: int,
    tail: int,
    floor: int,
    again: int = 0,
) -> Rest:
    """A rest from its moments: ``work`` counts layers' moments as if all others were stored.

    While a layer runs backward the layers after it are gone for one micro-batch, at least
    ``least`` bytes each, which the unordered models count all the same. Of chains nothing is known.
    """
    work, gone = 0, 0
    for bytes_, stored in zip(reversed(layers), reversed(least), strict=True):
        work = max(work, bytes_ - gone)
        gone += stored
    chained = max(*layers, tail)
    work = max(work, tail - gone, 0)
    return Rest(head, work, tuple(layers), tail, floor, chained, again)
