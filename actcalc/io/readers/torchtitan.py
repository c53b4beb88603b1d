"""torchtitan's TOML, or its ``--section.key value`` options (``torchtitan/config/job_config.py``).

Names are those of 0.2; 0.1 wrote ``[experimental]`` and ``training.batch_size``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from actcalc.errors import SpecError
from actcalc.io import presets
from actcalc.io.readers.document import Document
from actcalc.io.readers.part import Part
from actcalc.io.readers.settings import LeftOut, Settings
from actcalc.io.readers.words import optimizer

SECTIONS = ("job", "profiling", "metrics", "model", "optimizer", "lr_scheduler", "training",
            "parallelism", "checkpoint", "activation_checkpoint", "float8", "compile",
            "experimental", "comm", "validation", "fault_tolerance", "quantize",
            "memory_estimation", "debug",
            "lora")  # fmt: skip
FLAVOURS: Mapping[tuple[str, str], str] = {
    ("llama3", "8b"): "llama-3.1-8b", ("llama3", "70b"): "llama-3.1-70b",
    ("llama3", "405b"): "llama-3.1-405b", ("llama4", "17bx16e"): "llama-4-scout",
    ("llama4", "17bx128e"): "llama-4-maverick", ("deepseek_v3", "671b"): "deepseek-v3",
    ("deepseek_v3", "16b"): "deepseek-v2-lite", ("qwen3", "0.6b"): "qwen3-0.6b",
    ("qwen3", "1.7b"): "qwen3-1.7b", ("qwen3", "4b"): "qwen3-4b", ("qwen3", "8b"): "qwen3-8b",
    ("qwen3", "14b"): "qwen3-14b", ("qwen3", "32b"): "qwen3-32b",
    ("deepseek_v3", "236b"): "deepseek-v2",
    ("qwen3", "30b-a3b"): "qwen3-30b-a3b", ("qwen3", "235b-a22b"): "qwen3-235b-a22b",
    ("gpt_oss", "20b"): "gpt-oss-20b", ("gpt_oss", "120b"): "gpt-oss-120b",
}  # fmt: skip
"""Presets by name and flavour of the model, in lower case (``models/*/__init__.py``)."""

_DEBUG: Mapping[str, Any] = {
    "family": "llama", "layers": 6, "hidden": 256, "heads": 16, "ffn": 768, "vocab": 2048,
    "position": "rotary", "norm": "rmsnorm", "activation": "silu", "gated": True,
    "qkv_bias": False, "out_bias": False, "mlp_bias": False, "tied": False,
}  # fmt: skip
"""llama3's debugmodel (``models/llama3/__init__.py``: dim 256, 6 layers, 16 heads, 2048 words)."""

_SMALL: Mapping[tuple[str, str], tuple[str, Mapping[str, Any]]] = {
    ("qwen3", "debugmodel"): (
        "qwen3-0.6b",
        {"layers": 8, "hidden": 256, "heads": 16, "kv_heads": 8, "head_dim": 128, "ffn": 3072,
         "vocab": 2048},
    ),
    ("qwen3", "debugmodel_moe"): (
        "qwen3-30b-a3b",
        {"layers": 8, "hidden": 256, "heads": 16, "kv_heads": 8, "head_dim": 128, "ffn": 3072,
         "vocab": 2048, "moe": {"experts": 64, "topk": 8, "ffn": 768}},
    ),
    ("deepseek_v3", "debugmodel"): (
        "deepseek-v2-lite",
        {"layers": 6, "hidden": 256, "heads": 16, "kv_heads": 16, "ffn": 1024, "vocab": 2048,
         "mlp_pattern": ("dense", *("moe",) * 5),
         "moe": {"experts": 8, "topk": 3, "ffn": 256, "shared_ffn": 512}},
    ),
}  # fmt: skip
"""Small models: a preset of the same kind, and the sizes that differ (``models/*/__init__.py``)."""
_VARIANTS = re.compile(r"[_-](flex|varlen|flex_attn|varlen_attn|deepep|hybridep|sdpa|fused)$")
"""What a flavour adds that is no other model: how attention runs, how tokens travel."""

SCHEDULES = {
    "1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved",
    "interleavedzerobubble": "interleaved-zb", "zbvzerobubble": "zb-v", "dualpipev": "dualpipe-v",
}  # fmt: skip
IDLE = (
    r"job\..*|profiling\..*|metrics\..*|lr_scheduler\..*|checkpoint\..*|comm\..*|validation\..*"
    r"|memory_estimation\..*|debug\..*|fault_tolerance\..*"
    r"|model\.(hf_assets_path|tokenizer_path|tokenizer_type|print_after_conversion|norm_type)"
    r"|compile\.(components|backend|memory.*)|dataloader\..*|dump_folder|hf_assets_path|quantize\..*"
    r"|optimizer\.(lr_multi|weight_decay_multi|mu|adjust|momentum|muon).*|validator\..*|loss\..*"
    r"|training\.(add_bos.*|pack_.*|pad_.*|mask_.*|freeze_.*|dynamic_.*|expert_orth.*|clear_cache.*"
    r"|aggressive.*|disable_cuda.*|enable_detailed.*|dataset.*|steps|max_norm|gc_.*|seed|dtype|mixed_precision_reduce|warmup_steps"
    r"|debug_moe_force_load_balance)|optimizer\.(lr|eps|weight_decay|beta[12]|fused)"
    r"|parallelism\.(module_fsdp|context_parallel_rotate_method|enable_compiled_autograd"
    r"|pipeline_parallel_schedule_csv|fsdp_disable_prefetch|disable_loss_parallel)"
    r"|experimental\.(custom.*|pipeline_parallel_split_points|enable_compiled_autograd)"
    r"|activation_checkpoint\.(per_op_sac_force_recompute_mm_shapes_by_fqns|early_stop"
    r"|preserve_rng_state|determinism_check|debug)"
)
LEFT_OUT: LeftOut = (
    ("optimizer.cpu_offload", "keeps its states on the host: give --offload optimizer", ()),
    ("optimizer.state_dtype", "keeps its states in another type", ("float32", "fp32")),
    ("peft.use_lora", "trains adapters: give --lora-rank", ()),
    ("lora.rank", "trains adapters: give --lora-rank", ()),
    ("qat.enable", "trains with fake quantisation", ()),
    ("activation_checkpoint.cpu_offload", "moves what is kept to the host", ()),
    ("quantize.linear.float8.enable_fsdp_float8_all_gather", "gathers weights in 8 bits", ()),
    ("training.compile", "fuses kernels: less memory and time", ()),
    ("compile.enable", "fuses kernels: less memory and time", ()),
    ("float8.enable_fsdp_float8_all_gather", "gathers weights in 8 bits", ()),
    ("parallelism.enable_async_tensor_parallel", "overlaps messages with compiled products", ()),
    (
        "parallelism.expert_parallel_comm_backend",
        "dispatches tokens by other kernels",
        ("standard",),
    ),
    ("activation_checkpoint.memory_budget", "chooses what is re-run while it compiles", (0.5,)),
)


def recognises(data: Mapping[str, Any]) -> bool:
    """Whether a mapping has torchtitan's sections."""
    known = [name for name in data if name in SECTIONS and isinstance(data[name], Mapping)]
    told = {"training", "parallelism", "activation_checkpoint", "experimental", "job"} & set(known)
    if isinstance(data.get("module"), str) and isinstance(data.get("config"), str):
        return True  # 0.3: a function of Python's names what it starts from
    return len(known) >= 2 and bool(told) and "trainer" not in data and "ddp" not in data


