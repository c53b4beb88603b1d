"""Layers whose matrix products run in fp8: what they keep is the fp8 copy of their input.

Transformer Engine casts the input of a product and saves the cast tensor alone, one byte per
element (module/linear.py, layernorm_linear.py, grouped_linear.py ``save_for_backward``; on Hopper
the transposed copy, elsewhere the plain one). A tensor that another op saves too stays as it was
beside it. Embedding, router and output head are not run in fp8.
"""

from __future__ import annotations

from dataclasses import replace

from actcalc.layers.core.graph import DType, Graph, Op, Tensor


def quantised(graph: Graph) -> Graph:
    """The graph with the saved inputs of its linear layers in fp8."""
    tensors = dict(graph.tensors)
    made: set[str] = set()
    ops: list[Op] = []
    for op in graph.ops:
        if op.kind != "linear" or not op.weights or op.group == "head":
            ops.append(op)
            continue
        saves, outputs = [], list(op.outputs)
        for name in op.saves:
            source = tensors[name]
            if name not in op.inputs or source.dtype not in (DType.BF16, DType.FP16, DType.FP32):
                saves.append(name)
                continue
            copy = f"{name}_fp8"
            tensors[copy] = Tensor(copy, source.shape, DType.FP8)
            saves.append(copy)
            if copy not in made:
                made.add(copy)
                outputs.append(copy)
        ops.append(replace(op, outputs=tuple(outputs), saves=tuple(saves)))
    return replace(graph, tensors=tensors, ops=tuple(ops))
