"""Published memory measurements as runs: which figure of a prediction each one is beside.

Nothing here is fitted. A case whose configuration is not known, or that names layers this product
does not describe, is left out with its reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actcalc.answers.memory import MemoryReport, memory_run
from actcalc.errors import SpecError
from actcalc.io.megatron import read_arguments
from actcalc.io.runs import resolve
from actcalc.io.sources import Source, arguments_source, source
from actcalc.specs.run import Run

DATA = Path(__file__).resolve().parents[1] / "data"
DEVICES = {
    "H100": "h100-80gb",
    "A100": "a100-80gb",
    "GB200": "gb200",
    "H200": "h200",
    "V100": "v100-16gb",
}
BIG = 10e9

# Why a prediction is far off; shown beside the figures, never used in them.
CAUSES = {
    "moe/gpt3_mcore_te_tp2_pp2_ep4_etp1_resume_torch_dist_attn_cudagraph": (
        "attention runs in CUDA graphs, whose static pools micro-batches share"
    ),
    "titan/h200": "compiled layers, which keep less than single ops do, are not modelled",
    "bloom/single/n1-dp1-tp8-pp1-mbs1-fp16": (
        "allocated with context and communicators it is 67.8 GB: the replayed allocator caches "
        "5 GB more"
    ),
    "titan/T1/0": "6 GB more than the next row of its table, which differs by compiling alone",
    "bridge-rc": "the recipe's type of gradients is not published; 16-bit ones would explain it",
    "bloom/h13824-84/n48-dp8-tp8-pp6-mbs2": (
        "most likely a typo of the source: twice the micro-batch is printed with 56 GB"
    ),
    "bloom/": "whole device; sizes of communicators are those of one node of A100",
    "hf-bertlarge": (
        "the page prints 1.41 GB for context and kernels, where 0.99 is taken: nearly all that the "
        "runs with re-run layers lack; the rest of the others is open (before PyTorch 2.0 "
        "zero_grad kept gradients)"
    ),
    "lomo/": (
        "transformers of 2023: LlamaAttention took torch.max of the scores, which keeps them once "
        "more, and LlamaRMSNorm scaled its 16-bit input, which is kept beside the fp32 copy"
    ),
    "etp1_memory_speed": (
        "uneven routing, most likely: the same layers in fp8 save 60 % more than with balanced "
        "tokens, as about twice as many on this rank would"
    ),
    "etp1_mtp_resume_torch_dist_fp8": "uneven routing, as in the bf16 run of the same layers",
    "gpt3_7b_tp1_pp4": (
        "between steps, 16 pipeline messages of 67 MB (on H100 20) stay referenced: two for each "
        "model chunk"
    ),
    "etp1_fine_grained_offloading": (
        "forward and backward of two micro-batches run side by side, which is not modelled"
    ),
    "nemotron3_5_lightning_nightly": "uneven routing, most likely: experts of the last rank",
}


@dataclass(frozen=True)
class Case:
    """One measurement beside its prediction, in bytes; ``left_out`` says why there is none."""

    name: str
    metric: str
    measured: float
    predicted: float = 0.0
    resident_measured: float = 0.0
    resident_predicted: float = 0.0
    where: str = ""
    left_out: str = ""

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1

    @property
    def cause(self) -> str:
        """What is known about a large error."""
        return next((text for part, text in CAUSES.items() if part in self.name), "")


def _device(text: str) -> str | None:
    found = [name for word, name in DEVICES.items() if f" {word}" in f" {text}"]
    return found[-1] if found else None


def _read(name: str) -> Any:
    return json.loads((DATA / name).read_text(encoding="utf-8"))


def ci_arguments(case: dict[str, Any]) -> dict[str, Any]:
    """Megatron's arguments of a case, with world and vocabulary size as the case knows them."""
    arguments = dict(case["megatron_args"])
    if case["gpus"]:
        arguments.setdefault("world-size", case["gpus"])
    words = str(case["vocab"]).split()
    if case["family"] in ("bert", "t5"):
        # The vocabulary follows from the tokenizer, which pretrain_bert.py sets by default; the
        # record's own was inferred from GPT's.
        arguments["model-family"] = case["family"]
    elif words and words[0].isdigit():
        arguments.setdefault("vocab-size", int(words[0]))
    return arguments


