"""Fine-tuning: which weights are frozen, what frozen layers no longer keep, what adapters keep.

A linear layer saves its input for the gradient of its weight alone; frozen, it saves nothing, and
a norm no normalised tensor. An adapter reads the same input, so a layer that has one keeps it, and
the product of rank r between its two matrices (Hu et al. 2021, section 4.1;
torch.nn.functional.linear). Adapters of another type than the base, or with dropout, keep an input
of their own each (PEFT tuners/lora/layer.py Linear.forward, _cast_input_dtype). Parts trained
beside adapters are copies of the frozen ones, which stay (PEFT utils/other.py
ModulesToSaveWrapper).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Literal

from actcalc.errors import SpecError
from actcalc.layers.core.algebra import ZERO, Expr
from actcalc.layers.core.either import exact, single
from actcalc.layers.core.graph import DType, Graph, Op, Tensor, Weight
from actcalc.layers.core.ops import EMBEDDING_SCOPE
from actcalc.layers.model import LayerRun, ModelGraph
from actcalc.specs.targets import TARGET_GROUPS
from actcalc.specs.training import Training

_ENDS = ("embedding", "head")


def adapted(model: ModelGraph, training: Training, *, autocast: bool = False) -> ModelGraph:
    """The graphs with frozen weights and adapters; the same graphs if every weight is trained.

    ``autocast`` runs adapters of another type than the base in the base's.

    Raises:
        SpecError: nothing would be trained: no layer has a projection that ``lora_targets`` names,
            or all layers are frozen.
    """
    if model.context.model.tower and training.still_tower:
        model = _with_still_tower(model)
    if not training.tunes:
        return model
    depth = model.context.model.depth
    if abs(training.freeze) > depth:
        raise SpecError(
            f"freeze is {training.freeze}, the model has {depth} layers", f"use at most {depth}"
        )
    tuning = _Tuning(model, training, autocast=autocast)
    found = tuning.model()
    if training.lora_rank and not tuning.adapters:
        known = {op.name for run in model.runs for op in run.graph.ops if op.kind == "linear"}
        raise SpecError(
            f"lora_targets {training.lora_targets!r} names no projection of "
            f"{model.context.model.name}",
            "use " + ", ".join((*TARGET_GROUPS, *sorted(known))),
        )
    if not any(not weight.frozen for graph, _ in found.graphs() for weight in graph.weights):
        raise SpecError(
            "every weight is frozen: nothing would be trained",
            "freeze fewer layers, or add --train or --lora-rank",
        )
    return found


def _with_still_tower(model: ModelGraph) -> ModelGraph:
    """The graphs with a vision tower that keeps nothing and stays as it is."""
    from actcalc.layers.pytorch.tower import GROUP, still

    embedding = model.embedding
    ops = tuple(still(op) if op.group == GROUP else op for op in embedding.ops)
    return replace(model, embedding=replace(embedding, ops=ops))


class _Tuning:
    """The graphs of one run as fine-tuning leaves them; equal ones are made once."""

    def __init__(self, model: ModelGraph, training: Training, *, autocast: bool) -> None:
        self.before, self.training, self.autocast = model, training, autocast
        self.made: dict[tuple[int, frozenset[str], bool], tuple[Graph, Graph]] = {}
        self.adapters = 0
        """Projections that have one."""
        self.passes = False
        """Whether a weight so far is trained, so that gradients pass from here on."""
        depth = model.context.model.depth
        self.first = training.freeze if training.freeze >= 0 else depth + training.freeze
        """First layer that is not frozen."""
        needed = training.lora_rank and model.context.framework.hub_models
        self.stops: Literal["stops", "stops unless re-run"] = (
            "stops unless re-run" if needed else "stops"
        )
        self.targets = training.targets
        self.parts = set(training.train)
        tied = {"embeddings", "head"}
        if not training.lora_rank and model.context.model.tied and self.parts & tied:
            self.parts |= tied  # one weight

    def model(self) -> ModelGraph:
        """All graphs, in the order in which forward runs them."""
        before = self.before
        embedding = self._graph(before.embedding, -1)
        graphs = [self._graph(graph, at) for at, graph in enumerate(before.layers)]
        kinds = [run.kind for run in before.runs for _ in range(run.count)]
        runs = []
        for (_, kind), group in groupby(
            zip(graphs, kinds, strict=True), key=lambda pair: (id(pair[0]), pair[1])
        ):
            members = list(group)
            runs.append(LayerRun(kind, members[0][0], len(members)))
        last = len(graphs) - 1
        mtp = before.mtp
        if mtp is not None:
            mtp = replace(mtp, graph=self._graph(mtp.graph, last))
        head = self._graph(before.head, -1)
        return replace(before, embedding=embedding, runs=tuple(runs), head=head, mtp=mtp)

    def _graph(self, graph: Graph, layer: int) -> Graph:
        """One graph with what is frozen and what is added; ``layer`` is -1 at either end."""
        frozen = 0 <= layer < self.first
        chosen = frozenset[str]()
        if self.training.lora_rank and not frozen:
            place = -1 if graph.name in _ENDS else layer
            chosen = frozenset(op.name for op in graph.ops if self._adapts(op, place))
            self.adapters += len(chosen)
        key = (id(graph), chosen, frozen)
        if key not in self.made:
            found = self._changed(graph, chosen, frozen=frozen)
            self.made[key] = found, replace(found, gradient=self.stops)
        found, stopped = self.made[key]
        self.passes = self.passes or any(not w.frozen for w in found.weights)
        return found if self.passes or graph.name in _ENDS else stopped

    def _adapts(self, op: Op, layer: int) -> bool:
        if op.kind != "linear" or not op.weights:
            return False
        if layer < 0:
            return op.name == "head" and self.targets.hits(layer, op.name, op.group)
        return adapts(self.before, op, self.training, layer)

    def _changed(self, graph: Graph, chosen: frozenset[str], *, frozen: bool) -> Graph:
        tensors = dict(graph.tensors)
        ops = [
            self._op(op, graph, tensors, adapter=op.name in chosen, frozen=frozen)
            for op in graph.ops
        ]
        return replace(graph, tensors=tensors, ops=tuple(ops))

    def _op(
        self, op: Op, graph: Graph, tensors: dict[str, Tensor], *, adapter: bool, frozen: bool
    ) -> Op:
        weights = tuple(
            each for w in op.weights for each in self._weight(op, graph, w, frozen=frozen)
        )
        op = replace(op, weights=weights)
        if adapter:
            op = self._adapted(op, tensors)
        if op.trains or (adapter and not self._own_input):
            return op
        if op.kind == "norm":
            # weight * normed keeps the normed tensor for the weight's gradient alone
            normed = f"{op.name}_normed"
            if normed not in op.saves:
                return op
            # what is not there is not gone either at the highest moment of its backward
            more = tensors[normed].bytes if op.backward_scratch != ZERO else ZERO
            return replace(
                op, saves=tuple(n for n in op.saves if n != normed),
                backward_scratch=op.backward_scratch + more,
            )  # fmt: skip
        if op.kind == "multiply" and op.weights and set(op.inputs) <= set(op.saves):
            # a product with a learned vector keeps its other factor for the vector's gradient alone
            return replace(op, saves=tuple(name for name in op.saves if name not in op.inputs))
        if op.kind == "linear" and op.weights:
            inputs = {*op.inputs, f"{op.name}_input"} - {f"{low_rank(op.name)}_input"}
            return replace(op, saves=tuple(name for name in op.saves if name not in inputs))
        return op

    @property
    def _own_input(self) -> bool:
        """Whether adapters keep an input of their own instead of the layer's."""
        return self._wide or self.training.lora_dropout

    @property
    def _wide(self) -> bool:
        """Whether adapters cast their input to fp32: beside a quantised base autocast is left to it
        (PEFT tuners/lora/bnb.py Linear4bit.forward, requires_conversion)."""
        training = self.training
        casts = not (self.autocast and training.base_bits != 16)
        fp32 = training.lora_dtype == "fp32" and self.before.context.act is not DType.FP32
        return fp32 and casts

    def _weight(self, op: Op, graph: Graph, weight: Weight, *, frozen: bool) -> tuple[Weight, ...]:
        """One weight as it is left, and the copy that is trained in its place."""
        if weight.frozen:
            return (weight,)
        training = self.training
        part = "embeddings" if op.kind == "embedding" else "head" if (
            op.name == "head" and graph.name == "head"
        ) else "norms" if op.kind == "norm" else ""  # fmt: skip
        inside = "layers" in self.parts and graph.name not in _ENDS
        named = (part in self.parts or inside) and not frozen
        if training.lora_rank and named:
            scope = f"{weight.scope} of {part}" if weight.scope else ""
            copied = replace(weight, name=f"{weight.name}.copy", scope=scope, added="copy")
            return replace(weight, frozen=True), copied
        if training.lora_rank or self.parts:
            return (replace(weight, frozen=not named),)
        below = graph.name == "embedding" or weight.scope == EMBEDDING_SCOPE
        return (replace(weight, frozen=frozen or below),)

    def _adapted(self, op: Op, tensors: dict[str, Tensor]) -> Op:
        """The op with its adapter: its weights, what it makes and keeps, and its temporaries."""
        training, act = self.training, self.before.context.act
        source = tensors[op.inputs[0]]
        rows = source.shape[:-1]
        wide = self._wide
        dtype = DType.FP32 if wide and not self.autocast else act
        made = []

        def keep(what: str, shape: tuple[Expr, ...], kind: DType) -> None:
            name = f"{low_rank(op.name)}{what}"
            tensors[name] = Tensor(name, shape, kind)
            made.append(name)

        if self._own_input:
            keep("_input", source.shape, dtype)
        if training.lora_dropout:
            keep("_mask", source.shape, DType.BOOL)
        keep("", (*rows, Expr.of(training.lora_rank)), dtype)
        forward, backward = op.forward_scratch, op.backward_scratch
        result = tensors[op.outputs[0]].elements
        behind, ahead = self._passing(op, source, result, wide=wide)
        forward, backward = forward + behind, backward + ahead
        if training.dora:
            keep("_result", tensors[op.outputs[0]].shape, dtype)
            keep("_base", tensors[op.outputs[0]].shape, act)
            forward, backward = _dora_scratch(op, dtype, result, forward, backward)
        return replace(
            op,
            weights=(*op.weights, *_pairs(op, training)),
            outputs=(*op.outputs, *made),
            saves=tuple(dict.fromkeys((*op.saves, *made))),
            forward_scratch=forward,
            backward_scratch=backward,
        )

    def _passing(self, op: Op, source: Tensor, result: Expr, *, wide: bool) -> tuple[Expr, Expr]:
        """Bytes that an adapter has beside what is kept, forward and backward.

        Forward: its result and that scaled, beside the base's; under autocast the copy of the input
        in the adapters' type, which is cast again. Backward, before the base's: the scaled
        gradient, then that of its input, which waits for the base's (PEFT tuners/lora/layer.py
        Linear.forward).
        """
        own = 4 if wide and not self.autocast else self.before.context.act.itemsize
        forward = result * (2 * own)
        if wide and self.autocast:
            forward = forward + source.elements * 4
        *_, outside, inside = (
            exact(one.value(self.before.sizes)) for one in op.own_weights[0].shape
        )
        # the one gives way to the other
        ahead = result if single(outside) and outside > inside else source.elements
        return forward, ahead * (4 if wide else own)


