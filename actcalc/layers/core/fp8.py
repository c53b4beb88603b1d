"""Layers whose matrix products run in fp8: what they keep, and what they cast.

Transformer Engine casts the input of a product and saves the cast tensor alone, one byte per
element (module/linear.py, layernorm_linear.py, grouped_linear.py ``save_for_backward``; on Hopper
the transposed copy, elsewhere the plain one). A tensor that another op saves too stays as it was
beside it. Embedding, router and output head are not run in fp8.

torchao's ``Float8Linear`` (float8/float8_linear.py ``matmul_with_hp_or_float8_args``) keeps its
input as it is and casts it again in backward. Its tensor-parallel styles with one scale per tensor
(float8_tensor_parallel.py) cast before: what is gathered, and kept, is then in fp8.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from actcalc.layers.core.algebra import Expr
from actcalc.layers.core.graph import DType, Graph, Op, Tensor


def quantised(graph: Graph) -> Graph:
    """The graph with the saved inputs of its linear layers in fp8."""
    tensors = dict(graph.tensors)
    made: set[str] = set()
    ops: list[Op] = []
    for op in graph.ops:
        if not _in_fp8(op):
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


def cast_at_source(graph: Graph) -> Graph:
    """A quantised graph as DeepSeek-V3 caches it (technical report, arXiv:2412.19437, 3.3.3).

    What a product or SwiGLU reads is cast by the op that makes it, and kept once: where that op is
    in a module that re-runs, the copy goes with its output. Attention's output, which its own
    backward reads too, is kept once with 12 bits (E5M6).
    """
    tensors, made = dict(graph.tensors), dict(graph.producer)
    copies: dict[str, str] = {}
    for op in graph.ops:
        for name in _cached(op, graph):
            if name in made:
                copies[name] = f"{name}_fp8"
                wide = _read_by_core(graph, name)
                shape = tensors[name].shape
                shape = (*shape[:-1], shape[-1] * Fraction(3, 2)) if wide else shape
                tensors[copies[name]] = Tensor(copies[name], shape, DType.FP8)
    ops = []
    for op in graph.ops:
        own = _cached(op, graph)
        swapped = {name: copies[name] for name in own if name in copies}
        if op.kind == "core":
            swapped |= {name: copies[name] for name in op.outputs if name in copies}
        inputs = tuple(copies[n] if n in own and n in copies else n for n in op.inputs)
        saves = dict.fromkeys(swapped.get(name, name) for name in op.saves)
        kept = [name for name in op.outputs if name not in copies.values()]
        outputs = (*kept, *(copies[name] for name in kept if name in copies))
        ops.append(replace(op, inputs=inputs, outputs=outputs, saves=tuple(saves)))
    return replace(graph, tensors=tensors, ops=tuple(ops))


def _cached(op: Op, graph: Graph) -> tuple[str, ...]:
    """What an op reads from an fp8 copy: a product its input, a fused activation its too."""
    if _in_fp8(op):
        return tuple(name for name in op.inputs if f"{name}_fp8" in op.saves)
    if op.kind == "activation" and op.kernel == "fused":
        return tuple(name for name in op.inputs[:1] if name in op.saves)
    return ()


def _read_by_core(graph: Graph, name: str) -> bool:
    return any(op.kind == "core" and name in op.outputs and name in op.saves for op in graph.ops)


def cast_each_time(graph: Graph) -> Graph:
    """The graph with its linear layers torchao's: they keep their inputs, and cast either way.

    Forward has input and weight in fp8 beside them, backward the output's gradient and the input,
    each in two layouts.
    """
    sizes = {name: tensor.elements for name, tensor in graph.tensors.items()}
    ops = []
    for op in graph.ops:
        if not _in_fp8(op):
            ops.append(op)
            continue
        taken, made = sizes[op.inputs[0]], sizes[op.outputs[0]]
        weight = sum((w.parameters for w in op.weights[:1]), Expr.of(0))
        ops.append(
            replace(
                op,
                forward_scratch=op.forward_scratch + taken + weight,
                backward_scratch=op.backward_scratch + (taken + made) * 2,
            )
        )
    return replace(graph, ops=tuple(ops))


def cast_before(graph: Graph) -> Graph:
    """The graph under torchao's tensor parallelism: inputs are gathered and kept in fp8."""
    tensors = dict(graph.tensors)
    read = {name for op in graph.ops if _in_fp8(op) for name in op.inputs}
    ops = []
    for op in graph.ops:
        (out,) = op.outputs[:1]
        if op.kind != "gather" or out not in read:
            ops.append(op)
            continue
        narrow = tensors[out].dtype.itemsize
        tensors[out] = replace(tensors[out], dtype=DType.FP8)
        comm = tuple(replace(one, bytes=one.bytes / narrow) for one in op.comm)
        ops.append(replace(op, comm=comm))
    return quantised(replace(graph, tensors=tensors, ops=tuple(ops)))


def _in_fp8(op: Op) -> bool:
    return op.kind == "linear" and bool(op.weights) and op.group != "head"
