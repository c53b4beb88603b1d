"""Every stored tensor of each kind of layer, as a result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from actcalc.answers.compare import idle_settings, main_run, parse_for
from actcalc.layers.model import model_graph
from actcalc.policy.leaves import Leaf, leaves
from actcalc.policy.outcome import layer_outcome
from actcalc.policy.rules import NONE
from actcalc.specs.result import Result
from actcalc.specs.run import Run


@dataclass(frozen=True, kw_only=True)
class LayerTotal:
    """One kind of layer in the breakdown."""

    layer: str
    """Its kind, or embedding / head."""
    count: int
    """How many the model has."""
    bytes: int
    """Sum of its tensors, for one of them."""
    formula: str
    """The same as a formula."""


@dataclass(frozen=True, kw_only=True)
class Breakdown(Result):
    """Stored tensors of one layer of each kind; embedding and head apart."""

    schema_name: ClassVar[str] = "actcalc/breakdown/1"

    model: dict[str, Any]
    """The model's fields."""
    layout: dict[str, Any]
    """The layout's fields."""
    workload: dict[str, Any]
    """The workload's fields."""
    framework: str
    """The framework profile that chose the kernels."""
    policy: str
    """The recompute policy whose stored tensors these are."""
    layers: tuple[LayerTotal, ...]
    """Totals per kind of layer."""
    tensors: tuple[Leaf, ...]
    """The stored tensors of one layer of each kind."""
    shared: tuple[Leaf, ...]
    """Tensors that exist once for all layers."""
    ends: tuple[Leaf, ...]
    """What embedding and output head keep."""
    stored_bytes_per_layer: int
    """Sum over the most frequent kind of layer: compare's figure."""
    formula: str
    """The same as a formula."""
    notes: tuple[str, ...]
    """Choices made on the way that the reader should know."""


def breakdown_run(run: Run) -> Breakdown:
    """List what the run's policy (none, unless one is given) stores, tensor by tensor."""
    graph = model_graph(run.model, run.layout, run.workload, run.framework)
    policy = parse_for(run.policies[0], graph, run.model.depth) if run.policies else NONE
    tensors: list[Leaf] = []
    shared: list[Leaf] = []
    totals: list[LayerTotal] = []
    for kind in graph.kinds:
        outcome = layer_outcome(graph, kind.graph, policy)
        found = leaves(graph, kind.kind.label, outcome)
        tensors += found
        shared += leaves(graph, kind.kind.label, outcome, shared=True)
        totals.append(
            LayerTotal(
                layer=kind.kind.label,
                count=kind.count,
                bytes=sum(leaf.bytes for leaf in found),
                formula=outcome.stored_size.formula(),
            )
        )
    ends = [
        leaf
        for end in (graph.embedding, graph.head)
        for leaf in leaves(graph, end.name, layer_outcome(graph, end, NONE))
    ]
    main = main_run(graph).kind.label
    total = next(total for total in totals if total.layer == main)
    return Breakdown(
        model=run.model.model_dump(),
        layout=run.layout.model_dump(),
        workload=run.workload.model_dump(),
        framework=run.framework.name,
        policy=policy.name,
        layers=tuple(totals),
        tensors=tuple(tensors),
        shared=tuple({leaf.tensor: leaf for leaf in shared}.values()),
        ends=tuple(ends),
        stored_bytes_per_layer=total.bytes,
        formula=total.formula,
        notes=(
            *run.warnings,
            *dict.fromkeys(note for kind in graph.kinds for note in kind.graph.notes),
            *idle_settings(run, one_layer=True),
        ),
    )
