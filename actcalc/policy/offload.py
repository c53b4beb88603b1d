"""Fine-grained activation offloading: which saved tensors of a layer leave for host memory.

Megatron-Core wraps single modules in hooks on saved tensors: what autograd saves inside one of them
is copied to pinned host memory when the module's group is committed, if it has at least so many
elements, and brought back for its backward (pipeline_parallel/fine_grained_activation_offload.py;
the regions in transformer_layer.py, attention.py, multi_latent_attention.py and moe/experts.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from actcalc.layers.core.graph import Graph, Op
from actcalc.policy.outcome import LayerOutcome
from actcalc.specs.training import OFFLOADABLE


def region(graph: Graph, module: str) -> tuple[Op, ...]:
    """Ops that run inside one module's hooks; none where the layer has no such module.

    A norm fused into the linear layer behind it is no module of its own: its group does not exist
    (the layer's norm is an IdentityOp) and its input belongs to the linear layer.
    """
    return tuple(op for op in graph.ops if _inside(op, module))


def _inside(op: Op, module: str) -> bool:
    tags = op.modules
    match module:
        case "attn_norm":
            return op.name == "norm1" and "layernorm" in tags
        case "mlp_norm":
            return op.name == "norm2" and "layernorm" in tags
        case "core_attn":
            return "core_attn" in tags
        case "attn_proj":
            return _projects_out(op)
        case "expert_fc1":
            return op.name == "expert_fc1"
        case "moe_act":
            return op.name == "expert_activation"
    # qkv_linear ends with the projections; only latent attention turns positions inside it.
    latent = "mla_up_proj" in tags
    projection = op.kind in ("linear", "norm", "gather") and not _projects_out(op)
    return "attention" in tags and "core_attn" not in tags and (projection or latent)


def _projects_out(op: Op) -> bool:
    # cross-attention has its own, in the same class of attention
    return op.name in ("out_proj", "cross_out_proj")


class Group(NamedTuple):
    """The tensors of one module that are copied to the host, once for each op that saves them."""

    module: str
    first: str
    """The op of the module that runs backward last."""
    copies: tuple[tuple[str, str], ...]
    """Pairs of an op and a tensor that it saved."""


@dataclass(frozen=True, eq=False, repr=False)
class Away:
    """What leaves one layer for the host: ``leaving`` is no longer on the device after forward.

    A tensor that an op outside all modules also saved is copied and stays. ``groups`` are in the
    order in which they are committed.
    """

    leaving: frozenset[str]
    groups: tuple[Group, ...]

    @property
    def copied(self) -> tuple[str, ...]:
        """Every copy's tensor, as often as it is copied."""
        return tuple(name for group in self.groups for _, name in group.copies)


LAYER_ELEMENTS = 2**20
"""Elements from which Transformer Engine offloads a tensor (DEFAULT_MIN_TENSOR_SIZE_TO_OFFLOAD)."""


def whole_layer(outcome: LayerOutcome, sizes: Mapping[str, int]) -> frozenset[str]:
    """What leaves of a layer that is offloaded whole: each large tensor once.

    Transformer Engine's hooks span the layer and drop duplicates (cpu_offload.py
    OffloadSynchronizer, _deduplicate_tensors).
    """
    tensors = outcome.graph.tensors
    return frozenset(
        name
        for name in outcome.stored
        if int(tensors[name].elements.value(sizes)) >= LAYER_ELEMENTS
    )


def away(
    outcome: LayerOutcome, modules: Iterable[str], minimum: int, sizes: Mapping[str, int]
) -> Away:
    """What ``modules`` offload of a layer: tensors of at least ``minimum`` elements.

    A checkpoint inside a module saves its inputs, the ops in it nothing.
    """
    graph = outcome.graph
    again = {op.name for op in outcome.rerun}
    made = {name for op in graph.ops if op.name in again for name in op.outputs}

    def saved(op: Op) -> tuple[str, ...]:
        if op.name in again:
            return tuple(name for name in op.inputs if name not in made)
        return op.saves

    def large(name: str) -> bool:
        return int(graph.tensors[name].elements.value(sizes)) >= minimum

    chosen = set(modules)
    groups, inside = [], set()
    for module in OFFLOADABLE:
        ops = region(graph, module) if module in chosen else ()
        if not ops:
            continue
        inside |= {op.name for op in ops}
        copies: dict[str, tuple[str, str]] = {}
        for op in ops:
            for name in saved(op):
                if large(name) and name not in graph.shared:
                    key = name if op.name in again else f"{op.name} {name}"
                    copies.setdefault(key, (op.name, name))
        groups.append(Group(module, ops[0].name, tuple(copies.values())))
    names = {name for group in groups for _, name in group.copies}
    outside = {name for op in graph.ops if op.name not in inside for name in saved(op)}
    return Away(frozenset(names & set(outcome.stored) - outside), tuple(groups))