def _dora_scratch(
    op: Op, dtype: DType, result: Expr, forward: Expr, backward: Expr
) -> tuple[Expr, Expr]:
    """Temporaries of DoRA (PEFT tuners/lora/dora.py DoraLinearLayer.forward).

    Forward makes the identity of the input's width, B·A of the weight's shape, and the weight with
    it; then both scaled results and their sum.
    """
    weight = op.own_weights[0]
    count, inside = weight.parameters, weight.shape[-1]
    shaped = count * 2 * dtype.itemsize + inside * inside * dtype.itemsize
    return forward + shaped + result * dtype.itemsize, backward + result * dtype.itemsize


def _pairs(op: Op, training: Training) -> list[Weight]:
    """A (r x in) and B (out x r) of every projection of an op, and DoRA's magnitudes."""
    rank = Expr.of(training.lora_rank)
    found = []
    for weight in op.own_weights:
        if len(weight.shape) < 2:
            continue
        *many, outside, inside = weight.shape
        for name, shape in (("A", (rank, inside)), ("B", (outside, rank))):
            found.append(Weight(f"{weight.name}.lora_{name}", (*many, *shape),
                                expert=weight.expert, added="adapter"))  # fmt: skip
        if training.dora:
            found.append(Weight(f"{weight.name}.magnitude", (*many, outside),
                                expert=weight.expert, added="adapter"))  # fmt: skip
    return found


def low_rank(name: str) -> str:
    """The adapter's inner product of the linear layer ``name``."""
    return f"{name}_lora"


def in_module(model: ModelGraph, op: Op, weight: Weight) -> bool:
    """Whether a weight is that of a linear module, which quantisation packs and adapters wrap.

    transformers' routers, and its experts as one three-dimensional parameter (since version 5), are
    no torch.nn.Linear, which alone is replaced (integrations/bitsandbytes.py
    replace_with_bnb_linear).
    """
    if len(weight.shape) < 2 or op.kind in ("embedding", "norm"):
        return False
    if not model.context.framework.hub_models:
        return True
    return (len(weight.shape) == 2 or weight.apart) and op.name != "router"


def adapts(model: ModelGraph, op: Op, training: Training, layer: int = 0) -> bool:
    """Whether an op of a layer carries adapters."""
    if op.group not in ("attention", "ffn"):
        return False
    inside = any(in_module(model, op, weight) for weight in op.own_weights)
    return inside and training.targets.hits(layer, op.name, op.group)
