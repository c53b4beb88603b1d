"""Published training runs as runs of this program, their measured and predicted step times.

``tests/data/published_step_times.json`` holds every published run at hand that states, as numbers,
its model, layout, micro-batch and global batch, precision, recomputation and device, and a step
time, tokens per second or TFLOP/s. All of them are judged; the rules below read what the source
says, never a prediction:

- Kernels are the idealised ones (profile ``paper``: fused element-wise chains) unless the row
  names a profile: Megatron's where the run is Megatron-Bridge's (whose tables do not state
  recomputation: none is assumed), ``transformers`` and ``torchtitan`` where one of these ran op by
  op on one device or under data parallelism alone.
- What a source says of its framework for all of its runs (attention kernel, number formats of the
  states, collectives that wait, network) is in ``FACTS``.
- ``tier`` is how complete the source is (1: enough to judge a prediction by), ``unknown`` what of
  such a run its source says it does not know, or what was taken from elsewhere.
- A run that is more than a quarter off has its cause in ``CAUSES``: a fact of the source, or that
  none is known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from actcalc.cost.flops import hardware_flops
from actcalc.cost.rates import parse_overrides
from actcalc.cost.roofline import roofline_of
from actcalc.cost.step import step_time
from actcalc.io.runs import load_run, resolve
from actcalc.io.sources import Source
from actcalc.run.staged import StagedRun
from actcalc.specs.device import Device
from actcalc.specs.run import Run
from actcalc.specs.validate import build
from tests.conftest import load_data

ROWS = load_data("published_step_times.json")


class Outcome(NamedTuple):
    """One published run beside its prediction."""

    row: dict[str, Any]
    measured: float
    predicted: float

    @property
    def known(self) -> bool:
        """Whether the source states the whole configuration and every figure of the device."""
        return self.row["tier"] == 1 and "unknown" not in self.row

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


class Facts(NamedTuple):
    """What a source says of its framework beyond the row's own numbers."""

    training: Mapping[str, Any] = {}
    efficiency: tuple[str, ...] = ()
    dropout: float | None = None
    kernels: Mapping[str, Any] = {}
    device: Mapping[str, Any] = {}
    """Figures of the device that the source states otherwise than its data sheet."""
    framework: str = "paper"
    """Profile of a run whose row names none."""
    traits: Mapping[str, Any] = {}
    """What the source says of its framework that this profile has otherwise."""
    rmsnorm: str = ""
    """Its RMSNorm, where that is another than this profile's."""


NOT_ASYNC = {"async_tensor_model_parallel_allreduce": False}
OVERLAPPED = {"overlapped_reduction": True, "overlapped_gather": True}
FULLY_SHARD = {"sharded_units": "apart", "sequence_first": False}
CURRENT = {"fp8_recipe": "tensorwise"}
HBM2E = {"memory_bandwidth_bytes_per_second": 2.4e12}
FACTS = {
    # scripts/train/benchmarking/submit_benchmarks.py: --attn_impl triton unless given, and
    # sweep.sh gives none; MPTConfig: loss_fn fused_crossentropy; the YAMLs: decoupled_adamw, which
    # is not fused; FSDP; modeling_mpt.py: train metrics LanguageCrossEntropy, LanguagePerplexity.
    "llmfoundry": Facts(
        {
            "recipe": "fsdp",
            "compiled_loss": True,
            "fused_optimizer": False,
            "loss_metrics": 2,
        },
        ("flash-attention-triton",),
        framework="llm-foundry",
    ),
    # train/tr11-176B-ml/README.md: BF16_Optimizer, Megatron's dropout 0.1, 4 Omni-Path links of
    # 100 Gb/s for the 8 GPUs of a node.
    # chronicles-prequel.md: CUDA_LAUNCH_BLOCKING=1, without which 320 and more GPUs always hang:
    # NVIDIA's blog on CUDA graphs has 9.6 us for a synchronised kernel that runs for 2.9, 3.8 of
    # them its launch; PyTorch's own 13.5 us for an op (kernel_host_seconds), launch included, are
    # not hidden either.
    # The fork is of mid-2021, before Megatron's asynchronous all-reduce.
    "bloom": Facts(
        {"recipe": "deepspeed"},
        ("kernel_seconds=16.4e-6",),
        dropout=0.1,
        kernels=NOT_ASYNC,
        device={"inter_node_bandwidth_bytes_per_second": 6.25e9},
    ),
    # src/megatron/bridge/recipes/llama: ddp.overlap_grad_reduce, overlap_param_gather;
    # perf_recipes/llama: tp_comm_overlap where tp is above 1; gb200 8B: full-iteration graphs.
    # perf_recipes/qwen: moe_token_dispatcher_type flex (HybridEP); gb200, gb300: full-iteration
    # graphs; h100: attention, router and preprocessing captured.
    # performance-summary.md: FP8 is current scaling (FP8-CS) unless it says MXFP8.
    "bridge": Facts(OVERLAPPED, kernels={"tp_comm_overlap": True, **CURRENT}),
    "bridge-moe": Facts(OVERLAPPED, kernels=CURRENT),
    "bridge-rc": Facts(OVERLAPPED, kernels=CURRENT),
    "narayanan21": Facts(kernels=NOT_ASYNC),
    # doc/en/train_performance.md: zero1 over 8 GPUs, whatever their number; doc/en/install.md:
    # flash-attention 1.0.5; configs/7B_sft.py: overlap_sync_grad, overlap_sync_param, bf16;
    # internlm/train/training_internlm.py: torch.optim.AdamW over fp32 copies of its shards.
    "internevo": Facts(
        {"shards": 8, "recipe": "mixed", "fused_optimizer": False, **OVERLAPPED},
        ("flash-attention-1",),
    ),
    "mtnlg": Facts(kernels=NOT_ASYNC),
    # benchmarks/llama3_h100_202412_torchtitan.md, asyncTP_llama3_h100_2025-06_torchtitan.md: FSDP2;
    # H100 with 96 GB of HBM2e at 2.4 TB/s and a power limit of 500 W. DTensor waits for every
    # collective; with async TP none does.
    "titan": Facts(
        {"recipe": "fsdp"},
        ("h100-500w",),
        kernels=NOT_ASYNC,
        device=HBM2E,
        traits=FULLY_SHARD,
    ),
    "titan-old": Facts({"recipe": "fsdp"}, kernels=NOT_ASYNC, traits=FULLY_SHARD),
}


