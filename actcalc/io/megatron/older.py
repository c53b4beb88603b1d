"""Former and foreign names of Megatron-LM's options, with what they mean today.

Megatron-LM 2.x and 3.x (``checkpoint-activations``, ``activations-checkpoint-method``),
Megatron-DeepSpeed (``zero-stage``, ``num-key-value-heads``, a list of experts) and NeMo
(``activations_checkpoint_granularity``).
"""

from __future__ import annotations

from typing import Any

from actcalc.errors import SpecError, shorten

SAME = {
    "model-parallel-size": "tensor-model-parallel-size",
    "batch-size": "micro-batch-size",
    "activations-checkpoint-granularity": "recompute-granularity",
    "activations-checkpoint-method": "recompute-method",
    "activations-checkpoint-num-layers": "recompute-num-layers",
    "checkpoint-num-layers": "recompute-num-layers",
    "partition-activations": "distribute-saved-activations",
    "num-key-value-heads": "num-query-groups",
    "use-flash-attn-v1": "use-flash-attn",
    "use-flash-attn-v2": "use-flash-attn",
    "use-flash-attn-triton": "use-flash-attn",
}
"""Former names of options that take the same values."""

ALONE = ("deepspeed-activation-checkpointing",)
"""Options that recompute nothing by themselves."""


def renewed(found: dict[str, Any]) -> dict[str, Any]:
    """Options under today's names; one that is given by today's name wins."""
    result = dict(found)
    checkpointed = _on(result.pop("checkpoint-activations", None))
    method = result.get("activations-checkpoint-method")
    for old, new in SAME.items():
        value = result.pop(old, None)
        if value is not None and result.get(new) is None:
            result[new] = value
    if result.get("recompute-granularity") is None and (checkpointed or _on(method)):
        # 2.x and 3.x: whole layers, in segments of so many; method without it was uniform
        result["recompute-granularity"] = "full"
        result.setdefault("recompute-method", "uniform")
    if "num-key-value-heads" in found and result.get("group-query-attention") is None:
        fewer = str(found["num-key-value-heads"]) != str(result.get("num-attention-heads"))
        result["group-query-attention"] = fewer
    for name in ("num-layers-per-virtual-pipeline-stage", "num-experts"):
        if result.get(name) in (False, "False", "false"):
            result[name] = None
    result["num-experts"] = _experts(result.get("num-experts"))
    return result


def _experts(value: Any) -> Any:
    """Megatron-DeepSpeed lists experts for each group of layers; one means none."""
    listed = value if isinstance(value, list) else None
    if listed is None and isinstance(value, str) and value.startswith("["):
        listed = value.strip("[] ").replace(",", " ").split()
    if listed is None:
        return value
    if len({str(each) for each in listed}) != 1:
        raise SpecError(
            f"num-experts is {shorten(value)}: as many experts in every layer are modelled",
            "give one number",
        )
    return None if str(listed[0]) == "1" else listed[0]


def _on(value: Any) -> bool:
    return value not in (None, False, "False", "false", "none")
