"""The exact trade-off of one layer: every sensible (stored, working, cost), by dynamic programming.

**The re-run set decides everything.** Given R, a tensor whose producer is not re-run must be kept
iff backward saved it or an op of R reads it. Keeping more never helps: keeping a tensor that R
makes anyway moves b bytes from working to stored (K + b, W - b, same cost), and in every peak model
of this package (``inflight >= 1``) that is no better, because stored bytes weigh at least as much
as working bytes. So options are compared by (K, K + W, cost), and one option per R is enough.

**K + W is nearly constant**: it is the bytes a layer keeps without re-run, plus the tensors kept
although backward does not need them. The third axis is therefore those extra bytes alone.

**Independence.** A saved tensor is readable whether its producer is re-run or not, so it ties no
two ops together. Only unsaved tensors do: ops fall into components linked by unsaved tensors; each
component is solved by itself and the results are summed.

**Offload.** A kept tensor may move to host memory instead and come back for backward: its bytes
leave K and join W, so K + W is as before, and the bytes moved are a fourth axis.

**Inside a component** ops are taken in topological order. The state is the set of live unsaved
tensors that are *absent* (producer not re-run, not kept so far): a re-run reader of an absent
tensor makes it kept. Within one state only undominated (K, extra, cost, moved) survive.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from actcalc.solve.clock import give_up, limited, spent
from actcalc.solve.problem import PlanLayer

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

MAX_STATES = 100_000
"""Most (state, point) pairs that one component may carry; more are thinned out."""

MAX_POINTS = 6_000
"""Most ways to run one layer; more are thinned out, and no plan of them is proven."""

_MOST_SUMS = 2_000_000
"""Sums of two sets of points made at once."""

_MOST_MOVED = 120_000
"""The same where tensors may move: four columns take far longer to compare than three."""

_MOST_STEPS = 1_200_000_000
"""Numbers written at most to compare four columns once: about a second's."""

_HURRIED = 2_000
"""Pairs that a component may carry, and sums made at once, once the time is over."""

_Point = tuple[int, int, int, int, int, int]
# Stored, extra and cost, bytes moved; the ops re-run and the tensors moved as bits.
_LEVELS = 48
_NOWHERE = 2**62


@dataclass(frozen=True, slots=True)
class LayerOption:
    """One way to run a layer: bytes, cost, the ops re-run and the tensors kept (without input).

    ``stored`` counts the layer input; ``working`` are the saved tensors re-made at backward, and
    the tensors ``offloaded`` to host memory, ``moved`` bytes in all, that come back for it.
    """

    stored: int
    working: int
    cost: int
    recompute: tuple[str, ...]
    kept: tuple[str, ...]
    moved: int = 0
    offloaded: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class LayerFrontier:
    """Undominated options of a layer, sorted by stored bytes; option sets are rebuilt on demand.

    ``stored``, ``working``, ``cost`` (of re-running alone) and ``moved`` (to host memory) are
    parallel arrays. Option ``i`` is ``frontier[i]``.
    """

    layer: PlanLayer
    stored: Ints
    working: Ints
    cost: Ints
    moved: Ints
    _parts: tuple[tuple[_Point, ...], ...]
    _picks: tuple[tuple[Ints, Ints], ...]
    loose: tuple[tuple[Ints, Ints], ...] = ()
    """Where points were left out: (stored, cost) of each part's own ways, whose sums no way to run
    the layer can beat; else empty."""

    def __len__(self) -> int:
        return len(self.stored)

    def __getitem__(self, index: int) -> LayerOption:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return layer_option(self.layer, *self._masks(index % len(self)))

    def __iter__(self) -> Iterator[LayerOption]:
        return (self[i] for i in range(len(self)))

    def rerun(self) -> dict[str, Bools]:
        """By op that any option re-runs: which options do."""
        index, ops = np.arange(len(self)), self.layer.ops
        found = np.zeros((len(self), len(ops)), dtype=bool)
        for part, (left, right) in zip(reversed(self._parts), reversed(self._picks), strict=True):
            used, place = np.unique(right[index], return_inverse=True)
            bits = [[part[i][4] >> op & 1 for op in range(len(ops))] for i in used.tolist()]
            found |= np.array(bits, dtype=bool)[place.ravel()]
            index = left[index]
        return {op.name: column for op, column in zip(ops, found.T, strict=True) if column.any()}

    def kept(self, rerun: Mapping[str, Bools]) -> dict[str, Bools]:
        """By tensor that any option keeps, the layer's input among them: which options do.

        ``rerun`` is :meth:`rerun`'s answer; options with offloaded tensors are not told apart.
        """
        made: dict[str, Bools] = {}
        read: dict[str, Bools] = {}
        for op in self.layer.ops:
            if op.name in rerun:
                for names, found in ((op.outputs, made), (op.inputs, read)):
                    for name in names:
                        found[name] = found.get(name, False) | rerun[op.name]
        nobody = np.zeros(len(self), dtype=bool)
        kept = {self.layer.input: ~nobody}
        for name in self.layer.tensors:
            if name != self.layer.input:
                saved = name in self.layer.saved_for_backward
                needed = ~nobody if saved else read.get(name, nobody)
                kept[name] = needed & ~made.get(name, nobody)
        return {name: where for name, where in kept.items() if where.any()}

    def _masks(self, index: int) -> tuple[int, int]:
        again = away = 0
        for part, (left, right) in zip(reversed(self._parts), reversed(self._picks), strict=True):
            point = part[int(right[index])]
            again, away = again | point[4], away | point[5]
            index = int(left[index])
        return again, away

    @cached_property
    def everything(self) -> LayerOption:
        """Every op re-run that may be: the least that is ever stored, whatever the cost."""
        return layer_option(self.layer, _allowed_mask(self.layer))