def facts_of(row: Mapping[str, Any]) -> Facts:
    facts = FACTS.get(row["id"].split("/")[0], Facts())
    if row["id"].startswith("llmfoundry") and row["device"] == "a100-40gb":
        # That table's "MP Mode" column is PURE: gradients are reduced in 16 bits.
        return facts._replace(training={**facts.training, "gradients_in_16_bit": True})
    if row["id"].startswith("bloom") and row["precision"] == "fp16":
        return facts._replace(training={})
    if row["id"].startswith("narayanan21/T2/ZeRO-3"):
        # April 2021: DeepSpeed 0.3
        facts = facts._replace(traits={"sharded_units": "listed"})
    if "async TP" in row["id"] or row["id"] == "titan/T4/1":  # its table: 2D with async TP
        facts = facts._replace(kernels={"tp_comm_overlap": True})
    if row["id"] == "titan/T1/0":
        # December 2024, op by op: torch.nn.RMSNorm has one kernel on CUDA since July 2025
        # (aten/src/ATen/native/layer_norm.cpp rms_norm_composite before)
        facts = facts._replace(rmsnorm="rms_late_cast")
    if row["id"] == "torchtune/3.2-3B/+packed":
        # torchtune/modules/rms_norm.py: in fp32, cast back, times scale
        facts = facts._replace(rmsnorm="rms")
    if "rowwise" in row["id"]:
        facts = facts._replace(kernels={**facts.kernels, "fp8_recipe": "rowwise"})
    if row["id"].startswith("bridge/") and row["device"] == "gb200" and "8b" in row["preset"]:
        facts = facts._replace(kernels={"cuda_graphs": "full", **CURRENT})
    if row["id"].startswith("bridge-moe") and row["device"] != "h100-80gb":
        facts = facts._replace(kernels={"fp8_recipe": "mxfp8"})
    if row["device"] == "h200":
        facts = facts._replace(device={}, efficiency=())
    if row["id"] == "titan-old/llama3-405b/full/109":  # "H100 95GB HBM2e", the same servers
        facts = facts._replace(device=HBM2E, efficiency=("h100-500w",))
    return facts


