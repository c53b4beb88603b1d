"""Low-rank adapters: what a frozen layer no longer keeps, and what its adapters keep.

A linear layer saves its input for the gradient of its weight alone; frozen, it saves nothing, and
a norm no normalised tensor. An adapter reads the same input, so a layer that has one keeps it, and
the product of rank r between its two matrices (Hu et al. 2021, section 4.1;
torch.nn.functional.linear). Adapters of another type than the base, or with dropout, keep an input
of their own each (PEFT tuners/lora/layer.py Linear.forward, _cast_input_dtype).
"""

from __future__ import annotations

from dataclasses import replace

from actcalc.errors import SpecError
from actcalc.layers.core.algebra import Expr
from actcalc.layers.core.graph import DType, Graph, Op, Tensor, Weight
from actcalc.layers.model import LayerRun, ModelGraph
from actcalc.specs.training import TARGET_GROUPS, Training

_PEFT = {
    "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "out", "qkv_proj": "qkv",
    "gate_proj": "gate", "up_proj": "up", "gate_up_proj": "gate_up", "down_proj": "fc2",
}  # fmt: skip
"""Names of projections in models and in PEFT's target_modules, and of our ops."""


def adapted(model: ModelGraph, training: Training, *, autocast: bool = False) -> ModelGraph:
    """The graphs with frozen weights and adapters; the same graphs if every weight is trained.

    ``autocast`` runs adapters of another type than the base in the base's.

    Raises:
        SpecError: no layer has a projection that ``lora_targets`` names.
    """
    if not training.lora_rank:
        return model
    _check_targets(model, training)
    made: dict[int, Graph] = {}

    def change(graph: Graph) -> Graph:
        if id(graph) not in made:
            made[id(graph)] = _frozen(model, graph, training, autocast=autocast)
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


def _check_targets(model: ModelGraph, training: Training) -> None:
    known = {op.name for run in model.runs for op in run.graph.ops if op.kind == "linear"}
    for name in training.targets:
        if name not in TARGET_GROUPS and _PEFT.get(name, name) not in known:
            raise SpecError(
                f"lora_targets names {name!r}, which no layer of {model.context.model.name} has",
                "use " + ", ".join((*TARGET_GROUPS, *sorted(known))),
            )


def _frozen(model: ModelGraph, graph: Graph, training: Training, *, autocast: bool) -> Graph:
    tensors = dict(graph.tensors)
    ops: list[Op] = []
    for op in graph.ops:
        if op.kind == "norm":
            # weight * normed keeps the normed tensor for the weight's gradient alone
            kept = tuple(name for name in op.saves if name != f"{op.name}_normed")
            ops.append(replace(op, saves=kept))
        elif op.kind != "linear" or not op.weights:
            ops.append(op)
        elif graph.name not in ("embedding", "head") and any(
            adapts(model, op, weight, training) for weight in op.weights
        ):
            ops.append(_adapter(op, tensors, model, training, autocast=autocast))
        else:
            kept = tuple(name for name in op.saves if name not in op.inputs)
            ops.append(replace(op, saves=kept))
    return replace(graph, tensors=tensors, ops=tuple(ops))


def _adapter(
    op: Op, tensors: dict[str, Tensor], model: ModelGraph, training: Training, *, autocast: bool
) -> Op:
    """The op with its adapter: what that makes and keeps, and its temporaries."""
    source = tensors[op.inputs[0]]
    rows, act = source.shape[:-1], model.context.act
    wide = training.lora_dtype == "fp32" and act is not DType.FP32
    dtype = DType.FP32 if wide and not autocast else act
    made = []

    def keep(what: str, shape: tuple[Expr, ...], kind: DType) -> None:
        name = f"{low_rank(op.name)}{what}"
        tensors[name] = Tensor(name, shape, kind)
        made.append(name)

    saves = op.saves
    if wide or training.lora_dropout:
        saves = tuple(name for name in op.saves if name not in op.inputs)
        keep("_input", source.shape, dtype)
    if training.lora_dropout:
        keep("_mask", source.shape, DType.BOOL)
    keep("", (*rows, Expr.of(training.lora_rank)), dtype)
    forward, backward = op.forward_scratch, op.backward_scratch
    if wide and not autocast:
        # the adapter's result and its sum with the base's; its gradient, and that of its input
        result = tensors[op.outputs[0]].elements
        forward = forward + result * 8
        backward = backward + result * 4 + source.elements * 4
    return replace(
        op,
        outputs=(*op.outputs, *made),
        saves=tuple(dict.fromkeys((*saves, *made))),
        forward_scratch=forward,
        backward_scratch=backward,
    )


def low_rank(name: str) -> str:
    """The adapter's inner product of the linear layer ``name``."""
    return f"{name}_lora"


def in_module(model: ModelGraph, op: Op, weight: Weight) -> bool:
    """Whether a weight is that of a linear module, which quantisation packs and adapters wrap.

    transformers' routers, and its experts as one three-dimensional parameter, are no
    torch.nn.Linear, which alone is replaced (integrations/bitsandbytes.py replace_with_bnb_linear).
    """
    if len(weight.shape) < 2 or op.kind in ("embedding", "norm"):
        return False
    if not model.context.framework.hub_models:
        return True
    return len(weight.shape) == 2 and op.name != "router"


def adapts(model: ModelGraph, op: Op, weight: Weight, training: Training) -> bool:
    """Whether one weight of a layer's op carries an adapter."""
    if not in_module(model, op, weight) or op.group not in ("attention", "ffn"):
        return False
    return any(
        name == "all"
        or (name in TARGET_GROUPS and (name == "attention") == (op.group == "attention"))
        or _PEFT.get(name, name) == op.name
        for name in training.targets
    )
