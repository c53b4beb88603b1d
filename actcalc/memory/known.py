"""What walks through one graph have in common, and what one of them has alive.

Sizes are those of one run, or arrays of many runs that differ in their sizes alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from actcalc.layers.core.either import exact
from actcalc.layers.core.graph import DType, Graph, Op
from actcalc.layers.model import ModelGraph

_INTEGERS = frozenset((DType.BOOL, DType.UINT8, DType.INT32, DType.INT64))


class Beside(NamedTuple):
    """What is alive beside a layer's tensors while one op runs backward, whatever was stored."""

    before: int
    """Bytes of gradients as the op's turn comes."""
    before_sizes: Mapping[int, int]
    """The same by storage."""
    kept: int
    """Bytes of gradients of weights that earlier ops left."""
    gradients: int
    """Bytes of gradients while it works."""
    sizes: Mapping[int, int]
    """The same by storage."""
    inside: int
    """Bytes of its temporaries, and of gradients of weights."""
    after: int
    """Bytes of gradients once those of its outputs are gone."""
    after_sizes: Mapping[int, int]
    """The same by storage."""
    summing: int
    """Bytes of gradients of weights then, its own being summed."""
    kept_after: int
    """Bytes of them that stay."""


class Known:
    """Of one graph: sizes of tensors and of temporaries in ops, who makes, saves and reads what."""

    def __init__(self, model: ModelGraph, graph: Graph) -> None:
        self.values = model.sizes
        self.sizes = model.tensor_bytes[graph]
        self.own = {n: 0 if n in graph.shared else size for n, size in self.sizes.items()}
        self.inside: dict[tuple[str, bool], int] = {}
        self.saves = {op.name: frozenset(op.saves) for op in graph.ops}
        self.outputs = {op.name: frozenset(op.outputs) for op in graph.ops}
        self.makers: dict[str, list[str]] = {}
        last: dict[str, int] = {}
        for index, op in enumerate(graph.ops):
            last.update(dict.fromkeys(op.inputs, index))
            for name in op.outputs:
                self.makers.setdefault(name, []).append(op.name)
        self.ends = [
            frozenset(n for n in (*op.inputs, *op.outputs) if last.get(n, -1) <= index)
            - {graph.output}
            for index, op in enumerate(graph.ops)
        ]
        """Of each op, in order: the tensors that nothing reads after it."""
        self.savers = {name: len({op.name for op in ops}) for name, ops in graph.savers.items()}
        """How many ops save a tensor."""
        self.without_gradient = graph.shared | {
            name for name, tensor in graph.tensors.items() if tensor.dtype in _INTEGERS
        }
        self.beside: list[Beside] = []
        """Of each op's backward, from the last on; filled by the first walk."""
        self._parameters: dict[str, tuple[int, ...]] = {}

    def parameters(self, op: Op) -> tuple[int, ...]:
        """Parameters of each of the op's weights."""
        if op.name not in self._parameters:
            self._parameters[op.name] = tuple(
                exact(weight.parameters.value(self.values)) for weight in op.weights
            )
        return self._parameters[op.name]


class Alive:
    """Tensors of a layer that are alive: their names, and their bytes in all.

    Bytes may be arrays of many runs': they are added to new ones, never in place.
    """

    __slots__ = ("_own", "names", "total")

    def __init__(self, own: Mapping[str, int], names: Iterable[str]) -> None:
        self._own = own
        self.names = set(names)
        self.total = sum(map(own.__getitem__, self.names))

    def add(self, names: Iterable[str]) -> None:
        """Have ``names`` alive, too."""
        for name in names:
            if name not in self.names:
                self.names.add(name)
                self.total = self.total + self._own[name]

    def drop(self, names: Iterable[str]) -> None:
        """Have none of ``names`` alive."""
        for name in names:
            if name in self.names:
                self.names.remove(name)
                self.total = self.total - self._own[name]