def ci_run(case: dict[str, Any]) -> Run:
    """The run of one continuous-integration case; ``SpecError`` for layers not described."""
    found = read_arguments(ci_arguments(case), case["id"])
    origin = arguments_source(found, case["id"])
    return resolve(origin, device=_device(case["device"]))


def ci_cases(name: str = "megatron_ci_memory.json") -> Iterator[Case]:
    """Every case of Megatron's continuous integration in a file: the last stage of its run."""
    for case in _read(name)["cases"]:
        title = case["id"].removeprefix("mlm-golden/")
        values = {row["what"]: row["value"] for row in case["measured"]}
        peak = next((v for k, v in values.items() if "max_memory_allocated" in k), 0.0)
        resident = next((v for k, v in values.items() if "cuda memory_allocated" in k), 0.0)
        unknown = []
        if not case["gpus"]:
            unknown.append("number of GPUs")
        if case["family"] != "t5" and not str(case["vocab"]).split()[0].isdigit():
            unknown.append("vocabulary")
        try:
            result = memory_run(ci_run(case))
            stage = result.stages[-1]
        except SpecError as error:
            why = f"{' and '.join(unknown)} not published" if unknown else str(error)
            yield Case(title, "allocated", peak, left_out=why)
            continue
        if unknown:
            yield Case(title, "allocated", peak, left_out=f"{' and '.join(unknown)} not published")
            continue
        yield Case(
            name=title,
            metric="allocated",
            measured=peak,
            predicted=_up_to_last_step(case, peak, result) - stage.last_rank_spare_bytes,
            resident_measured=resident,
            resident_predicted=stage.static_bytes - stage.last_rank_spare_bytes,
            where=stage.peak_at,
        )


def _up_to_last_step(case: dict[str, Any], peak: float, result: MemoryReport) -> float:
    """The predicted peak, or that of the first step where the measurement never passed it.

    Adam makes its moments at the end of the first step: until then they are absent, and the
    highest moment may be the one in which they appear.
    """
    stage = result.stages[-1]
    if case["first_step_peak_bytes"] != peak:
        return stage.peak_bytes
    moments, master = 2 * result.recipe["moment"], result.recipe["master"]
    made: int = stage.optimizer_bytes * moments // (moments + master)
    return max(stage.static_bytes, stage.peak_bytes - made)


def published_cases() -> Iterator[Case]:
    """Published measurements with a configuration complete enough to judge by."""
    for record in _read("measured_memory.json")["records"]:
        yield _published(record)


def _published(record: dict[str, Any]) -> Case:
    row = next(m for m in record["measured"] if "mem" in m["what"].lower())
    unit = str(row["unit"])
    scale = 2**30 if unit.startswith("GiB") else 2**20 if "MiB" in unit else 1e9
    measured = float(row["value"]) * scale
    name = record["id"]
    kind = name.split("/")[0]
    try:
        if kind == "stas":
            return _coefficient(record, row)
        run, metric = _RUNS[kind](record)
    except SpecError as error:
        return Case(name, "", measured, left_out=str(error))
    except KeyError as error:
        return Case(name, "", measured, left_out=f"no rule for {error}")
    report = memory_run(run, reserved=metric in ("reserved", "device"))
    stage = max(report.stages, key=lambda s: s.total_bytes)
    if metric == "activations":
        return Case(name, metric, measured, float(stage.activations_bytes), where="after forward")
    reserved = stage.reserved_bytes or stage.reserved_at_least_bytes
    known = {"reserved": reserved, "device": reserved + stage.overhead_bytes}
    predicted = known.get(metric, stage.peak_bytes)
    return Case(name, metric, measured, float(predicted), where=stage.peak_at)


def _fields(record: dict[str, Any]) -> dict[str, Any]:
    model = record["model"]
    found = {
        "layers": model["layers"],
        "hidden": model["hidden"],
        "heads": model["heads"],
        "kv_heads": model.get("kv_heads") or model["heads"],
        "ffn": model["ffn"],
    }
    if found["heads"] is None:
        raise SpecError("number of heads not published")
    return found


