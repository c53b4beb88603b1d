"""What a policy does to one kind of layer: bytes stored, bytes alive while re-running, FLOPs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from actcalc.layers.core.algebra import ONE, Expr
from actcalc.layers.core.either import exact
from actcalc.layers.core.graph import Graph, Op
from actcalc.layers.model import ModelGraph
from actcalc.policy.rules import Policy, discarded, executed, per_op_stored, rerun_ops, stored


class LayerBytes(NamedTuple):
    """Bytes of one layer under one policy, on one rank for one micro-batch.

    ``stored`` stays from forward to backward; ``restored`` is what a re-run makes again; ``saved``
    is what the layer saves without recomputation, ``kept`` the part of it that is stored.
    """

    stored: int
    restored: int
    saved: int
    kept: int


@dataclass(frozen=True, eq=False, repr=False)
class LayerOutcome:
    """One kind of layer under one policy, on one rank, for one micro-batch.

    ``stored`` names what stays from forward to backward, ``copies`` times (the tensor-parallel
    degree where the layer's input is kept gathered, its inverse where it is kept split).
    ``restored`` names the saved tensors that a re-run makes again and that are alive together when
    the layer's backward begins. ``rerun`` are the ops that run again.
    ``detached``: no gradient passes, so that nothing is kept and there is no backward.
    ``at_once``: one checkpoint spans the layer, so that all that re-runs does so before the layer's
    backward begins, and what it cached goes with its last reader (torch/utils/checkpoint.py:
    the first saved tensor that is asked for re-runs the function; _CachedTorchDispatchMode pops).
    """

    graph: Graph
    stored: tuple[str, ...]
    copies: Expr
    restored: tuple[str, ...]
    rerun: tuple[Op, ...]
    detached: bool = False
    at_once: bool = False

    @property
    def own(self) -> tuple[str, ...]:
        """Names of all tensors the layer saves itself (those shared by all layers left out)."""
        if self.detached:
            return ()
        return tuple(name for name in self.graph.saved if name not in self.graph.shared)

    @property
    def stored_size(self) -> Expr:
        """What stays from forward to backward, as one expression in bytes."""
        return self.graph.bytes_of(self.stored) * self.copies

    def sizes(self, model: ModelGraph) -> LayerBytes:
        """Its bytes at the sizes of the run, each the sum of its leaves."""
        size = model.tensor_bytes[self.graph]
        own = set(self.own)
        stored = sum(size[name] for name in self.stored)
        inside = sum(size[name] for name in self.stored if name in own)
        if self.copies != ONE:
            tensors = self.graph.tensors
            whole = {
                n: exact((tensors[n].bytes * self.copies).value(model.sizes)) for n in self.stored
            }
            stored = sum(whole.values())
        return LayerBytes(
            stored=stored,
            restored=sum(size[name] for name in self.restored),
            saved=sum(size[name] for name in own),
            kept=inside,
        )


def layer_outcome(model: ModelGraph, graph: Graph, policy: Policy) -> LayerOutcome:
    """Apply ``policy`` to one layer; a policy that re-runs whole layers keeps the layer's input.

    A replicated boundary keeps the input gathered over the tensor-parallel group (the paper's
    2sbh also under sequence parallelism), of which the rank's own part is a slice; a split one
    keeps a slice of an input that every rank has, and gathers it again.
    """
    context = model.context
    stops = graph.gradient == "stops unless re-run" and not policy.whole
    if graph.gradient == "stops" or stops:
        return LayerOutcome(graph, (), ONE, (), (), detached=True)
    rerun = rerun_ops(policy, graph)
    kept = per_op_stored(graph) if policy.per_op else stored(graph, rerun, discarded(policy, graph))
    copies = ONE
    if policy.whole and policy.boundary == "replicated" and context.layout.sp:
        copies = context.t
    if policy.whole and policy.boundary == "split" and not context.layout.sp:
        copies = ONE / context.t
    restored = tuple(n for n in graph.saved if n not in graph.shared and n not in kept)
    early = context.framework.early_stop
    return LayerOutcome(
        graph=graph,
        stored=kept,
        copies=copies,
        restored=restored,
        rerun=executed(graph, rerun, early_stop=early),
        at_once=policy.per_op,
    )
