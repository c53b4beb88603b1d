"""Which runs can offload their modules or layers to host memory."""

from __future__ import annotations

from actcalc.errors import SpecError
from actcalc.layers.core.context import Context
from actcalc.policy.rules import Policy
from actcalc.specs.training import Training


def check_offload(context: Context, training: Training, policy: Policy) -> None:
    """Raise ``SpecError`` where modules or layers cannot be offloaded under ``policy``."""
    if not context.framework.offloads_modules:
        name = "offload_layers" if training.offload_layers else "offload_modules"
        raise SpecError(
            f"{name} is Megatron's, with Transformer Engine",
            "use --framework megatron (--transformer-impl transformer_engine), or drop it",
        )
    if training.offload_layers:
        _check_layers(context, training.offload_layers, policy)
    elif policy.whole or policy.per_op:
        raise SpecError(
            f"offload_modules with policy {policy.name}: what re-runs whole saves nothing in "
            "its modules",
            "use --policy none or single modules, or drop offload_modules",
        )


def _check_layers(context: Context, count: int, policy: Policy) -> None:
    # transformer_config.py cpu_offloading: no pipeline, no recomputation, not the last layer
    if count >= context.model.depth:
        raise SpecError(
            f"offload_layers is {count} of {context.model.depth}: the last layer stays",
            f"use at most {context.model.depth - 1}",
        )
    if context.layout.pp > 1 or policy.name != "none":
        raise SpecError(
            f"offload_layers with pp {context.layout.pp} and policy {policy.name}: Megatron "
            "offloads layers without pipeline and recomputation only",
            "use pp 1 and --policy none, or offload_modules",
        )
    if context.model.encoder_layers:
        raise SpecError(
            "offload_layers is not modelled for an encoder and a decoder, each with its own",
            "drop offload_layers",
        )