def _llama(record: dict[str, Any], framework: str) -> Source:
    origin = source("llama-3-8b")
    fields = {
        **origin.model,
        **_fields(record),
        "name": record["id"],
        "vocab": record["model"]["vocab"],
        "tied": record["model"]["tied"],
    }
    return Source(name=record["id"], model=fields, framework=framework)


def _titan(record: dict[str, Any]) -> tuple[Run, str]:
    """torchtitan: FSDP2 over fp32 shards, what the allocator has reserved."""
    layout, train = record["layout"], record["train"]
    recompute = record["recompute"]
    per_op = "selective" in recompute
    if layout["pp"] > 1:
        raise SpecError("number of pipeline micro-batches not published")
    plan = {
        "tp": layout["tp"], "cp": layout["cp"], "dp": layout["dp"] or 1, "zero": 3,
        "sp": bool(layout["sp"]),
    }  # fmt: skip
    run = resolve(
        _llama(record, "torchtitan"),
        layout=plan,
        workload={
            "seq": train["seq"], "micro_batch": train["micro_batch"],
            "attention": "sdpa", "fp8": "fp8" in train["precision"],
        },
        # components/loss.py compiles the loss with the model from April 2025 on (#1033)
        training={
            "recipe": "fsdp", "loss": "full",
            "compiled_loss": bool(train["compile"]) and record["date"] >= "2025-04",
        },
        policies=("op" if per_op else "full" if "full" in recompute else "none",),
        device="h200" if record["device"] == "H200" else "h100-80gb",
    )  # fmt: skip
    return run, "reserved"


def _torchao(record: dict[str, Any]) -> tuple[Run, str]:
    """torchao on torchtitan's Llama 3 8B: every second layer, or all, re-run."""
    train, layout = record["train"], record["layout"]
    run = resolve(
        _llama(record, "torchtitan"),
        layout={"dp": layout["dp"], "zero": 3},
        workload={"seq": train["seq"], "micro_batch": train["micro_batch"], "attention": "sdpa"},
        training={"recipe": "fsdp"},
        policies=("full" if "full" in record["recompute"] else "every:2",),
        device="h100-80gb",
    )
    return run, "reserved"


def _bloom(record: dict[str, Any]) -> tuple[Run, str]:
    """Megatron-DeepSpeed: fp16 or bf16 states, ZeRO 1, full recomputation of every layer."""
    layout, train = record["layout"], record["train"]
    model = {
        "name": record["id"], "family": "gpt", **_fields(record), "vocab": 250_680, "tied": True,
        "position": "alibi", "embedding_norm": True,
    }  # fmt: skip
    half = "bf16" if train["precision"].startswith("bf16") else "fp16"
    run = resolve(
        Source(name=record["id"], model=model, framework="paper"),
        layout={"tp": layout["tp"], "pp": layout["pp"], "dp": layout["dp"], "zero": 1},
        workload={
            "seq": train["seq"], "micro_batch": train["micro_batch"], "precision": half,
            "global_batch": train["global_batch"],
            "kernels": {"make_vocab_size_divisible_by": 128},
        },
        training={"recipe": "deepspeed" if half == "bf16" else "mixed"},
        policies=("full",),
        device="a100-80gb",
    )  # fmt: skip
    return run, "device"


def _bridge(record: dict[str, Any]) -> tuple[Run, str]:
    """Megatron-Bridge fine-tuning of Llama 3 70B in fp8."""
    layout, train = record["layout"], record["train"]
    policy = record["recompute"].split("modules=")[1]
    run = resolve(
        _llama(record, "megatron"),
        layout={k: layout[k] for k in ("tp", "sp", "pp", "vpp", "dp")} | {"zero": 1},
        workload={
            "seq": train["seq"], "micro_batch": train["micro_batch"], "precision": "fp8",
            "global_batch": train["global_batch"], "attention": "flash",
        },
        # Megatron-Bridge mixed_precision.py, bf16_with_fp8_current_scaling_mixed
        training={"fp8_weights": True},
        policies=(policy,),
        device="h100-80gb",
    )  # fmt: skip
    return run, "allocated"


