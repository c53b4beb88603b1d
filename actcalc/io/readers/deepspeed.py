"""DeepSpeed's JSON configuration (``deepspeed/runtime/config.py``, ``zero/config.py``).

``auto`` leaves a value to the arguments of the Trainer beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actcalc.errors import SpecError
from actcalc.io.readers.document import Document
from actcalc.io.readers.part import Part
from actcalc.io.readers.settings import LeftOut, Settings
from actcalc.io.readers.words import optimizer

KEYS = (
    "zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "fp16", "bf16",
    "optimizer", "gradient_accumulation_steps", "steps_per_print", "wall_clock_breakdown",
    "zero_allow_untested_optimizer", "activation_checkpointing", "gradient_clipping", "scheduler",
)  # fmt: skip
IDLE = (
    r"steps_per_print|wall_clock_breakdown|dump_state|gradient_clipping|prescale_gradients|comms_logger.*"
    r"|gradient_predivide_factor|zero_allow_untested_optimizer|zero_force_ds_cpu_optimizer|seed"
    r"|scheduler.*|optimizer\.params.*|optimizer\.legacy_fusion|fp16\..*|bf16\..*|bfloat16\..*"
    r"|tensorboard.*|wandb.*|csv_monitor.*|comet.*|checkpoint\..*|data_types.*|flops_profiler.*"
    r"|zero_optimization\.(contiguous_gradients|reduce_scatter|overlap_comm|allgather_partitions"
    r"|round_robin_gradients|allgather_bucket_size|sub_group_size|ignore_unused_parameters"
    r"|stage3_gather_(16bit|fp16)_weights_on_model_save|load_from_fp32_weights|elastic_checkpoint"
    r"|legacy_stage1|use_multi_rank_bucket_allreduce|stage3_max_reuse_distance|log_trace.*"
    r"|memory_efficient_linear|stage3_param_persistence_threshold|stage3_prefetch_bucket_size"
    r"|stage3_max_live_parameters|stage3_model_persistence_threshold|cpu_offload_use_pin_memory"
    r"|(gather_16bit_weights_on_model_save|max_live_parameters|max_reuse_distance"
    r"|prefetch_bucket_size|param_persistence_threshold|model_persistence_threshold)"
    r"|offload_(param|optimizer)\.(pin_memory|buffer_count|buffer_size|max_in_cpu|fast_init"
    r"|pipeline_read|pipeline_write|nvme_path|ratio)|reduce_bucket_size)"
    r"|activation_checkpointing\.(contiguous_memory_optimization|synchronize_checkpoint_boundary"
    r"|profile|number_checkpoints|cpu_checkpointing|partition_activations)|aio.*|dataloader_drop_last"
    r"|train_batch_size|communication_data_type|memory_breakdown|amp\.opt_level|autotuning.*"
    r"|zero_optimization\.zero_quantized_nontrainable_weights"
)
LEFT_OUT: LeftOut = (
    ("zero_optimization.zero_quantized_weights", "gathers weights in 8 bits: less traffic", ()),
    ("zero_optimization.zero_quantized_gradients", "reduces gradients in 4 bits", ()),
    ("zero_optimization.zero_hpz_partition_size", "keeps a second copy of weights in a node", (1,)),
    ("activation_checkpointing.partition_activations", "splits re-run inputs over tp ranks", ()),
    ("activation_checkpointing.cpu_checkpointing", "moves re-run inputs to the host", ()),
    ("sparse_attention.mode", "runs other attention kernels", ()),
    ("compression_training.enabled", "changes the model", ()),
    ("zero_optimization.zenflow.enabled", "updates on the host beside the step", ()),
    ("tensor_parallel.autotp_size", "splits layers over ranks: give --tp", (0, 1)),
    ("pipeline.stages", "splits layers into stages: give --pp", (0, 1)),
)


def recognises(data: Mapping[str, Any]) -> bool:
    """Whether a mapping is DeepSpeed's configuration."""
    if not isinstance(data.get("zero_optimization", {}), Mapping):
        return False
    own = {"zero_optimization", "train_micro_batch_size_per_gpu", "zero_allow_untested_optimizer",
           "wall_clock_breakdown", "steps_per_print", "activation_checkpointing"}  # fmt: skip
    known = sum(key in KEYS for key in data)
    return bool(own & set(data)) and 2 * known >= len(data)


