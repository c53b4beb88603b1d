"""The layers of a stack: runs of equal ones with their options, and how they behave in chains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from actcalc.errors import SpecError
from actcalc.solve.beside import Beside, Room
from actcalc.solve.frontier import layer_frontier
from actcalc.solve.options import OptionSet
from actcalc.solve.problem import (
    LIMIT,
    PeakModel,
    PlanLayer,
    Problem,
    check_int,
    check_peak_model,
)
from actcalc.solve.segments import Chain, Step


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """A run of equal layers of the stack.

    ``same``: every layer of this ``name`` must take the same option (and, with segments, every run
    is either single layers or chains of one length, the last one shorter). ``chain``: how these
    layers behave inside a chain, None if they may not. ``inflight`` overrides the number of
    micro-batches in flight for this run (chunks of an interleaved pipeline).
    """

    name: str
    options: OptionSet
    count: int
    same: bool = False
    chain: Chain | None = None
    inflight: int | None = None


@lru_cache(maxsize=256)
def layer_options(layer: PlanLayer) -> OptionSet:
    """The exact option set of a layer kind, cached.

    Raises:
        SpecError: see :func:`actcalc.solve.frontier.layer_frontier`.
    """
    return OptionSet.from_frontier(layer_frontier(layer))


def layer_chain(layer: PlanLayer) -> Chain:
    """How ``layer`` behaves inside a chain that is re-run whole.

    Every op that may be re-run is; outputs of forbidden ops stay stored where needed, so a chain
    stores the first layer's input plus those.
    """
    every = layer_frontier(layer).everything
    return Chain(
        head_bytes=layer.input_bytes,
        extra_bytes=every.stored - layer.input_bytes,
        working_bytes=every.working,
        cost=every.cost,
        recompute=every.recompute,
        kept=every.kept,
    )


def problem_groups(problem: Problem, *, same: Iterable[str] = ()) -> tuple[LayerGroup, ...]:
    """The stack of ``problem`` as runs with exact options; kinds in ``same`` take one option each.

    Raises:
        SpecError: ``same`` names an unknown kind.
    """
    same = frozenset(same)
    unknown = same - set(problem.layer_types)
    if unknown:
        raise SpecError(
            f"same option asked for unknown layer types {sorted(unknown)}",
            hint=f"known: {sorted(problem.layer_types)}",
        )
    segments = problem.peak_model == "stored+working+segments"
    groups: list[LayerGroup] = []
    for kind, count in problem.stack:
        layer = problem.layer_types[kind]
        chain = layer_chain(layer) if segments else None
        groups.append(LayerGroup(kind, layer_options(layer), count, kind in same, chain))
    return tuple(groups)


@dataclass(frozen=True)
class Stack:
    """A stack of layers, the peak model, and the GPUs that follow its plan."""

    groups: tuple[LayerGroup, ...]
    inflight: int
    model: PeakModel
    max_segment: int
    holders: tuple[tuple[Beside, int], ...]

    @property
    def beside(self) -> Beside:
        """What else is in memory, where one GPU follows the plan."""
        return self.holders[0][0]

    def room(self, budget: int) -> Callable[[int], int]:
        """Bytes that may be stored within ``budget``, by the largest working set."""
        return self.shared.within(budget, working=self.model not in ("stored", "timeline"))

    @property
    def shared(self) -> Room:
        """What the GPUs of this plan leave for stored bytes, weighed as in ``merged``."""
        return Room(self.holders)

    @classmethod
    def of(
        cls,
        groups: Sequence[LayerGroup],
        inflight: int,
        const: int | Beside,
        model: PeakModel,
        max_segment: int,
    ) -> Stack:
        """The stack of these layers; ``SpecError`` as :func:`actcalc.solve.stack.solve_groups`."""
        check_int(inflight, "inflight", low=1, high=1_000_000)
        check_int(max_segment, "max_segment", low=1)
        check_peak_model(model)
        if not groups:
            raise SpecError("no layers to plan", hint="give at least one group of layers")
        held = cost = 0
        sets: dict[str, OptionSet] = {}
        for g in groups:
            check_int(g.count, f"count of {g.name!r}", low=1)
            m = inflight if g.inflight is None else g.inflight
            check_int(m, f"inflight of {g.name!r}", low=1, high=1_000_000)
            held += g.count * (m * max(g.options.stored) + max(g.options.working))
            cost += g.count * max(g.options.cost)
            if sets.setdefault(g.name, g.options) is not g.options:
                raise SpecError(
                    f"two groups called {g.name!r} have different options",
                    hint="pass the same option set, or use two names",
                )
        if held >= LIMIT or cost >= LIMIT:
            raise SpecError(
                f"bytes in flight ({held}) or costs ({cost}) reach 2**60",
                hint="check the sizes, or state costs in a coarser unit",
            )
        return cls(tuple(groups), inflight, model, max_segment, ((Beside.of(const), 1),))

    @property
    def moves(self) -> bool:
        """Whether any layer may offload tensors."""
        return any(g.options.moved_levels[-1] for g in self.groups)

    def weight(self, group: LayerGroup) -> int:
        """Micro-batches in flight of a run of layers."""
        return self.inflight if group.inflight is None else group.inflight

    def merged(self) -> list[tuple[list[int], OptionSet, int, int]]:
        """(indices of groups, options, layers, weight) where the order of layers is irrelevant."""
        found: dict[tuple[str | int, int, bool], list[int]] = {}
        for i, g in enumerate(self.groups):
            # Kinds with one option set are one kind here: telling them apart only makes ties.
            kind = g.name if g.same else id(g.options)
            found.setdefault((kind, 0 if g.same else self.weight(g), g.same), []).append(i)
        parts: list[tuple[list[int], OptionSet, int, int]] = []
        for (_, weight, same), members in found.items():
            options = self.groups[members[0]].options
            if same:
                # One decision for all: its bytes weigh with every layer's micro-batches.
                layers = sum(self.groups[i].count for i in members)
                total = sum(self.groups[i].count * self.weight(self.groups[i]) for i in members)
                parts.append((members, options.together(layers, total), 1, 1))
            else:
                parts.append((members, options, sum(self.groups[i].count for i in members), weight))
        return parts


class Answer(NamedTuple):
    """A plan as steps through the stack, and what is proven of its cost.

    ``bound`` is what the relaxation alone proves; ``lower`` what the search did (None: the cost).
    """

    cost: int
    units: list[Step]
    bound: int
    states: int
    method: str
    lower: int | None = None
