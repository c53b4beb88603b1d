"""Every stored tensor of each kind of layer, as a result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from actcalc.answers.compare import idle_settings, stored_per_layer
from actcalc.answers.header import RunAnswer, header, run_notes
from actcalc.policy.leaves import Leaf, leaves
from actcalc.policy.outcome import layer_outcome
from actcalc.policy.rules import NONE
from actcalc.run.staged import StagedRun
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


@dataclass(frozen=True, kw_only=True, repr=False)
class Breakdown(RunAnswer):
    """Stored tensors of one layer of each kind; embedding and head apart."""

    schema_name: ClassVar[str] = "actcalc/breakdown/1"
    lists: ClassVar[Mapping[str, str]] = {
        "frameworks": "With several frameworks: the answer of each."
    }

    training: dict[str, Any]
    """Optimizer, number formats, offload, adapters."""
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
    """Of the most frequent kind of layer, compare's figure: the sum of its tensors, or the mean
    over the stage where the policy does not treat its layers alike."""
    formula: str
    """The same as a formula."""
    notes: tuple[str, ...]
    """Choices made on the way that the reader should know."""


def breakdown_run(run: Run) -> Breakdown:
    """List what the run's policy (none, unless one is given) stores, tensor by tensor."""
    staged = StagedRun(run)
    graph, policy = staged.graph, staged.first_policy
    tensors: list[Leaf] = []
    shared: list[Leaf] = []
    totals: list[LayerTotal] = []
    for kind in staged.kinds:
        outcome = staged.under(policy).outcome(kind.graph)
        found = leaves(graph, kind.label, outcome)
        tensors += found
        shared += leaves(graph, kind.label, outcome, shared=True)
        totals.append(
            LayerTotal(
                layer=kind.label,
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
    total = next(total for total in totals if total.layer == staged.main.label)
    stored = stored_per_layer(staged, policy)
    uneven = "" if stored == total.bytes else _uneven(policy.name, stored, total)
    return Breakdown(
        **header(staged),
        training=run.training.model_dump(),
        policy=policy.name,
        layers=tuple(totals),
        tensors=tuple(tensors),
        shared=tuple({leaf.tensor: leaf for leaf in shared}.values()),
        ends=tuple(ends),
        stored_bytes_per_layer=stored,
        formula=total.formula,
        notes=tuple(
            note
            for note in (*run_notes(staged), uneven, *idle_settings(run, one_layer=True))
            if note
        ),
    )


def _uneven(policy: str, stored: int, total: LayerTotal) -> str:
    """What to say where the policy does not treat a stage's layers alike."""
    return (
        f"Policy {policy} does not treat all layers alike: listed is a {total.layer} layer that it "
        f"re-runs (or the first of a segment), {total.bytes:,} B; the mean over the stage's layers "
        f"is {stored:,} B."
    )
