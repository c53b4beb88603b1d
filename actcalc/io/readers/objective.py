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
        told = (each for each, names in _OWN if (trl or each == "grpo") and s.has(*names))
        name = next(told, "sft")
    if name == "sft":
        return {}, ()
    fields: dict[str, Any] = {"training.objective": name}
    if s.flag("precompute_ref_log_probs") and name in ("dpo", "kto"):
        fields["training.reference"] = "none"
    if name != "grpo":
        return fields, ()
    completion = s.number("max_completion_length") or _COMPLETION
    fields["workload.completion"] = completion
    fields["workload.seq"] = s.number("max_prompt_length", default=_PROMPT) + completion
    if float(s.text("beta", default="0") or 0):
        fields["training.reference"] = "model"
    return fields, (*_generation(s, fields), "GRPO: one update is counted; generation and scoring "
                    "run at other times.")  # fmt: skip


def _generation(s: Settings, fields: dict[str, Any]) -> tuple[str, ...]:
    """vLLM beside training takes its share of the device, unless it sleeps or is elsewhere."""
    share = float(s.text("vllm_gpu_memory_utilization", default=str(_SHARE)))
    if not s.flag("use_vllm") or s.text("vllm_mode", default="colocate") != "colocate":
        return ()
    if s.flag("vllm_enable_sleep_mode"):
        return ("vLLM sleeps while the model is updated: its memory is not counted.",)
    fields["training.generation_share"] = share
    return ()
