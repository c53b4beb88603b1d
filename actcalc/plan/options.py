"""From a layer graph to a planning problem: sizes in bytes, costs in whole units.

A cost is what running an op's forward once more takes. With a device it is the roofline's seconds,
rounded to nanoseconds. Without one it is FLOPs, and where plans tie in FLOPs (most ops are not
matrix products) the one that moves fewer bytes is meant: FLOPs and bytes share one integer,
``flops / unit · scale + bytes``, with ``scale`` above any sum of the second part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import gcd
from typing import Literal

from actcalc.layers.core.algebra import ONE
from actcalc.layers.core.context import whole
from actcalc.layers.core.graph import Graph, Op
from actcalc.layers.model import ModelGraph
from actcalc.policy.outcome import LayerOutcome, layer_outcome
from actcalc.policy.rules import NONE, Policy
from actcalc.run.staged import StagedRun
from actcalc.solve.options import Option
from actcalc.solve.problem import LIMIT, PlanLayer, PlanOp
from actcalc.solve.segments import Chain
from actcalc.specs.recompute import MODULES

Unit = Literal["seconds", "flops"]

NANO = 1_000_000_000
_SHARE = 100
"""Steps in which the bytes moved by an op are told apart where FLOPs tie."""


@dataclass(frozen=True, eq=False)
class Costs:
    """Cost of running each op of a model's layers once more, as whole numbers.

    ``unit`` is what they stand for; :meth:`value` turns a sum of them back into seconds (of one
    rank) or FLOPs (over all ranks), for one micro-batch.
    """

    unit: Unit
    of: dict[int, tuple[int, ...]]
    flops_unit: int = 1
    scale: int = 1
    gathers: Mapping[int, int] = field(default_factory=dict)
    """Cost of gathering a layer's input that was kept in parts; none where FLOPs are counted."""

    def ops(self, graph: Graph) -> tuple[int, ...]:
        """Cost of each op of ``graph``, in order."""
        return self.of[id(graph)]

    def total(self, graph: Graph, ops: Iterable[Op]) -> int:
        """Summed cost of some ops of ``graph``."""
        names = {op.name for op in ops}
        return sum(
            cost for op, cost in zip(graph.ops, self.ops(graph), strict=True) if op.name in names
        )

    def gather(self, graph: Graph, policy: Policy) -> int:
        """Cost of gathering the layer's input again, where ``policy`` keeps a part of it."""
        return self.gathers.get(id(graph), 0) if policy.boundary == "split" else 0

    def value(self, cost: int) -> float | int:
        """Seconds, or FLOPs, that ``cost`` stands for."""
        if self.unit == "seconds":
            return cost / NANO
        return cost // self.scale * self.flops_unit


def costs_of(staged: StagedRun) -> Costs:
    """Costs of every op in seconds on the run's device, else in FLOPs.

    Raises ``SpecError`` where the device has no known peak for the run's precision.
    """
    graphs = [run.graph for run in staged.kinds]
    if staged.run.device is not None:
        from actcalc.cost.roofline import roofline_of

        roofline = roofline_of(staged)
        return Costs(
            "seconds",
            {
                id(g): tuple(round(NANO * time.forward_seconds) for time in roofline.ops(g))
                for g in graphs
            },
            gathers={
                id(g): round(NANO * roofline.regathered(g, staged.policy("full-sharded")))
                for g in graphs
            },
        )
    return _flops(staged.graph, graphs)