def read(data: Mapping[str, Any], where: Document) -> Part:
    """What a job's configuration says; ``SpecError`` for a model or a mode that is not known."""
    s = Settings(data, where.name)
    given: dict[str, Any] = {"framework": "torchtitan"}
    usual: dict[str, Any] = {"workload.attention": "sdpa"}
    notes: list[str] = []
    given |= _model(s)
    seq = s.number("training.seq_len", "training.max_context_length", default=2048, least=1)
    given["workload.seq"] = seq
    tokens = s.number("training.num_tokens_per_microbatch_per_dp_rank", default=8 * seq, least=1)
    local = s.number("training.local_batch_size", "training.batch_size",
                     default=max(1, tokens // seq), least=1)  # fmt: skip
    if s.has("module"):
        notes.append(f"What {s.text('config')} sets beyond these options is Python's, and is not "
                     "read.")  # fmt: skip
    if s.text("training.mixed_precision_param", default="bfloat16") == "float32":
        given["workload.precision"] = "fp32"
    else:
        given["workload.precision"] = "bf16"
    _parallelism(s, given, notes, local)
    total = s.number("training.global_batch_size", default=-1, least=-1)
    given["workload.global_batch"] = total if total > 0 else None
    given["policy"] = _checkpointing(s, notes)
    given |= _training(s, notes)
    if any("float8" in word for word in s.words("model.converters")) or s.flag(
        "float8.enable_float8_linear"
    ):
        given["workload.precision"] = "fp8"
        if s.text("float8.recipe_name", default="tensorwise").startswith("rowwise"):
            given["workload.kernels.fp8_recipe"] = "rowwise"
    s.section("float8")
    _check_async(s)
    notes += s.notes(IDLE, LEFT_OUT)
    return Part(kind="torchtitan", name=where.name, given=given, usual=usual, notes=tuple(notes))


def _check_async(s: Settings) -> None:
    """Refuse asynchronous tensor parallelism that torchtitan itself refuses.

    ``distributed/tensor_parallel.py`` maybe_enable_async_tp: a pass of the compiler makes it.
    """
    wanted = s.flag(
        "parallelism.enable_async_tensor_parallel", "experimental.enable_async_tensor_parallel"
    )
    compiled = s.flag("compile.enable", "training.compile")
    parts = s.words("compile.components") or ("model", "loss")
    if wanted and not (compiled and "model" in parts):
        raise SpecError(
            f"{s.where}: enable_async_tensor_parallel needs a compiled model",
            "add compile.enable = true with model among compile.components, or drop it",
        )


def _model(s: Settings) -> dict[str, Any]:
    name, flavour = s.text("model.name", "module", default="llama3"), s.text("model.flavor")
    if not flavour and not s.has("model.name", "module"):
        return {}
    config = s.text("config").removeprefix(f"{name}_")
    flavour = flavour or config or "debugmodel"
    name = name.rsplit(".", 1)[-1].removesuffix("_ft")
    plain = _VARIANTS.sub("", flavour.lower())
    if name == "llama3" and plain == "debugmodel":
        return {"model.name": "llama3-debugmodel"} | {f"model.{k}": v for k, v in _DEBUG.items()}
    if (name, plain) in _SMALL:
        return _small(*_SMALL[name, plain])
    return {"base": FLAVOURS.get((name, plain), f"{name} {flavour}")}


def _small(preset: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """A preset's model with other sizes; experts keep what is not changed of them."""
    model = presets.load("models", preset).values["model"]
    moe = {"moe": {**model["moe"], **changes["moe"]}} if "moe" in changes else {}
    return {"base": preset} | {f"model.{k}": v for k, v in {**changes, **moe}.items()}


def _parallelism(s: Settings, given: dict[str, Any], notes: list[str], local: int) -> None:
    def degree(name: str, default: int = 1) -> int:
        return s.number(
            f"parallelism.{name}", f"training.{name}", f"experimental.{name}", default=default,
            least=-1,
        )  # fmt: skip

    tp, pp = degree("tensor_parallel_degree"), degree("pipeline_parallel_degree")
    cp, ep = degree("context_parallel_degree"), degree("expert_parallel_degree")
    etp = degree("expert_tensor_parallel_degree")
    copies = degree("data_parallel_replicate_degree")
    shards = degree("data_parallel_shard_degree", -1)
    given |= {"layout.tp": tp, "layout.pp": pp, "layout.cp": cp}
    if tp > 1:
        given["layout.sp"] = True  # parallelize.py: norms read sequences that are split
    if ep > 1:
        given["layout.ep"] = ep
        given["layout.etp"] = etp
    if shards > 0:
        given["layout.dp"] = copies * shards
    if shards == -1 or shards > 1 or cp > 1:
        given["layout.zero"] = 3
        word = s.text("parallelism.fsdp_reshard_after_forward", default="default")
        if word == "never" or (word == "default" and pp > 1):
            given["layout.zero"] = 2
    else:
        given["layout.zero"] = 0
        if given["workload.precision"] == "bf16" and max(tp, pp) == 1:
            given["workload.precision"] = "amp-bf16"  # maybe_enable_amp: DDP or one device
    if copies > 1 and shards > 1:
        given["training.shards"] = shards
    given["workload.micro_batch"] = local
    if pp > 1:
        _pipeline(s, given, local)
    s.get("parallelism.pipeline_parallel_schedule")  # of a pipeline alone


def _pipeline(s: Settings, given: dict[str, Any], local: int) -> None:
    """local_batch_size is cut into micro-batches for the pipeline."""
    names = ("parallelism.pipeline_parallel_", "experimental.pipeline_parallel_")
    word = s.text(*(name + "schedule" for name in names), default="1F1B")
    schedule = SCHEDULES.get(word.lower())
    if schedule is None:
        raise SpecError(f"{s.where}: schedule {word} is not modelled",
                        "modelled are " + ", ".join(SCHEDULES))  # fmt: skip
    given["layout.schedule"] = schedule
    if schedule in ("interleaved", "interleaved-zb"):
        given["layout.vpp"] = 2
    size = s.number(*(name + "microbatch_size" for name in names), default=1, least=1)
    given["workload.micro_batch"] = size
    given["accumulation"] = max(1, local // size)
    if s.words(*(name + "split_points" for name in names)):
        raise SpecError(
            f"{s.where}: pipeline_parallel_split_points names modules, which is not read",
            "give --layers-per-stage, as in 7,8x14,7, and drop it",
        )
    s.number(*(name + "layers_per_stage" for name in names))
    for end in ("first_stage_less_layers", "last_stage_less_layers"):
        s.number("parallelism.pipeline_parallel_" + end)


def _checkpointing(s: Settings, notes: list[str]) -> str:
    """Modes of ``distributed/activation_checkpoint.py``; selective re-runs every second layer."""
    mode = s.text("activation_checkpoint.mode", default="selective")
    option = s.text("activation_checkpoint.selective_ac_option",
                    "activation_checkpoint.selective_ac_type", default="2")  # fmt: skip
    if mode == "none":
        return "none"
    if mode == "full":
        return "full"
    if mode == "selective":
        if option == "op":
            return "op"
        if option.isdigit() and int(option) > 0:
            return "full" if int(option) == 1 else f"every:{option}"
        raise SpecError(f"{s.where}: selective_ac_option is {option!r}", "use op or a number")
    if mode == "memory_budget":
        notes.append("activation_checkpoint.mode memory_budget is not modelled: nothing is re-run.")
        return "none"
    raise SpecError(f"{s.where}: activation_checkpoint.mode is {mode!r}",
                    "use none, selective or full")  # fmt: skip


def _training(s: Settings, notes: list[str]) -> dict[str, Any]:
    fields, told, needs = optimizer(
        s.text("optimizer.name", default="AdamW"), "torchtitan", f"{s.where}: optimizer.name"
    )
    for error in needs.values():
        raise error
    notes += told
    if s.text("optimizer.implementation", default="fused") != "fused":
        fields["training.fused_optimizer"] = False
    if s.flag("optimizer.early_step_in_backward"):
        fields["training.step_in_backward"] = True
    if s.flag("training.enable_cpu_offload", "experimental.enable_cpu_offload"):
        fields["training.offload"] = "weights"
    if s.flag("training.deterministic", "debug.deterministic"):
        fields["training.deterministic"] = True
    return fields
