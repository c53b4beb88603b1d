"""axolotl's YAML (``axolotl/utils/schemas/config.py`` and its parts)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actcalc.errors import SpecError
from actcalc.io.readers import deepspeed, sharding
from actcalc.io.readers.beside import beside, missing
from actcalc.io.readers.document import Document
from actcalc.io.readers.part import Part
from actcalc.io.readers.settings import LeftOut, Settings
from actcalc.io.readers.unfrozen import unfrozen
from actcalc.io.readers.words import attention, optimizer, saved_modules, targets

IDLE = (
    r"(processor_type|use_kernels|use_scattermoe|ebft|diffusion|qat\.|gptq|num_labels|use_swanlab|datasets|test_datasets|pretraining_dataset|dataset|val_set_size|output_dir|hub_|wandb|mlflow"
    r"|comet|swanlab|trackio|lisa|num_epochs|max_steps|warmup|lr_|learning_rate|cosine|weight_decay"
    r"|adam_|max_grad_norm|eval|save|saves|logging|early_stopping|resume|auto_resume|local_rank|seed"
    r"|special_tokens|tokens|added_tokens|chat_template|default_system|train_on|group_by_length|tf32"
    r"|strict|tokenizer|model_type|trust_remote|is_|base_model_(config|ignore)|revision|type_of|hf_"
    r"|gradient_checkpointing_kwargs|lora_(alpha|dropout|fan|model_dir|on_cpu"
    r"|mlp_kernel|qkv_kernel|o_kernel|embedding_kernel)|peft_(use_rslora|init|layers_pattern"
    r"|autocast)|loraplus|debug|dataloader|ddp|pad_to|sample_packing|eval_sample|excess_length"
    r"|shuffle|skip_prepare|dataset_|remove_unused|push|use_tensorboard|loss_watchdog|streaming"
    r"|noisy_embedding|neftune|bnb_config|load_best|metric_for|greater|include|save_|plugins|device"
    r"|liger_(rms_norm|rope|glu|layer_norm|swiglu|use_token)|flash_attn_(rms_norm|cross_entropy"
    r"|fuse)|rope_scaling|overrides_of_model|low_cpu|xformers|unsloth|float32|gc_|torch_compile_"
    r"|auto_find|profiler|generate|rl_beta|dpo_|orpo_|kto_|simpo|cpo_|trl|vllm|world_size|eot_"
    r"|preprocess|field_|conversation|bos|eos|quantize_moe|use_ray|ray_|flex_attn|scaling_softmax"
    r"|fix_untrained|fsdp_final|fsdp_version|ring_attn|heads_k).*"
)
LEFT_OUT: LeftOut = (
    ("torch_compile", "fuses kernels: less memory and time", ()),
    ("lora_target_parameters", "puts adapters on parameters of experts", ()),
    ("relora", "merges adapters while it trains", ()),
    ("tiled_mlp", "runs the feed-forward in parts: less memory", ()),
    ("layer_offloading", "moves frozen layers to the host", ()),
    ("selective_checkpointing", "keeps some outputs of re-run layers", ()),
    ("llmcompressor", "quantises the trained model", ()),
    ("qat", "trains with fake quantisation", ()),
    ("s2_attention", "runs other attention kernels", ()),
)


CHUNKS = 8  # axolotl/utils/schemas/config.py chunked_cross_entropy_num_chunks


def recognises(data: Mapping[str, Any]) -> bool:
    """Whether a mapping is axolotl's: its model, and at least one name that others do not have."""
    own = ("sequence_len", "micro_batch_size", "datasets", "adapter", "lora_r", "val_set_size",
           "dataset_prepared_path", "lora_target_linear", "num_epochs",
           "sample_packing")  # fmt: skip
    return "base_model" in data and any(name in data for name in own)


def read(data: Mapping[str, Any], where: Document) -> Part:
    """What a configuration says; ``SpecError`` for values that axolotl refuses."""
    plain = {k: v for k, v in data.items() if k not in ("deepspeed", "datasets", "test_datasets")}
    s = Settings(plain, where.name)
    given: dict[str, Any] = {"base": s.text("base_model")}
    notes: list[str] = []
    needs: dict[str, SpecError] = {}
    assumed: dict[str, str] = {}
    more: list[Part] = []
    given["workload.seq"] = s.number("sequence_len", default=512, least=1)
    given["workload.micro_batch"] = s.number("micro_batch_size", least=0) or None
    given["accumulation"] = s.number("gradient_accumulation_steps") or None
    _types(s, given)
    _kernels(s, given, notes)
    _adapter(s, given, notes)
    _unfrozen(s, given, notes)
    _checkpointing(s, given, notes)
    if s.has("optimizer"):
        field, told, needs = optimizer(s.text("optimizer"), "transformers",
                                       f"{where.name}: optimizer")  # fmt: skip
        given |= field
        notes += told
    _sharding(data, s, where, given, more, assumed, notes)
    if s.has("rl"):
        word = s.text("rl").lower()
        if word in ("dpo", "kto"):
            given["training.objective"] = word
            if s.flag("precompute_ref_log_probs"):
                given["training.reference"] = "none"
        else:
            notes.append(f"rl {word} is not modelled: training on next tokens is counted.")
    elif s.flag("reward_model"):
        given["training.objective"] = "reward"
    notes += s.notes(f"{IDLE}|{sharding.IDLE}", LEFT_OUT)
    usual = {
        "framework": "transformers", "policy": "none", "training.optimizer": "adamw",
        "workload.attention": "sdpa", "workload.micro_batch": 1, "accumulation": 1,
    }  # fmt: skip
    return Part(
        kind="axolotl", name=where.name, given=given, usual=usual, notes=tuple(notes),
        assumed=assumed, needs=needs, more=tuple(more),
    )  # fmt: skip


