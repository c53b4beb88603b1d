"""Which runs of one model have the same graphs but for the sizes of their symbols.

A builder reads a run's degrees and micro-batch as symbols, and a few of them as conditions: whether
there is tensor parallelism, whether a rank has more query heads than key heads, whether there is
more than one sequence. Runs that agree in all of these share their graphs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from actcalc.layers.core.graph import Comm, Graph, Op, Weight
from actcalc.layers.model import ModelGraph
from actcalc.specs import Framework, Layout, Model, Workload

_BLOCK = 8  # rows, or batches times heads, that a fused softmax wants to be a multiple of


def structure(
    model: Model, layout: Layout, workload: Workload, framework: Framework
) -> tuple[Hashable, ...]:
    """What the graphs of a run depend on beside their symbols: equal for runs that share them.

    Model, framework and the workload but for its micro-batch are the same in all of them.
    """
    tp, kv, size = layout.tp, model.kv_heads, workload.micro_batch
    if _reads_more(model):
        return tp, layout.sp, layout.cp, layout.ep, layout.etp, size
    heads, groups = model.heads // tp, kv // min(kv, tp)
    conditions: tuple[Hashable, ...] = (
        layout.sp, tp > 1, layout.cp > 1, layout.ep > 1, layout.expert_tp > 1,
        layout.expert_tp == tp, layout.pp > 1, size > 1,
        kv < tp, groups > 1, heads > max(1, kv // tp), heads == 1, kv // tp <= 1,
        workload.seq % (2 * layout.cp) == 0,
        (tp, layout.cp) if framework.layers == "pytorch" else 0,  # rings are written out in steps
    )  # fmt: skip
    if workload.attention == "flash" and workload.kernels.attention_backend != "unfused":
        return conditions
    return (*conditions, size * heads % _BLOCK, workload.seq // layout.cp % _BLOCK)


def _reads_more(model: Model) -> bool:
    """Whether builders read more of the degrees: of mixers, towers and layers of other sizes."""
    return bool(
        model.mamba or model.linear or model.patches or model.tower or model.encoder_layers
        or model.layer_sizes
    )  # fmt: skip


def signature(model: ModelGraph) -> tuple[Hashable, ...]:
    """All that rules read of a run's graphs beside sizes: equal where graphs are the same."""
    layout = model.context.layout
    graphs = [model.embedding, *(run.graph for run in model.kinds), model.head]
    if model.mtp:
        graphs.append(model.mtp.graph)
    degrees = (layout.tp > 1, layout.sp, layout.cp > 1, layout.ep > 1, layout.pp)
    return (degrees, *map(_graph, graphs))


def _graph(graph: Graph) -> tuple[Hashable, ...]:
    tensors = tuple((t.name, t.shape, t.dtype) for t in graph.tensors.values())
    ops = tuple(map(_op, graph.ops))
    return graph.input, graph.output, tensors, ops, graph.shared, graph.gradient


def _op(op: Op) -> tuple[Hashable, ...]:
    return (
        op.name, op.kind, op.group, op.inputs, op.outputs, op.saves, op.flops, op.backward_flops,
        _weights(op.weights), _comms(op.comm), _comms(op.backward_comm), op.forward_scratch,
        op.backward_scratch, op.modules, op.rerunnable, op.kernel,
    )  # fmt: skip


def _weights(weights: Iterable[Weight]) -> tuple[Hashable, ...]:
    return tuple(tuple(vars(weight)[name] for name in _WEIGHT) for weight in weights)


def _comms(comms: Iterable[Comm]) -> tuple[Hashable, ...]:
    return tuple((comm.collective, comm.group, comm.bytes) for comm in comms)


_WEIGHT = ("name", "shape", "expert", "scope", "frozen", "added")
