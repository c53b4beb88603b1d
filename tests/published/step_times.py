"""Published training runs as runs of this program, their measured and predicted step times.

``tests/data/published_step_times.json`` holds every published dense run at hand whose model,
layout, batch and device are stated as numbers, in 16-bit precision or fp8, with a step time,
tokens per second or TFLOP/s. The rules below read inputs only, never a prediction, but the first
was written after seeing that long sequences are predicted too fast where the kernel is unknown:
``benchmarks/step_times.py`` prints the median over all runs beside that of the judged ones.

- A run whose attention kernel is not stated is judged only while attention's products are at most
  a quarter of its FLOPs: above that the figure is one of the kernel.
- Kernels are the idealised ones (profile ``paper``: fused element-wise chains), or Megatron's
  where the run is of a preset under Megatron-Bridge; those tables do not state recomputation, and
  none is assumed.
- Runs of 2021 and 2022 have eager attention with dropout 0.1, whatever their table leaves out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from actcalc.cost.flops import hardware_flops
from actcalc.cost.rates import rates_of
from actcalc.cost.roofline import Roofline
from actcalc.cost.step import policy_of, step_time
from actcalc.layers.model import model_graph
from actcalc.specs.run import Run, Source, load_run, resolve
from tests.conftest import load_data

ROWS = load_data("published_step_times.json")


class Outcome(NamedTuple):
    row: dict[str, Any]
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def run_of(row: dict[str, Any]) -> Run:
    keys = ("tp", "sp", "pp", "vpp", "cp", "dp", "zero")
    work = ("seq", "micro_batch", "global_batch", "precision", "attention")
    changes = {
        "layout": {key: row[key] for key in keys},
        "workload": {**{key: row[key] for key in work}, "dropout": row["dropout"] > 0},
        "device": row["device"],
        "policies": (row["policy"],),
    }
    if "preset" in row:
        return load_run(row["preset"], framework=row["framework"], **changes)
    fields = {"name": "published", "family": "gpt", **row["model"]}
    if row["model"]["gated"]:
        fields |= {
            "family": "llama", "activation": "silu", "norm": "rmsnorm", "position": "rotary",
            "qkv_bias": False, "out_bias": False, "mlp_bias": False,
        }  # fmt: skip
    else:
        rate = row["dropout"]
        fields |= {"max_positions": row["seq"], "hidden_dropout": rate, "attention_dropout": rate}
    return resolve(Source(name="published", model=fields), framework="paper", **changes)


def attention_share(row: dict[str, Any]) -> float:
    """Share of attention's products in a layer's, counted in full: s/6h of 1 + s/6h."""
    ratio = row["seq"] / (6 * row["model"]["hidden"])
    return ratio / (1 + ratio)


def judged(row: dict[str, Any]) -> bool:
    return row["attention_stated"] or attention_share(row) <= 0.25


def outcome(row: dict[str, Any]) -> Outcome:
    run = run_of(row)
    graph = model_graph(run.model, run.layout, run.workload, run.framework)
    policy = policy_of(run, graph)
    devices = run.layout.devices
    rates = rates_of(run.device, run.workload.precision, devices=devices)
    predicted = step_time(graph, policy, Roofline(graph, rates)).total
    measured = row.get("step_seconds")
    if measured is None:
        # These print hardware FLOPs: the re-run forward is counted.
        batches = row["global_batch"] / row["micro_batch"]
        done = hardware_flops(graph, policy).op_flops * batches
        measured = done / (row["tflops_per_gpu"] * 1e12 * devices)
    return Outcome(row, measured, predicted)


def outcomes() -> list[Outcome]:
    """The judged runs."""
    return [outcome(row) for row in ROWS if judged(row)]
