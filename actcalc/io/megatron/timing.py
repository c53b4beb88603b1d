"""Options of Megatron-LM that change what runs beside what, or who launches it: time alone."""

from __future__ import annotations

from actcalc.io.megatron.options import Options


def dispatcher(o: Options) -> str:
    """How tokens travel; flex is DeepEP or HybridEP (moe/token_dispatcher.py)."""
    known = ("allgather", "alltoall", "flex", "alltoall_seq")
    name = o.text("moe-token-dispatcher-type", "allgather", known)
    if o.flag("moe-enable-deepep"):
        return "flex"
    return name if name in ("allgather", "flex") else "alltoall"


def fp8_recipe(o: Options) -> str:
    """How fp8 operands are scaled; a recipe of one's own is taken for the default."""
    name = o.text("fp8-recipe", "", ("tensorwise", "delayed", "mxfp8", "blockwise", "custom"))
    return "auto" if name in ("", "custom") else name


GRAPHS = ("none", "local", "transformer_engine", "full_iteration")
"""Values of --cuda-graph-impl."""


def captured(o: Options) -> str:
    """What CUDA graphs capture: attention alone where a scope of modules says so, else all.

    Modules that a scope names beside attention are captured too (transformer/cuda_graphs.py), but
    where tokens are not dropped no graph holds the experts.
    """
    kind = o.text("cuda-graph-impl", "none", GRAPHS)
    if kind == "none" and not (o.flag("enable-cuda-graph") or o.flag("external-cuda-graph")):
        return "none"
    scope = {*o.words("cuda-graph-scope"), *o.words("cuda-graph-modules")}
    experts = o.has("num-experts")
    if kind == "full_iteration" or "full_iteration" in scope or not (scope or experts):
        return "full"
    return "full" if {"attn", "moe" if experts else "mlp"} <= scope else "attention"
