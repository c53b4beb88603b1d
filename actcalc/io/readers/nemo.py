"""NeMo's and Megatron-Bridge's YAML: Megatron's fields in sections, under Megatron's names or near.

NeMo 1.x and the NeMo launcher: ``model:`` and ``trainer:``; NeMo 2 and Megatron-Bridge:
``model:``, ``train:``, ``optimizer:``, ``ddp:``, ``dataset:``, ``mixed_precision:``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from actcalc.errors import SpecError
from actcalc.io import presets
from actcalc.io.megatron import read_arguments
from actcalc.io.megatron.options import plain
from actcalc.io.readers.document import Document
from actcalc.io.readers.megatron import part_of
from actcalc.io.readers.part import Part
from actcalc.io.readers.settings import Settings

SECTIONS = ("model", "trainer", "train", "optimizer", "ddp", "dataset", "mixed_precision", "dist",
            "scheduler", "checkpoint", "logger", "rng", "peft", "comm_overlap", "exp_manager",
            "run", "training", "tokenizer", "validation", "profiling", "data", "optim", "recipe",
            "resume", "log", "strategy", "plugins")  # fmt: skip
RENAMED = {
    "encoder-seq-length": "seq-length", "sequence-length": "seq-length",
    "activation": "activation", "activation-func": "activation",
    "virtual-pipeline-model-parallel-size": "num-virtual-stages-per-pipeline-rank",
    "num-moe-experts": "num-experts", "expert-tensor-parallel-size": "expert-tensor-parallel-size",
    "layernorm-epsilon": "norm-epsilon", "rotary-percentage": "rotary-percent",
    "share-embeddings-and-output-weights": "share-embeddings-and-output-weights",
    "num-layers-in-first-pipeline-stage": "decoder-first-pipeline-num-layers",
    "num-layers-in-last-pipeline-stage": "decoder-last-pipeline-num-layers",
    "bias-activation-fusion": "bias-swiglu-fusion",
    "masked-softmax-fusion": "masked-softmax-fusion", "fp8": "fp8-format",
    "cross-entropy-fusion-impl": "cross-entropy-fusion-impl", "vocab-size": "vocab-size",
    "qk-layernorm": "qk-layernorm", "gated-linear-unit": "swiglu", "grad-reduce-in-fp32": "",
    "fp8-param": "fp8-param-gather",
}  # fmt: skip
"""Fields that are called otherwise than Megatron's option."""

RECIPE = "recipe"
"""The option of Megatron-Bridge's ``run_recipe.py`` and its kin that names a model's recipe."""

IDLE = (
    r"(recipe|name|target|_target_|hf-|restore|resume|model-name|mcore-gpt|megatron-amp|init-method|nsys"
    r"|gradient-as-bucket|sync-batch|ub-|fp8-e4m3|fp8-hybrid|fp8-interval|reduce-amax|seed|apply-"
    r"|native|grad-|params|pipeline-dtype|autocast|enable-autocast|perform-init|gradient-clip|make-"
    r"|get-attention|precision|transformer-engine|transformer-layer|parallel-output|kv-|share-emb"
    r"|batch-p2p|deallocate|variable|num-sanity|use-cpu|barrier|data-impl|do-layer|openai|optim$"
    r"|hysteresis|activations-checkpoint-layers|onnx|gc-|rotary-(base|percentage|interpol)|scale|"
    r"|position-interpolation|memory-efficient-layer-norm|cuda-graph|attention-softmax|bias-dropout"
    r"|seq-len-interpolation|async-grad|loss|log|accumulate|async|overlap|tokenizer|dataloader"
    r"|average|check|num-dataset|vocab-file|merge-file|distributed|external|lazy|local-rank|cls).*"
)


def recognises(data: Mapping[str, Any]) -> bool:
    """Whether a mapping has NeMo's sections with Megatron's fields in the model's."""
    if isinstance(data.get(RECIPE), str) and any(name in data for name in ("model", "train")):
        return True
    model = data.get("model")
    if not isinstance(model, Mapping):
        return False
    inner = model.get("config") if isinstance(model.get("config"), Mapping) else model
    assert isinstance(inner, Mapping)
    own = {"tensor_model_parallel_size", "pipeline_model_parallel_size", "encoder_seq_length",
           "num_layers", "micro_batch_size", "seq_length", "context_parallel_size"}  # fmt: skip
    others = [key for key in data if key in SECTIONS and key != "model"]
    return bool(own & set(inner)) and (bool(others) or "_target_" in model)


