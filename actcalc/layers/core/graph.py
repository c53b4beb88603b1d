"""Tensors, ops and layer graphs: the one description every figure is derived from.

A :class:`Tensor` has a shape in named dimensions (sharding is part of a dimension: ``a/t`` heads
on each tensor-parallel rank). An :class:`Op` reads tensors, produces tensors, and *saves* some of
them for backward. A :class:`Graph` is the ops of one layer in order. A tensor that two ops save is
one tensor: autograd shares its storage, and so do we.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, Literal

from actcalc.layers.core.algebra import ONE, ZERO, Expr, Operand, product, total


class DType(Enum):
    """Element types, by their size in bytes."""

    FP32 = ("fp32", 4)
    BF16 = ("bf16", 2)
    FP16 = ("fp16", 2)
    FP8 = ("fp8", 1)
    BOOL = ("bool", 1)
    UINT8 = ("uint8", 1)
    INT32 = ("int32", 4)
    INT64 = ("int64", 8)

    def __init__(self, label: str, itemsize: int) -> None:
        self.label = label
        self.itemsize = itemsize


@dataclass(frozen=True, eq=False, repr=False)
class Tensor:
    """One storage on one rank: a name, a shape in named dimensions and an element type."""

    name: str
    shape: tuple[Expr, ...]
    dtype: DType

    @cached_property
    def elements(self) -> Expr:
        """Number of elements on one rank."""
        return product(self.shape)

    @cached_property
    def bytes(self) -> Expr:
        """Size in bytes on one rank."""
        return self.elements * self.dtype.itemsize

    @cached_property
    def shape_text(self) -> str:
        """The shape as text, e.g. ``(b, a/t, s, s)``."""
        return "(" + ", ".join(dim.formula() for dim in self.shape) + ")"


@dataclass(frozen=True, eq=False, repr=False)
class Weight:
    """A parameter tensor on one rank.

    ``expert`` marks routed-expert weights, which are sharded and data-parallel reduced over other
    groups than the rest (expert parallelism). ``scope`` names tensors that several layers share
    (a tied embedding): equal scopes are counted once where they live together. A ``frozen`` one has
    no gradient. What fine-tuning ``added`` is none of the model's own weights: an adapter's, or a
    trained copy of a frozen one. One that lies ``apart`` is a matrix in a module of its own for
    each of its first dimension (experts that are no single parameter).
    """

    name: str
    shape: tuple[Expr, ...]
    expert: bool = False
    scope: str = ""
    frozen: bool = False
    added: Literal["", "adapter", "copy"] = ""
    apart: bool = False

    @cached_property
    def parameters(self) -> Expr:
        """Number of parameters on one rank."""
        return product(self.shape)

    @property
    def at_once(self) -> Expr:
        """Parameters of one tensor of it."""
        return product(self.shape[1:]) if self.apart else self.parameters


class Collective(Enum):
    """What a communication op does."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    RING = "ring"


@dataclass(frozen=True, eq=False, repr=False)
class Comm:
    """A collective of one op: which, over which group (``tp``, ``cp``, ``ep``), full message bytes.

    ``bytes`` is the size of the whole (gathered, or reduced) buffer, the unit in which bus
    bandwidth is usually stated.
    """

    collective: Collective
    group: str
    bytes: Expr


