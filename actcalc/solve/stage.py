"""A pipeline stage as a planning problem: what its GPU holds at every moment of a step.

A stage runs chunks of layers. While part ``j`` of chunk ``k`` runs forward or backward, the GPU
holds, beside ``base``, n_c micro-batches of every chunk c, of which one of chunk k is the running
one: it has the parts before j stored (``prefix``), part j at work, and nothing after it:

    base + sum_c n_c S_c - S_k + prefix_j + forward_j - absent_forward_j   (kind F)
    base + sum_c n_c S_c - S_k + prefix_j + backward_j - absent_j          (kind B or I)
    base + sum_c n_c S_c                                                   (kind W)

S_c is all that chunk c stores; the two ``absent`` are what ``base`` has and that moment has not
(gradients that do not exist yet), less what it has beside (weights gathered for it). The peak of
the stage is the highest of these over the moments of its schedule, and ``floor`` (the optimizer
step).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from actcalc.errors import SpecError
from actcalc.solve.problem import LIMIT, check_int

Ints = NDArray[np.int64]


class Way(NamedTuple):
    """One way to run a layer: bytes for one micro-batch, cost, and what it stands for.

    ``stored`` from forward to backward; ``forward`` and ``backward`` are the most alive while the
    layer runs, what it stores included.
    """

    stored: int
    forward: int
    backward: int
    cost: int
    payload: Any = None


class Held(NamedTuple):
    """A part of a chunk with nothing to choose: what it stores, and the most it has alive."""

    stored: int
    forward: int
    backward: int
    layers: int = 1
    """Parts of the chunk (layers, mostly) that it stands for."""


class Moment(NamedTuple):
    """A kind of work on a stage (F, B, I or W), of which chunk, and micro-batches held of each."""

    kind: str
    chunk: int
    held: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ends:
    """The fixed parts of a chunk before and after its layers, and what its moments lack.

    ``absent`` are bytes while each part runs backward, in order of the chunk (empty: none), which
    may be negative; ``absent_forward`` the same of forward.
    """

    before: tuple[Held, ...] = ()
    after: tuple[Held, ...] = ()
    absent: tuple[int, ...] = ()
    absent_forward: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Gpu:
    """What a GPU holds beside its layers, and when."""

    moments: tuple[Moment, ...]
    chunks: tuple[Ends, ...]
    base: int = 0
    floor: int = 0


def line(inflight: int, base: int = 0) -> Gpu:
    """One chunk of layers, of which ``inflight`` micro-batches are held, and ``base`` bytes."""
    moments = (Moment("F", 0, (inflight,)), Moment("B", 0, (inflight,)))
    return Gpu(moments, (Ends(),), base)


def peak(gpu: Gpu, layers: Sequence[Sequence[Held | Way]], most: Any = max) -> Any:
    """The highest bytes of ``gpu`` whose chunks have these ``layers``, in order.

    Figures of layers may be arrays, of many plans at once: then ``most`` is ``numpy.maximum``.
    """
    found = [_highs(ends, parts, most) for ends, parts in zip(gpu.chunks, layers, strict=True)]
    high: Any = gpu.floor - gpu.base
    for kind, chunk, held in gpu.moments:
        now: Any = 0
        for n, (stored, _, _) in zip(held, found, strict=True):
            now = now + n * stored
        if kind == "F":
            now = now + found[chunk][1]
        elif kind != "W":
            now = now + found[chunk][2]
        high = most(high, now)
    return gpu.base + high


def _highs(ends: Ends, layers: Sequence[Held | Way], most: Any) -> tuple[Any, Any, Any]:
    # Stored bytes of a chunk, and its highest forward and backward moment relative to them.
    stored: Any
    forward: Any
    backward: Any
    stored, forward, backward, at = 0, -_FAR, -_FAR, 0
    absent, early = ends.absent, ends.absent_forward
    for part in (*ends.before, *layers, *ends.after):
        at += part.layers if isinstance(part, Held) else 1
        forward = most(forward, stored + part.forward - (early[at - 1] if early else 0))
        backward = most(backward, stored + part.backward - (absent[at - 1] if absent else 0))
        stored = stored + part.stored
    if not at:
        return 0, 0, 0
    return stored, forward - stored, backward - stored


def layers_at_peak(gpu: Gpu, layers: Sequence[Sequence[Held | Way]]) -> int:
    """How much of :func:`peak` layers store or have alive, at that moment."""
    best, mine = gpu.floor, 0
    own = [[part.stored for part in row] for row in layers]
    ends = [[part.stored for part in (*one.before, *one.after)] for one in gpu.chunks]
    for kind, chunk, held in gpu.moments:
        of_layers = sum(n * sum(row) for n, row in zip(held, own, strict=True))
        total = gpu.base + of_layers
        total += sum(n * sum(row) for n, row in zip(held, ends, strict=True))
        one, at = gpu.chunks[chunk], 0
        running = (*one.before, *layers[chunk], *one.after)
        if kind == "W" or not running:
            best, mine = max((best, mine), (total, of_layers))
            continue
        rest = total - sum(own[chunk]) - sum(ends[chunk])
        of_layers -= sum(own[chunk])
        first, last = len(one.before), len(one.before) + len(layers[chunk])
        for index, part in enumerate(running):
            at += part.layers if isinstance(part, Held) else 1
            alive = part.forward if kind == "F" else part.backward
            absent = one.absent_forward if kind == "F" else one.absent
            lacks = absent[at - 1] if absent else 0
            layer = first <= index < last
            now = (rest + alive - lacks, of_layers + (alive if layer else 0))
            best, mine = max((best, mine), now)
            rest += part.stored
            of_layers += part.stored if layer else 0
    return mine


_FAR = 2**61


class Ways:
    """The ways to run one kind of layer that none other beats in all four figures.

    Sorted by stored bytes. Keep it and pass it again: what is derived from it is cached on it.

    Raises:
        SpecError: there is none, or a number is not a whole number in range.
    """

    def __init__(self, ways: Iterable[Way], *, grain: int = 1) -> None:
        every = list(ways)
        if not every:
            raise SpecError("a layer without a way to run it", hint="give at least one")
        if not all(type(n) is int and 0 <= n < LIMIT for way in every for n in way[:4]):
            for way in every:
                for name in ("stored", "forward", "backward", "cost"):
                    check_int(getattr(way, name), f"{name} of {way.payload!r}")
        rows = np.array([way[:4] for way in every], dtype=np.int64)
        keep = _undominated(rows)
        self.ways = tuple(every[i] for i in keep)
        self.grain = grain
        self.stored, self.forward, self.backward, self.cost = (
            np.ascontiguousarray(column) for column in rows[keep].T
        )
        self.scratch: dict[Any, Any] = {}

    def __len__(self) -> int:
        return len(self.ways)

    @cached_property
    def cheapest(self) -> int:
        """Index of the cheapest way, the one with the least alive among equals."""
        rows = zip(self.cost.tolist(), self.backward.tolist(), range(len(self)), strict=True)
        return min(rows)[2]

    @cached_property
    def least(self) -> int:
        """The fewest bytes stored."""
        return int(self.stored[0])

    @cached_property
    def lean(self) -> Ints:
        """Indices of the ways that matter where cost does not."""
        rows = np.stack([self.stored, self.forward, self.backward], axis=1)
        return np.array(_undominated(rows), dtype=np.int64)


_AT_ONCE = 4_000_000  # comparisons, so that their tables stay small


def _undominated(rows: Ints) -> list[int]:
    """Indices of the rows that no other is at most equal to in all columns, by the columns.

    Of equal rows the first stays. A row that beats another comes before it in that order, and who
    beats a beaten one beats what that beats: each is compared with all before it.
    """
    order = np.lexsort(rows.T[::-1])
    small = np.int16 if len(rows) < 2**15 else np.int32
    columns: list[NDArray[Any]] = [
        np.unique(column, return_inverse=True)[1].ravel().astype(small)
        for column in rows[order].T[1:]
    ]
    step = max(1, _AT_ONCE // len(rows))
    found: list[int] = []
    for start in range(0, len(rows), step):
        end = min(len(rows), start + step)
        beaten = np.arange(end)[None, :] < np.arange(start, end)[:, None]
        for column in columns:
            beaten &= column[None, :end] <= column[start:end, None]
        found += order[start:end][~beaten.any(axis=1)].tolist()
    return found


@dataclass(frozen=True, eq=False)
class StageProblem:
    """Layers to choose for, chunk by chunk, and the GPUs that follow the choice.

    ``layers`` has for every chunk the ways of each of its layers, in forward order. Several
    ``gpus`` share one plan; all have as many chunks of as many layers.
    """

    layers: tuple[tuple[Ways, ...], ...]
    gpus: tuple[Gpu, ...]

    def __post_init__(self) -> None:
        for gpu in self.gpus:
            if len(gpu.chunks) != len(self.layers):
                raise SpecError(
                    f"a GPU of {len(gpu.chunks)} chunks for a plan of {len(self.layers)}",
                    hint="give the ends of every chunk",
                )

    def peak(self, choice: Sequence[Sequence[int]]) -> int:
        """The highest bytes of any of the GPUs under a choice of one way for every layer."""
        chosen = [
            [ways.ways[i] for ways, i in zip(row, picks, strict=True)]
            for row, picks in zip(self.layers, choice, strict=True)
        ]
        found: int = max(peak(gpu, chosen) for gpu in self.gpus)
        return found

    def cost(self, choice: Sequence[Sequence[int]]) -> int:
        """The summed cost of a choice."""
        return sum(
            ways.ways[i].cost
            for row, picks in zip(self.layers, choice, strict=True)
            for ways, i in zip(row, picks, strict=True)
        )

    @cached_property
    def grain(self) -> int:
        """Costs are minimised in whole grains."""
        return max((ways.grain for row in self.layers for ways in row), default=1)

    @cached_property
    def limits(self) -> tuple[Limit, ...]:
        """Everything that has to stay within the budget, moments that never bind left out."""
        found: dict[tuple[int, tuple[int, ...]], Limit] = {}
        for gpu in self.gpus:
            for moment in gpu.moments:
                chunk = -1 if moment.kind == "W" else moment.chunk
                limit = found.setdefault((chunk, moment.held), Limit(chunk, moment.held, self))
                limit.add(gpu, moment.kind)
        highest: list[Limit] = []
        for one in sorted(found.values(), key=lambda one: (-sum(one.held), one.chunk < 0)):
            # what is at least this one holds more, so that it, or what it is below, came before
            if not any(one.below(other) for other in highest):
                highest.append(one)
        binding = set(map(id, highest))
        return tuple(one for one in found.values() if id(one) in binding)


class Limit:
    """All moments of one chunk with the same micro-batches held: one linear form in what is stored.

    For layer ``j`` of the chunk the form is n_c bytes of every layer of chunk c, but in chunk k
    itself n_k for layers before j, n_k - 1 after it, and for j itself (n_k - 1) stored bytes and
    what is alive while it runs (``alive``). ``fixed`` are the bytes of moments in fixed parts, in
    which all layers of chunk k weigh n_k (after them, ``whole``) or n_k - 1 (before, ``gone``).
    """

    def __init__(self, chunk: int, held: tuple[int, ...], problem: StageProblem) -> None:
        self.chunk, self.held = chunk, held
        self.whole = self.gone = -_FAR
        self.layers = problem.layers[chunk] if chunk >= 0 else ()
        self.forward = [-_FAR] * len(self.layers)
        self.backward = [-_FAR] * len(self.layers)
        self._alive: dict[int, Ints] = {}
        self._rows: set[tuple[Any, ...]] = set()

    def add(self, gpu: Gpu, kind: str) -> None:
        """One GPU's moments of a kind, as constants beside what the layers hold."""
        key = (kind, id(gpu))
        if key in self._rows:
            return
        self._rows.add(key)
        ends = zip(self.held, gpu.chunks, strict=True)
        base = gpu.base + sum(
            n * sum(part.stored for part in (*one.before, *one.after)) for n, one in ends
        )
        if kind == "W":
            self.whole = max(self.whole, base)
            return
        one = gpu.chunks[self.chunk]
        rest = base - sum(part.stored for part in (*one.before, *one.after))
        runs = kind == "F"
        if not (one.before or one.after or self.layers):
            self.whole = max(self.whole, rest)
        lacks = (one.absent_forward if runs else one.absent) or (0,) * (
            len(one.before) + len(self.layers) + len(one.after)
        )
        at = 0
        for part in one.before:
            self.gone = max(self.gone, rest + (part.forward if runs else part.backward) - lacks[at])
            rest, at = rest + part.stored, at + 1
        room = self.forward if runs else self.backward
        for layer in range(len(self.layers)):
            room[layer] = max(room[layer], rest - lacks[at])
            at += 1
        for part in one.after:
            alive = part.forward if runs else part.backward
            self.whole = max(self.whole, rest + alive - lacks[at])
            rest, at = rest + part.stored, at + 1

    def below(self, other: Limit) -> bool:
        """Whether ``other`` is at least this one, whatever is chosen."""
        if other is self:
            return False
        smaller = all(a <= b for a, b in zip(self.held, other.held, strict=True))
        if self.chunk < 0 and other.chunk >= 0:
            return smaller and self.whole <= other.whole
        if other.chunk != self.chunk or other.held == self.held:
            return False
        pairs = [
            (self.whole, other.whole),
            (self.gone, other.gone),
            *zip(self.forward, other.forward, strict=True),
            *zip(self.backward, other.backward, strict=True),
        ]
        return smaller and all(a <= b for a, b in pairs)

    def alive(self, layer: int) -> Ints:
        """Bytes of this limit while ``layer`` runs, by its way: less what other layers hold."""
        if layer not in self._alive:
            ways = self.layers[layer]
            own = np.maximum(
                ways.forward + self.forward[layer], ways.backward + self.backward[layer]
            )
            self._alive[layer] = own + (self.held[self.chunk] - 1) * ways.stored
        return self._alive[layer]

    def highest(self, choice: Sequence[Sequence[int]], problem: StageProblem) -> tuple[int, int]:
        """The bytes of this limit under a choice, and where: a layer, ``WHOLE`` or ``GONE``."""
        held = 0
        for n, row, picks in zip(self.held, problem.layers, choice, strict=True):
            held += n * sum(w.ways[i].stored for w, i in zip(row, picks, strict=True))
        best, where = held + self.whole, WHOLE
        if self.chunk < 0:
            return best, where
        picks = choice[self.chunk]
        after = sum(w.ways[i].stored for w, i in zip(self.layers, picks, strict=True))
        if held - after + self.gone > best:
            best, where = held - after + self.gone, GONE
        for layer, (ways, i) in enumerate(zip(self.layers, picks, strict=True)):
            way = ways.ways[i]
            alive = max(way.forward + self.forward[layer], way.backward + self.backward[layer])
            if held - after + alive > best:
                best, where = held - after + alive, layer
            after -= way.stored
        return best, where


WHOLE = -1
"""Instead of a layer: a moment with all layers of the chunk stored."""

GONE = -2
"""Instead of a layer: a moment with the layers of the running chunk freed."""
