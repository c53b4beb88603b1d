"""What a GPU holds beside its layers, where their order is not looked at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from actcalc.solve.problem import Problem, check_int


@dataclass(frozen=True, slots=True)
class Beside:
    """Bytes beside the layers'.

    ``head``: while all layers are stored and none works. ``work``: while some layer runs backward
    with everything stored. ``floor``: with no activations at all (the optimizer step).

    Raises:
        SpecError: a number is not a whole number in range.
    """

    head: int = 0
    work: int = 0
    floor: int = 0

    def __post_init__(self) -> None:
        for name in ("head", "work", "floor"):
            check_int(getattr(self, name), f"bytes beside the layers ({name})")

    @classmethod
    def of(cls, bytes_: int | Beside) -> Beside:
        """The same bytes at every moment, or a ``Beside`` as it is."""
        if isinstance(bytes_, Beside):
            return bytes_
        check_int(bytes_, "const_bytes")
        return cls(head=bytes_, work=bytes_)

    def peak(self, stored: int, working: int | None) -> int:
        """The peak without order: all stored bytes, and the largest working set (None: ignored)."""
        high = max(self.floor, self.head + stored)
        return high if working is None else max(high, self.work + stored + working)


def beside_of(problem: Problem) -> Beside:
    """What a problem holds beside its layers."""
    beside: Beside | None = problem.beside
    return Beside.of(problem.const_bytes) if beside is None else beside


@dataclass(frozen=True, slots=True)
class Room:
    """How much GPUs that follow one plan leave for what it stores.

    ``holders`` are what each GPU holds beside, and the micro-batches a stored byte is held for.
    """

    holders: tuple[tuple[Beside, int], ...]

    def within(self, budget: int, *, working: bool = True) -> Callable[[int], int]:
        """Bytes that may be stored, by the largest working set; negative if nothing may."""
        floor = max(beside.floor for beside, _ in self.holders)

        def room(largest: int) -> int:
            if budget < floor:
                return -1
            least = min((budget - beside.head) // m for beside, m in self.holders)
            if not working:
                return least
            return min(least, *((budget - b.work - largest) // m for b, m in self.holders))

        return room

    def peak(self, stored: int, working: int | None) -> int:
        """The memory of the fullest GPU."""
        return max(beside.peak(m * stored, working) for beside, m in self.holders)
