"""transformers' Trainer as TRL's script of supervised fine-tuning starts it: alone, with FSDP, with
DeepSpeed.
"""

from __future__ import annotations

import json
from typing import Any

from actcalc.errors import SpecError
from actcalc.io import presets
from actcalc.io.writers.own import preset_of
from actcalc.io.writers.profile import check_profile
from actcalc.specs.optimizers import OPTIMIZERS
from actcalc.specs.run import Run
from actcalc.specs.targets import module_names
from actcalc.specs.training import Training

_DATASET = "YOUR_DATASET"
_WORDS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "amp-bf16": "float32",
          "amp-fp16": "float32"}  # fmt: skip
_KERNELS = {"eager": "eager", "sdpa": "sdpa", "flash": "flash_attention_2"}


def hub_id(run: Run) -> str:
    """The hub id of the run's model where it is a preset's, else its name."""
    name = preset_of(run)
    stated = presets.stated_source("models", name) if name else ""
    return stated.split()[0] if stated.endswith("config.json") else run.model.name


def accumulation(run: Run) -> int:
    """Micro-batches of one replica in a step."""
    each = run.workload.micro_batch * run.layout.dp
    return (run.workload.global_batch or each) // each


def _check(run: Run, target: str, engine: str) -> None:
    check_profile(run, target, "transformers")
    if not engine and run.layout.zero:
        raise SpecError(
            f"--emit {target} shards nothing, and zero is {run.layout.zero}",
            "use --emit fsdp or deepspeed",
        )


def _arguments(run: Run, target: str, engine: str) -> dict[str, Any]:
    """Arguments of TRL's SFT script (``trl/trainer/sft_config.py``, ``model_config.py``)."""
    _check(run, target, engine)
    work, training = run.workload, run.training
    name = str(work.precision)
    if name not in _WORDS or (engine and name.startswith("amp")):
        what = f"{engine} runs nothing under autocast" if engine else "the Trainer has none of that"
        raise SpecError(f"--emit {target}: precision is {name}, and {what}", "use --precision bf16")
    found: dict[str, Any] = {
        "model_name_or_path": hub_id(run),
        "dtype": _WORDS["amp-" + name if engine == "fsdp" and name != "fp32" else name],
        "attn_implementation": _KERNELS[work.attention],
        "dataset_name": _DATASET,
        **({} if training.objective == "grpo" else {"max_length": work.seq}),
        "per_device_train_batch_size": work.micro_batch,
        "gradient_accumulation_steps": accumulation(run),
        "gradient_checkpointing": policy_word(run, target),
        "bf16": name.endswith("bf16"),
        "fp16": name.endswith("fp16"),
        "optim": optimizer_word(run, "transformers", target),
    }
    found |= _objective(run, target)
    if training.loss == "fused":
        found["use_liger_kernel"] = True
    if training.lora_rank:
        found |= {
            "use_peft": True,
            "lora_r": training.lora_rank,
            "lora_target_modules": list(module_names(run.model, training.lora_targets)),
        }
        if training.dora:
            found["use_dora"] = True
        if training.train:
            found["lora_modules_to_save"] = saved_modules(training)
    if training.base_bits < 16:
        found[f"load_in_{training.base_bits}bit"] = True
    return found


_SAVED = {
    "embeddings": ["embed_tokens"],
    "head": ["lm_head"],
    "norms": ["input_layernorm", "post_attention_layernorm", "norm"],
}


def saved_modules(training: Training) -> list[str]:
    """Names of modules that PEFT trains whole beside adapters, of a model like Llama."""
    return [name for part in training.train for name in _SAVED[part]]


def _objective(run: Run, target: str) -> dict[str, Any]:
    """Arguments of TRL's script for the run's objective (``trl/trainer/*_config.py``)."""
    training, work = run.training, run.workload
    if training.objective == "grpo":
        found: dict[str, Any] = {
            "max_completion_length": work.completion,
            "vllm_max_model_length": work.seq,
        }
        if not work.completion:
            raise SpecError(f"--emit {target}: grpo without completions", "add --completion N")
        if training.reference == "model":
            found["beta"] = 0.04
        if training.generation_share:
            found |= {
                "use_vllm": True,
                "vllm_gpu_memory_utilization": training.generation_share,
            }
        return found
    precomputed = training.objective in ("dpo", "kto") and training.reference == "none"
    return {"precompute_ref_log_probs": True} if precomputed else {}


def policy_word(run: Run, target: str) -> bool:
    """Whether every layer is re-run; ``SpecError`` for policies between."""
    policy = (run.policies or ("none",))[0]
    if policy not in ("none", "full"):
        raise SpecError(
            f"--emit {target}: transformers re-runs every layer or none, not {policy}",
            "use --policy full or none",
        )
    return policy == "full"


def optimizer_word(run: Run, column: str, target: str) -> str:
    """What a framework calls the run's optimizer; ``SpecError`` where it has none."""
    names: tuple[str, ...] = getattr(OPTIMIZERS[run.training.optimizer], column)
    if not names:
        raise SpecError(
            f"--emit {target}: {column} has no {run.training.optimizer}", "use --optimizer adamw"
        )
    return names[0]


def _script(run: Run, found: dict[str, Any]) -> str:
    lines = [
        f"accelerate launch --num_processes {run.layout.devices} "
        f"trl/scripts/{run.training.objective}.py"
    ]
    for name, value in found.items():
        words = value if isinstance(value, list) else [value]
        texts = [str(word) if not isinstance(word, bool) else str(word).lower() for word in words]
        lines.append(f"    --{name} " + " ".join(f'"{t}"' if " " in t else t for t in texts))
    return " \\\n".join(lines) + "\n"


def write_transformers(run: Run) -> str:
    """A launch without sharding."""
    return _script(run, _arguments(run, "transformers", ""))


def write_fsdp(run: Run) -> str:
    """A launch with FSDP: weights in fp32, gathered and computed with in 16 bits."""
    found = _arguments(run, "fsdp", "fsdp")
    words = {3: "full_shard auto_wrap", 2: "shard_grad_op auto_wrap", 0: "no_shard"}
    if run.layout.zero not in words:
        raise SpecError(f"--emit fsdp has no ZeRO {run.layout.zero}", "use --zero 2 or 3")
    offload = " offload" if run.training.offload == "weights" else ""
    return _script(run, {**found, "fsdp": words[run.layout.zero] + offload})


def write_deepspeed(run: Run) -> str:
    """The same arguments as JSON, DeepSpeed's configuration among them, with no auto in it."""
    found = _arguments(run, "deepspeed", "deepspeed")
    return json.dumps({**found, "deepspeed": deepspeed(run)}, indent=2) + "\n"


def deepspeed(run: Run) -> dict[str, Any]:
    """DeepSpeed's configuration of a run (``deepspeed/runtime/config.py``)."""
    work, training = run.workload, run.training
    name = str(work.precision)
    zero: dict[str, Any] = {
        "stage": run.layout.zero,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": training.bucket_elements,
    }
    if training.offload in ("optimizer", "weights"):
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if training.offload == "weights":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    if training.shards:
        zero["mics_shard_size"] = training.shards
    each = work.micro_batch * accumulation(run)
    config: dict[str, Any] = {
        "train_batch_size": each * run.layout.dp,
        "train_micro_batch_size_per_gpu": work.micro_batch,
        "gradient_accumulation_steps": accumulation(run),
        "bf16": {"enabled": name.endswith("bf16")},
        "fp16": {"enabled": name.endswith("fp16")},
        "zero_optimization": zero,
    }
    if training.recipe == "deepspeed":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config
