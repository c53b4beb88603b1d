"""Megatron's degrees and recompute options under their own names in a configuration of others.

verl (``override_transformer_config``) and LLaMA-Factory (its Megatron trainers) write them so.
"""

from __future__ import annotations

from typing import Any

from actcalc.errors import SpecError
from actcalc.io.readers.settings import Settings

DEGREES = {"tp": "tensor", "pp": "pipeline", "ep": "expert"}


def named(s: Settings, prefix: str = "") -> bool:
    """Whether any of Megatron's degrees is given."""
    return s.has(*(f"{prefix}{word}_model_parallel_size" for word in DEGREES.values()))


def layout(s: Settings, prefix: str = "", *, sp: bool = False) -> dict[str, Any]:
    """Fields of the layout; ``sp`` is what sequence_parallel is where it is not said."""
    found: dict[str, Any] = {
        f"layout.{name}": s.number(f"{prefix}{word}_model_parallel_size", default=1, least=1)
        for name, word in DEGREES.items()
    }
    found["layout.cp"] = s.number(prefix + "context_parallel_size", default=1, least=1)
    chunks = s.number(prefix + "virtual_pipeline_model_parallel_size",
                      prefix + "num_virtual_stages_per_pipeline_rank")  # fmt: skip
    if chunks > 1 and found["layout.pp"] > 1:
        found["layout.vpp"] = chunks
    if size := s.number(prefix + "expert_tensor_parallel_size"):
        found["layout.etp"] = size
    split = s.flag(prefix + "sequence_parallel", default=sp)
    found["layout.sp"] = split and found["layout.tp"] > 1
    return found


def recomputed(s: Settings, prefix: str = "") -> str | None:
    """The policy that recompute options mean; None where they say nothing."""
    granularity = s.text(prefix + "recompute_granularity").lower()
    method = s.text(prefix + "recompute_method").lower()
    count = s.number(prefix + "recompute_num_layers", default=1, least=1)
    modules = s.words(prefix + "recompute_modules")
    if granularity == "full":
        return f"block:{count}" if method == "block" else "full" if count == 1 else (
            f"uniform:{count}")  # fmt: skip
    if granularity == "selective":
        return "+".join(modules) or "core_attn"
    if granularity:
        raise SpecError(
            f"{s.where}: recompute_granularity is {granularity!r}", "use selective or full"
        )
    return None
