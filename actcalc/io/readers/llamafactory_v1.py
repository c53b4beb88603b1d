"""LLaMA-Factory's second configuration (``llamafactory/v1/config/``): plugins in sections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actcalc.errors import SpecError
from actcalc.io.readers import deepspeed
from actcalc.io.readers.beside import beside, missing
from actcalc.io.readers.document import Document
from actcalc.io.readers.part import Part
from actcalc.io.readers.settings import Settings
from actcalc.io.readers.words import attention, targets

OWN = ("dist_config", "peft_config", "kernel_config", "quant_config", "init_config",
       "optim_config", "batching_strategy", "model_class", "train_dataset")  # fmt: skip
IDLE = (
    r"(model_class|trust_remote|custom_chat|train_dataset|eval_dataset|output_dir|learning_rate|num_train"
    r"|max_steps|max_grad|batching_workers|dist_timeout|lr_scheduler|seed|full_det|resume|save|logging"
    r"|pref_|simpo|dpo_|ld_alpha|sample_backend|max_new_tokens|cp_mode|init_config|report_to"
    r"|kernel_config|dist_config\.(dcp_path|name|pin_memory|timeout)|optim_config|peft_config\.(name"
    r"|lora_|freeze_trainable_modules|freeze_extra|bias|task|use_rslora)|quant_config\.(name|comp"
    r"|double|quant_type|bnb)|export).*"
)


def recognises(data: Mapping[str, Any]) -> bool:
    """Whether a mapping names its model by a text beside two of its own sections."""
    return isinstance(data.get("model"), str) and sum(name in data for name in OWN) >= 2


def read(data: Mapping[str, Any], where: Document) -> Part:
    """What a configuration says, with the defaults of ``training_args.py``."""
    s = Settings(data, where.name)
    given: dict[str, Any] = {
        "base": s.text("model"),
        "workload.seq": s.number("cutoff_len", default=2048, least=1),
        "workload.micro_batch": s.number("micro_batch_size", default=1, least=1),
        "workload.global_batch": s.number("global_batch_size") or None,
        "workload.attention": attention(s.text("flash_attn", default="sdpa")) or "sdpa",
        "policy": "full" if s.flag("enable_activation_checkpointing", default=True) else "none",
        "workload.precision": "bf16",
    }
    notes: list[str] = []
    more: list[Part] = []
    assumed: dict[str, str] = {}
    _adapter(s, given, notes)
    if "liger" in s.text("kernel_config.name") or "liger" in s.text(
        "kernel_config.include_kernels"
    ):
        notes.append("Liger's kernels are counted as PyTorch's own.")
    if s.text("optim_config.name").lower() == "muon":
        given["training.optimizer"] = "muon"
    if "padding_free" in s.text("batching_strategy"):
        notes.append("Sequences are packed: a micro-batch of the longest is counted.")
    given |= {
        k: v for k, v in {"layout.cp": s.number("cp_size", default=1, least=1)}.items() if v > 1
    }
    given["layout.dp"] = s.number("dp_size") or None
    _sharding(s, where, given, more, assumed)
    usual = {"framework": "transformers", "training.optimizer": "adamw"}
    return Part(
        kind="llamafactory", name=where.name, given=given, usual=usual,
        notes=(*notes, *s.notes(IDLE)), assumed=assumed, more=tuple(more),
    )  # fmt: skip


def _adapter(s: Settings, given: dict[str, Any], notes: list[str]) -> None:
    kind = s.text("peft_config.name").lower()
    if kind == "lora":
        given["training.lora_rank"] = s.number("peft_config.r", default=8, least=1)
        field, told = targets(s, "peft_config.target_modules")
        given |= field
        notes += told
        if bits := s.number("quant_config.quantization_bit"):
            given["training.base_bits"] = bits
    elif kind == "freeze":
        last = s.number("peft_config.freeze_trainable_layers", default=2, least=1)
        given |= {"training.train": ("layers",), "training.freeze": -last}
    elif kind:
        notes.append(f"peft_config {kind} is not modelled: every weight is counted as trained.")


def _sharding(
    s: Settings, where: Document, given: dict[str, Any], more: list[Part], assumed: dict[str, str]
) -> None:
    """FSDP over weights as they are loaded, or DeepSpeed's file (``plugins/.../distributed``)."""
    kind = s.text("dist_config.name").lower()
    if kind == "deepspeed":
        name = s.text("dist_config.config_file")
        found = beside(where, name) if name else None
        if found is not None:
            more.append(deepspeed.read(found.data, found))
        elif name:
            assumed["engine"] = missing(where, name, "dist_config")
    elif kind in ("fsdp2", "fsdpturbo"):
        kept = s.flag("dist_config.reshard_after_forward", default=True)
        given |= {"layout.zero": 3 if kept else 2, "engine": "fsdp", "training.recipe": "pure"}
        if s.flag("dist_config.offload_params"):
            given["training.offload"] = "weights"
        if experts := s.number("dist_config.ep_size"):
            given["layout.ep"] = experts
        replicas, shards = s.number("mp_replicate_size", default=1), s.number("mp_shard_size")
        if replicas > 1 and shards:
            given |= {"training.shards": shards, "layout.dp": replicas * shards}
    elif kind:
        raise SpecError(f"{s.where}: dist_config {kind} is not known", "use fsdp2 or deepspeed")
