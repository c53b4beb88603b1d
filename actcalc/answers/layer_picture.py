"""What one layer keeps, in parts, and the order of its work: the data of compare's charts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from actcalc.answers.header import RunAnswer, header
from actcalc.cost.roofline import roofline_of
from actcalc.layers.core.algebra import Expr, symbol
from actcalc.layers.core.graph import Graph
from actcalc.policy.leaves import keepers, module_of
from actcalc.policy.rules import Policy
from actcalc.run.staged import StagedRun
from actcalc.specs.run import Run

Kind = Literal["forward", "re-run", "backward"]
INPUT = "layer input"
"""Where the layer's input is counted, whichever op saves it."""
DRAWN = 3
"""Layers of a time line: enough to see the order in which they re-run."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Tensors that one layer keeps under a policy, of one module and one kind of shape."""

    module: str
    """Part of the layer they belong to: its input, norm, attention, ffn, ..."""
    quadratic: bool
    """Whether they grow with the square of the sequence (attention's s x s scores)."""
    bytes: int
    """Their bytes on one rank, for one micro-batch."""
    units: float
    """The same over the picture's unit."""
    tensors: tuple[str, ...]
    """Their names."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One layer's forward, re-run or backward on the time line."""

    kind: Kind
    """What is done."""
    layer: int
    """Which layer, from 1."""
    start: float
    """When it begins, in the picture's measure of work."""
    end: float
    """When it ends."""


@dataclass(frozen=True, kw_only=True)
class PolicyPicture:
    """One policy: what a layer keeps, and the work of a few layers in order."""

    policy: str
    """Its name."""
    segmented: bool
    """Whether a segment of several layers keeps together what ``parts`` say of one."""
    formula: str
    """What the layer keeps, as a formula."""
    parts: tuple[Part, ...]
    """What it keeps; the bytes sum to what the layer keeps."""
    work: tuple[Work, ...]
    """Forward, re-runs and backward of the drawn layers, in order."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LayerPicture(RunAnswer):
    """One layer of the most frequent kind under each policy."""

    layer: str
    """Its kind: dense, moe, ..."""
    count: int
    """How many the model has."""
    unit: str
    """The unit of ``Part.units``: sbh over the degrees that split the sequence or the width."""
    unit_bytes: float
    """What one of it is in bytes."""
    measure: Literal["flops", "seconds"]
    """Of ``Work``: FLOPs over all ranks, or seconds of one rank where there is a device."""
    drawn: int
    """Layers on the time line."""
    policies: tuple[PolicyPicture, ...]
    """One entry per policy."""


def layer_picture(run: Run | StagedRun, names: tuple[str, ...] = ()) -> LayerPicture:
    """What one layer keeps and does under the policies ``names`` (the run's, or the usual ones).

    Raises ``SpecError`` for an unknown policy.
    """
    staged = StagedRun.of(run)
    run = staged.asked
    unit = _unit(staged)
    one = float(unit.value(staged.graph.sizes))
    drawn = min(DRAWN, staged.longest)
    amounts = _seconds(staged) if run.device else _flops(staged)
    policies = [staged.policy(name) for name in names or run.policies or staged.usual_policies]
    return LayerPicture(
        **header(staged),
        layer=staged.main.label,
        count=staged.main.count,
        unit=unit.formula(),
        unit_bytes=one,
        measure="seconds" if run.device else "flops",
        drawn=drawn,
        policies=tuple(
            PolicyPicture(
                policy=policy.name,
                segmented=policy.segmented,
                formula=staged.under(policy).outcome(staged.main.graph).stored_size.formula(),
                parts=_parts(staged, policy, one),
                work=tuple(_placed(policy, drawn, amounts)),
            )
            for policy in policies
        ),
    )


def _unit(staged: StagedRun) -> Expr:
    """sbh over tensor and context parallelism: one byte of each element of a split activation."""
    unit = symbol("s") * symbol("b") * symbol("h")
    layout = staged.run.layout
    for name, degree in (("t", layout.tp), ("c", layout.cp)):
        if degree > 1:
            unit = unit / symbol(name)
    return unit


def _parts(staged: StagedRun, policy: Policy, unit: float) -> tuple[Part, ...]:
    graph = staged.main.graph
    found: dict[tuple[str, bool], list[tuple[str, int]]] = {}
    outcome = staged.under(policy).outcome(graph)
    for name, ops in keepers(outcome, outcome.stored).items():
        module = INPUT if name == graph.input else module_of(ops)
        size = int((graph.tensors[name].bytes * outcome.copies).value(staged.graph.sizes))
        found.setdefault((module, _quadratic(graph, name)), []).append((name, size))
    parts = [
        Part(
            module=module,
            quadratic=quadratic,
            bytes=sum(size for _, size in tensors),
            units=sum(size for _, size in tensors) / unit,
            tensors=tuple(name for name, _ in tensors),
        )
        for (module, quadratic), tensors in found.items()
    ]
    return tuple(sorted(parts, key=lambda part: (part.quadratic, part.module != INPUT)))


def _quadratic(graph: Graph, name: str) -> bool:
    """Whether a tensor has a score for every pair of tokens."""
    return any(dict(monomial).get("s", 0) > 1 for monomial in graph.tensors[name].elements.terms)


Amounts = Callable[[Policy], Mapping[Kind, float]]
"""Forward, re-run and backward of one layer under a policy that holds for it alone."""


def _flops(staged: StagedRun) -> Amounts:
    graph = staged.main.graph
    flops = staged.graph.op_flops[graph]
    forward = float(sum(flops.values()))

    def of(policy: Policy) -> Mapping[Kind, float]:
        again = sum(flops[op.name] for op in staged.under(policy).outcome(graph).rerun)
        return {"forward": forward, "re-run": float(again), "backward": 2 * forward}

    return of


def _seconds(staged: StagedRun) -> Amounts:
    roofline = roofline_of(staged)

    def of(policy: Policy) -> Mapping[Kind, float]:
        time = roofline.layer(staged.main.graph, policy)
        return {
            "forward": time.forward,
            "re-run": time.rerun,
            "backward": time.backward - time.rerun,
        }

    return of


def _order(policy: Policy, layers: int) -> Iterator[tuple[Kind, int]]:
    """Forward of all layers; then what backward does with them."""
    for layer in range(layers):
        yield "forward", layer
    for step in policy.backward(range(layers)):
        yield step.kind, step.layer


def _placed(policy: Policy, layers: int, amounts: Amounts) -> Iterator[Work]:
    at = 0.0
    for kind, layer in _order(policy, layers):
        length = amounts(policy.of_layer(layer))[kind]
        if length:
            yield Work(kind=kind, layer=layer + 1, start=at, end=at + length)
        at += length
