"""A policy on a pipeline stage: what its chunks store, and what lives while a segment re-runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from actcalc.layers.core.graph import Graph
from actcalc.layers.model import ModelGraph
from actcalc.policy.outcome import LayerBytes, LayerOutcome, layer_outcome
from actcalc.policy.rules import Policy


class Segment(NamedTuple):
    """Consecutive layers re-run together (or a single layer that keeps some or all tensors)."""

    layers: range
    stored_bytes: int
    restored_bytes: int
    waiting_bytes: int = 0
    """Of those that a re-run makes: inputs of other layers, which wait for theirs."""


class StagePolicy:
    """Evaluates one policy over the layers of a model at the sizes of its run."""

    def __init__(self, model: ModelGraph, policy: Policy) -> None:
        self.model = model
        self.policy = policy
        self._outcomes: dict[tuple[int, str], LayerOutcome] = {}
        self._bytes: dict[tuple[int, str], LayerBytes] = {}
        self._passes: dict[int, Policy] = {1: policy}

    def graph(self, layer: int) -> Graph:
        """The graph of layer ``layer`` (from 0)."""
        return self.model.layers[layer]

    def outcome(self, graph: Graph, policy: Policy | None = None) -> LayerOutcome:
        """The policy's outcome on one kind of layer (cached)."""
        chosen = policy or self.policy
        key = (id(graph), chosen.name)
        if key not in self._outcomes:
            self._outcomes[key] = layer_outcome(self.model, graph, chosen)
        return self._outcomes[key]

    def layer_bytes(self, graph: Graph, policy: Policy | None = None) -> LayerBytes:
        """The outcome's bytes at the sizes of the run (cached)."""
        key = (id(graph), (policy or self.policy).name)
        if key not in self._bytes:
            self._bytes[key] = self.outcome(graph, policy).sizes(self.model)
        return self._bytes[key]

    def layer_policy(self, layer: int, chunk: range) -> Policy:
        """The policy of one layer of a chunk: block and every-nth leave some layers alone."""
        return self.policy.of_layer(layer - chunk.start)

    def segments(self, chunk: range) -> Iterator[Segment]:
        """Cut a chunk of layers into the segments that re-run together."""
        if self.policy.recursive:
            yield from self._nested(chunk)
            return
        for layers in self.policy.segments(chunk):
            if len(layers) > 1:
                yield self._segment(layers)
                continue
            policy = self.layer_policy(layers.start, chunk)
            size = self.layer_bytes(self.graph(layers.start), policy)
            yield Segment(layers, size.stored, size.restored)

    def _segment(self, layers: range) -> Segment:
        first = self.layer_bytes(self.graph(layers.start))
        saved = sum(
            count * self.layer_bytes(graph).saved
            for graph, count in self.model.counts(layers).items()
        )
        return Segment(layers, first.stored, saved - first.kept)

    def _nested(self, chunk: range) -> Iterator[Segment]:
        """Layers of a recursive checkpoint: only the chunk's first input is there from forward."""
        steps = {step.layer: step for step in self.policy.backward(chunk)}  # the last is backward
        for layer in chunk:
            size = self.layer_bytes(self.graph(layer))
            others = [self.layer_bytes(self.graph(one)).stored for one in steps[layer].beside]
            own = 0 if layer == chunk.start else size.stored
            yield Segment(
                range(layer, layer + 1),
                size.stored - own,
                size.restored + own + sum(others),
                sum(others),
            )

    def _repeated(self, passes: int) -> Policy:
        if passes not in self._passes:
            self._passes[passes] = replace(self.policy, passes=passes)
        return self._passes[passes]

    def tally(self, chunk: range) -> Iterator[tuple[Graph, Policy, int]]:
        """How many layers of a chunk there are of each graph and policy."""
        policy = self.policy
        if policy.recursive:
            runs = Counter(step.layer for step in policy.backward(chunk) if step.kind == "re-run")
            pairs = Counter((self.graph(layer), self._repeated(runs[layer])) for layer in chunk)
            for (graph, chosen), count in pairs.items():
                yield graph, chosen, count
            return
        if policy.block is None and policy.every == 1:
            for graph, count in self.model.counts(chunk).items():
                yield graph, policy, count
            return
        graphs = self.model.layers[chunk.start : chunk.stop]
        found = Counter((graph, policy.of_layer(at)) for at, graph in enumerate(graphs))
        for (graph, chosen), count in found.items():
            yield graph, chosen, count

    def stored_bytes(self, chunk: range) -> int:
        """Bytes a chunk of layers keeps of one micro-batch."""
        if self.policy.segmented:
            return sum(segment.stored_bytes for segment in self.segments(chunk))
        return sum(
            count * self.layer_bytes(graph, policy).stored
            for graph, policy, count in self.tally(chunk)
        )

    def transient_bytes(self, chunks: Sequence[range]) -> int:
        """Bytes made again, at most, when one segment is re-run before its backward."""
        return max((self._chunk_restored(chunk) for chunk in chunks), default=0)

    def _chunk_restored(self, chunk: range) -> int:
        if self.policy.segmented:
            return max((segment.restored_bytes for segment in self.segments(chunk)), default=0)
        return max(
            (self.layer_bytes(graph, policy).restored for graph, policy, _ in self.tally(chunk)),
            default=0,
        )
