"""FSDP as accelerate, transformers, axolotl and verl write it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actcalc.errors import SpecError

_ZERO = {
    "FULL_SHARD": 3, "1": 3, "SHARD_GRAD_OP": 2, "2": 2, "NO_SHARD": 0, "3": 0, "HYBRID_SHARD": 3,
    "4": 3, "HYBRID_SHARD_ZERO2": 2, "_HYBRID_SHARD_ZERO2": 2, "5": 2,
}  # fmt: skip
"""torch.distributed.fsdp.ShardingStrategy by name and number, as a ZeRO stage."""

IDLE = (
    r"(fsdp_)?(auto_wrap_policy|transformer_layer_cls_to_wrap|min_num_params|backward_prefetch(_policy)?"
    r"|forward_prefetch|use_orig_params|cpu_ram_efficient_loading|sync_module_states|version"
    r"|state_dict_type|limit_all_gathers|final_state_dict_type|wrap_policy.*|xla.*"
    r"|mixed_precision_policy|ignored_modules)"
)
"""Options that change neither memory nor time here."""


def fsdp(
    options: Mapping[str, Any], words: tuple[str, ...], where: str
) -> tuple[dict[str, Any], tuple[str, ...], set[str]]:
    """Fields of a run that shards with FSDP, notes, and the options that were read.

    ``words`` are those of transformers' older ``fsdp: "full_shard auto_wrap offload"``.
    """
    read: set[str] = set()

    def get(name: str) -> Any:
        for key in (f"fsdp_{name}", name):
            if options.get(key) is not None:
                read.add(key)
                return options[key]
        return None

    strategy = str(get("sharding_strategy") or "").upper()
    named = [word.upper() for word in words if word.upper() in _ZERO]
    strategy = strategy or (named[0] if named else "")
    resharded = get("reshard_after_forward")
    if not strategy and isinstance(resharded, str) and resharded.upper() in _ZERO:
        strategy, resharded = resharded.upper(), None
    if strategy and strategy not in _ZERO:
        raise SpecError(
            f"{where}: sharding strategy {strategy!r} is not known", "use FULL_SHARD or another"
        )
    zero = _ZERO[strategy] if strategy else 2 if _off(resharded) else 3
    fields: dict[str, Any] = {"layout.zero": zero, "engine": "fsdp"}
    notes: list[str] = []
    if "HYBRID" in strategy:
        notes.append(
            f"{where}: {strategy} shards inside each node: --shards says over how many ranks."
        )
    if _on(get("offload_params")) or _on(get("cpu_offload")) or "OFFLOAD" in map(str.upper, words):
        fields["training.offload"] = "weights"
    if _on(get("activation_checkpointing")):
        fields["policy"] = "full"
    return fields, tuple(notes), read


def _on(value: Any) -> bool:
    return str(value).strip().lower() in ("true", "1", "yes")


def _off(value: Any) -> bool:
    return str(value).strip().lower() in ("false", "0", "no")