def layer_option(layer: PlanLayer, recompute: int, away: int = 0) -> LayerOption:
    """The option of re-running the ops whose index bits are set in ``recompute``.

    Kept tensors whose bits are set in ``away``, in the order of ``layer.tensors``, are offloaded.
    """
    again = [op for i, op in enumerate(layer.ops) if recompute >> i & 1]
    made = {t for op in again for t in op.outputs}
    read = {t for op in again for t in op.inputs}
    kept = [
        t
        for t in layer.tensors
        if t != layer.input and t not in made and (t in layer.saved_for_backward or t in read)
    ]
    offloaded = tuple(
        t for i, t in enumerate(layer.tensors) if away >> i & 1 and (t == layer.input or t in kept)
    )
    moved = sum(layer.tensors[t] for t in offloaded)
    remade = sum(
        layer.tensors[t] for t in layer.saved_for_backward if t != layer.input and t in made
    )
    return LayerOption(
        stored=layer.input_bytes + sum(layer.tensors[t] for t in kept) - moved,
        working=remade + moved,
        cost=sum(op.cost for op in again),
        recompute=tuple(op.name for op in again),
        kept=tuple(t for t in kept if t not in offloaded),
        moved=moved,
        offloaded=offloaded,
    )


@lru_cache(maxsize=256)
def layer_frontier(layer: PlanLayer, movable: frozenset[str] = frozenset()) -> LayerFrontier:
    """Every undominated option of ``layer``, by (stored, stored + working, cost, moved). Cached.

    ``movable`` names the tensors that may be offloaded to host memory.

    Of very many a part stays (``loose`` is not empty then): where more than ``MAX_STATES`` partial
    choices are alive at once, because many unsaved tensors are alive together or many are movable.
    """
    arrival = _placed([(0, 0, 0, 0, 0, 0)], layer, [layer.input], movable)
    with limited() as effort:
        parts = (tuple(arrival), *(_component(layer, ops, movable) for ops in _components(layer)))
    whole = effort.complete
    axes = [np.array([0])] * 4
    picks: list[tuple[Ints, Ints]] = []
    for part in parts:
        columns = list(np.array([p[:4] for p in part], dtype=np.int64).T)
        before = len(axes[0]), len(part)
        sums = _HURRIED if spent() else _MOST_MOVED if movable else _MOST_SUMS
        later = thinned(sums // 2, columns)
        columns = [column[later] for column in columns]
        earlier, summed = _added(axes, columns, max(2, sums // len(later)))
        keep = pareto(*summed)
        few = keep[thinned(MAX_POINTS, [axis[keep] for axis in summed])]
        whole = whole and before == (len(earlier), len(later)) and len(few) == len(keep)
        axes = [axis[few] for axis in summed]
        picks.append((earlier[few // len(later)], later[few % len(later)]))
    stored, extra, cost, moved = axes
    return LayerFrontier(
        layer=layer,
        stored=stored,
        working=layer.total_saved_bytes - stored + extra,
        cost=cost,
        moved=moved,
        _parts=parts,
        _picks=tuple(picks),
        loose=() if whole else tuple(_loose(part, effort.complete) for part in parts),
    )


def _added(axes: Sequence[Ints], columns: Sequence[Ints], room: int) -> tuple[Ints, list[Ints]]:
    """The sums of ``room`` points of the first set with all of the second: which, and the sums.

    Of fewer points, where comparing four columns of the sums would take too long.
    """
    while True:
        earlier = thinned(room, axes)
        summed = [
            (axis[earlier][:, None] + column[None, :]).ravel()
            for axis, column in zip(axes, columns, strict=True)
        ]
        if room <= 2 or _steps(*summed) <= _MOST_STEPS:
            return earlier, summed
        room = max(2, len(earlier) // 2)


def _steps(first: Ints, second: Ints, third: Ints, fourth: Ints) -> int:
    """Numbers that :func:`_pareto_by_levels` writes, at most."""
    if not fourth.any():
        return 0
    values, rows = (len(np.unique(column)) for column in (first, second))
    starts = len(np.unique(np.stack([second, fourth]), axis=1).T)
    return values * rows * starts


def _loose(part: Sequence[_Point], whole: bool) -> tuple[Ints, Ints]:
    """Stored bytes and cost of a part's ways; of one with ways left out, nothing is sure."""
    if not whole:
        return np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    stored, cost = (np.array([p[i] for p in part], dtype=np.int64) for i in (0, 2))
    return stored, cost


def thinned(most: int, columns: Sequence[Ints]) -> Ints:
    """Indices of at most ``most`` points: the best in each column, and others evenly spread."""
    first = columns[0]
    if len(first) <= most:
        return np.arange(len(first))
    ends = {int(np.argmin(column)) for column in (*columns, first + columns[1])}
    order = np.argsort(first, kind="stable")
    even = order[np.linspace(0, len(order) - 1, max(2, most - len(ends))).astype(np.int64)]
    found: Ints = np.unique(np.concatenate([even, np.array(sorted(ends), dtype=np.int64)]))
    return found[np.argsort(first[found], kind="stable")]


def pareto(first: Ints, second: Ints, third: Ints, fourth: Ints | None = None) -> Ints:
    """Indices of the points that no other point is at most equal to in all columns.

    Of equal points the earliest stays. Sorted by the first column.
    """
    if fourth is not None and fourth.any():
        return _pareto_by_levels(first, second, third, fourth)
    order = np.lexsort((third, second, first))
    b, c = second[order], third[order]
    levels = np.unique(b)
    if len(levels) > _LEVELS:
        return order[_staircase(b.tolist(), c.tolist())]
    alive = np.zeros(len(order), dtype=bool)
    for level in levels:
        below = np.flatnonzero(b <= level)
        costs = c[below]
        best = np.minimum.accumulate(costs)
        better = np.empty(len(below), dtype=bool)
        better[0] = True
        better[1:] = costs[1:] < best[:-1]
        alive[below[better & (b[below] == level)]] = True
    return order[alive]


def _pareto_by_levels(first: Ints, second: Ints, third: Ints, fourth: Ints) -> Ints:
    # Level by level of the fourth column, then of the second: the least third column up to every
    # value of the first is what a point must be below.
    order = np.lexsort((third, first, second, fourth))
    b, c, d = second[order], third[order], fourth[order]
    values, rank = np.unique(first[order], return_inverse=True)
    rows, row = np.unique(b, return_inverse=True)
    least = np.full((len(rows), len(values)), _NOWHERE)
    starts = np.flatnonzero(np.append(True, (np.diff(d) > 0) | (np.diff(b) > 0)))
    alive: list[Ints] = []
    for start, end in zip(starts, np.append(starts[1:], len(order)), strict=True):
        level = int(row[start])
        costs, place = c[start:end], rank[start:end]
        below = costs < least[level][place]
        below[1:] &= costs[1:] < np.minimum.accumulate(costs)[:-1]
        kept = np.flatnonzero(below) + start
        if len(kept):
            alive.append(kept)
            line = np.full(len(values), _NOWHERE)
            line[rank[kept]] = c[kept]
            least[level:] = np.minimum(least[level:], np.minimum.accumulate(line))
    found = order[np.concatenate(alive)]
    ranked: Ints = found[np.argsort(first[found], kind="stable")]
    return ranked


def _staircase(second: list[int], third: list[int]) -> list[int]:
    # Points come sorted by the first column; the stairs hold the undominated (second, third).
    stair_b: list[int] = []
    stair_c: list[int] = []
    alive: list[int] = []
    for i, (b, c) in enumerate(zip(second, third, strict=True)):
        at = bisect_right(stair_b, b)
        if at and stair_c[at - 1] <= c:
            continue
        alive.append(i)
        start = at - 1 if at and stair_b[at - 1] == b else at
        end = at
        while end < len(stair_c) and stair_c[end] >= c:
            end += 1
        stair_b[start:end] = [b]
        stair_c[start:end] = [c]
    return alive


def _allowed_mask(layer: PlanLayer) -> int:
    return sum(1 << i for i, op in enumerate(layer.ops) if op.name not in layer.forbid_recompute)


def _ties(layer: PlanLayer, op: int) -> set[str]:
    # A tensor read by nobody, saved, or the layer input cannot link a reader to its producer.
    return {
        t for t in layer.ops[op].inputs if t != layer.input and t not in layer.saved_for_backward
    }


def _components(layer: PlanLayer) -> list[list[int]]:
    root = list(range(len(layer.ops)))

    def find(i: int) -> int:
        while root[i] != i:
            root[i] = root[root[i]]
            i = root[i]
        return i

    for op in layer.order:
        for tensor in _ties(layer, op):
            root[find(op)] = find(layer.producer[tensor])
    groups: dict[int, list[int]] = {}
    for op in layer.order:
        groups.setdefault(find(op), []).append(op)
    return sorted(groups.values(), key=len)


def _component(
    layer: PlanLayer, ops: list[int], movable: frozenset[str] = frozenset()
) -> tuple[_Point, ...]:
    last_use: dict[str, int] = {}
    for op in ops:
        for tensor in _ties(layer, op):
            last_use[tensor] = op
    states: dict[frozenset[str], list[_Point]] = {frozenset(): [(0, 0, 0, 0, 0, 0)]}
    for op in ops:
        states = _step(layer, op, last_use, states, movable)
        most = _HURRIED if spent() else MAX_STATES
        if sum(map(len, states.values())) > most:
            states = _fewer(states, most)
    (points,) = states.values()
    return tuple(points)


def _fewer(
    states: dict[frozenset[str], list[_Point]], most: int
) -> dict[frozenset[str], list[_Point]]:
    """A part of the partial plans: of each state the leanest, the cheapest and some between.

    What runs nothing again is always among them, so that there is a plan in the end.
    """
    give_up()
    if len(states) > most // 4:
        ranked = sorted(states, key=lambda state: min(p[2] for p in states[state]))
        states = {state: states[state] for state in ranked[: max(1, most // 4)]}
    each = max(3, most // len(states))
    found = {}
    for state, points in states.items():
        if len(points) > each:
            step = (len(points) - 1) / (each - 2)
            cheapest = min(range(len(points)), key=lambda i: points[i][2])
            chosen = sorted({cheapest, *(round(i * step) for i in range(each - 1))})
            points = [points[i] for i in chosen]
        found[state] = points
    return found


def _step(
    layer: PlanLayer,
    index: int,
    last_use: dict[str, int],
    states: dict[frozenset[str], list[_Point]],
    movable: frozenset[str],
) -> dict[frozenset[str], list[_Point]]:
    op = layer.ops[index]
    saved = [t for t in op.outputs if t in layer.saved_for_backward]
    dead = {t for t, last in last_use.items() if last == index}
    born = frozenset(t for t in op.outputs if t not in layer.saved_for_backward and t in last_use)
    reads = frozenset(_ties(layer, index))
    after: dict[frozenset[str], list[_Point]] = {}
    for absent, points in states.items():
        skip = (absent - dead) | born
        after.setdefault(skip, []).extend(_placed(points, layer, saved, movable))
        if op.name in layer.forbid_recompute:
            continue
        kept = sorted(absent & reads)
        more, bit = sum(layer.tensors[t] for t in kept), 1 << index
        after.setdefault(absent - reads - dead, []).extend(
            (k, n + more, c + op.cost, x, m | bit, away)
            for k, n, c, x, m, away in _placed(points, layer, kept, movable)
        )
    return {state: _prune(points) for state, points in after.items()}


def _placed(
    points: list[_Point], layer: PlanLayer, kept: Iterable[str], movable: frozenset[str]
) -> list[_Point]:
    # Every point with these tensors kept, each on the device or, where it may, in host memory.
    for tensor in kept:
        size = layer.tensors[tensor]
        here = [(k + size, n, c, x, m, away) for k, n, c, x, m, away in points]
        if tensor in movable and size:
            bit = 1 << list(layer.tensors).index(tensor)
            here += [(k, n, c, x + size, m, away | bit) for k, n, c, x, m, away in points]
        points = here
    return points


def _prune(points: list[_Point]) -> list[_Point]:
    if len(points) < 2:
        return points
    points = sorted(points, key=lambda p: (*p[:3], p[4].bit_count()))
    if any(p[3] for p in points):
        columns = np.array([p[:4] for p in points], dtype=np.int64).T
        alive = pareto(*columns).tolist()
    else:
        alive = _staircase([p[1] for p in points], [p[2] for p in points])
    return [points[i] for i in alive]
