"""Activations that Megatron-LM's options move to the host."""

from __future__ import annotations

from typing import Any

from actcalc.errors import SpecError
from actcalc.io.megatron.options import Options


def offloaded(o: Options) -> dict[str, Any]:
    """Modules whose activations are offloaded.

    Refuses what ``transformer_config.py`` and ``training/arguments.py`` refuse.
    """
    modules, least = o.words("offload-modules"), o.number("min-offloaded-tensor-size", 1024 * 1024)
    layers = _whole_layers(o)
    if not o.flag("fine-grained-activation-offloading"):
        return layers
    if not modules:
        raise SpecError(
            "fine-grained-activation-offloading names no modules",
            "give --offload-modules, as in core_attn attn_proj",
        )
    return {"offload_modules": modules, "offload_elements": least, **layers}


def _whole_layers(o: Options) -> dict[str, Any]:
    """Layers whose activations are offloaded; weights are not any more (TE cpu_offload.py)."""
    count = o.number("cpu-offloading-num-layers", 0)
    kept = o.has("cpu-offloading-activations") and not o.flag("cpu-offloading-activations")
    if not o.flag("cpu-offloading") or kept:
        return {}
    if o.text("cuda-graph-impl", "none") != "none" or o.flag("enable-cuda-graph"):
        raise SpecError("cpu-offloading and CUDA graphs exclude each other", "drop one of them")
    if count and count >= o.number("num-layers", count + 1):
        raise SpecError(
            f"cpu-offloading-num-layers is {count}, but the last layer is never offloaded",
            f"use at most {o.number('num-layers', 1) - 1}",
        )
    if o.flag("fine-grained-activation-offloading"):
        raise SpecError(
            "fine-grained-activation-offloading and cpu-offloading exclude each other",
            "drop one of them",
        )
    return {"offload_layers": count}
