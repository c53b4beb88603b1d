"""What training by preference, for a reward or on generated completions says, in TRL's options.

Names and defaults are those of ``trl/trainer/*_config.py`` (1.16); which trainer runs is the
script's name, or told by options that only one of them has.
"""

from __future__ import annotations

from typing import Any

from actcalc.io.readers.settings import Settings
from actcalc.specs.objectives import OBJECTIVES

PROGRAM = "_program"
"""The option under which the name of a launch's script is handed over."""
_OWN = (
    ("grpo", ("max_completion_length", "num_generations", "max_prompt_length")),
    ("kto", ("desirable_weight", "undesirable_weight")),
    ("reward", ("center_rewards_coefficient",)),
    ("dpo", ("precompute_ref_log_probs", "rpo_alpha", "ld_alpha", "beta")),
)
"""Options that tell an objective; a script's name goes first."""
_SHARE = 0.3  # vllm_gpu_memory_utilization
_PROMPT, _COMPLETION = 512, 512


def objective(s: Settings, *, trl: bool) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Fields of the objective that options describe, with the length of sequences, and notes."""
    program = s.text(PROGRAM).rsplit("/", 1)[-1].removeprefix("trl ").removesuffix(".py")
    name = program.split()[0] if program else ""
    if name not in OBJECTIVES:
        own = (each for each, names in _OWN if (trl or each == "grpo") and s.has(*names))
        name = next(own, "sft")
    if name == "sft":
        return {}, ()
    fields: dict[str, Any] = {"training.objective": name}
    if s.flag("precompute_ref_log_probs") and name in ("dpo", "kto"):
        fields["training.reference"] = "none"
    if name != "grpo":
        return fields, ()
    completion = s.number("max_completion_length") or _COMPLETION
    fields["workload.completion"] = completion
    whole = s.number("vllm_max_model_length")
    fields["workload.seq"] = whole or s.number("max_prompt_length", default=_PROMPT) + completion
    told = () if whole or s.has("max_prompt_length") else (
        f"GRPO: no length of prompts is given: {_PROMPT} tokens are taken (--seq for both).",
    )  # fmt: skip
    if _real(s, "beta", 0.0):
        fields["training.reference"] = "model"
    other = "GRPO: one update is counted; generation and scoring run at other times."
    return fields, (*told, *_generation(s, fields), other)


def _real(s: Settings, name: str, default: float) -> float:
    value = s.get(name)
    try:
        return default if value is None else float(value)
    except (TypeError, ValueError):
        raise s.wrong((name,), value, "not a number", "give a number") from None


def _generation(s: Settings, fields: dict[str, Any]) -> tuple[str, ...]:
    """vLLM beside training takes its share of the device, unless it sleeps or is elsewhere."""
    share = _real(s, "vllm_gpu_memory_utilization", _SHARE)
    if not s.flag("use_vllm") or s.text("vllm_mode", default="colocate") != "colocate":
        return ()
    if s.flag("vllm_enable_sleep_mode"):
        return ("vLLM sleeps while the model is updated: its memory is not counted.",)
    fields["training.generation_share"] = share
    return ()
