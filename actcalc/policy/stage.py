"""A policy on a pipeline stage: what its chunks store, and what lives while a segment re-runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from actcalc.layers.core.graph import Graph
from actcalc.layers.model import ModelGraph
from actcalc.policy.outcome import LayerBytes, LayerOutcome, layer_outcome
from actcalc.policy.rules import NONE, Policy


class Segment(NamedTuple):
    """Consecutive layers re-run together (or a single layer that keeps some or all tensors)."""

    layers: range
    stored_bytes: int
    restored_bytes: int


class StagePolicy:
    """Evaluates one policy over the layers of a model at the sizes of its run."""

    def __init__(self, model: ModelGraph, policy: Policy) -> None:
        self.model = model
        self.policy = policy
        self._outcomes: dict[tuple[int, str], LayerOutcome] = {}
        self._bytes: dict[tuple[int, str], LayerBytes] = {}
        self._graphs = [run.graph for run in model.runs for _ in range(run.count)]

    def graph(self, layer: int) -> Graph:
        """The graph of layer ``layer`` (from 0)."""
        return self._graphs[layer]

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
            self._bytes[key] = self.outcome(graph, policy).sizes(self.model.sizes)
        return self._bytes[key]

    def layer_policy(self, layer: int, chunk: range) -> Policy:
        """The policy of one layer: block and every-nth leave some layers alone."""
        position = layer - chunk.start
        if self.policy.block is not None and position >= self.policy.block:
            return NONE
        if self.policy.every > 1 and (position + 1) % self.policy.every:
            return NONE
        return self.policy

    def segments(self, chunk: range) -> Iterator[Segment]:
        """Cut a chunk of layers into the segments that re-run together."""
        if self.policy.whole and self.policy.segment > 1:
            for start in range(chunk.start, chunk.stop, self.policy.segment):
                yield self._segment(range(start, min(start + self.policy.segment, chunk.stop)))
            return
        for layer in chunk:
            policy = self.layer_policy(layer, chunk)
            size = self.layer_bytes(self.graph(layer), policy)
            yield Segment(range(layer, layer + 1), size.stored, size.restored)

    def _segment(self, layers: range) -> Segment:
        sizes = [self.layer_bytes(self.graph(layer)) for layer in layers]
        saved = sum(size.saved for size in sizes)
        return Segment(layers, sizes[0].stored, saved - sizes[0].kept)

    def _tally(self, chunk: range) -> Mapping[tuple[int, Policy], tuple[Graph, int]]:
        """How many layers of a chunk fall under each (graph, policy), where layers stand alone."""
        tally: dict[tuple[int, Policy], tuple[Graph, int]] = {}
        uniform = self.policy.block is None and self.policy.every == 1
        for layer in chunk:
            graph = self._graphs[layer]
            key = (id(graph), self.policy if uniform else self.layer_policy(layer, chunk))
            tally[key] = (graph, tally[key][1] + 1 if key in tally else 1)
        return tally

    def stored_bytes(self, chunks: Sequence[range], held: Sequence[int]) -> int:
        """Bytes a stage keeps: each chunk's stored tensors times the microbatches it holds."""
        return sum(
            count * self._chunk_bytes(chunk) for chunk, count in zip(chunks, held, strict=True)
        )

    def _chunk_bytes(self, chunk: range) -> int:
        if self.policy.segment > 1:
            return sum(segment.stored_bytes for segment in self.segments(chunk))
        return sum(
            count * self.layer_bytes(graph, policy).stored
            for (_, policy), (graph, count) in self._tally(chunk).items()
        )

    def transient_bytes(self, chunks: Sequence[range]) -> int:
        """Bytes made again, at most, when one segment is re-run before its backward."""
        return max((self._chunk_restored(chunk) for chunk in chunks), default=0)

    def _chunk_restored(self, chunk: range) -> int:
        if self.policy.segment > 1:
            return max((segment.restored_bytes for segment in self.segments(chunk)), default=0)
        tally = self._tally(chunk).items()
        return max(
            (self.layer_bytes(g, policy).restored for (_, policy), (g, _) in tally), default=0
        )

    def rerun_flops(self, chunk: range, sizes: Mapping[str, int]) -> int:
        """Forward FLOPs run again for one micro-batch over the layers of a chunk, at ``sizes``."""
        return sum(
            count * int(self.outcome(graph, policy).rerun_flops.value(sizes))
            for (_, policy), (graph, count) in self._tally(chunk).items()
        )
