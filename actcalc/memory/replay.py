"""A stage's step as requests to PyTorch's allocator, and what that reserves.

Two steps are replayed, the first of which ends with making the optimizer's states: in the second,
activations find what those left of the first one's segments. Each tensor of each layer is a
request, in the order in which ops make and drop it (:mod:`actcalc.memory.working`); what FSDP
gathers and reduces are requests of streams of their own. What an op makes and drops inside are
requests as large as the largest tensor it takes or makes; head and loss are one request where their
cross-entropy is none of single ops, and so is a backward that makes no gradients of weights.
Micro-batches in flight follow the moments of the schedule. What is not replayed: other libraries,
and code between the moments (clipping, logging, checkpoints).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from actcalc.layers.core.graph import Graph
from actcalc.layers.model import ModelGraph
from actcalc.memory.around import Around, Both
from actcalc.memory.caching import Block, CachingAllocator
from actcalc.memory.figures import StageFigure
from actcalc.memory.parts import EMBEDDING, HEAD, REFERENCE, Part
from actcalc.memory.stage import StageMemory
from actcalc.memory.update import StepMoment
from actcalc.memory.working import Instant, LayerWalk
from actcalc.policy.rules import NONE, Policy
from actcalc.run.staged import Work

_GATHER, _REDUCE = 1, 2
"""Streams of their own."""

_MOST = 1_000
"""Passes of layers in one step, at most."""

_PIECES = 256
"""Requests inside one op, at most: larger ones where it would be more."""

Key = str | tuple[str, int]
"""A tensor by its name; a storage's gradient, or a piece of weight gradients, by its number."""

_HANDED: Key = ("gradient", 1)
"""The gradient of a layer's output."""


class Reserved(NamedTuple):
    """The most bytes in use and the most reserved in two steps of a stage."""

    allocated: int
    reserved: int


def replay(memory: StageMemory, stage: int, *, outside: int = 0) -> Iterator[Reserved]:
    """What the allocator of a GPU of ``stage`` has in use and reserved in two steps, at most.

    First without and then with ``expandable_segments``. ``outside`` bytes of the device are taken
    by others. None of them where there are more passes of layers than are looked at.
    """
    works = memory.staged.work(stage)
    if len(works) * sum(len(chunk) + 2 for chunk in memory.places[stage]) > _MOST:
        return
    device = memory.run.device
    limit = None if device is None else device.usable_bytes - outside
    script = _Script(memory, stage)
    for expandable in (False, True):
        pool = CachingAllocator(limit=limit, expandable=expandable)
        _Replay(script, pool).steps()
        yield Reserved(pool.most_allocated, pool.most_reserved)


def replayed(memory: StageMemory, figure: StageFigure) -> StageFigure:
    """The figure of a stage with what the allocator reserves for it, either way of its option."""
    found = [each.reserved for each in replay(memory, figure.stage, outside=figure.overhead_bytes)]
    plain, expandable = found or (None, None)
    return replace(figure, reserved_bytes=plain, reserved_expandable_bytes=expandable)


class _Change(NamedTuple):
    """What one moment drops, takes, and makes and drops again; names and bytes."""

    given: tuple[Key, ...]
    taken: tuple[tuple[Key, int], ...]
    inside: tuple[int, ...]


class _Passage(NamedTuple):
    """A layer's pass as changes."""

    changes: tuple[_Change, ...]
    left: frozenset[Key]
    """What is alive at its end."""
    most: int
    """The most bytes alive."""


