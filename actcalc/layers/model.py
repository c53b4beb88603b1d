"""A whole model as graphs: embedding, runs of equal layers, head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from actcalc.layers.core.context import Context, sizes_of, whole
from actcalc.layers.core.either import exact
from actcalc.layers.core.graph import Graph, Weight
from actcalc.layers.core.resize import graph_at
from actcalc.layers.megatron.ends import embedding_graph, head_graph
from actcalc.layers.megatron.layer import layer_graph
from actcalc.specs import Framework, LayerKind, Layout, Model, Workload


@dataclass(frozen=True, eq=False, repr=False)
class LayerRun:
    """Consecutive equal layers: what they are, their graph, how many."""

    kind: LayerKind
    graph: Graph
    count: int
    label: str = ""
    """Its name in answers, unlike that of every other kind."""


@dataclass(frozen=True, eq=False, repr=False)
class ModelGraph:
    """The graphs of one run and the sizes to evaluate them at.

    ``mtp`` are the multi-token-prediction layers, which live beside the head.
    """

    context: Context
    embedding: Graph
    runs: tuple[LayerRun, ...]
    head: Graph
    sizes: Mapping[str, Any]
    mtp: LayerRun | None = None

    @cached_property
    def layers(self) -> tuple[Graph, ...]:
        """The graph of each layer, in model order."""
        return tuple(run.graph for run in self.runs for _ in range(run.count))

    def counts(self, chunk: range) -> Mapping[Graph, int]:
        """How many layers of a chunk have each graph, in order of first appearance."""
        if chunk not in self._counts:
            self._counts[chunk] = Counter(self.layers[chunk.start : chunk.stop])
        return self._counts[chunk]

    @cached_property
    def _counts(self) -> dict[range, Mapping[Graph, int]]:
        return {}

    @cached_property
    def kept(self) -> dict[str, Any]:
        """What rooms above have counted of these graphs at these sizes, each by its own name."""
        return {}

    @cached_property
    def tensor_bytes(self) -> Mapping[Graph, Mapping[str, int]]:
        """Bytes of each tensor of a graph, on one rank for one micro-batch."""
        sizes = self.sizes
        return _PerGraph(
            lambda graph: {n: exact(t.bytes.value(sizes)) for n, t in graph.tensors.items()}
        )

    @cached_property
    def op_flops(self) -> Mapping[Graph, Mapping[str, int]]:
        """Forward FLOPs of each op of a graph for one micro-batch, over all ranks."""
        sizes = whole(dict(self.sizes))
        return _PerGraph(lambda graph: {op.name: int(op.flops.value(sizes)) for op in graph.ops})

    @cached_property
    def kinds(self) -> tuple[LayerRun, ...]:
        """Each kind of layer once, with its total count, in order of first appearance."""
        counts: dict[Graph, int] = {}
        kinds: dict[Graph, LayerKind] = {}
        for run in self.runs:
            counts[run.graph] = counts.get(run.graph, 0) + run.count
            kinds.setdefault(run.graph, run.kind)
        known = list(dict.fromkeys(kinds.values()))
        labels = dict(zip(known, _labels(known), strict=True))
        return tuple(
            LayerRun(kinds[graph], graph, count, labels[kinds[graph]] + _tuned(kinds, graph))
            for graph, count in counts.items()
        )

    def graphs(self, *, mtp: bool = True) -> Iterator[tuple[Graph, int]]:
        """Every graph with its multiplicity: embedding, layers, head, prediction layers."""
        yield self.embedding, 1
        for run in self.runs:
            yield run.graph, run.count
        yield self.head, 1
        if self.mtp and mtp:
            yield self.mtp.graph, self.mtp.count


class _PerGraph(dict[Graph, Mapping[str, int]]):
    """A figure for every name of a graph, worked out when a graph is first asked for."""

    def __init__(self, table: Callable[[Graph], Mapping[str, int]]) -> None:
        super().__init__()
        self._table = table

    def __missing__(self, graph: Graph) -> Mapping[str, int]:
        self[graph] = self._table(graph)
        return self[graph]


def _tuned(kinds: Mapping[Graph, LayerKind], graph: Graph) -> str:
    """What tells a graph from others of its kind: which of its weights are trained."""
    alike = [each for each, kind in kinds.items() if kind == kinds[graph]]
    if len(alike) == 1:
        return ""
    if any(weight.added == "adapter" for weight in graph.weights):
        adapted = [each for each in alike if any(w.added for w in each.weights)]
        number = f" {adapted.index(graph) + 1}" if len(adapted) > 1 else ""
        return f" with adapters{number}"
    trained = any(not weight.frozen for weight in graph.weights)
    if trained:
        return ""
    return " frozen" if graph.gradient == "passes" else " frozen, without backward"


def _labels(kinds: Sequence[LayerKind]) -> list[str]:
    """A label for each kind: where several share one, sizes, rotary position or a number tell."""
    labels = [kind.label for kind in kinds]
    labels = [
        _sized(kind) if labels.count(label) > 1 else label
        for kind, label in zip(kinds, labels, strict=True)
    ]
    some = [kind for kind, label in zip(kinds, labels, strict=True) if labels.count(label) > 1]
    if any(kind.rotary for kind in some):
        labels = [
            label if kind.rotary or kind not in some else f"{label} without rotary"
            for kind, label in zip(kinds, labels, strict=True)
        ]
    return [
        label if labels.count(label) == 1 else f"{label} {labels[: index + 1].count(label)}"
        for index, label in enumerate(labels)
    ]


def _sized(kind: LayerKind) -> str:
    """A kind's label with the sizes that are its own, e.g. ``dense ffn 14336``."""
    return " ".join([kind.label, *(f"{name} {size}" for name, size in kind.sizes)])


