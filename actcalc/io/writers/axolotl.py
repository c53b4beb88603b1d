"""axolotl's YAML."""

from __future__ import annotations

from typing import Any

from actcalc.errors import SpecError
from actcalc.io.readers.axolotl import CHUNKS
from actcalc.io.readers.unfrozen import patterns_of
from actcalc.io.writers.hugging import (
    _check,
    accumulation,
    deepspeed,
    hub_id,
    optimizer_word,
    policy_word,
    saved_modules,
)
from actcalc.specs.run import Run
from actcalc.specs.targets import module_names


def write(run: Run) -> str:
    """The configuration's text, with a data set to fill in."""
    import yaml

    _check(run, "axolotl", "any")
    work, training = run.workload, run.training
    data: dict[str, Any] = {
        "base_model": hub_id(run),
        "datasets": [{"path": "YOUR_DATASET", "type": "alpaca"}],
        "sequence_len": work.seq,
        "micro_batch_size": work.micro_batch,
        "gradient_accumulation_steps": accumulation(run),
        "num_epochs": 1,
        "optimizer": optimizer_word(run, "transformers", "axolotl"),
        "learning_rate": 1e-5,
        "attn_implementation": {"flash": "flash_attention_2"}.get(work.attention, work.attention),
        "gradient_checkpointing": policy_word(run, "axolotl"),
        **_types(run),
        **_adapter(run),
        **_sharding(run),
    }
    if not training.lora_rank and (training.freeze or training.train):
        data["unfrozen_parameters"] = _unfrozen(run)
    if training.objective in ("dpo", "kto"):
        data["rl"] = training.objective
    elif training.objective == "reward":
        data["reward_model"] = True
    if training.reference == "none":
        data["precompute_ref_log_probs"] = True
    if training.loss == "fused":
        data["plugins"] = ["axolotl.integrations.liger.LigerPlugin"]
        data["liger_fused_linear_cross_entropy"] = True
    elif training.loss == "chunked":
        data["chunked_cross_entropy"] = True
        data["chunked_cross_entropy_num_chunks"] = training.loss_chunks or CHUNKS
    text: str = yaml.safe_dump(data, sort_keys=False)
    return text


def _types(run: Run) -> dict[str, Any]:
    name = str(run.workload.precision)
    if name == "bf16":
        return {"bf16": True}
    if name == "amp-fp16":
        return {"fp16": True}
    if name == "fp32":
        return {"bf16": False, "fp16": False}
    raise SpecError(f"--emit axolotl: it has no precision {name}", "use --precision bf16")


def _unfrozen(run: Run) -> list[str]:
    """Patterns of what is trained: the last layers, and what lies around them."""
    training, model = run.training, run.model
    first = training.freeze if training.freeze >= 0 else model.depth + training.freeze
    parts = ("norm", "head", *training.train) if "layers" not in training.train else ()
    if not set(training.train) <= {"layers", "embeddings"}:
        raise SpecError(
            f"--emit axolotl: its patterns of {', '.join(training.train)} are not written",
            "train layers, or write --emit yaml",
        )
    if "layers" in training.train:
        parts = tuple(part for part in training.train if part != "layers")
    return patterns_of(first, model.depth, parts)


def _adapter(run: Run) -> dict[str, Any]:
    training = run.training
    if not training.lora_rank:
        return {}
    quantised = training.base_bits < 16
    found: dict[str, Any] = {
        "adapter": "qlora" if training.base_bits == 4 else "lora",
        "lora_r": training.lora_rank,
        "lora_alpha": 2 * training.lora_rank,
    }
    if training.lora_targets == "all":
        found["lora_target_linear"] = True
    else:
        names = module_names(run.model, training.lora_targets)
        alone = training.targets.pattern is not None
        found["lora_target_modules"] = names[0] if alone else list(names)
    if training.dora:
        found["peft_use_dora"] = True
    if training.train:
        found["lora_modules_to_save"] = saved_modules(training)
    return found | ({f"load_in_{training.base_bits}bit": True} if quantised else {})


def _sharding(run: Run) -> dict[str, Any]:
    """FSDP for its recipe, DeepSpeed for its own, replicas alone without ZeRO."""
    layout, training = run.layout, run.training
    if not layout.zero and training.recipe in ("auto", "pure"):
        return {"dp_replicate_size": layout.dp} if layout.dp > 1 else {}
    if training.recipe != "fsdp":
        return {"deepspeed": deepspeed(run)}
    if layout.zero not in (2, 3):
        raise SpecError(f"--emit axolotl: FSDP has no ZeRO {layout.zero}", "use --zero 2 or 3")
    config = {
        "reshard_after_forward": layout.zero == 3,
        "offload_params": training.offload == "weights",
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    }
    return {"fsdp_version": 2, "fsdp_config": config, "dp_shard_size": layout.dp}
