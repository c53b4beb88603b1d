"""LLaMA-Factory's YAML: its own arguments beside the Trainer's (``llamafactory/hparams/``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from actcalc.errors import SpecError
from actcalc.io.readers import mcore, trainer
from actcalc.io.readers.document import Document
from actcalc.io.readers.part import Part
from actcalc.io.readers.settings import LeftOut, Settings
from actcalc.io.readers.words import attention, saved_modules, targets

OWN = ("finetuning_type", "cutoff_len", "stage", "template", "lora_target", "quantization_bit",
       "pure_bf16", "disable_gradient_checkpointing", "enable_liger_kernel", "flash_attn",
       "quantization_method", "neat_packing")  # fmt: skip
IDLE = (
    r"(template|dataset|media_dir|train_on|mask_history|buffer|mix_|interleave|tool|default_system"
    r"|enable_thinking|preserve|tokenized|data_|val_size|lora_(alpha|dropout)|use_rslora|pissa|loraplus"
    r"|create_new|pref_|dpo_|kto_|simpo|ppo_|ref_model|reward_model|plot_loss|stage"
    r"|compute_accuracy|use_swanlab|swanlab|infer|vllm|sglang|export|image|video|audio|crop|print"
    r"|ray|master|enable_torch_profiler|profil|double_quant|quantization_(type|method|device)|rope"
    r"|use_(fast|v1|kv|unsloth_gc|reentrant)|split_special|add_|new_special|init_special|resize_vocab"
    r"|packing|neat_packing|freeze_(vision|multi|trainable_modules|extra)|adapter|include_num"
    r"|preprocessing|max_samples|moe_aux|overwrite|ignore_pad|eval_|include_effective|trust"
    r"|cutoff|ddp|use_(dft|eaft|asft)|apollo|asft|fp8_backend|badam|galore|num_expand|predict_with|kt_|oft_|moe_token"
    r"|apply_rope|bias_activation|moe_grouped|use_packed|mixed_precision|export_hf|freeze_train).*"
)
LEFT_OUT: LeftOut = (
    ("use_apollo", "scales gradients by a low rank: fewer states", ()),
    ("use_badam", "updates one block of layers at a time: fewer states", ()),
    ("use_adam_mini", "keeps fewer second moments", ()),
    ("use_llama_pro", "trains added layers alone", ()),
    ("use_unsloth", "runs kernels of its own: less memory", ()),
    ("upcast_layernorm", "keeps norms in fp32", ()),
    ("upcast_lmhead_output", "keeps the head in fp32", ()),
    ("mixture_of_depths", "skips tokens in layers", ()),
    ("use_kt", "moves experts to the host", ()),
    ("freeze_language_model", "trains the vision tower alone: fewer states", ()),
    ("use_asft_loss", "runs a reference model beside the trained one", ()),
    ("fp8", "runs products in 8 bits", ()),
    ("fp8_enable_fsdp_float8_all_gather", "gathers weights in 8 bits", ()),
    ("enable_fp8", "runs products in 8 bits", ()),
    ("shift_attn", "runs attention in groups: less time", ()),
)


def recognises(data: Mapping[str, Any]) -> bool:
    """Whether a mapping is LLaMA-Factory's: two of its own names, or the model and one."""
    own = sum(name in data for name in OWN)
    return own >= 2 or (own == 1 and "model_name_or_path" in data and "max_length" not in data)


def read(data: Mapping[str, Any], where: Document) -> Part:
    """What a configuration says; ``SpecError`` for values that LLaMA-Factory refuses."""
    s = Settings({k: v for k, v in data.items() if k != "deepspeed"}, where.name, hyphens=True)
    kind = s.text("finetuning_type", default="lora")
    given: dict[str, Any] = {"workload.seq": s.number("cutoff_len", default=2048, least=1)}
    notes: list[str] = []
    usual = {"policy": "full"}  # gradient checkpointing is on unless it is disabled
    if s.flag("disable_gradient_checkpointing"):
        given["policy"] = "none"
    _kernels(s, given)
    tuned, told = _tuning(s, kind, where)
    given |= tuned
    notes += told
    if s.flag("use_galore"):
        given["training.galore_rank"] = s.number("galore_rank", default=16, least=1)
        given["training.step_in_backward"] = s.flag("galore_layerwise")
    if s.flag("use_muon"):
        given["training.optimizer"] = "muon"
    field, told = _stage(s)
    given |= field
    notes += told
    if mcore.named(s):
        given |= _megatron(s)
    rest = {k: v for k, v in data.items() if k.replace("-", "_") not in s.asked}
    part = trainer.read(rest, where)
    pure = s.flag("pure_bf16")
    precision = part.given.get("workload.precision")
    if kind == "full" and not pure and precision in ("bf16", "fp16") and not _sharded(part):
        precision = f"amp-{precision}"  # trained weights are cast to fp32 (model/adapter.py)
    given["workload.precision"] = "bf16" if pure else precision
    if mcore.named(s) and precision:
        given["workload.precision"] = precision.removeprefix("amp-")
    assumed = {
        k: v for k, v in part.assumed.items() if k not in ("training.recipe", "workload.seq")
    }
    return replace(
        part,
        kind="llamafactory",
        given={**part.given, **given},
        usual={**part.usual, **usual},
        assumed=assumed,
        notes=(*notes, *_notes(s, part)),
    )