@dataclass(frozen=True, eq=False, repr=False)
class Op:
    """One kernel: what it reads, makes, saves for backward and costs (on one rank, forward).

    ``flops`` counts matrix products only, 2·m·n·k, as the papers and PyTorch's counter do.
    ``backward_flops`` is the same for its backward (twice the forward for a matrix product, 2.5
    times for a flash-attention core). ``group`` is what ``breakdown`` sums by (attention, ffn,
    norm, ...), ``modules`` are the recompute modules the op belongs to (core_attn, mlp, ...).
    ``rerunnable`` is false where running twice could differ (routing decisions). The two
    ``scratch`` sizes are bytes that its kernels make and drop beside inputs and outputs.
    """

    name: str
    kind: str
    group: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    saves: tuple[str, ...] = ()
    flops: Expr = ZERO
    backward_flops: Expr = ZERO
    weights: tuple[Weight, ...] = ()
    comm: tuple[Comm, ...] = ()
    backward_comm: tuple[Comm, ...] = ()
    forward_scratch: Expr = ZERO
    backward_scratch: Expr = ZERO
    modules: frozenset[str] = frozenset()
    rerunnable: bool = True
    kernel: str = ""
    source: str = ""

    @property
    def trains(self) -> bool:
        """Whether it makes a gradient of a weight, adapters' left out."""
        return any(not weight.frozen and weight.added != "adapter" for weight in self.weights)

    @property
    def own_weights(self) -> tuple[Weight, ...]:
        """Its weights without what fine-tuning added."""
        return tuple(weight for weight in self.weights if not weight.added)


@dataclass(frozen=True, eq=False, repr=False)
class Graph:
    """The ops of one layer, in order, over named tensors.

    ``input`` is the tensor handed over by the layer before; ``output`` the one handed on.
    ``shared`` are saved tensors that exist once for all layers (rotary tables, a padding mask):
    each layer saves a reference, the model keeps one. Where no weight up to the layer is trained
    its ``gradient`` stops: nothing is saved and there is no backward; or so unless it re-runs
    whole, where its input is made to need one (transformers ``enable_input_require_grads``).
    """

    name: str
    input: str
    output: str
    tensors: Mapping[str, Tensor]
    ops: tuple[Op, ...]
    shared: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    gradient: Literal["passes", "stops", "stops unless re-run"] = "passes"

    def __post_init__(self) -> None:
        made = {self.input, *self.shared}
        for op in self.ops:
            for name in (*op.inputs, *op.outputs, *op.saves):
                if name not in self.tensors:
                    raise ValueError(f"{self.name}: op {op.name} names no tensor {name!r}")
            missing = [name for name in op.inputs if name not in made]
            if missing:
                raise ValueError(f"{self.name}: op {op.name} reads {missing} before it is made")
            made.update(op.outputs)
            unsaved = [name for name in op.saves if name not in made]
            if unsaved:
                raise ValueError(f"{self.name}: op {op.name} saves {unsaved}, which nobody made")

    @cached_property
    def saved(self) -> tuple[str, ...]:
        """Names of all tensors saved for backward, each once, in op order."""
        return tuple(dict.fromkeys(name for op in self.ops for name in op.saves))

    @cached_property
    def savers(self) -> Mapping[str, tuple[Op, ...]]:
        """For each saved tensor the ops that save it."""
        found: dict[str, list[Op]] = {}
        for op in self.ops:
            for name in dict.fromkeys(op.saves):
                found.setdefault(name, []).append(op)
        return {name: tuple(ops) for name, ops in found.items()}

    @cached_property
    def producer(self) -> Mapping[str, Op]:
        """For each tensor made inside the layer the op that makes it."""
        return {name: op for op in self.ops for name in op.outputs}

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """Every parameter tensor of the layer."""
        return tuple(weight for op in self.ops for weight in op.weights)

    def parameters(self) -> Expr:
        """Number of parameters on one rank."""
        return total(weight.parameters for weight in self.weights)

    def factor(self, op: Op) -> tuple[Expr, ...]:
        """The shape of what a matrix product multiplies by: (outside, inside), experts before it.

        Its own weight, or one that another op of the layer has.
        """
        if op.weights:
            return op.weights[0].shape
        source, out = (self.tensors[names[0]].shape for names in (op.inputs, op.outputs))
        return out[-1], source[-1]

    def trains(self, op: Op) -> bool:
        """Whether a product makes a gradient of what it multiplies by, its own or another's."""
        return op.trains if op.weights else any(other.trains for other in self.ops)

    def bytes_of(self, names: Iterable[str]) -> Expr:
        """Summed size of the named tensors, as one expression (bytes on one rank)."""
        return total(self.tensors[name].bytes for name in names)

    def op(self, name: str) -> Op:
        """The op called ``name``; ``KeyError`` when there is none."""
        for op in self.ops:
            if op.name == name:
                return op
        raise KeyError(name)


