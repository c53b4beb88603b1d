"""torchtitan's TOML (``torchtitan/config/job_config.py``, 0.2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actcalc.errors import SpecError
from actcalc.io.readers.torchtitan import FLAVOURS, SCHEDULES
from actcalc.io.writers.hugging import optimizer_word
from actcalc.io.writers.own import same_model
from actcalc.io.writers.profile import check_profile
from actcalc.specs.run import Run

_WRITTEN = {"8b": "8B", "70b": "70B", "405b": "405B"}
"""Flavours as torchtitan spells them, where that is in capitals."""


def write(run: Run) -> str:
    """The configuration's text."""
    check_profile(run, "torchtitan", "torchtitan")
    work, training = run.workload, run.training
    sections: dict[str, dict[str, Any]] = {
        "model": _model(run),
        "optimizer": {
            "name": optimizer_word(run, "torchtitan", "torchtitan"),
            "implementation": "fused" if training.fused_optimizer else "for-loop",
            "early_step_in_backward": training.step_in_backward,
        },
        "training": {
            "local_batch_size": _local_batch(run),
            "seq_len": work.seq,
            "mixed_precision_param": "float32" if work.precision == "fp32" else "bfloat16",
            "enable_cpu_offload": training.offload == "weights",
        },
        "parallelism": _parallelism(run),
        "activation_checkpoint": _checkpointing(run),
    }
    if training.deterministic:
        sections["debug"] = {"deterministic": True}
    if work.global_batch:
        sections["training"]["global_batch_size"] = work.global_batch
    return "\n".join(_section(name, values) for name, values in sections.items())


def _section(name: str, values: Mapping[str, Any]) -> str:
    lines = [f"{key} = {_value(value)}" for key, value in values.items()]
    return "\n".join([f"[{name}]", *lines]) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def _model(run: Run) -> dict[str, Any]:
    for (name, flavour), known in FLAVOURS.items():
        if same_model(run, known):
            return {"name": name, "flavor": _WRITTEN.get(flavour, flavour)}
    if run.model.name == "llama3-debugmodel":
        return {"name": "llama3", "flavor": "debugmodel"}
    raise SpecError(
        f"--emit torchtitan: {run.model.name} is no model that torchtitan has",
        "its models are " + ", ".join(sorted(set(FLAVOURS.values()))),
    )


def _parallelism(run: Run) -> dict[str, Any]:
    layout, training = run.layout, run.training
    shards = training.shards or layout.dp
    sharded = layout.zero in (2, 3)
    found: dict[str, Any] = {
        "data_parallel_replicate_degree": layout.dp // shards if sharded else layout.dp,
        "data_parallel_shard_degree": shards if sharded else 1,
    }
    if sharded and shards == 1:
        found["data_parallel_shard_degree"] = -1
    if sharded:
        found["fsdp_reshard_after_forward"] = "always" if layout.zero == 3 else "never"
    if layout.tp > 1:
        found["tensor_parallel_degree"] = layout.tp
    if layout.cp > 1:
        found["context_parallel_degree"] = layout.cp
    if layout.ep > 1:
        found["expert_parallel_degree"] = layout.ep
        found["expert_tensor_parallel_degree"] = layout.etp or layout.tp
    if layout.pp > 1:
        found["pipeline_parallel_degree"] = layout.pp
        found["pipeline_parallel_schedule"] = _schedule(run)
        found["pipeline_parallel_microbatch_size"] = run.workload.micro_batch
    return found


def _schedule(run: Run) -> str:
    """torchtitan's name of the run's schedule (``torch.distributed.pipelining``)."""
    names = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B",
             "interleaved-zb": "InterleavedZeroBubble", "zb-v": "ZBVZeroBubble"}  # fmt: skip
    name = names.get(run.layout.pipeline)
    if name is None or name.lower() not in SCHEDULES:
        raise SpecError(
            f"--emit torchtitan: it has no schedule {run.layout.pipeline}", "use --schedule 1f1b"
        )
    return name


def _local_batch(run: Run) -> int:
    """Sequences of one replica: a pipeline cuts them into micro-batches."""
    work, layout = run.workload, run.layout
    if layout.pp == 1:
        return work.micro_batch
    if work.global_batch is None:
        raise SpecError(
            f"--emit torchtitan: pp {layout.pp} without a global batch", "add --global-batch"
        )
    return work.global_batch // layout.dp


def _checkpointing(run: Run) -> dict[str, Any]:
    policy = (run.policies or ("none",))[0]
    if policy in ("none", "full"):
        return {"mode": policy}
    if policy == "op" or policy.startswith("every:"):
        return {"mode": "selective", "selective_ac_option": policy.removeprefix("every:")}
    raise SpecError(
        f"--emit torchtitan: it has no mode that re-runs {policy}",
        "use --policy none, full, op or every:N",
    )