def _flops(model: ModelGraph, graphs: Sequence[Graph]) -> Costs:
    sizes = whole(dict(model.sizes))
    flops = {id(g): [int(op.flops.value(sizes)) for op in g.ops] for g in graphs}
    moved = {id(g): [_moved(model, g, op) for op in g.ops] for g in graphs}
    most = max((m for row in moved.values() for m in row), default=0) or 1
    shares = {key: [-(-_SHARE * m // most) for m in row] for key, row in moved.items()}
    unit = gcd(*(f for row in flops.values() for f in row)) or 1
    counts = {id(run.graph): run.count for run in model.kinds}
    scale = 1 + sum(counts[key] * sum(row) for key, row in shares.items())
    if sum(counts[key] * sum(row) for key, row in flops.items()) // unit * scale >= LIMIT // 4:
        # The tie-break is dropped where it has no room: FLOPs alone stay exact.
        scale, shares = 1, {key: [0] * len(row) for key, row in shares.items()}
    return Costs(
        "flops",
        {
            key: tuple(f // unit * scale + share for f, share in zip(row, shares[key], strict=True))
            for key, row in flops.items()
        },
        unit,
        scale,
    )


def _moved(model: ModelGraph, graph: Graph, op: Op) -> int:
    names = {*op.inputs, *op.outputs} - graph.shared
    return sum(int(graph.tensors[name].bytes.value(model.sizes)) for name in names)


def plan_layer(model: ModelGraph, graph: Graph, costs: Costs) -> PlanLayer:
    """One kind of layer as a planning problem, op by op.

    Tensors that exist once for all layers are left out. Where no op saves the layer's input it is
    stored only if a re-run op reads it: the planner's own input is then an empty tensor, which an
    op that must not run again turns into the real one.
    """
    sizes = model.sizes
    own = [name for name in graph.tensors if name not in graph.shared]
    tensors = {name: int(graph.tensors[name].bytes.value(sizes)) for name in own}
    ops = [
        PlanOp(
            op.name,
            tuple(n for n in dict.fromkeys(op.inputs) if n not in graph.shared),
            tuple(n for n in op.outputs if n not in graph.shared),
            cost,
        )
        for op, cost in zip(graph.ops, costs.ops(graph), strict=True)
    ]
    forbidden = {op.name for op in graph.ops if not op.rerunnable}
    start = graph.input
    if graph.input not in graph.saved:
        start = "(handed over)"
        tensors[start] = 0
        ops.insert(0, PlanOp(ARRIVAL, (start,), (graph.input,), 0))
        forbidden.add(ARRIVAL)
    return PlanLayer(
        input=start,
        tensors=tensors,
        saved_for_backward=frozenset(n for n in graph.saved if n not in graph.shared),
        ops=tuple(ops),
        forbid_recompute=frozenset(forbidden),
        name=graph.name,
        grain=costs.scale,
    )


ARRIVAL = "(arrival)"
"""The op that stands for a layer's input arriving; it never runs again."""


@dataclass(frozen=True)
class ModuleChoice:
    """What an option of ``module`` semantics stands for: a policy, its ops, its stored tensors."""

    policy: str
    recompute: tuple[str, ...]
    kept: tuple[str, ...]
    offloaded: tuple[str, ...] = ()


def outcome_of(graph: Graph, stored: Iterable[str], again: Iterable[str]) -> LayerOutcome:
    """A layer that stores the tensors ``stored`` and re-runs the ops ``again``."""
    kept, names = set(stored), set(again)
    return LayerOutcome(
        graph=graph,
        stored=tuple(name for name in graph.tensors if name in kept),
        copies=ONE,
        restored=tuple(n for n in graph.saved if n not in graph.shared and n not in kept),
        rerun=tuple(op for op in graph.ops if op.name in names),
    )


def policy_option(model: ModelGraph, graph: Graph, costs: Costs, policy: Policy) -> Option:
    """One layer under ``policy``: bytes stored and brought back, cost of what runs again."""
    outcome = layer_outcome(model, graph, policy)
    size = outcome.sizes(model)
    return Option(
        size.stored,
        size.restored,
        costs.total(graph, outcome.rerun) + costs.gather(graph, policy),
        ModuleChoice(policy.name, tuple(op.name for op in outcome.rerun), outcome.stored),
    )


def wrapped_modules(model: ModelGraph, graph: Graph) -> tuple[str, ...]:
    """Recompute modules this layer has and the framework can wrap.

    Discarding a module's output needs Megatron-Core's ``CheckpointWithoutOutput``; PyTorch's own
    wrapper keeps what the next op saved of it.
    """
    tags = {tag for op in graph.ops for tag in op.modules}
    discards = model.context.framework.discards_outputs
    return tuple(
        name
        for name, module in MODULES.items()
        if module.tag in tags and (discards or not module.discards_output)
    )


def module_policies(model: ModelGraph, graph: Graph, full: Policy) -> tuple[Policy, ...]:
    """Every combination of wrapped modules of one layer, none and full, each re-run set once."""
    names = wrapped_modules(model, graph)
    found: dict[frozenset[str], Policy] = {frozenset(): NONE}
    for size in range(1, len(names) + 1):
        for chosen in combinations(names, size):
            tags = {MODULES[name].tag for name in chosen}
            again = {op.name for op in graph.ops if op.modules & tags}
            drops = {name for name in chosen if MODULES[name].discards_output}
            key = frozenset(again | {f"drops {name}" for name in drops})
            found.setdefault(key, Policy("+".join(chosen), modules=chosen))
    return (*found.values(), full)


def module_chain(model: ModelGraph, graph: Graph, costs: Costs, full: Policy) -> Chain:
    """The layer's part in a segment of layers that re-runs whole from one stored input."""
    option = policy_option(model, graph, costs, full)
    choice = option.payload
    assert isinstance(choice, ModuleChoice)
    return Chain(
        head_bytes=option.stored,
        extra_bytes=0,
        working_bytes=option.working,
        cost=option.cost,
        recompute=choice.recompute,
        kept=(),
    )
