"""Recompute policies by name: which ops re-run, and what they leave stored.

The rule is that of ``torch.utils.checkpoint``: for a set R of re-run ops, everything saved by an op
outside R stays, plus each input of an op in R that no op in R produces. A module whose checkpoint
*discards its output* (Megatron-Core ``CheckpointWithoutOutput``) also drops what ops outside R
save of its products: they are made again before backward needs them.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from actcalc.errors import SpecError, suggestion
from actcalc.layers.core.graph import Graph, Op
from actcalc.specs.recompute import ALIASES, COUNTED, MODULES, WHOLE

Boundary = Literal["replicated", "own", "split"]


class Step(NamedTuple):
    """One layer's turn in the backward of a chunk."""

    kind: Literal["re-run", "backward"]
    """What it does: its forward again, or its backward."""
    layer: int
    """Which layer."""
    beside: tuple[int, ...] = ()
    """Other layers whose inputs a re-run made, and that wait for theirs."""


@dataclass(frozen=True, eq=False, repr=False)
class Policy:
    """What is re-run: nothing, modules of each layer, or whole layers in segments.

    ``modules`` are the re-run modules of every layer. ``whole`` re-runs layers whole, ``segment``
    consecutive layers of a pipeline chunk from one stored input (None: √n of a chunk's n layers,
    Chen et al. 2016); ``block`` limits that to the first so many layers of a chunk (the rest store
    everything); ``every`` to each so-manieth layer of a chunk. ``boundary``
    says how the layer input is kept: ``own`` as the layer gets it (split under sequence
    parallelism), ``replicated`` on every tensor-parallel rank, ``split`` over them (Megatron's
    ``distribute_saved_activations``, without sequence parallelism). ``per_op`` re-runs all but
    every second matrix product and fused attention, whose outputs are kept (torchtitan).
    ``recursive`` keeps a chunk's first input alone; backward runs half of the chunk again to make
    the input of the other half, and so on in both (Chen et al. 2016, section 4.4). ``passes`` says
    how often a layer's forward runs again.
    """

    name: str
    modules: tuple[str, ...] = ()
    whole: bool = False
    segment: int | None = 1
    block: int | None = None
    boundary: Boundary = "own"
    every: int = 1
    per_op: bool = False
    recursive: bool = False
    passes: int = 1

    @property
    def segmented(self) -> bool:
        """Whether several layers are re-run from one stored input."""
        return self.segment != 1 or self.recursive

    @property
    def count(self) -> int:
        """The number of layers in its name (uniform:N, block:N, every:N); else 1."""
        return max(self.segment or 1, self.block or 1, self.every)

    def segments(self, chunk: range) -> Iterator[range]:
        """A chunk's layers cut into those that are stored, and re-run, together."""
        length = self.segment
        if length is None:
            length = -(-len(chunk) // max(1, round(len(chunk) ** 0.5)))
        for start in range(chunk.start, chunk.stop, max(1, length)):
            yield range(start, min(start + length, chunk.stop))

    def backward(self, chunk: range) -> Iterator[Step]:
        """What backward does with a chunk's layers, in order."""
        if self.recursive:
            yield from _nested(chunk, ())
            return
        for segment in reversed(list(self.segments(chunk))):
            for layer in segment:
                yield Step("re-run", layer)
            for layer in reversed(segment):
                yield Step("backward", layer)

    def of_layer(self, position: int) -> Policy:
        """What holds for one layer of a chunk, counted from 0: block and every leave some alone."""
        if self.block is not None and position >= self.block:
            return NONE
        if self.every > 1 and (position + 1) % self.every:
            return NONE
        return self


def _nested(chunk: range, waiting: tuple[int, ...]) -> Iterator[Step]:
    """Backward of layers of which the first one's input is there, and those in ``waiting``."""
    if len(chunk) < 2:
        for layer in chunk:
            yield Step("re-run", layer, _but(waiting, layer))
            yield Step("backward", layer, _but(waiting, layer))
        return
    middle = (chunk.start + chunk.stop + 1) // 2
    for layer in range(chunk.start, middle):
        yield Step("re-run", layer, _but(waiting, layer))
    yield from _nested(range(middle, chunk.stop), (*waiting, middle))
    yield from _nested(range(chunk.start, middle), waiting)


def _but(layers: tuple[int, ...], one: int) -> tuple[int, ...]:
    return tuple(layer for layer in layers if layer != one)


NONE = Policy("none")

NAMES = (
    "none",
    *ALIASES,
    *MODULES,
    *WHOLE,
    *(f"{name}:N" for name in COUNTED),
)
_COUNTED = rf"({'|'.join(COUNTED)}):(\d{{1,6}})"


def parse_policy(text: str, *, full_boundary: Boundary = "own") -> Policy:
    """Return the policy called ``text``; combinations of modules are joined with ``+``.

    ``full_boundary`` is how the framework keeps the input of a fully re-run layer. Raises
    ``SpecError`` for an unknown name, or a number of layers below 1.
    """
    name = text.strip()
    if name == "none":
        return NONE
    if name == "full":
        return Policy(name, whole=True, boundary=full_boundary)
    if name == "full-sharded":
        return Policy(name, whole=True, boundary="split")
    if name == "op":
        return Policy(name, per_op=True)
    if name == "sqrt":
        return Policy(name, whole=True, segment=None, boundary=full_boundary)
    if name == "recursive":
        return Policy(name, whole=True, boundary=full_boundary, recursive=True)
    counted = re.fullmatch(_COUNTED, name) if ":" in name else None
    if counted:
        return _counted(name, counted[1], int(counted[2]), full_boundary)
    modules: list[str] = []
    for word in name.split("+"):
        module = ALIASES.get(word.strip(), word.strip())
        if module not in MODULES:
            if word in ("none", *WHOLE):
                raise SpecError(
                    f"policy {name!r}: {word!r} already decides for the whole layer",
                    "combine only modules: " + ", ".join([*ALIASES, *MODULES]),
                )
            raise SpecError(
                f"unknown policy {name!r}",
                suggestion(word, NAMES) or "policies: " + ", ".join(NAMES),
            )
        if module in modules:
            raise SpecError(f"policy {name!r} names {module} twice", "name each module once")
        modules.append(module)
    return Policy(name, modules=tuple(modules))


def _counted(name: str, method: str, count: int, boundary: Boundary) -> Policy:
    if count < 1:
        raise SpecError(f"policy {name!r}: {count} is no number of layers", "count from 1")
    if method == "uniform":
        return Policy(name, whole=True, segment=count, boundary=boundary)
    if method == "block":
        return Policy(name, whole=True, block=count, boundary=boundary)
    # torchtitan counts layers from 1 and wraps those that the number divides.
    return Policy(name, whole=True, every=count, boundary=boundary)


def rerun_ops(policy: Policy, graph: Graph) -> tuple[Op, ...]:
    """Ops of the layer that lie in the policy's re-run set, in order (empty if none match)."""
    if policy.whole:
        return graph.ops
    if policy.per_op:
        cached = cached_ops(graph)
        return tuple(op for op in graph.ops if op.name not in cached)
    tags = {MODULES[name].tag for name in policy.modules}
    return tuple(op for op in graph.ops if op.modules & tags)


def cached_ops(graph: Graph, forced: Container[str] = ()) -> frozenset[str]:
    """Ops whose outputs a per-op selective checkpoint keeps.

    The first, third, fifth ... matrix product with a weight, fused attention, what is summed and
    scattered, and what is exchanged (torchtitan distributed/activation_checkpoint.py: aten.mm every
    second time, sdpa flash and efficient, reduce_scatter_tensor, all_to_all_single). Products named
    in ``forced`` always re-run and are not counted.
    """
    products = [op.name for op in counted_products(graph) if op.name not in forced]
    fused = [op.name for op in graph.ops if op.kind == "core" and op.kernel]
    moved = [op.name for op in graph.ops if op.kind in ("scatter", "exchange")]
    return frozenset((*products[::2], *fused, *moved))


def counted_products(graph: Graph) -> tuple[Op, ...]:
    """Products that a per-op checkpoint counts: ``aten.mm``, a router's left out.

    A product of torchao's fp8 tensors is aten.mm too: a dispatch mode sees it before the tensors
    turn it into aten._scaled_mm. Grouped products are none (aten._grouped_mm), and routers always
    re-run (job_config.py per_op_sac_force_recompute_mm_shapes_by_fqns, moe.router.gate).
    """
    return tuple(
        op for op in graph.ops
        if op.kind == "linear" and op.kernel != "grouped_mm" and "router" not in op.modules
    )  # fmt: skip


def per_op_stored(graph: Graph) -> tuple[str, ...]:
    """What a per-op selective checkpoint keeps: the layer's input and the cached ops' outputs."""
    cached = cached_ops(graph)
    return (graph.input, *(n for op in graph.ops if op.name in cached for n in op.outputs))


def discarded(policy: Policy, graph: Graph) -> frozenset[str]:
    """Tensors made by output-discarding modules of the policy: dropped whoever saves them."""
    tags = {MODULES[name].tag for name in policy.modules if MODULES[name].discards_output}
    return frozenset(name for op in graph.ops if op.modules & tags for name in op.outputs)


def stored(graph: Graph, rerun: Iterable[Op], dropped: frozenset[str]) -> tuple[str, ...]:
    """Names of the tensors that stay from forward to backward, in op order.

    Tensors that exist once for all layers (``graph.shared``) are left out.
    """
    again = {op.name for op in rerun}
    made = {name for op in graph.ops if op.name in again for name in op.outputs}
    kept: set[str] = set()
    for op in graph.ops:
        kept |= set(op.inputs) - made if op.name in again else set(op.saves) - dropped
    return tuple(name for name in graph.tensors if name in kept and name not in graph.shared)


def executed(graph: Graph, rerun: tuple[Op, ...], *, early_stop: bool) -> tuple[Op, ...]:
    """The ops of R that really run again.

    A wrapped module runs whole. With early stop (non-reentrant ``torch.utils.checkpoint``) it ends
    as soon as the last tensor that backward needs exists: an op that saves only its inputs is
    reached but not run.
    """
    if not early_stop:
        return rerun
    for index in range(len(rerun) - 1, -1, -1):
        op = rerun[index]
        if op.saves:
            own = set(op.outputs) & set(op.saves)
            return rerun[: index + 1] if own else rerun[:index]
    return ()
