"""The ways to run each kind of layer of a run, measured as ``actcalc memory`` measures them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from actcalc.layers.core.graph import Graph, Op
from actcalc.layers.model import ModelGraph
from actcalc.memory.known import Known
from actcalc.memory.many import Choices, many_working
from actcalc.memory.parts import Timeline
from actcalc.memory.stage import read
from actcalc.memory.working import working
from actcalc.plan.options import Costs, module_policies, plan_layer, policy_option
from actcalc.policy.outcome import LayerOutcome, layer_outcome
from actcalc.policy.rules import NONE, Policy, rerun_ops
from actcalc.solve.frontier import Bools, Ints, LayerFrontier, LayerOption, layer_frontier
from actcalc.solve.layers import layer_options
from actcalc.solve.options import Option, OptionSet
from actcalc.solve.problem import LIMIT, PlanLayer
from actcalc.solve.stage import Way, Ways


class Measured(NamedTuple):
    """One way to run a layer: what the solver stores of it, and what memory says of it."""

    option: Option | LayerOption
    outcome: LayerOutcome
    again: Sequence[Op] = ()
    """What re-runs, as it is asked for: a wrapper holds all that these ops are given."""
    whole: bool = False
    """The layer re-runs whole before its backward begins."""


class _Table:
    """All ways to run one kind of layer, those of its frontier first, and what each stands for."""

    def __init__(
        self,
        graph: Graph,
        frontier: LayerFrontier | None,
        figures: Ints,
        again: Mapping[str, Bools],
        others: Sequence[Measured],
        working: Ints,
    ) -> None:
        """``figures`` has a row per way: stored, forward, backward, cost."""
        self.graph, self.figures = graph, figures
        self.excess = int((figures[:, 1:3].max(axis=1) - figures[:, 0] - working).max())
        """The most that any way has alive beyond what it stores and makes again."""
        self._again, self._others, self._frontier = again, others, frontier
        self._first = 0 if frontier is None else len(frontier)
        self._options: dict[int, Option | LayerOption] = {}

    def ways(self, without: frozenset[str]) -> list[Way]:
        """Those that re-run nothing that is given one of the tensors ``without``."""
        gone = np.zeros(self._first, dtype=bool)
        for op in self.graph.ops:
            if op.name in self._again and without.intersection(op.inputs):
                gone |= self._again[op.name]
        gone = np.append(gone, [bool(without & read(row.again)) for row in self._others])
        rows = zip(self.figures[~gone].tolist(), np.flatnonzero(~gone).tolist(), strict=True)
        return [Way(k, f, b, c, row) for (k, f, b, c), row in rows]

    def option(self, row: int) -> Option | LayerOption:
        """What a way stands for: the same object whenever it is asked for."""
        if row >= self._first or self._frontier is None:
            return self._others[row - self._first].option
        if row not in self._options:
            self._options[row] = self._frontier[row]
        return self._options[row]


class LayerWays:
    """The ways to run the layers of a model; each kind of layer is looked at once.

    ``policies`` are those that decide for one layer at a time. ``modules`` plans whole modules
    (with ``full`` for whole layers) instead of single ops. ``special`` replaces all of that.
    """

    def __init__(
        self,
        timeline: Timeline,
        costs: Costs,
        policies: Sequence[Policy],
        *,
        full: Policy,
        modules: bool,
        special: Callable[[Graph], Sequence[tuple[Option, LayerOutcome]]] | None,
    ) -> None:
        self.timeline, self.costs, self.policies = timeline, costs, policies
        self.model: ModelGraph = timeline.model
        self.full, self.modules, self.special = full, modules, special
        self._tables: dict[int, _Table] = {}
        self._ways: dict[tuple[int, frozenset[str], bool], Ways] = {}
        self._sets: dict[int, OptionSet] = {}
        self._layers: dict[int, PlanLayer] = {}
        self._known: dict[int, Known] = {}
        self._named: dict[tuple[int, str], tuple[Option, Way]] = {}

    def layer(self, graph: Graph) -> PlanLayer:
        """One kind of layer as a problem of its own, op by op."""
        if id(graph) not in self._layers:
            self._layers[id(graph)] = plan_layer(self.model, graph, self.costs)
        return self._layers[id(graph)]

    def named(self, graph: Graph, policy: Policy) -> tuple[Option, Way]:
        """One layer under one policy."""
        key = (id(graph), policy.name)
        if key not in self._named:
            row = self._policy(graph, policy)
            assert isinstance(row.option, Option)
            self._named[key] = (row.option, self.way(row))
        return self._named[key]

    def way(self, row: Measured) -> Way:
        """What memory says of one way: stored, and most alive in forward and backward."""
        outcome = row.outcome
        known = self._known_of(outcome.graph)
        work = working(self.model, outcome, self.timeline.options, whole=row.whole, known=known)
        held = self.timeline.alive(outcome, row.option.stored, work)
        return Way(*held, row.option.cost, row.option)

    def _known_of(self, graph: Graph) -> Known:
        if id(graph) not in self._known:
            self._known[id(graph)] = Known(self.model, graph)
        return self._known[id(graph)]

    def option(self, graph: Graph, way: Way) -> Option | LayerOption:
        """What a way of :meth:`measured` or :meth:`stored` stands for."""
        return self._table(graph).option(way.payload)

    def measured(self, graph: Graph, without: frozenset[str] = frozenset()) -> Ways:
        """The undominated ways, with their working sets.

        Of those that re-run nothing that is given one of the tensors ``without``.
        """
        return self._undominated(graph, without, alive=True)

    def stored(self, graph: Graph, without: frozenset[str] = frozenset()) -> Ways:
        """The undominated ways by stored bytes alone, as if nothing worked."""
        return self._undominated(graph, without, alive=False)

    def options(self, graph: Graph) -> OptionSet:
        """The undominated ways by stored bytes and what they make again."""
        if id(graph) not in self._sets:
            self._sets[id(graph)] = self._set(graph)
        return self._sets[id(graph)]

    def excess(self, graph: Graph) -> int:
        """The most that any way has alive beyond what it stores and makes again."""
        return self._table(graph).excess

    def _undominated(self, graph: Graph, without: frozenset[str], *, alive: bool) -> Ways:
        key = (id(graph), without, alive)
        if key not in self._ways:
            ways = self._table(graph).ways(without)
            if not alive:
                ways = [way._replace(forward=way.stored, backward=way.stored) for way in ways]
            self._ways[key] = Ways(ways, grain=self.costs.scale)
        return self._ways[key]

    def _table(self, graph: Graph) -> _Table:
        if id(graph) not in self._tables:
            by_op = self.special is None and not self.modules and graph.gradient == "passes"
            frontier = layer_frontier(self.layer(graph)) if by_op else None
            self._tables[id(graph)] = self._measure(graph, frontier)
        return self._tables[id(graph)]

    def _measure(self, graph: Graph, frontier: LayerFrontier | None) -> _Table:
        others = list(self._listed(graph))
        rows = [self.way(row)[:4] for row in others]
        small = all(figure < LIMIT for row in rows for figure in row)  # else refused, by name
        figures = np.array(rows, dtype=np.int64 if small else object).reshape(len(rows), 4)
        working = np.array([row.option.working for row in others], dtype=np.int64)
        if frontier is None:
            return _Table(graph, None, figures, {}, others, working)
        again = frontier.rerun()
        kept = frontier.kept(again)
        choices = Choices({n: kept[n] for n in graph.tensors if n in kept}, again, len(frontier))
        known, options = self._known_of(graph), self.timeline.options
        found = many_working(self.model, graph, options, known, choices)
        first = [frontier.stored, *(np.maximum(frontier.stored, high) for high in found)]
        first.append(frontier.cost)
        figures = np.concatenate([np.stack(first, axis=1), figures])
        working = np.append(frontier.working, working)
        return _Table(graph, frontier, figures, again, others, working)

    def _listed(self, graph: Graph) -> Iterator[Measured]:
        """The ways that are no choice of single ops."""
        if self.special is not None:
            for special, outcome in self.special(graph):
                yield Measured(special, outcome, outcome.rerun)
            return
        if graph.gradient != "passes":
            yield self._policy(graph, NONE)
        elif self.modules:
            for policy in module_policies(self.model, graph, self.full):
                yield self._policy(graph, policy)
        for policy in self.policies:
            yield self._policy(graph, policy)

    def _policy(self, graph: Graph, policy: Policy) -> Measured:
        option = policy_option(self.model, graph, self.costs, policy)
        again = rerun_ops(policy, graph)
        return Measured(option, layer_outcome(self.model, graph, policy), again, policy.whole)

    def _set(self, graph: Graph) -> OptionSet:
        if self.special is None and not self.modules:
            return layer_options(self.layer(graph)).joined(self.of_policies(graph))
        found = [row.option for row in self._listed(graph)]
        options = [option for option in found if isinstance(option, Option)]
        return OptionSet.of(options)

    def of_policies(self, graph: Graph) -> list[Option]:
        """One layer under each of the policies."""
        return [self.named(graph, policy)[0] for policy in self.policies]