def _passage(walk: LayerWalk, moments: Iterable[Instant], start: Iterable[Key]) -> _Passage:
    """The differences from one moment to the next, of what was alive at the ``start``."""
    own = {name: size for name, size in walk.known.own.items() if size}
    begun = set(start)
    alive: dict[Key, None] = {name: None for name in own if name in begun}
    changes: list[_Change] = []
    pieces = most = 0
    last: Instant | None = None

    largest = {op.name: max(map(walk.size, (*op.inputs, *op.outputs))) for op in walk.graph.ops}

    def change(moment: Instant, inside: int) -> None:
        nonlocal pieces
        now: dict[Key, int] = {n: size for n, size in own.items() if n in moment.alive}
        now.update((("gradient", key), size) for key, size in moment.gradients.items() if size)
        given = tuple(k for k in alive if k not in now and not _is_weights(k))
        taken = [(key, size) for key, size in now.items() if key not in alive]
        if moment.kept > pieces:
            taken.append((("weights", pieces), moment.kept - pieces))
            pieces = moment.kept
        for key in given:
            del alive[key]
        alive.update((key, None) for key, _ in taken)
        if given or taken or inside:
            each = max(largest.get(moment.at) or inside, -(-inside // _PIECES))
            pieces_inside = [min(each, inside - at) for at in range(0, inside, each or 1)]
            changes.append(_Change(given, tuple(taken), tuple(pieces_inside)))

    for last in moments:
        change(last, max(0, last.inside - last.kept))
        most = max(most, last.total)
    if last is not None:
        change(last, 0)
    return _Passage(tuple(changes), frozenset(alive), most)


def _is_weights(key: Key) -> bool:
    return key[0] == "weights" and isinstance(key, tuple)


class _Layer(NamedTuple):
    """Both passes of one kind of layer under its policy."""

    graph: Graph
    forward: _Passage
    backward: _Passage
    kept: frozenset[Key]
    stored: int
    """Bytes of what is kept."""
    ends: tuple[int, int]
    """Bytes of its input and of its output."""


class _Pile:
    """Bytes that grow and shrink as a whole, in blocks as large as each growth."""

    def __init__(self, pool: CachingAllocator, stream: int = 0) -> None:
        self.pool, self.stream = pool, stream
        self.blocks: list[Block] = []
        self.bytes = 0

    def to(self, size: int) -> None:
        """Hold ``size`` bytes: more of them, or others."""
        if size < self.bytes:
            self.empty()
        if size > self.bytes:
            self.blocks.append(self.pool.take(size - self.bytes, self.stream))
            self.bytes = size

    def add(self, block: Block, size: int) -> None:
        """Take over a block."""
        self.blocks.append(block)
        self.bytes += size

    def empty(self) -> None:
        """Give all of it back."""
        for block in self.blocks:
            self.pool.give(block)
        self.blocks, self.bytes = [], 0


class _Held:
    """What one micro-batch holds of one occurrence of a part: blocks by name."""

    def __init__(self) -> None:
        self.blocks: dict[Key, Block] = {}


class _Place(NamedTuple):
    """One occurrence of a part in its chunk."""

    part: Part
    layers: tuple[_Layer, ...]
    """Its layers, op by op; none where only its size is known."""
    around: Both


class _Script:
    """What a stage does in a step, as changes of what it holds: the same for every allocator."""

    def __init__(self, memory: StageMemory, stage: int) -> None:
        self.memory, self.stage = memory, stage
        self.model: ModelGraph = memory.graph
        self.held, _, self.buffers = memory.beside(stage)
        self.table = memory.table(stage)
        self._layers: dict[tuple[int, str], _Layer] = {}
        self.chunks = [
            list(self._places(parts, around, chunk))
            for parts, around, chunk in zip(
                memory.parts(stage),
                memory.around(stage, self.held),
                memory.places[stage],
                strict=True,
            )
        ]

    def _places(
        self, parts: Sequence[Part], around: Sequence[Both], chunk: range
    ) -> Iterator[_Place]:
        at = 0
        for part in parts:
            for index in range(part.count):
                yield _Place(part, self._opened(part, index, chunk), around[at])
                at += 1

    def _opened(self, part: Part, index: int, chunk: range) -> tuple[_Layer, ...]:
        timeline = self.memory.timeline
        if part.name == REFERENCE:
            return ()
        if part.first < 0:
            graph = {EMBEDDING: self.model.embedding, HEAD: self.model.head}.get(part.name)
            graph = graph or self.model.mtp.graph if self.model.mtp else graph
            found = [] if graph is None else [self._layer(graph, NONE)]
        else:
            first = part.first + index * part.layers
            found = [
                self._layer(
                    timeline.stages.graph(layer),
                    NONE if part.layers > 1 else timeline.stages.layer_policy(layer, chunk),
                )
                for layer in range(first, first + part.layers)
            ]
        if part.layers > 1:
            return tuple(found)
        (one,) = found
        exact = one.stored == part.stored and one.forward.most <= part.forward
        return (one,) if exact and one.backward.most <= part.backward else ()

    def _layer(self, graph: Graph, policy: Policy) -> _Layer:
        key = (id(graph), policy.name)
        if key not in self._layers:
            outcome = self.memory.timeline.stages.outcome(graph, policy)
            known = self.memory.timeline.known(graph)
            walk = LayerWalk(self.model, outcome, self.memory.timeline.options, None, False, known)
            start = [graph.input] if known.own[graph.input] else []
            kept = [name for name in outcome.stored if known.own[name]]
            # below the first trained weight no backward runs
            back = () if outcome.detached else walk.backward_moments(whole=policy.whole)
            self._layers[key] = _Layer(
                graph,
                _passage(walk, walk.forward_moments(set(outcome.stored)), start),
                _passage(walk, back, (*kept, _HANDED)),
                frozenset(kept),
                sum(known.own[name] for name in kept),
                (known.own[graph.input], known.own[graph.output]),
            )
        return self._layers[key]

    def pieces(self, size: int) -> list[int]:
        """``size`` bytes in one piece per weight, or in one where the framework has one buffer."""
        if not size:
            return []
        if self.memory.run.framework.main_gradients:
            return [size]
        sizes = self.model.sizes
        counts = [
            int(weight.parameters.value(sizes))
            for graph in self.memory.staged.graphs(self.stage)
            for weight in graph.weights
        ]
        total = sum(counts)
        return [-(-size * count // total) for count in counts if count]


class _Replay:
    """A script run with one allocator."""

    def __init__(self, script: _Script, pool: CachingAllocator) -> None:
        self.script, self.pool = script, pool
        self.memory, self.chunks = script.memory, script.chunks
        self.gradients = _Pile(pool)
        sharded = self.memory.sharding is not None
        self.gathered = _Pile(pool, _GATHER if sharded else 0)
        self.unreduced = _Pile(pool, _REDUCE if sharded else 0)
        self.flying: list[list[list[_Held]]] = [[] for _ in self.chunks]

    # --- steps -----------------------------------------------------------------------------------

    def steps(self) -> None:
        """Two steps: the first makes the optimizer's states."""
        script, table = self.script, self.script.table
        held = script.held
        for size in script.pieces(held.weights):
            self.pool.take(size)
        for buffer in script.buffers:
            if buffer.inside:
                self.pool.take(buffer.bytes)
        self.pool.take(table.shared)
        later = table.made_at_first
        for size in script.pieces(held.optimizer - later):
            self.pool.take(size)
        for step in range(2):
            if not table.kept or not step:
                self.gradients.empty()
            self._works(table.works)
            self.gradients.to(max(self.gradients.bytes, held.gradients))
            if not step:
                for size in script.pieces(later):
                    self.pool.take(size)
            for moment in table.steps:
                self._updates(moment)

    def _updates(self, moment: StepMoment) -> None:
        """A moment of the optimizer's step: gradients that it still needs, and its temporaries."""
        if moment.gradients < self.gradients.bytes:
            self.gradients.to(moment.gradients)
        for block in [self.pool.take(size) for size in moment.blocks if size]:
            self.pool.give(block)

    def _works(self, works: Sequence[Work]) -> None:
        for kind, chunk, held in works:
            for other, count in enumerate(held):
                running = 1 if other == chunk and kind == "F" else 0
                self._match(other, count - running)
            if kind == "F":
                self.flying[chunk].append(self._forward(chunk))
            elif kind == "B":
                self._backward(chunk, self.flying[chunk].pop(0))
            elif kind == "I":
                self._inputs_alone(chunk)
        for chunk in range(len(self.chunks)):
            self._match(chunk, 0)
        for pile in (self.gathered, self.unreduced):
            pile.empty()

    def _match(self, chunk: int, count: int) -> None:
        """Have ``count`` micro-batches of a chunk in flight: run more, or drop the first."""
        flying = self.flying[chunk]
        while len(flying) < count:
            flying.append(self._forward(chunk))
        while len(flying) > max(0, count):
            for held in flying.pop(0):
                for block in held.blocks.values():
                    self.pool.give(block)

    def _beside(self, around: Around) -> None:
        self.gathered.to(around.gathered)
        self.unreduced.to(around.unreduced)
        if around.gradients > self.gradients.bytes:
            self.gradients.to(around.gradients)

    # --- passes ----------------------------------------------------------------------------------

    def _run(self, passage: _Passage, blocks: dict[Key, Block]) -> None:
        pool = self.pool
        for given, taken, inside in passage.changes:
            for key in given:
                block = blocks.pop(key, None)
                if block is not None:
                    pool.give(block)
            for key, size in taken:
                if key not in blocks:
                    blocks[key] = pool.take(size)
            if inside:
                pool.touch(inside)

    def _forward(self, chunk: int) -> list[_Held]:
        """A micro-batch's forward of a chunk; what it holds from then on, place by place."""
        found: list[_Held] = []
        handed: Block | None = None
        for place in self.chunks[chunk]:
            self._beside(place.around.forward)
            held = _Held()
            if not place.layers:
                self._give(handed)
                handed = None
                stored = place.part.stored
                if stored:
                    held.blocks["stored"] = self.pool.take(stored)
                self._lump(place.part.forward - stored)
            elif len(place.layers) == 1:
                handed = self._one_forward(place.layers[0], held, handed)
            else:
                handed = self._segment_forward(place, held, handed)
            found.append(held)
        self._give(handed)
        return found

    def _one_forward(self, layer: _Layer, held: _Held, handed: Block | None) -> Block | None:
        start = layer.graph.input
        if handed is not None:
            held.blocks[start] = handed
        elif layer.kept or layer.forward.changes:
            size, _ = layer.ends
            if size:
                held.blocks[start] = self.pool.take(size)
        self._run(layer.forward, held.blocks)
        output = layer.graph.output
        if output in layer.kept:
            return None
        return held.blocks.pop(output, None)

    def _segment_forward(self, place: _Place, held: _Held, handed: Block | None) -> Block | None:
        if place.part.stored:
            held.blocks["stored"] = self.pool.take(place.part.stored)
        for layer in place.layers:
            inner = _Held()
            handed = self._one_forward(layer, inner, handed)
            for block in inner.blocks.values():
                self.pool.give(block)
        return handed

    def _backward(self, chunk: int, held: list[_Held]) -> None:
        """A micro-batch's backward of a chunk."""
        handed: Block | None = None
        for place, one in zip(reversed(self.chunks[chunk]), reversed(held), strict=True):
            self._beside(place.around.backward)
            if not place.layers:
                self._give(handed)
                handed = None
                self._lump(place.part.backward - place.part.stored)
            elif len(place.layers) == 1:
                handed = self._one_backward(place.layers[0], one.blocks, handed)
            else:
                handed = self._segment_backward(place, handed)
            for block in one.blocks.values():
                self.pool.give(block)
            self._reduce(place)
        self._give(handed)

    def _segment_backward(self, place: _Place, handed: Block | None) -> Block | None:
        """All layers of a segment run again, and then their backward."""
        passed: Block | None = None
        every = []
        for layer in place.layers:
            held = _Held()
            passed = self._one_forward(layer, held, passed)
            every.append(held)
        self._give(passed)
        for layer, held in zip(reversed(place.layers), reversed(every), strict=True):
            handed = self._one_backward(layer, held.blocks, handed)
            for block in held.blocks.values():
                self.pool.give(block)
        return handed

    def _one_backward(
        self, layer: _Layer, blocks: dict[Key, Block], handed: Block | None
    ) -> Block | None:
        if handed is not None:
            blocks[_HANDED] = handed
        else:
            _, size = layer.ends
            if size:
                blocks[_HANDED] = self.pool.take(size)
        self._run(layer.backward, blocks)
        sharded = self.memory.sharding is not None
        last: Block | None = None
        for key in [key for key in blocks if isinstance(key, tuple)]:
            block = blocks.pop(key)
            if key[0] == "weights" and not sharded:
                self.gradients.add(block, block.size)
            elif key[0] == "gradient" and (last is None or block.size > last.size):
                self._give(last)
                last = block
            else:
                self.pool.give(block)
        return last

    def _reduce(self, place: _Place) -> None:
        """What a unit's reduction holds beyond its backward, in the stream of reductions."""
        if len(place.layers) == 1 and place.part.backward > place.layers[0].backward.most:
            self._lump(place.part.backward, _REDUCE)

    def _inputs_alone(self, chunk: int) -> None:
        """A backward that makes no gradients of weights, and keeps what those need."""
        for place in reversed(self.chunks[chunk]):
            self._beside(place.around.backward)
            self._lump(place.part.backward - place.part.stored)

    def _lump(self, size: int, stream: int = 0) -> None:
        if size > 0:
            self.pool.give(self.pool.take(size, stream))

    def _give(self, block: Block | None) -> None:
        if block is not None:
            self.pool.give(block)
