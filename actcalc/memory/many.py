"""The highest moments of one layer run in many ways, all at once.

:class:`actcalc.memory.working.LayerWalk` walks through one way and names what is alive at every
moment; a planner has thousands of ways to run a layer and asks for the highest moments alone. Here
a column stands for each way, and a tensor is alive in some of them. Both count the same; the tests
hold one against the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from actcalc.layers.core.algebra import ONE
from actcalc.layers.core.graph import Graph, Op
from actcalc.layers.model import ModelGraph
from actcalc.memory.known import Beside, Known
from actcalc.memory.working import LayerWalk, Options
from actcalc.policy.outcome import LayerOutcome

Bools = NDArray[np.bool_]
Numbers = NDArray[Any]

_WIDE = 2**62  # more than this is no 64-bit number: Python's own are exact


class Choices(NamedTuple):
    """Many ways to run one layer: of each way, which tensors it stores and which ops re-run."""

    stored: Mapping[str, Bools]
    again: Mapping[str, Bools]
    ways: int


def many_working(
    model: ModelGraph, graph: Graph, options: Options, known: Known, choices: Choices
) -> tuple[Numbers, Numbers]:
    """The most bytes alive in forward and in backward of each way, what it stores included.

    Of a layer through which gradients pass, and that does not re-run whole: what re-runs makes its
    tensors when backward asks for them (:func:`actcalc.memory.working.working`).
    """
    plain = LayerOutcome(graph, graph.saved, ONE, (), ())
    walk = _ManyWalks(LayerWalk(model, plain, options, None, True, known), choices)
    return walk.forward(), walk.backward()


class _Alive:
    """In which ways each tensor is alive, and the bytes of all of them by way."""

    def __init__(self, own: Mapping[str, int], nobody: Bools, kind: Any) -> None:
        self.own, self.nobody, self.kind = own, nobody, kind
        self.where: dict[str, Bools] = {}
        self.total: Numbers = np.zeros(len(nobody), dtype=kind)

    def add(self, name: str, where: Bools) -> None:
        before = self.where.get(name, self.nobody)
        self.total = self.total + self.own[name] * (where & ~before).astype(self.kind)
        self.where[name] = before | where

    def drop(self, name: str, where: Bools) -> None:
        before = self.where.get(name, self.nobody)
        self.total = self.total - self.own[name] * (before & where).astype(self.kind)
        self.where[name] = before & ~where


class _ManyWalks:
    """One layer, op by op, in all its ways."""

    def __init__(self, walk: LayerWalk, choices: Choices) -> None:
        self.walk, self.graph, self.known = walk, walk.graph, walk.known
        self.nobody = np.zeros(choices.ways, dtype=bool)
        self.everybody = ~self.nobody
        self.stored = choices.stored
        self.again = [choices.again.get(op.name, self.nobody) for op in self.graph.ops]
        self.numbers = self._numbers()
        self.place = {op.name: index for index, op in enumerate(self.graph.ops)}
        self.beside = walk.beside()
        most = sum(self.known.sizes.values()) + max(map(_most_beside, self.beside), default=0)
        most += sum(walk.inside(op, backward=way) for op in self.graph.ops for way in (True, False))
        self.kind: Any = np.int64 if most < _WIDE else object

    def _numbers(self) -> list[NDArray[np.int64]]:
        """Of each op the number of the run of consecutive re-run ops it is in: its module."""
        found, number, before = [], np.zeros(len(self.nobody), dtype=np.int64), self.nobody
        for again in self.again:
            number = number + (again & ~before)
            before = again
            found.append(number)
        return found

    def forward(self) -> Numbers:
        """The highest moment of forward."""
        alive = _Alive(self.known.own, self.nobody, self.kind)
        alive.add(self.graph.input, self.everybody)
        high = alive.total
        for op, ends in zip(self.graph.ops, self.known.ends, strict=True):
            for name in op.outputs:
                alive.add(name, self.everybody)
            high = np.maximum(high, alive.total + self.walk.inside(op, backward=False))
            for name in ends:
                alive.drop(name, ~self.stored.get(name, self.nobody))
        return high

    def backward(self) -> Numbers:
        """The highest moment of backward, re-runs included."""
        alive = _Alive(self.known.own, self.nobody, self.kind)
        for name, where in self.stored.items():
            alive.add(name, where)
        pending = {
            name: ~self.stored.get(name, self.nobody)
            for name in self.graph.saved
            if name not in self.graph.shared
        }
        savers = dict(self.known.savers)
        high = np.zeros(len(self.nobody), dtype=self.kind)
        for op, own in zip(reversed(self.graph.ops), self.beside, strict=True):
            high = np.maximum(high, self._remade(op, own, alive, pending))
            high = np.maximum(high, alive.total + own.gradients + own.inside)
            for name in self.known.saves[op.name]:
                savers[name] -= 1
                if not savers[name]:
                    alive.drop(name, self.everybody)
            high = np.maximum(high, alive.total + own.after + own.summing)
        return high

    def _remade(self, op: Op, own: Beside, alive: _Alive, pending: dict[str, Bools]) -> Numbers:
        """The moment in which what ``op`` asks for runs again; 0 in ways where nothing does."""
        members = self._members(self._asking(op, pending))
        made = {
            name: pending[name] & runs
            for name, runs in self._reached(members).items()
            if name in pending and (pending[name] & runs).any()
        }
        some = np.logical_or.reduce([self.nobody, *made.values()])
        if not made:
            return np.zeros(len(some), dtype=self.kind)
        for name, where in made.items():
            alive.add(name, where)
            pending[name] = pending[name] & ~where
        passing = np.zeros(len(some), dtype=self.kind)
        for index, runs in members.items():
            names = self.known.outputs[self.graph.ops[index].name]
            size = sum(
                self.known.own[name] * (~made.get(name, self.nobody)).astype(self.kind)
                for name in names
            )
            passing = np.maximum(passing, size * runs.astype(self.kind))
        now: Numbers = alive.total + own.before + own.kept + passing
        found: Numbers = now * some.astype(self.kind)
        return found

    def _asking(self, op: Op, pending: Mapping[str, Bools]) -> list[tuple[int, Bools]]:
        """Ops whose modules run again before the backward of ``op``: itself, and makers."""
        asking = [(self.place[op.name], self.everybody)]
        for name in self.known.saves[op.name] & pending.keys():
            makers = self.known.makers.get(name, ())
            asking += [(self.place[maker], pending[name]) for maker in makers]
        found = [(index, where & self.again[index]) for index, where in asking]
        return [(index, where) for index, where in found if where.any()]

    def _members(self, asking: Iterable[tuple[int, Bools]]) -> dict[int, Bools]:
        """All ops of their modules, and in which ways."""
        found: dict[int, Bools] = {}
        for index, where in asking:
            number = self.numbers[index]
            for way in (range(index, -1, -1), range(index + 1, len(self.again))):
                for other in way:
                    runs = where & self.again[other] & (self.numbers[other] == number)
                    if not runs.any():
                        break
                    found[other] = found.get(other, self.nobody) | runs
        return found

    def _reached(self, members: Mapping[int, Bools]) -> dict[str, Bools]:
        """What those ops make or save, and in which ways."""
        found: dict[str, Bools] = {}
        for index, runs in members.items():
            op = self.graph.ops[index]
            for name in (*op.outputs, *op.saves):
                found[name] = found.get(name, self.nobody) | runs
        return found


def _most_beside(own: Beside) -> int:
    return max(own.before + own.kept, own.gradients + own.inside, own.after + own.summing)