def read(data: Mapping[str, Any], where: Document) -> Part:
    """What a configuration says: its fields as Megatron's options, read as those."""
    options: dict[str, Any] = {}
    whole = data.get("model")
    model = dict(whole) if isinstance(whole, Mapping) else {}
    for name in ("config", "optim", "data", "peft"):
        inner = model.pop(name, None)
        if isinstance(inner, Mapping) and name == "config":
            model = {**model, **inner}
    for section in (model, *_others(data)):
        for key, value in section.items():
            if not isinstance(value, Mapping):
                option = plain(key)
                options[RENAMED.get(option, option)] = value
    options.pop("", None)
    if isinstance(data.get(RECIPE), str):
        options[RECIPE] = data[RECIPE]
    s = Settings(data, where.name)
    _translate(options, s, model)
    _recomputation(options)
    if size := options.pop("override-vocab-size", None):
        options["vocab-size"] = size
    options = {**_tokenizer(data), **options}
    base, notes = _base(model, options, where)
    if base:
        part = _layout_only(options, where, base, notes)
    else:
        part = part_of(read_arguments(options, where.name, IDLE), where.name, "nemo", notes)
    return replace(part, given={**part.given, **_adapter(s)})


def _adapter(s: Settings) -> dict[str, Any]:
    """Megatron-Bridge's and NeMo 2's LoRA: rank 32 on every linear layer (``peft/lora.py``)."""
    words = " ".join(s.text(name) for name in (RECIPE, "mode", "peft_scheme", "peft._target_",
                                               "model.peft.peft_scheme")).lower()  # fmt: skip
    rank = s.number("peft.dim", "model.peft.lora_tuning.adapter_dim")
    if not re.search(r"lora|peft_|_peft", words):
        return {}
    return {"training.lora_rank": rank or 32}


_LIBRARIES = {"megatron": "tokenizer-type", "huggingface": "tokenizer-model",
              "sentencepiece": "tokenizer-model"}  # fmt: skip
"""What NeMo's ``tokenizer:`` names, by its library, as Megatron's option."""


def _tokenizer(data: Mapping[str, Any]) -> dict[str, Any]:
    """The tokenizer as Megatron's options, from which the vocabulary follows where it is known."""
    model = data.get("model")
    inner = model.get("tokenizer") if isinstance(model, Mapping) else None
    section = inner if isinstance(inner, Mapping) else data.get("tokenizer")
    if not isinstance(section, Mapping):
        return {}
    library = str(section.get("library") or "").lower()
    words = [
        section.get(key) for key in ("type", "model", "tokenizer_model", "pretrained_model_name")
    ]
    if library == "sentencepiece":
        words = [section.get("model") or library]
    named = [str(word) for word in words if isinstance(word, str) and word]
    kind = section.get("tokenizer_type")
    found = {"tokenizer-type": kind} if isinstance(kind, str) else {}
    if library in _LIBRARIES and named:
        found[_LIBRARIES[library]] = named[0]
    elif isinstance(section.get("tokenizer_model"), str):
        found["tokenizer-model"] = section["tokenizer_model"]
    return found


def _recomputation(o: dict[str, Any]) -> None:
    """NeMo heeds no method beside selective (build_transformer_config)."""
    for name in ("activations-checkpoint", "recompute"):
        if str(o.get(f"{name}-granularity")) == "selective":
            for option in ("method", "num-layers"):
                o.pop(f"{name}-{option}", None)


