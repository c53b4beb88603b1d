"""What the layer graphs predict for the parts that a measurement tells apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actcalc.answers.header import run_notes
from actcalc.layers.core.graph import Graph, size_of
from actcalc.layers.model import ModelGraph
from actcalc.policy.outcome import layer_outcome
from actcalc.policy.rules import Policy
from actcalc.run.staged import StagedRun
from actcalc.specs.run import Run


@dataclass(frozen=True)
class Prediction:
    """The layer graphs' figures for the parts that a measurement tells apart, in bytes."""

    layers: tuple[int, ...]
    kinds: tuple[str, ...]
    embedding: int
    head: int
    parameters: int
    middle: Sequence[Expected]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Expected:
    """One predicted tensor of the middle layer."""

    op: str
    tensor: str
    shape: str
    sizes: tuple[int, ...]
    bytes: int


def predict(run: Run, policy: str) -> Prediction:
    """What the run's layer graphs say about each part of the model, under the policy named.

    The first layer that saves a tensor shared by all pays for it, as autograd has it.
    """
    staged = StagedRun(run)
    graph, sizes, chosen = staged.graph, staged.graph.sizes, staged.policy(policy)
    layers: list[int] = []
    kinds: list[str] = []
    paid: set[str] = set()
    for group in graph.runs:
        outcome = staged.under(chosen).outcome(group.graph)
        own = outcome.sizes(graph).stored
        kept = {name for name in group.graph.saved if name in group.graph.shared}
        if chosen.whole:
            kept = set()
        for _ in range(group.count):
            new, paid = kept - paid, paid | kept
            layers.append(own + int(size_of(group.graph, new, sizes)))
            kinds.append(group.kind.label)
    middle = staged.layers[len(layers) // 2]
    return Prediction(
        layers=tuple(layers),
        kinds=tuple(kinds),
        embedding=int(size_of(graph.embedding, graph.embedding.saved, sizes)),
        head=int(size_of(graph.head, graph.head.saved, sizes)),
        parameters=staged.parameters,
        middle=_expected(graph, middle, chosen),
        notes=tuple(run_notes(staged)),
    )


def _expected(graph: ModelGraph, layer: Graph, policy: Policy) -> list[Expected]:
    outcome = layer_outcome(graph, layer, policy)
    found = []
    for name in outcome.stored:
        tensor = layer.tensors[name]
        savers = layer.savers.get(name, ())
        found.append(
            Expected(
                op=savers[0].name if savers and not policy.whole else "input",
                tensor=name,
                shape=tensor.shape_text,
                sizes=tuple(int(dim.value(graph.sizes)) for dim in tensor.shape),
                bytes=int((tensor.bytes * outcome.copies).value(graph.sizes)),
            )
        )
    return found