def run_of(row: Mapping[str, Any]) -> Run:
    facts = facts_of(row)
    keys = ("tp", "sp", "pp", "vpp", "cp", "dp", "zero")
    work = ("seq", "micro_batch", "global_batch", "precision", "attention")
    rate = row["dropout"] if facts.dropout is None else facts.dropout
    changes = {
        "layout": {key: row[key] for key in keys}
        | {key: row[key] for key in ("ep", "etp") if key in row},
        "workload": {
            **{key: row[key] for key in work},
            "dropout": rate > 0,
            "kernels": {**facts.kernels, **row.get("kernels", {})},
        },
        "device": row["device"],
        "policies": (row["policy"],),
        "training": {**facts.training, **row.get("training", {})},
    }
    if "preset" in row:
        run = load_run(
            row["preset"], framework=row["framework"], model=row.get("changes"), **changes
        )
    else:
        fields = {"name": "published", "family": "gpt", **row["model"]}
        if row["model"]["gated"]:
            fields |= {
                "family": "llama", "activation": "silu", "norm": "rmsnorm", "position": "rotary",
                "qkv_bias": False, "out_bias": False, "mlp_bias": False,
            }  # fmt: skip
        else:
            fields |= {
                "max_positions": row["seq"], "hidden_dropout": rate, "attention_dropout": rate,
            }  # fmt: skip
        origin = Source(name="published", model=fields)
        run = resolve(origin, framework=row.get("framework", facts.framework), **changes)
    traits = dict(facts.traits)
    if facts.rmsnorm:
        traits["kernels"] = {**run.framework.kernels, "rmsnorm": facts.rmsnorm}
    run = replace(run, framework=run.framework.model_copy(update=traits))
    if not facts.device or run.device is None:
        return run
    values = {**run.device.model_dump(), **facts.device}
    return replace(run, device=build(Device, values, "device"))


def outcome(row: dict[str, Any]) -> Outcome:
    run = run_of(row)
    staged = StagedRun(run)
    policy, devices = staged.only_policy, run.layout.devices
    shares = parse_overrides(facts_of(row).efficiency)
    predicted = step_time(policy, roofline_of(staged, shares)).total
    measured = row.get("step_seconds")
    if measured is None:
        # These print hardware FLOPs: the re-run forward is counted.
        batches = row["global_batch"] / row["micro_batch"]
        done = hardware_flops(staged, policy).op_flops * batches
        measured = done / (row["tflops_per_gpu"] * 1e12 * devices)
    return Outcome(row, measured, predicted)


def outcomes() -> list[Outcome]:
    """Every run."""
    return [outcome(row) for row in ROWS]


OUTLIER = 0.25
CAUSES = {
    r"bloom/(single|repl)": (
        "hidden 14400 with heads 450 or 150 wide: the attention core's unaligned products are "
        "counted, what else the source gained with 13824 (94 to 120 TFLOP/s) is not explained"
    ),
    r"bridge-moe/(050|227)": (
        "no cause is proven: experts in fp8, one sequence a micro-batch, 3 to 4 ms a layer and "
        "micro-batch predicted, 6 to 9 measured; casts expert by expert, and ranks that wait in "
        "each exchange for the slowest host, are not modelled"
    ),
    r"bridge-rc/moonlight": (
        "one micro-batch of 4096 tokens for 27 layers of 64 experts on 8 GPUs: 77 TFLOP/s, 8 % of "
        "peak; launches are counted, ranks that wait for the slowest host in each exchange are not"
    ),
    r"hf-bertlarge/.*(fp16|all)": (
        "micro-batch of one sequence of 512 under autocast, op by op: kernels of 4 to 80 us that "
        "the host launches one by one, of a host slower than the one measured, with casts "
        "that are not counted (fp32 runs of the same source fit)"
    ),
    r"internevo/flops/ckpt(True|False)/(512|1024)/2x": (
        "one or two micro-batches per reduction over 512 and more GPUs, of a network not stated; "
        "the same table with four micro-batches loses a third as much"
    ),
    r"llmfoundry/\d+/70b-T2048-64xa100_40gb": (
        "no cause is stated: micro-batch 2 on 64 GPUs; with micro-batch 4 on 128 it fits"
    ),
    r"llmfoundry/\d+/30b-T8192": (
        "no cause is stated: the same model with 4096 tokens fits; 70 of 80 GB are predicted to be "
        "taken, and an allocator that gives memory back and asks again waits for the device"
    ),
    r"mds-1.3B": (
        "the source does not say that the script's values (tp 2, ZeRO 0, batch 2) were unchanged"
    ),
    r"titan/T2/2": "no cause is stated: context parallelism over 4, sequence 131072",
    r"titan/asyncTP70B/float8 rowwise": (
        "row-wise scales under tensor parallelism: its developers found them slower than bf16 too "
        "(pytorch/torchtitan issue 1207, a bug then); products alone explain a tenth of it"
    ),
}


def cause_of(one: Outcome) -> str:
    """Why the run is an outlier; empty where it is none. ``KeyError`` if no cause is given."""
    if abs(one.error) <= OUTLIER:
        return ""
    (found,) = [text for key, text in CAUSES.items() if re.match(key, one.row["id"])] or [None]
    if found is None:
        raise KeyError(f"{one.row['id']}: {one.error:+.0%} and no cause")
    return found