def size_of(graph: Graph, names: Iterable[str], sizes: Mapping[str, Any]) -> Any:
    """Summed bytes of the named tensors at ``sizes``: the sum of the leaves, each exact."""
    result: Any = 0
    for name in names:
        result = result + graph.tensors[name].bytes.value(sizes)
    return result


@dataclass(eq=False, repr=False)
class GraphBuilder:
    """Collects tensors and ops in order; ``build`` checks and freezes them."""

    name: str
    _tensors: dict[str, Tensor] = field(default_factory=dict)
    _ops: list[Op] = field(default_factory=list)
    _shared: set[str] = field(default_factory=set)
    _notes: list[str] = field(default_factory=list)

    def tensor(self, name: str, shape: Iterable[Operand], dtype: DType) -> str:
        """Declare a tensor and return its name; a name may be declared once."""
        if name in self._tensors:
            raise ValueError(f"{self.name}: tensor {name!r} declared twice")
        self._tensors[name] = Tensor(name, tuple(Expr.of(dim) for dim in shape), dtype)
        return name

    def shared(self, name: str, shape: Iterable[Operand], dtype: DType) -> str:
        """Declare a tensor that exists once for all layers (idempotent)."""
        if name not in self._tensors:
            self.tensor(name, shape, dtype)
            self._shared.add(name)
        return name

    def share(self, name: str) -> None:
        """Say of a tensor made here that other layers read it too: it exists once for all."""
        self._shared.add(name)

    def shape(self, name: str) -> tuple[Expr, ...]:
        """The shape of a declared tensor."""
        return self._tensors[name].shape

    def dtype(self, name: str) -> DType:
        """The element type of a declared tensor."""
        return self._tensors[name].dtype

    def note(self, text: str) -> None:
        """Record a sentence for the reader about a choice made while building."""
        if text not in self._notes:
            self._notes.append(text)

    def op(
        self,
        name: str,
        kind: str,
        group: str,
        inputs: Iterable[str],
        outputs: Iterable[str],
        *,
        saves: Iterable[str] = (),
        flops: Operand = 0,
        backward_flops: Operand | None = None,
        weights: Iterable[Weight] = (),
        comm: Iterable[Comm] = (),
        backward_comm: Iterable[Comm] = (),
        forward_scratch: Operand = 0,
        backward_scratch: Operand = 0,
        modules: Iterable[str] = (),
        rerunnable: bool = True,
        kernel: str = "",
        source: str = "",
    ) -> None:
        """Append one op; backward FLOPs default to twice the forward's."""
        forward = Expr.of(flops)
        self._ops.append(
            Op(
                name=name,
                kind=kind,
                group=group,
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                saves=tuple(saves),
                flops=forward,
                backward_flops=forward * 2 if backward_flops is None else Expr.of(backward_flops),
                weights=tuple(weights),
                comm=tuple(comm),
                backward_comm=tuple(backward_comm),
                forward_scratch=Expr.of(forward_scratch),
                backward_scratch=Expr.of(backward_scratch),
                modules=frozenset(modules),
                rerunnable=rerunnable,
                kernel=kernel,
                source=source,
            )
        )

    @property
    def ops(self) -> list[Op]:
        """The ops so far, in order."""
        return self._ops

    def append(self, op: Op) -> None:
        """Append an op that was made elsewhere, over tensors declared here."""
        self._ops.append(op)

    def build(self, input: str, output: str) -> Graph:
        """Check the whole and return it frozen."""
        return Graph(
            name=self.name,
            input=input,
            output=output,
            tensors=dict(self._tensors),
            ops=tuple(self._ops),
            shared=frozenset(self._shared),
            notes=tuple(self._notes),
        )


__all__ = [
    "ONE",
    "ZERO",
    "Collective",
    "Comm",
    "DType",
    "Graph",
    "GraphBuilder",
    "Op",
    "Tensor",
    "Weight",
    "size_of",
]