def _types(s: Settings, given: dict[str, Any]) -> None:
    """Weights are loaded in the type that the run asks for (axolotl sets torch_dtype)."""
    word = s.text("bf16").lower()
    bf16 = word in ("true", "auto", "full") or s.flag("bfloat16")
    fp16 = s.text("fp16").lower() == "true" or s.flag("float16")
    if bf16 and fp16 and word == "true":
        raise SpecError(f"{s.where}: bf16 and fp16 are both on", "keep one of them")
    given["workload.precision"] = "bf16" if bf16 else "amp-fp16" if fp16 else "fp32"
    if s.text("fp8").lower() == "true":
        s.asked.discard("fp8")


def _kernels(s: Settings, given: dict[str, Any], notes: list[str]) -> None:
    word = s.text("attn_implementation")
    if s.flag("flash_attention"):
        word = "flash_attention_2"
    elif s.flag("sdp_attention"):
        word = "sdpa"
    elif s.flag("eager_attention"):
        word = "eager"
    elif s.flag("flex_attention", "sage_attention", "xformers_attention"):
        word = "flex_attention"
    if word:
        given["workload.attention"] = attention(word)
        if given["workload.attention"] is None:
            notes.append(f"attn_implementation {word} is not known: sdpa is counted.")
    if s.flag("liger_fused_linear_cross_entropy", "cut_cross_entropy"):
        given["training.loss"] = "fused"
    elif s.flag("chunked_cross_entropy"):
        given["training.loss"] = "chunked"
        chunks = s.number("chunked_cross_entropy_num_chunks", default=CHUNKS, least=1)
        given["training.loss_chunks"] = chunks


def _adapter(s: Settings, given: dict[str, Any], notes: list[str]) -> None:
    kind = s.text("adapter").lower()
    four, eight = s.flag("load_in_4bit"), s.flag("load_in_8bit")
    bits = 4 if four else 8 if eight else 16
    rank = s.number("lora_r")
    if kind not in ("lora", "qlora"):
        if kind:
            notes.append(f"adapter {kind} is not modelled: every weight is counted as trained.")
        return
    given["training.lora_rank"] = rank or 8
    linear = s.flag("lora_target_linear")
    field, told = targets(s) if linear else targets(s, "lora_target_modules")
    s.get("lora_target_modules")
    given |= field
    notes += told
    if kind == "qlora" and bits == 16:
        raise SpecError(
            f"{s.where}: adapter qlora needs load_in_4bit: axolotl refuses it", "add load_in_4bit"
        )
    if bits < 16:
        given["training.base_bits"] = bits
    if s.flag("peft_use_dora"):
        given["training.dora"] = True
    field, told = saved_modules(s, "lora_modules_to_save")
    given |= field
    notes += told


def _unfrozen(s: Settings, given: dict[str, Any], notes: list[str]) -> None:
    listed = s.get("unfrozen_parameters")
    if not listed or given.get("training.lora_rank"):
        return
    fields = unfrozen([str(each) for each in listed]) if isinstance(listed, list) else None
    if fields is None:
        notes.append("unfrozen_parameters is not modelled; it trains some parameters alone: fewer "
                     "states.")  # fmt: skip
    else:
        given |= fields


def _checkpointing(s: Settings, given: dict[str, Any], notes: list[str]) -> None:
    word = s.text("gradient_checkpointing").lower()
    if word:
        given["policy"] = "none" if word == "false" else "full"
        if word.startswith("offload"):
            notes.append("gradient_checkpointing offload moves layer inputs to the host: they are "
                         "counted on the device.")  # fmt: skip
    if s.text("activation_offloading").lower() not in ("", "false"):
        notes.append("activation_offloading is not counted: give --offload activations.")


def _sharding(
    data: Mapping[str, Any], s: Settings, where: Document, given: dict[str, Any],
    more: list[Part], assumed: dict[str, str], notes: list[str],
) -> None:  # fmt: skip
    value = data.get("deepspeed")
    if isinstance(value, Mapping):
        more.append(deepspeed.part_of(value, f"{where.name}: deepspeed"))
    elif isinstance(value, str) and value:
        found = beside(where, value)
        if found is not None:
            more.append(deepspeed.read(found.data, found))
        else:
            assumed["engine"] = missing(where, value, "deepspeed")
    section = s.section("fsdp_config")
    words = s.words("fsdp")
    if section or words:
        fields, told, _ = sharding.fsdp(section, words, where.name)
        given |= fields
        notes += told
        if given["workload.precision"] != "fp32":
            given["training.recipe"] = "fsdp"
    degrees = {"tp": ("tensor_parallel_size",),
               "cp": ("context_parallel_size", "sequence_parallel_degree")}  # fmt: skip
    for degree, names in degrees.items():
        if size := s.number(*names):
            given[f"layout.{degree}"] = size
    replicated, sharded = s.number("dp_replicate_size"), s.number("dp_shard_size")
    if sharded or replicated:
        given["layout.dp"] = max(1, replicated) * max(1, sharded)
        if replicated > 1 and sharded > 1:
            given["training.shards"] = sharded
