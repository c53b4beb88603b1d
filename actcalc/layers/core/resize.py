"""Graphs at other sizes: some of their symbols replaced by numbers, or by other symbols.

A layer whose sizes are not the model's is built with the model's symbols and takes its own sizes
in their place, as a tower does in the graph of an embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from actcalc.layers.core.algebra import Expr, Operand
from actcalc.layers.core.graph import Comm, Graph, Op

Values = Mapping[str, Operand]


def shape_at(dims: tuple[Expr, ...], values: Values) -> tuple[Expr, ...]:
    """Dimensions with ``values`` in place of their symbols."""
    return tuple(dim.at(values) for dim in dims)


def op_at(op: Op, values: Values) -> Op:
    """An op with ``values`` in place of the symbols of its sizes."""
    return replace(
        op,
        flops=op.flops.at(values),
        backward_flops=op.backward_flops.at(values),
        forward_scratch=op.forward_scratch.at(values),
        backward_scratch=op.backward_scratch.at(values),
        weights=tuple(replace(w, shape=shape_at(w.shape, values)) for w in op.weights),
        comm=_comm_at(op.comm, values),
        backward_comm=_comm_at(op.backward_comm, values),
    )


def _comm_at(messages: tuple[Comm, ...], values: Values) -> tuple[Comm, ...]:
    return tuple(replace(comm, bytes=comm.bytes.at(values)) for comm in messages)


def graph_at(graph: Graph, values: Values) -> Graph:
    """A graph with ``values`` in place of the symbols of all of its sizes."""
    tensors = {
        name: replace(tensor, shape=shape_at(tensor.shape, values))
        for name, tensor in graph.tensors.items()
    }
    return replace(graph, tensors=tensors, ops=tuple(op_at(op, values) for op in graph.ops))
