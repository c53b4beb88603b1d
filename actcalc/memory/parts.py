"""One step of one pipeline stage as a sequence of moments, and the highest of them.

A stage runs chunks of the model. Inside a chunk the parts (embedding, segments of layers that
re-run together, prediction layers, head and loss) run one after another; while part j runs
forward, the parts before it are stored and part j holds its working set; in backward likewise,
with the parts after it gone. Which other micro-batches the stage holds meanwhile is read off the
pipeline's schedule (:func:`actcalc.run.schedule.moments`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, NamedTuple

from actcalc.layers.adapters import in_module
from actcalc.layers.core.algebra import most
from actcalc.layers.core.either import exact, greatest
from actcalc.layers.core.graph import Graph
from actcalc.layers.model import ModelGraph
from actcalc.memory.gradients import NO_GRADIENTS, Gradients
from actcalc.memory.known import Known
from actcalc.memory.losses import Sizes, loss_sizes
from actcalc.memory.offloading import check_offload
from actcalc.memory.states import Parameters, Trained, packs, parameters_of, together, trained_of
from actcalc.memory.working import Options, Working, working
from actcalc.policy.offload import Away, away, whole_layer
from actcalc.policy.outcome import LayerOutcome, layer_outcome
from actcalc.policy.rules import NONE
from actcalc.policy.stage import StagePolicy
from actcalc.run.placement import Ends
from actcalc.specs.training import Training

EMBEDDING, PREDICTION, HEAD = "embedding", "prediction layer", "head and loss"
"""Names of the parts at either end of a model."""
TILES = "tiles of logits"
"""Where a loss in tiles has its highest moment."""
REFERENCE = "the reference model"
"""The forward of a second model, or of the base without its adapters."""

Offloading = Literal["stays", "ahead", "asked"]
"""Whether a layer's modules are offloaded, and when their tensors come back: a layer ahead, or when
backward asks for them."""


@dataclass(frozen=True)
class Part:
    """One piece of a chunk that is stored, and re-run, as a whole; bytes for one micro-batch."""

    name: str
    """``embedding``, ``layer 11``, ``layers 0-3``, ``head and loss``."""
    count: int
    """How many times in a row it occurs (equal layers are folded)."""
    first: int
    """Index of its first layer, -1 for embedding and head."""
    layers: int
    """Layers in one occurrence."""
    stored: int
    """Bytes kept from forward to backward."""
    forward: int
    """Most bytes alive while it runs forward, what it stores included."""
    backward: int
    """Most bytes alive in its backward, what it stored and makes again included."""
    reruns: bool
    """Whether backward runs it (or modules of it) again."""
    forward_at: str
    backward_at: str
    parameters: Parameters
    """Its parameters on one rank, once."""
    trained: Trained
    """Those of them that get a gradient."""
    shapes: frozenset[tuple[int, ...]]
    """Shapes of the weights of its matrix products."""
    backward_rest: int = 0
    """The most alive in its backward without the loss (of the head)."""
    largest: int = 0
    """Elements of its largest trained weight, on one rank."""
    casts: int = 0
    """16-bit copies of its weights that autocast keeps until forward ends, and it does not store.
    """
    host: int = 0
    """Bytes of its offloaded modules that wait in host memory."""


class Alive(NamedTuple):
    """Bytes of a part: kept, the most alive while it runs either way, and autocast's copies."""

    stored: int
    forward: int
    backward: int
    casts: int