def model_graph(
    model: Model, layout: Layout, workload: Workload, framework: Framework
) -> ModelGraph:
    """Build every graph of a run; equal kinds of layers share one graph."""
    ctx = Context(model, layout, workload, framework)
    built: dict[LayerKind, Graph] = {}
    runs = []
    for kind, count in model.runs():
        if kind not in built:
            built[kind] = _layer(ctx.of_decoder() if kind.cross else ctx, kind)
        runs.append(LayerRun(kind, built[kind], count))
    mtp = None
    if model.mtp_layers and framework.multi_token_prediction:
        from actcalc.layers.megatron.mtp import mtp_graph

        last = model.kind(model.layers - 1)
        mtp = LayerRun(last, mtp_graph(ctx, last), model.mtp_layers)
    return ModelGraph(
        context=ctx,
        embedding=embedding_graph(ctx),
        runs=tuple(runs),
        head=head_graph(ctx.of_decoder() if model.encoder_layers else ctx),
        sizes=sizes_of(model, layout, workload),
        mtp=mtp,
    )


def _layer(ctx: Context, kind: LayerKind) -> Graph:
    graph = _own_size(ctx, kind) if kind.sizes else layer_graph(ctx, kind)
    if not ctx.workload.fp8_products:
        return graph
    from actcalc.layers.core.fp8 import cast_at_source, cast_before, cast_each_time, quantised

    if ctx.framework.transformer_engine:
        at_source = ctx.workload.kernels.fp8_caching == "source"
        return cast_at_source(quantised(graph)) if at_source else quantised(graph)
    if not ctx.framework.op_by_op:
        return graph
    return cast_before(graph) if ctx.tp else cast_each_time(graph)


def _own_size(ctx: Context, kind: LayerKind) -> Graph:
    """The graph of a layer whose sizes are not the model's: its own stand there as numbers."""
    own = ctx.of_kind(kind)
    usual = sizes_of(ctx.model, ctx.layout, ctx.workload)
    sizes = sizes_of(own.model, ctx.layout, ctx.workload)
    return graph_at(
        layer_graph(own, kind),
        {name: size for name, size in sizes.items() if usual.get(name) != size},
    )


def unique_weights(graphs: Iterator[tuple[Graph, int]]) -> Iterator[tuple[Weight, int]]:
    """Every parameter tensor of the model itself with its multiplicity; a shared scope once."""
    seen: set[str] = set()
    for graph, count in graphs:
        for weight in graph.weights:
            if weight.added:
                continue
            if weight.scope:
                if weight.scope in seen:
                    continue
                seen.add(weight.scope)
            yield weight, 1 if weight.scope else count


def parameters(graph: ModelGraph, sizes: Mapping[str, Any], *, mtp: bool = False) -> Any:
    """Number of parameters at ``sizes``: all of them with ``whole(sizes)``, else one rank's.

    Multi-token-prediction layers, which inference drops and published counts leave out, are added
    with ``mtp``.
    """
    result: Any = 0
    for weight, count in unique_weights(graph.graphs(mtp=mtp)):
        result = result + weight.parameters.value(sizes) * count
    return result
