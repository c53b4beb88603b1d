"""torchtune's YAML recipes (``recipes/configs/``): components by dotted name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from actcalc.errors import SpecError
from actcalc.io import presets
from actcalc.io.readers.document import Document
from actcalc.io.readers.part import Part
from actcalc.io.readers.settings import LeftOut, Settings
from actcalc.io.readers.words import element_type, optimizer

IDLE = (
    r"(output_dir|tokenizer|checkpointer|dataset|seed|shuffle|batch_size_val|run_val|resume|save_"
    r"|lr_scheduler|optimizer\.(lr|weight|betas|eps|momentum)|epochs|max_steps|clip_grad|metric"
    r"|log_|device|profiler|quantizer|low_cpu_ram|base_model_path|enable_async|enable_kv|keep_last"
    r"|model\.(lora_(alpha|dropout)|image_size|norm_eps|attn_dropout|rope_base|max_num_tiles"
    r"|tile_size|vision|encoder_|decoder_|fusion_)|custom_sharded|tensor_parallel_plan|epoch"
    r"|collate_fn|packed|loss\.|dist|ref_checkpointer|teacher_checkpointer|cudnn|optimizer_kwargs).*"
)
LEFT_OUT: LeftOut = (
    ("compile", "fuses kernels: less memory and time", ()),
    ("enable_activation_offloading", "moves saved tensors to the host", ()),
    ("teacher_model._component_", "runs a teacher beside the trained model", ()),
    ("enable_fp8_training", "runs products in 8 bits", ()),
)
_NAME = re.compile(r"torchtune\.models\.[a-z0-9_]+\.(?:(lora|qlora)_)?([a-z0-9_]+)")
_SIZES = {
    "phi3_mini": "phi-3-mini", "phi4_14b": "phi-4", "mistral_7b": "mistral-7b-v0.1",
    "llama4_scout_17b_16e": "llama-4-scout", "llama4_maverick_17b_128e": "llama-4-maverick",
    "gemma_2b": "gemma-2b", "gemma_7b": "gemma-7b", "llama3_3_70b": "llama-3.1-70b",
}  # fmt: skip
"""Builders that presets are not named like."""


def recognises(data: Mapping[str, Any]) -> bool:
    """Whether a mapping names components of torchtune."""
    model = data.get("model")
    return isinstance(model, Mapping) and "torchtune.models" in str(model.get("_component_"))


def read(data: Mapping[str, Any], where: Document) -> Part:
    """What a recipe says; ``SpecError`` for a model that is none of the presets."""
    s = Settings(data, where.name)
    component = s.text("model._component_")
    found = _NAME.fullmatch(component)
    preset = preset_called(found[2]) if found else ""
    if not found or not preset:
        raise SpecError(
            f"{where.name}: the model {component} is none of the presets",
            "give its config.json to actcalc, with these options as flags",
        )
    given: dict[str, Any] = {"base": preset}
    notes: list[str] = []
    given["workload.micro_batch"] = s.number("batch_size", default=1, least=1)
    given["accumulation"] = s.number("gradient_accumulation_steps", default=1, least=1)
    given["policy"] = "full" if s.flag("enable_activation_checkpointing") else "none"
    precision = element_type(s.text("dtype", default="bf16"), f"{where.name}: dtype")
    given["workload.precision"] = precision
    given["training.step_in_backward"] = s.flag("optimizer_in_bwd")
    assumed = _sequence(s, given)
    notes += _loss(s, given)
    field, told, needs = optimizer(s.text("optimizer._component_", default="AdamW"), "torch",
                                   f"{where.name}: optimizer")  # fmt: skip
    given |= field
    notes += told
    if s.has("optimizer.fused"):
        given["training.fused_optimizer"] = s.flag("optimizer.fused")
    _adapters(s, found[1] or "", given)
    _distributed(s, given)
    notes += s.notes(IDLE, LEFT_OUT)
    usual = {"framework": "transformers", "training.recipe": "pure", "workload.attention": "sdpa"}
    return Part(
        kind="torchtune", name=where.name, given=given, usual=usual, notes=tuple(notes),
        assumed=assumed, needs=needs,
    )  # fmt: skip


def preset_called(word: str) -> str:
    """The preset that a builder's name means: ``llama3_1_8b_instruct`` is ``llama-3.1-8b``."""
    plain = re.sub(r"_(instruct|base)$", "", word)
    if plain in _SIZES:
        return _SIZES[plain]
    letters = re.sub(r"[^a-z0-9]", "", plain)
    for name in presets.names("models"):
        if re.sub(r"[^a-z0-9]", "", name) == letters:
            return name
    return ""


def _sequence(s: Settings, given: dict[str, Any]) -> dict[str, str]:
    length = s.number("tokenizer.max_seq_len", "dataset.max_seq_len")
    if length:
        given["workload.seq"] = length
        return {}
    return {
        "workload.seq": "tokenizer.max_seq_len is not given: sequences are as long as the "
        "data; the model's usual length is taken (--seq)."
    }


def _loss(s: Settings, given: dict[str, Any]) -> tuple[str, ...]:
    name = s.text("loss._component_").rsplit(".", 1)[-1]
    if name in ("CEWithChunkedOutputLoss", "LinearCrossEntropyLoss"):
        given["training.loss"] = "chunked" if name.startswith("CE") else "fused"
        given["training.loss_chunks"] = s.number("loss.num_output_chunks", default=8, least=1)
        return ()
    return () if name in ("", "CrossEntropyLoss") else (f"loss {name} is counted as the usual.",)


def _adapters(s: Settings, kind: str, given: dict[str, Any]) -> None:
    if not kind:
        return
    given["training.lora_rank"] = s.number("model.lora_rank", default=8, least=1)
    words = list(s.words("model.lora_attn_modules"))
    if s.flag("model.apply_lora_to_mlp"):
        words += ["gate_proj", "up_proj", "down_proj"]
    if s.flag("model.apply_lora_to_output"):
        words.append("output")
    if words:
        given["training.lora_targets"] = "+".join(words)
    if s.flag("model.use_dora"):
        given["training.dora"] = True
    if kind == "qlora" or s.flag("model.quantize_base"):
        given["training.base_bits"] = 4


def _distributed(s: Settings, given: dict[str, Any]) -> None:
    if tp := s.number("tensor_parallel_dim"):
        given["layout.tp"] = tp
    shard, copies = s.number("data_parallel_shard_dim", least=-1), s.number(
        "data_parallel_replicate_dim")  # fmt: skip
    if s.flag("fsdp_cpu_offload", "fsdp.cpu_offload"):
        given["training.offload"] = "weights"
        given["layout.zero"] = 3
    if shard > 0:
        given["layout.zero"] = 3
        given["layout.dp"] = shard * max(1, copies)
        if copies > 1:
            given["training.shards"] = shard