class Timeline:
    """Evaluates parts and peaks of a run's stages under one policy; layers are measured once."""

    def __init__(
        self,
        stages: StagePolicy,
        training: Training,
        gradients: Gradients = NO_GRADIENTS,
        *,
        like: Timeline | None = None,
    ) -> None:
        """``like`` is the same run's under another policy: what none changes is taken of it."""
        self.stages = stages
        self.model: ModelGraph = stages.model
        self.training = training
        framework = self.model.context.framework
        gathers = framework.gather_buffer if self.model.context.layout.sp else "none"
        gathering = {"head"} if gathers != "none" else set()
        if gathers == "all":
            gathering |= {op.name for run in self.model.runs for op in run.graph.ops}
        self.options = Options(
            gradient_fusion=training.gradient_fusion or not framework.main_gradients,
            gathers_to_buffer=frozenset(gathering),
            loss_compiled=self.model.context.workload.kernels.cross_entropy_loss_fusion,
            loss_in_place=framework.loss_in_place and training.loss in ("auto", "fused"),
            gradients=gradients,
            dequantises=self._packed_ops() if packs(training) else frozenset(),
            op_by_op=framework.op_by_op and not framework.main_gradients,
        )
        if training.offload_modules or training.offload_layers:
            check_offload(self.model.context, training, stages.policy)
        self._working: dict[tuple[int, str, str], Working] = {}
        self._away: dict[tuple[int, str], Away] = {}
        same = like is not None and like.options == self.options
        self._known: dict[int, Known] = like._known if like and same else {}
        self._ends: dict[str, Part] = like._ends if like and same else {}
        self._parameters: dict[int, Parameters] = like._parameters if like else {}
        self._trained: dict[int, Trained] = like._trained if like else {}
        self._largest: dict[int, int] = like._largest if like else {}
        self._shapes: dict[int, frozenset[tuple[int, ...]]] = like._shapes if like else {}
        self.last_layer = self.model.context.model.depth

    def _packed_ops(self) -> frozenset[str]:
        return frozenset(
            op.name
            for run in self.model.runs
            for op in run.graph.ops
            if any(in_module(self.model, op, weight) for weight in op.own_weights)
        )

    def parameters(self, graph: Graph) -> Parameters:
        """Parameters of one graph on one rank (cached; shared scopes counted)."""
        key = id(graph)
        if key not in self._parameters:
            self._parameters[key] = parameters_of(self.model, graph, self.training)
        return self._parameters[key]

    def trained(self, graph: Graph) -> Trained:
        """Parameters of one graph that get a gradient (cached)."""
        key = id(graph)
        if key not in self._trained:
            self._trained[key] = trained_of(self.model, graph, self.training)
        return self._trained[key]

    def largest(self, graph: Graph) -> int:
        """Elements of the largest trained weight of a graph, on one rank (cached)."""
        if id(graph) not in self._largest:
            sizes = self.model.sizes
            trained = (weight for weight in graph.weights if not weight.frozen)
            counts = (exact(weight.at_once.value(sizes)) for weight in trained)
            self._largest[id(graph)] = greatest(counts)
        return self._largest[id(graph)]

    def _casts(self, outcome: LayerOutcome) -> int:
        """Bytes of cast weights of a layer that its policy does not store.

        A weight is cast once in a forward pass and the copy cached until autocast is left
        (ATen autocast_mode.cpp cached_cast), re-run or not.
        """
        if not self.model.context.autocast:
            return 0
        names = (f"{op.name}_weight" for op in outcome.graph.ops if op.kind == "linear")
        stored = set(outcome.stored)
        known = self.model.tensor_bytes[outcome.graph]
        return sum(known.get(name, 0) for name in names if name not in stored)

    def shapes(self, graph: Graph) -> frozenset[tuple[int, ...]]:
        """Shapes of the weights of matrix products in one graph, on one rank (cached)."""
        if id(graph) not in self._shapes:
            self._shapes[id(graph)] = frozenset(self.weight_shapes(graph))
        return self._shapes[id(graph)]

    def weight_shapes(self, graph: Graph) -> Iterator[tuple[int, ...]]:
        """The same of every weight: of one run, or of many."""
        for op in graph.ops:
            for weight in op.weights if op.kind == "linear" else ():
                if len(weight.shape) > 1 and not weight.frozen and not weight.added:
                    yield tuple(exact(dim.value(self.model.sizes)) for dim in weight.shape)

    def working(self, graph: Graph, layer: int, chunk: range, way: Offloading = "stays") -> Working:
        """Working set of one layer under its policy (cached)."""
        policy = self.stages.layer_policy(layer, chunk)
        key = (id(graph), policy.name, way)
        if key not in self._working:
            self._working[key] = working(
                self.model,
                self.stages.outcome(graph, policy),
                self.options,
                whole=policy.whole,
                away=None if way == "stays" else self.away(layer, chunk),
                ahead=way == "ahead",
                known=self.known(graph),
            )
        return self._working[key]

    def known(self, graph: Graph) -> Known:
        """What every outcome of one graph has in common (cached)."""
        if id(graph) not in self._known:
            self._known[id(graph)] = Known(self.model, graph)
        return self._known[id(graph)]

    def away(self, layer: int, chunk: range) -> Away:
        """What the offloaded modules of one layer send to the host (cached)."""
        graph = self.stages.graph(layer)
        policy = self.stages.layer_policy(layer, chunk)
        key = (id(graph), policy.name)
        if key not in self._away:
            modules = set(self.training.offload_modules)
            if self.model.context.workload.kernels.moe_grouped_gemm == "off":
                # experts one after another (SequentialMLP) have no hooks
                modules -= {"expert_fc1", "moe_act"}
            self._away[key] = away(
                self.stages.outcome(graph, policy),
                modules,
                self.training.offload_elements,
                self.model.sizes,
            )
        return self._away[key]

    def parts(self, chunk: range, ends: Ends, *, ahead: bool = True) -> tuple[Part, ...]:
        """The parts of one chunk with its ends in model order; equal neighbours folded.

        Where modules are offloaded, ``ahead`` says whether they come back a layer ahead.
        """
        if self.training.offload_modules and len(chunk):
            return self._offloaded(chunk, ends, ahead=ahead)
        if self.training.offload_layers:
            return self._layers_offloaded(chunk, ends)
        return self._parts(chunk, ends, "stays")

    def _offloaded(self, chunk: range, ends: Ends, *, ahead: bool) -> tuple[Part, ...]:
        """Parts of a chunk whose modules are offloaded.

        The last layer of a chunk that runs backward at once stays (should_bulk_offload); with
        prediction layers that is the last of those, and all of them are taken to stay. Between two
        backwards of a pipeline the groups of the layer that comes next are back already
        (pre_reload_last_layer).
        """
        layout = self.model.context.layout
        _, last = ends
        parts = self._parts(chunk, ends, "ahead" if ahead else "asked")
        if not ahead:
            return parts
        waiting = next(part.host for part in reversed(parts) if part.first >= 0)
        if last and not self.model.mtp:
            parts = self._last_stays(parts, chunk)
        if last and layout.vpp == 1:
            return parts
        return tuple(
            replace(
                part,
                forward=part.forward + waiting,
                backward=part.backward + (waiting if part.name == "embedding" else 0),
            )
            for part in parts
        )

    def _layers_offloaded(self, chunk: range, ends: Ends) -> tuple[Part, ...]:
        """Parts of all layers, the first of which are offloaded.

        Of L layers with n offloaded, layer i has left when layer L - n + i begins forward, and
        comes back when layer L - 1 - n + i begins backward: L - n layers are there at any time,
        the running one included (cpu_offload.py _default_offload_sync_init).
        """
        count = self.training.offload_layers
        gone = [
            self._sum(graph, whole_layer(self.stages.outcome(graph), self.model.sizes))
            for graph in (self.stages.graph(layer) for layer in chunk)
        ]
        waiting = sum(gone[count + 1 :])
        found: list[Part] = []
        for part in self._parts(chunk, ends, "stays"):
            begin = part.first - chunk.start
            leaving = min(part.count, count - begin) if part.first >= 0 else 0
            if leaving > 0:
                found.append(
                    replace(
                        part,
                        count=leaving,
                        stored=part.stored - gone[begin],
                        forward=part.forward + waiting,
                        backward=part.backward + waiting,
                        host=gone[begin],
                    )
                )
            if leaving < part.count:
                rest = max(0, leaving)
                first = part.first + rest if part.first >= 0 else part.first
                found.append(
                    replace(
                        part,
                        name=f"layer {first}" if part.first >= 0 else part.name,
                        count=part.count - rest,
                        first=first,
                    )
                )
        return tuple(found)

    def _last_stays(self, parts: Sequence[Part], chunk: range) -> tuple[Part, ...]:
        index = max(i for i, part in enumerate(parts) if part.first >= 0)
        group = parts[index]
        before = [replace(group, count=group.count - 1)] if group.count > 1 else []
        stays = self._layer(chunk[-1], 1, chunk, "stays")
        alone = len(chunk) == 1
        found = stays if alone else replace(stays, backward=max(stays.backward, group.backward))
        return (*parts[:index], *before, found, *parts[index + 1 :])

    def _parts(self, chunk: range, ends: Ends, way: Offloading) -> tuple[Part, ...]:
        found: list[Part] = []
        first, last = ends
        if first:
            found.append(self.end(EMBEDDING))
        found += self._segments(chunk, way)
        if last:
            if self.model.mtp:
                found += [self.end(PREDICTION)] * self.model.mtp.count
            found.append(self.end(HEAD))
        return tuple(found)

    def _segments(self, chunk: range, way: Offloading) -> Iterator[Part]:
        policy = self.stages.policy
        if policy.segmented:
            for segment in self.stages.segments(chunk):
                if policy.recursive:
                    part = self._layer(segment.layers.start, 1, chunk, way)
                    yield replace(
                        part,
                        stored=min(part.stored, segment.stored_bytes),
                        backward=part.backward + segment.waiting_bytes,
                    )
                else:
                    yield self._segment(segment.layers, segment.stored_bytes, chunk)
            return

        def kind(layer: int) -> tuple[int, str]:
            return id(self.stages.graph(layer)), self.stages.layer_policy(layer, chunk).name

        for _, group in groupby(chunk, key=kind):
            layers = list(group)
            yield self._layer(layers[0], len(layers), chunk, way)

    def _layer(self, layer: int, count: int, chunk: range, way: Offloading) -> Part:
        graph = self.stages.graph(layer)
        policy = self.stages.layer_policy(layer, chunk)
        outcome = self.stages.outcome(graph, policy)
        work = self.working(graph, layer, chunk, way)
        leaving = host = 0
        if way != "stays":
            gone = self.away(layer, chunk)
            leaving = self._sum(graph, gone.leaving)
            host = self._sum(graph, gone.copied)
        size = self.stages.layer_bytes(graph, policy)
        stored, forward, backward = self.alive(outcome, size.stored, work, leaving)
        if self.training.offload == "activations":
            stored = 0
        return Part(
            name=f"layer {layer}",
            count=count,
            first=layer,
            layers=1,
            stored=stored,
            forward=forward,
            backward=backward,
            reruns=bool(outcome.rerun),
            forward_at=work.forward_at,
            backward_at=work.backward_at,
            parameters=self.parameters(graph),
            trained=self.trained(graph),
            largest=self.largest(graph),
            casts=self._casts(outcome),
            shapes=self.shapes(graph),
            host=host,
        )

    def alive(
        self, outcome: LayerOutcome, size: int, work: Working, leaving: int = 0
    ) -> tuple[int, int, int]:
        """Bytes that one layer stores, and the most it has alive in forward and in backward.

        ``leaving`` bytes of the ``size`` it stores are in host memory between the two. Copies that
        a replicated boundary makes are stored beside the layer's own tensors.
        """
        copies = most(0, size - self._sum(outcome.graph, outcome.stored))
        stored = size - leaving
        return stored, most(stored, work.forward + copies), most(stored, work.backward + copies)

    def _segment(self, layers: range, stored: int, chunk: range) -> Part:
        """Layers that re-run together: all they save is alive when their backward begins."""
        graphs = [self.stages.graph(layer) for layer in layers]
        works = [self.working(g, layer, chunk) for g, layer in zip(graphs, layers, strict=True)]
        saved = [self.stages.layer_bytes(graph).saved for graph in graphs]
        total = self.parameters(graphs[0])
        for graph in graphs[1:]:
            total = total + self.parameters(graph)
        return Part(
            name=f"layers {layers.start}-{layers.stop - 1}",
            count=1,
            first=layers.start,
            layers=len(layers),
            stored=stored,
            forward=stored + max(work.forward for work in works),
            backward=sum(saved[:-1]) + works[-1].backward,
            reruns=True,
            forward_at=works[0].forward_at,
            backward_at=works[-1].backward_at,
            parameters=total,
            trained=together([self.trained(graph) for graph in graphs]),
            largest=max(self.largest(graph) for graph in graphs),
            casts=sum(self._casts(self.stages.outcome(graph)) for graph in graphs),
            shapes=frozenset().union(*(self.shapes(graph) for graph in graphs)),
        )

    def alive_alone(self, layer: int) -> Alive:
        """Bytes of one layer as the first of a chunk, of one run or of many."""
        chunk = range(layer, layer + 1)
        graph, policy = self.stages.graph(layer), self.stages.layer_policy(layer, chunk)
        outcome = self.stages.outcome(graph, policy)
        stored = self.stages.layer_bytes(graph, policy).stored
        alive = self.alive(outcome, stored, self.working(graph, layer, chunk))
        return Alive(*alive, self._casts(outcome))

    def end_alive(self, name: str) -> Alive:
        """Bytes of embedding, prediction layer or head, of one run or of many."""
        found, _ = self.end_sizes(name)
        forward, backward = most(found.stored, found.forward), most(found.stored, found.backward)
        return Alive(found.stored, forward, backward, 0)

    def end(self, name: str) -> Part:
        """Embedding, one prediction layer, or head with loss (cached); policies leave them be."""
        if name not in self._ends:
            self._ends[name] = self._end(name, self._end_graph(name))
        return self._ends[name]

    def _end_graph(self, name: str) -> Graph:
        if name == PREDICTION and self.model.mtp:
            return self.model.mtp.graph
        return self.model.embedding if name == EMBEDDING else self.model.head

    def end_sizes(self, name: str) -> tuple[Sizes, Working]:
        """Bytes of an end, and of its working set, of one run or of many."""
        graph = self._end_graph(name)
        outcome = layer_outcome(self.model, graph, NONE)
        work = working(self.model, outcome, self.options)
        stored = outcome.sizes(self.model).stored
        if name == HEAD and graph.ops[-1].kind == "loss":
            return loss_sizes(self.model, graph, self.training, self.options, stored, work), work
        return Sizes(stored, work.forward, work.backward, work.backward_rest), work

    def _end(self, name: str, graph: Graph) -> Part:
        found, work = self.end_sizes(name)
        stored = found.stored
        tiled = name == HEAD and self.training.loss == "tiled"
        return Part(
            name=name,
            count=1,
            first=-1,
            layers=0,
            stored=stored,
            forward=max(stored, found.forward),
            backward=max(stored, found.backward),
            backward_rest=max(stored, found.rest),
            reruns=False,
            forward_at=work.forward_at,
            backward_at=TILES if tiled else work.backward_at,
            parameters=self.parameters(graph),
            trained=self.trained(graph),
            largest=self.largest(graph),
            shapes=self.shapes(graph),
        )

    def _sum(self, graph: Graph, names: Iterable[str]) -> int:
        return sum(self._size(graph, name) for name in names)

    def _size(self, graph: Graph, name: str) -> int:
        return self.model.tensor_bytes[graph][name]