def _torchtune(record: dict[str, Any]) -> tuple[Run, str]:
    """torchtune on one GPU, bf16 throughout: active bytes."""
    step = record["id"].split("/")[-1]
    if step == "baseline":
        raise SpecError("padded data of unknown length")
    # torchtune's README adds, in this order: packing, compilation, the chunked loss, activation
    # checkpointing, the optimizer in backward, activation offloading, 8-bit AdamW; the adapters
    # leave out the optimizer's two. Rank 64 is that of its Llama 3.2 3B recipes.
    late = step not in ("+packed", "+compile")
    training: dict[str, Any] = {
        "loss": "chunked" if late else "full",
        "compiled_loss": step != "+packed",
    }
    if step in ("+optimizer in backward", "+8-bit AdamW"):
        training["step_in_backward"] = True
    if step in ("+8-bit AdamW", "LoRA", "QLoRA"):
        training["offload"] = "activations"
    if step == "+8-bit AdamW":
        training["optimizer"] = "adam8bit"
    if "LoRA" in step:
        training["lora_rank"] = 64
    if step == "QLoRA":
        training["base_bits"] = 4
    train = record["train"]
    run = resolve(
        _llama(record, "transformers"),
        workload={"seq": train["seq"], "micro_batch": train["micro_batch"], "attention": "flash"},
        training=training,
        policies=("full",) if late else ("none",),
        device="a100-80gb",
    )
    return run, "active"


def _bert(record: dict[str, Any]) -> tuple[Run, str]:
    """transformers' BERT-large on one V100: what the whole device holds."""
    train = record["train"]
    amp = "AMP" in train["precision"]
    names = {"AdamW": "adamw", "Adafactor": "adafactor", "8-bit Adam": "adam8bit"}
    run = resolve(
        source("bert-large"),
        model={"head": "classifier", "labels": 2, "tied": True},
        workload={
            "seq": train["seq"], "micro_batch": train["micro_batch"], "attention": "eager",
            "precision": "amp-fp16" if amp else "fp32", "global_batch": train["global_batch"],
        },
        training={"optimizer": names[train["optimizer"]]},
        policies=("full" if "full" in record["recompute"] else "none",),
        framework="transformers",
        device="v100-16gb",
    )  # fmt: skip
    return run, "device"


def _lomo(record: dict[str, Any]) -> tuple[Run, str]:
    train = record["train"]
    run = resolve(
        source("llama-2-7b"),
        workload={
            "seq": train["seq"], "micro_batch": train["micro_batch"], "attention": "eager",
        },
        framework="transformers",
    )  # fmt: skip
    return run, "activations"


def _coefficient(record: dict[str, Any], row: dict[str, Any]) -> Case:
    """Bytes one layer keeps over b·s·h·2, in units of its hidden states."""
    presets = {"Qwen/Qwen3-4B": "qwen3-4b", "google/gemma-1.1-2b-it": "gemma-2b"}
    presets["deepseek-ai/DeepSeek-R1-0528-Qwen3-8B"] = "qwen3-8b"
    name = presets[record["model"]["name"]]
    train = record["train"]
    run = resolve(
        source(name),
        workload={"seq": train["seq"], "micro_batch": 1, "attention": "sdpa"},
        framework="transformers",
    )
    stage = memory_run(run).stages[0]
    hidden = run.workload.tokens * run.model.hidden * 2
    # The measurement holds the layer's output, which is the next layer's stored input.
    per_layer = stage.layers_activations_bytes / run.model.layers + hidden
    return Case(
        record["id"], "one layer, in hidden states", float(row["value"]), per_layer / hidden
    )


_RUNS = {
    "titan": _titan,
    "titan-773": _titan,
    "ao-f8nc": _torchao,
    "bloom": _bloom,
    "bridge-rc": _bridge,
    "torchtune": _torchtune,
    "hf-bertlarge": _bert,
    "lomo": _lomo,
}


def report_of(case: dict[str, Any]) -> MemoryReport:
    """The whole report of one continuous-integration case."""
    return memory_run(ci_run(case))
