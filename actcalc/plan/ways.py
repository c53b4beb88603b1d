"""The ways to run each kind of layer of a run, measured as ``actcalc memory`` measures them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from actcalc.layers.core.graph import Graph, Op
from actcalc.layers.model import ModelGraph
from actcalc.memory.known import Known
from actcalc.memory.parts import Timeline
from actcalc.memory.stage import read
from actcalc.memory.working import working
from actcalc.plan.options import Costs, module_policies, outcome_of, plan_layer, policy_option
from actcalc.policy.outcome import LayerOutcome, layer_outcome
from actcalc.policy.rules import NONE, Policy, rerun_ops
from actcalc.solve.frontier import LayerOption, layer_frontier
from actcalc.solve.layers import layer_options
from actcalc.solve.options import Option, OptionSet
from actcalc.solve.problem import PlanLayer
from actcalc.solve.stage import Way, Ways


class Measured(NamedTuple):
    """One way to run a layer: what the solver stores of it, and what memory says of it."""

    option: Option | LayerOption
    outcome: LayerOutcome
    again: Sequence[Op] = ()
    """What re-runs, as it is asked for: a wrapper holds all that these ops are given."""
    whole: bool = False
    """The layer re-runs whole before its backward begins."""


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
        self._rows: dict[int, list[tuple[Measured, Way]]] = {}
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
        if id(outcome.graph) not in self._known:
            self._known[id(outcome.graph)] = Known(self.model, outcome.graph)
        known = self._known[id(outcome.graph)]
        work = working(self.model, outcome, self.timeline.options, whole=row.whole, known=known)
        held = self.timeline.alive(outcome, row.option.stored, work)
        return Way(*held, row.option.cost, row.option)

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
        return max(
            max(way.forward, way.backward) - row.option.stored - row.option.working
            for row, way in self._measured(graph)
        )

    def _undominated(self, graph: Graph, without: frozenset[str], *, alive: bool) -> Ways:
        key = (id(graph), without, alive)
        if key not in self._ways:
            rows = self._measured(graph)
            if without:
                rows = [row for row in rows if not without & read(row[0].again)]
            ways = [
                way if alive else way._replace(forward=way.stored, backward=way.stored)
                for _, way in rows
            ]
            self._ways[key] = Ways(ways, grain=self.costs.scale)
        return self._ways[key]

    def _measured(self, graph: Graph) -> list[tuple[Measured, Way]]:
        if id(graph) not in self._rows:
            self._rows[id(graph)] = [(row, self.way(row)) for row in self._all(graph)]
        return self._rows[id(graph)]

    def _all(self, graph: Graph) -> Iterator[Measured]:
        if self.special is not None:
            for special, outcome in self.special(graph):
                yield Measured(special, outcome, outcome.rerun)
            return
        if graph.gradient != "passes":
            yield self._policy(graph, NONE)
        elif self.modules:
            for policy in module_policies(self.model, graph, self.full):
                yield self._policy(graph, policy)
        else:
            layer = self.layer(graph)
            for option in layer_frontier(layer):
                kept = {layer.input, *option.kept}
                outcome = outcome_of(graph, kept, option.recompute)
                yield Measured(option, outcome, outcome.rerun)
        for policy in self.policies:
            yield self._policy(graph, policy)

    def _policy(self, graph: Graph, policy: Policy) -> Measured:
        option = policy_option(self.model, graph, self.costs, policy)
        again = rerun_ops(policy, graph)
        return Measured(option, layer_outcome(self.model, graph, policy), again, policy.whole)

    def _set(self, graph: Graph) -> OptionSet:
        if self.special is None and not self.modules:
            return layer_options(self.layer(graph)).joined(self.of_policies(graph))
        rows = list(self._all(graph))
        options = [row.option for row in rows if isinstance(row.option, Option)]
        return OptionSet.of(options)

    def of_policies(self, graph: Graph) -> list[Option]:
        """One layer under each of the policies."""
        return [self.named(graph, policy)[0] for policy in self.policies]
