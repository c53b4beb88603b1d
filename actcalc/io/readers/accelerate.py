"""accelerate's YAML (``accelerate config``, ``launch --config_file``), FSDP's section among it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actcalc.errors import SpecError
from actcalc.io.readers import deepspeed, sharding
from actcalc.io.readers.beside import beside, missing
from actcalc.io.readers.document import Document
from actcalc.io.readers.part import Part
from actcalc.io.readers.settings import LeftOut, Settings

OWN = ("distributed_type", "mixed_precision", "num_processes", "num_machines",
       "compute_environment", "downcast_bf16", "main_training_function",
       "machine_rank")  # fmt: skip
IDLE = (
    r"fsdp_config\..*|compute_environment|debug|machine_rank|main_process_.*|main_training_function|rdzv_backend"
    r"|same_network|tpu_.*|use_cpu|downcast_bf16|enable_cpu_affinity|gpu_ids|num_machines"
    r"|dynamo_config\.dynamo_(mode|use.*)|fp8_config.*|mpirun_config.*|command_.*|commands"
    r"|deepspeed_config\.(deepspeed_multinode_launcher|deepspeed_hostfile|zero3_init_flag"
    r"|zero3_save_16bit_model|gradient_clipping|deepspeed_moe_layer_cls_names)|use_configured.*"
)
LEFT_OUT: LeftOut = (
    ("dynamo_config.dynamo_backend", "fuses kernels: less memory and time", ("NO", "no")),
    ("megatron_lm_config.megatron_lm_tp_degree", "splits layers: give --tp", (1, "1")),
    ("megatron_lm_config.megatron_lm_pp_degree", "splits layers: give --pp", (1, "1")),
)


def recognises(data: Mapping[str, Any]) -> bool:
    """Whether a mapping is accelerate's."""
    return "distributed_type" in data or (
        sum(name in data for name in OWN) >= 2 and "mixed_precision" in data
    )


def recognises_fsdp(data: Mapping[str, Any]) -> bool:
    """Whether it is the FSDP section of one alone (transformers' ``fsdp_config`` file)."""
    names = [str(key) for key in data]
    known = ("fsdp_config", "sharding_strategy", "reshard_after_forward")
    return bool(names) and (
        sum(name.startswith("fsdp_") for name in names) >= 2 or any(name in known for name in names)
    )


def read(data: Mapping[str, Any], where: Document) -> Part:
    """Processes, precision and sharding."""
    s = Settings(data, where.name)
    given: dict[str, Any] = {"devices": s.number("num_processes") or None}
    notes: list[str] = []
    assumed: dict[str, str] = {}
    more: list[Part] = []
    precision = s.text("mixed_precision", default="no").lower()
    if precision not in ("no", "fp16", "bf16", "fp8"):
        raise SpecError(f"{where.name}: mixed_precision is {precision!r}", "use no, fp16 or bf16")
    half = precision if precision in ("fp16", "bf16") else ""
    if precision == "fp8":
        notes.append("mixed_precision fp8 is not modelled with this profile: bf16 is counted.")
        half = "bf16"
    kind = s.text("distributed_type", default="NO").upper()
    section = s.section("deepspeed_config")
    if kind == "DEEPSPEED":
        _deepspeed(section, where, half, more, assumed, given)
    elif kind == "FSDP":
        fields, told, _ = sharding.fsdp(s.section("fsdp_config"), (), where.name)
        given |= fields
        notes += told
        if half:
            given["training.recipe"] = "fsdp"
            given["workload.precision"] = half
    elif half:
        given["workload.precision"] = f"amp-{half}"
    _parallelism(s, given)
    notes += s.notes(IDLE, LEFT_OUT)
    return Part(
        kind="accelerate", name=where.name, given=given, usual={"framework": "transformers"},
        notes=tuple(notes), assumed=assumed, more=tuple(more),
    )  # fmt: skip


def read_fsdp(data: Mapping[str, Any], where: Document) -> Part:
    """The FSDP section alone."""
    inner = data.get("fsdp_config", data)
    s = Settings(inner, where.name)
    fields, notes, read = sharding.fsdp(s.flat, (), where.name)
    s.asked |= read
    return Part(
        kind="fsdp", name=where.name, given=fields,
        usual={"framework": "transformers", "training.recipe": "fsdp"},
        notes=(*notes, *s.notes(sharding.IDLE)),
    )  # fmt: skip


def _deepspeed(
    section: Mapping[str, Any], where: Document, half: str, more: list[Part],
    assumed: dict[str, str], given: dict[str, Any],
) -> None:  # fmt: skip
    """accelerate's short form, or the file that it names."""
    named = section.get("deepspeed_config_file")
    given["engine"] = "deepspeed"
    if named:
        found = beside(where, str(named))
        if found is not None:
            more.append(deepspeed.read(found.data, found))
        else:
            assumed["layout.zero"] = missing(where, str(named), "deepspeed_config_file")
        return
    data: dict[str, Any] = {
        "zero_optimization": {
            "stage": section.get("zero_stage", 2),
            "offload_optimizer": {"device": section.get("offload_optimizer_device", "none")},
            "offload_param": {"device": section.get("offload_param_device", "none")},
        },
        "gradient_accumulation_steps": section.get("gradient_accumulation_steps", "auto"),
        "bf16": {"enabled": half == "bf16"},
        "fp16": {"enabled": half == "fp16"},
    }
    more.append(deepspeed.part_of(data, where.name))


def _parallelism(s: Settings, given: dict[str, Any]) -> None:
    """accelerate's ParallelismConfig (``parallelism_config``)."""
    prefix = "parallelism_config.parallelism_config_"
    for degree in ("tp", "cp"):
        if size := s.number(f"{prefix}{degree}_size"):
            given[f"layout.{degree}"] = size
    replicated, sharded = (
        s.number(f"{prefix}dp_replicate_size"),
        s.number(f"{prefix}dp_shard_size"),
    )
    if sharded > 1 and replicated > 1:
        given["training.shards"] = sharded
    s.section("parallelism_config")
