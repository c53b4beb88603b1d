"""Low-rank adapters: what a frozen layer no longer keeps, and what its adapters keep.

A linear layer saves its input for the gradient of its weight alone; frozen, it saves nothing. An
adapter reads the same input, so a layer that has one keeps it, and the product of rank r between
its two matrices (Hu et al. 2021, section 4.1; torch.nn.functional.linear).
"""

from __future__ import annotations

from dataclasses import replace

from actcalc.layers.core.algebra import Expr
from actcalc.layers.core.graph import Graph, Op, Tensor
from actcalc.layers.model import LayerRun, ModelGraph
from actcalc.specs.training import Training


def adapted(model: ModelGraph, training: Training) -> ModelGraph:
    """The graphs with frozen weights and adapters; the same graphs if every weight is trained."""
    if not training.lora_rank:
        return model
    made: dict[int, Graph] = {}

    def change(graph: Graph) -> Graph:
        if id(graph) not in made:
            made[id(graph)] = _frozen(model, graph, training)
        return made[id(graph)]

    return replace(
        model,
        embedding=change(model.embedding),
        runs=tuple(LayerRun(run.kind, change(run.graph), run.count) for run in model.runs),
        head=change(model.head),
        mtp=LayerRun(model.mtp.kind, change(model.mtp.graph), model.mtp.count)
        if model.mtp
        else None,
    )


def _frozen(model: ModelGraph, graph: Graph, training: Training) -> Graph:
    tensors = dict(graph.tensors)
    ops: list[Op] = []
    for op in graph.ops:
        if op.kind != "linear" or not op.weights:
            ops.append(op)
        elif targeted(op.group, training) and graph.name not in ("embedding", "head"):
            low = _low_rank(op, tensors, model, training)
            ops.append(
                replace(
                    op, outputs=(*op.outputs, low), saves=tuple(dict.fromkeys((*op.saves, low)))
                )
            )
        else:
            kept = tuple(name for name in op.saves if name not in op.inputs)
            ops.append(replace(op, saves=kept))
    return replace(graph, tensors=tensors, ops=tuple(ops))


def _low_rank(op: Op, tensors: dict[str, Tensor], model: ModelGraph, training: Training) -> str:
    """Declare the adapter's inner product: the input's rows, r wide."""
    source = tensors[op.inputs[0]]
    name = low_rank(op.name)
    rows = source.shape[:-1]
    tensors[name] = Tensor(name, (*rows, Expr.of(training.lora_rank)), model.context.act)
    return name


def low_rank(name: str) -> str:
    """The adapter's inner product of the linear layer ``name``."""
    return f"{name}_lora"


def targeted(group: str, training: Training) -> bool:
    """Whether linear layers of that group carry adapters."""
    wanted = training.lora_targets
    if group not in ("attention", "ffn"):
        return False
    return wanted == "all" or (wanted == "attention") == (group == "attention")