def _others(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    names = ("train", "training", "dataset", "ddp", "dist", "strategy")
    return [data[name] for name in names if isinstance(data.get(name), Mapping)]


def _translate(o: dict[str, Any], s: Settings, model: Mapping[str, Any]) -> None:
    """Values that NeMo writes in words of its own."""
    activation = str(o.pop("activation", "")).lower()
    if "swiglu" in activation or "silu" in activation:
        o["swiglu"] = True
    elif "geglu" in activation or "reglu" in activation:
        o["gated-linear-unit"] = True
    if "squared" in activation:
        o["squared-relu"] = True
    norm = str(o.pop("normalization", o.pop("normalization-type", "layernorm"))).lower()
    if norm.startswith("rms"):
        o["normalization"] = "RMSNorm"
    if o.pop("bias", None) is False:
        o["add-bias-linear"] = False
    shared = o.pop("share-embeddings-and-output-weights", None)
    if shared is not None:
        o["untie-embeddings-and-output-weights"] = not shared
    groups, heads = o.get("num-query-groups"), o.get("num-attention-heads")
    if groups and groups != heads:
        o["group-query-attention"] = True
    precision = str(s.get("mixed_precision", "trainer.precision", "trainer.plugins.precision",
                          "model.precision", "run.precision") or "bf16").lower()  # fmt: skip
    o["bf16" if "bf16" in precision or "bfloat16" in precision else
      "fp16" if "16" in precision else "fp32"] = True  # fmt: skip
    o.pop("fp32", None)
    if "fp8" in precision and not o.get("fp8-format"):
        o["fp8-format"] = "hybrid"
    if o.get("fp8-format") is True:
        o["fp8-format"] = "hybrid"
    nodes, each = s.number("trainer.num_nodes", default=1), s.get("trainer.devices")
    if isinstance(each, int) and each > 0:
        o["world-size"] = nodes * each
    if "distributed_fused_adam" in s.text("model.optim.name"):
        o["use-distributed-optimizer"] = True
    if o.get("seq-length") is None:
        o["seq-length"] = s.get("data.seq_length", "model.data.seq_length")
    transformer = {"tp-comm-overlap": o.pop("ub-tp-comm-overlap", None)}
    o.update({k: v for k, v in transformer.items() if v is not None})


_KINDS = re.compile(r"_(pretrain|sft|peft|finetune|lora|dora|qat)(_.*)?$|_config$")


def _recipe(name: str) -> tuple[str, tuple[str, ...]]:
    """The preset that a recipe (``qwen3_8b_sft_config``) is of, "?" for none, and a note."""
    bare = _KINDS.sub("", name.removesuffix("_config")).replace("_", "")
    same = (each for each in presets.names("models") if re.sub(r"[^a-z0-9]", "", each) == bare)
    note = f"What the recipe {name} sets beyond these options is Python's, and is not read."
    return next(same, "?"), (note,)


def _base(
    model: Mapping[str, Any], options: Mapping[str, Any], where: Document
) -> tuple[str, tuple[str, ...]]:
    """The model by name, where its sizes are not in the file."""
    if options.get("hidden-size"):
        return "", ()
    if isinstance(options.get(RECIPE), str):
        return _recipe(options[RECIPE])
    for key in ("hf_model_id", "hf_path", "pretrained_checkpoint", "name"):
        value = model.get(key)
        if isinstance(value, str) and "/" in value:
            return value, ()
    return "?", ()


def _layout_only(
    options: dict[str, Any], where: Document, base: str, notes: tuple[str, ...]
) -> Part:
    """An override of a recipe: how a model is trained, which is named beside it."""
    sizes = {"num-layers": 1, "hidden-size": 64, "num-attention-heads": 1, "vocab-size": 1}
    probe = {**options, **{k: v for k, v in sizes.items() if options.get(k) is None}}
    for name in ("num-experts", "num-query-groups", "group-query-attention"):
        probe.pop(name, None)
    pp = probe.get("pipeline-model-parallel-size") or 1
    vpp = probe.get("num-virtual-stages-per-pipeline-rank") or 1
    try:
        probe["num-layers"] = int(pp) * int(vpp)
    except (TypeError, ValueError):
        raise SpecError(f"{where.name}: a pipeline of {pp} x {vpp}", "give numbers") from None
    found = read_arguments(probe, where.name, IDLE)
    part = part_of(found, where.name, "nemo", notes)
    given = {k: v for k, v in part.given.items() if not k.startswith("model.")}
    s = Settings(options, where.name)
    given["layout.ep"] = s.number("expert-model-parallel-size") or None
    given["layout.etp"] = s.number("expert-tensor-parallel-size") or None
    if base != "?":
        given["base"] = base
    return Part(kind="nemo", name=where.name, given=given, notes=part.notes, assumed=part.assumed)