def _tuning(
    s: Settings, kind: str | None, where: Document
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Which weights are trained (``model/adapter.py``), and what is not read of it."""
    given: dict[str, Any] = {}
    notes: list[str] = []
    bits = s.number("quantization_bit")
    if bits and kind not in ("lora", "oft"):
        raise SpecError(
            f"{where.name}: quantization_bit {bits} with finetuning_type {kind}: LLaMA-Factory "
            "quantises under adapters alone",
            "use finetuning_type lora, or drop quantization_bit",
        )
    if kind == "lora":
        given["training.lora_rank"] = s.number("lora_rank", default=8, least=1)
        field, told = targets(s, "lora_target")
        given |= field
        notes += told
        if bits:
            given["training.base_bits"] = bits
        if s.flag("use_dora"):
            given["training.dora"] = True
        field, told = saved_modules(s, "additional_target")
        given |= field
        notes += told
    elif kind == "freeze" and not s.has("freeze_extra_modules"):
        # the last layers alone are trained; a negative number: the first (model/adapter.py)
        last = s.number("freeze_trainable_layers", default=2, least=1)
        given |= {"training.train": ("layers",), "training.freeze": -last}
    elif kind != "full":
        notes.append(f"finetuning_type {kind} is not modelled: every weight is counted as trained.")
    return given, tuple(notes)


_OBJECTIVES = {"dpo": "dpo", "kto": "kto", "rm": "reward"}


def _stage(s: Settings) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The objective of a stage (``train/dpo``, ``train/kto``, ``train/rm``).

    Log-probabilities come from fp32 copies of all logits (``concatenated_forward``); orpo and simpo
    run no reference (``hparams/finetuning_args.py`` use_ref_model).
    """
    stage = s.text("stage", default="sft")
    loss = s.text("pref_loss", default="sigmoid")
    name = _OBJECTIVES.get(stage)
    if name is None:
        told = f"stage {stage} is not modelled: one update on next tokens is counted."
        return {}, () if stage in ("sft", "pt") else (told,)
    fields: dict[str, Any] = {"training.objective": name}
    if name == "reward":
        return fields, (
            "stage rm: its models make logits beside the score, which are not counted.",
        )
    fields["training.loss"] = "full"
    if name == "dpo" and loss in ("orpo", "simpo"):
        fields["training.reference"] = "none"
    return fields, ()


def _megatron(s: Settings) -> dict[str, Any]:
    """Degrees and recomputation of its Megatron trainers (``train/mca``, ``megatron_bridge``)."""
    found = {**mcore.layout(s), "framework": "megatron"}
    found["layout.zero"] = int(s.flag("use_distributed_optimizer"))
    found["training.overlapped_reduction"] = s.flag("overlap_grad_reduce")
    found["training.overlapped_gather"] = s.flag("overlap_param_gather")
    found["policy"] = mcore.recomputed(s) or "none"
    return found


def _sharded(part: Part) -> bool:
    """Whether the engine that shards keeps fp32 copies of its own."""
    return "engine" in part.given or any("engine" in each.given for each in part.more)


def _kernels(s: Settings, given: dict[str, Any]) -> None:
    word = s.text("flash_attn", default="auto")
    given["workload.attention"] = attention(word) or "sdpa"
    if s.flag("enable_liger_kernel"):
        given["training.loss"] = "fused"


def _notes(s: Settings, part: Part) -> tuple[str, ...]:
    """Notes of both readers, options listed once: those that neither knows."""
    kept = [note for note in part.notes if not note.startswith("Options not understood")]
    both = f"{trainer.IDLE}|{IDLE}|{'|'.join(trainer.OWN)}|use_liger_kernel|model_name_or_path"
    both += r"|bf16|fp16|fsdp(_config\..*)?|deepspeed.*|attn_implementation|adafactor"
    return (*kept, *s.notes(both, LEFT_OUT))