def read(data: Mapping[str, Any], where: Document) -> Part:
    """What a configuration says; ``SpecError`` for values that DeepSpeed refuses."""
    return part_of(data, where.name)


def part_of(data: Mapping[str, Any], name: str) -> Part:
    """The same for a configuration inside another file."""
    s = Settings(data, name)
    s.flat = {key: None if value == "auto" else value for key, value in s.flat.items()}
    given: dict[str, Any] = {"engine": "deepspeed"}
    usual: dict[str, Any] = {"framework": "transformers"}
    stage = s.number("zero_optimization.stage")
    if stage > 3:
        raise SpecError(f"{name}: zero_optimization.stage is {stage}", "use 0, 1, 2 or 3")
    given["layout.zero"] = stage
    _batch(s, given)
    half = _precision(s, given)
    _recipe(s, given, half, stage)
    notes = _offload(s, given)
    needs: dict[str, SpecError] = {}
    if s.has("optimizer.type"):
        field, told, needs = optimizer(s.text("optimizer.type"), "deepspeed",
                                       f"{name}: optimizer.type")  # fmt: skip
        given |= field
        notes += told
    if bucket := s.number("zero_optimization.reduce_bucket_size"):
        given["training.bucket_elements"] = bucket
    shards = s.text("zero_optimization.mics_shard_size")
    if shards.isdigit() and int(shards) > 0:
        given["training.shards"] = int(shards)
    elif shards:
        s.number("zero_optimization.mics_shard_size", least=-1)
    notes += s.notes(IDLE, LEFT_OUT)
    return Part(kind="deepspeed", name=name, given=given, usual=usual, notes=notes, needs=needs)


def _batch(s: Settings, given: dict[str, Any]) -> None:
    """train_batch_size = micro x accumulation x replicas, of which any may be left out."""
    micro = s.number("train_micro_batch_size_per_gpu")
    steps = s.number("gradient_accumulation_steps")
    total = s.number("train_batch_size")
    given["workload.micro_batch"] = micro or None
    given["accumulation"] = steps or None
    given["workload.global_batch"] = total or None
    if total and micro and steps:
        if total % (micro * steps):
            raise SpecError(
                f"{s.where}: train_batch_size {total} is no multiple of {micro} x {steps}",
                "make it micro-batch x accumulation x replicas",
            )
        given["devices"] = total // (micro * steps)


def _precision(s: Settings, given: dict[str, Any]) -> str:
    bf16 = s.flag("bf16.enabled") or s.flag("bfloat16.enabled")
    fp16 = s.flag("fp16.enabled")
    if bf16 and fp16:
        raise SpecError(f"{s.where}: bf16 and fp16 are both enabled", "enable one of them")
    half = "bf16" if bf16 else "fp16" if fp16 else ""
    given["workload.precision"] = half or None
    return half


def _recipe(s: Settings, given: dict[str, Any], half: str, stage: int) -> None:
    """Formats of the states (engine.py _do_optimizer_sanity_check, get_data_types).

    ZeRO keeps fp32 master weights beside 16-bit weights and gradients; ``BF16_Optimizer``, which
    sums gradients in fp32, runs for bf16 at stage 1 where gradients accumulate in fp32.
    """
    summed = s.text("data_types.grad_accum_dtype")
    if half == "bf16" and summed in ("fp32", "float32") and stage == 1:
        given["training.recipe"] = "deepspeed"
    elif s.flat.get("fp16.enabled") is False and s.flat.get("bf16.enabled") in (False, None):
        return
    else:
        given["training.recipe"] = "mixed"


def _offload(s: Settings, given: dict[str, Any]) -> tuple[str, ...]:
    prefix = "zero_optimization.offload_"
    states = s.text(prefix + "optimizer.device", default="none")
    weights = s.text(prefix + "param.device", default="none")
    if s.flag("zero_optimization.cpu_offload"):
        states = "cpu"
    if s.flag("zero_optimization.cpu_offload_params"):
        weights = "cpu"
    if weights != "none":
        given["training.offload"] = "weights"
        if states == "none":
            return (f"{s.where}: weights are offloaded; optimizer states are counted with them.",)
    elif states != "none":
        given["training.offload"] = "optimizer"
    return ()
