"""The fastest layouts on so many GPUs that fit, as a result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar, Literal

from actcalc.answers.judged import judged
from actcalc.cost.rates import default_note
from actcalc.search.best import Indices, different, ordered, pareto
from actcalc.search.find import Found, Progress, find
from actcalc.search.space import Space
from actcalc.specs.result import Result
from actcalc.specs.run import Run

Listed = Literal["different", "pareto", "all"]
"""Which rows are listed: the best of each set of degrees; those that nothing tops in both time and
memory; every one that fits."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class FoundLayout:
    """One layout that fits."""

    layout: dict[str, Any]
    """The layout's fields."""
    micro_batch: int
    """Sequences in a micro-batch."""
    microbatches: int
    """Micro-batches each replica runs in a step."""
    policy: str
    """Recompute policy of every layer."""
    peak_bytes: int
    """What the fullest GPU needs in all: total_bytes of ``actcalc memory``."""
    step_seconds: float
    """One optimizer step: step_seconds of ``actcalc compare``."""
    tokens_per_second_per_gpu: float
    """Tokens per second of one GPU."""
    mfu_ratio: float
    """Model FLOPs over what the devices could do in the step."""
    named_policy: str | None = None
    """Where the policy is planned: the fastest policy with a name that fits there."""
    named_step_seconds: float | None = None
    """The step under that one."""
    plan_command: str | None = None
    """The command that prints the plan."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Search(Result):
    """The fastest layouts of a model on so many GPUs, best first."""

    schema_name: ClassVar[str] = "actcalc/search/1"

    title: str
    """What the user calls the run; the model's name unless a run file has a title."""
    model: dict[str, Any]
    """The model's fields."""
    workload: dict[str, Any]
    """The workload's fields; its micro-batch is searched."""
    training: dict[str, Any]
    """Optimizer, number formats, offload, adapters."""
    device: dict[str, Any]
    """The device's fields."""
    headroom_ratio: float
    """Share of the device's memory that a layout which fits leaves free."""
    framework: str
    """The framework profile that chose the kernels."""
    gpus: int
    """Devices of every layout."""
    considered: int
    """Legal layouts that were looked at: each with a micro-batch and a policy."""
    feasible: int
    """Those of them that fit."""
    complete: bool
    """False where the search was stopped before its end."""
    planned: bool
    """The layouts listed were refined by the planner: each layer's policy is its own."""
    listed: Listed
    """Which of them are listed: different, the best of each set of degrees (tp, cp, ep, pp);
    pareto, those that none tops in both memory and time; all."""
    results: tuple[FoundLayout, ...]
    """They, the fastest first."""
    notes: tuple[str, ...]
    """Choices made on the way that the reader should know."""


COLUMNS: dict[str, type] = {
    "tp": int, "sp": bool, "pp": int, "vpp": int, "cp": int, "ep": int, "etp": int, "dp": int,
    "zero": int, "schedule": str, "layers_per_stage": str, "micro_batch": int, "policy": str,
    "peak_bytes": int, "step_seconds": float, "tokens_per_second_per_gpu": float,
    "mfu_ratio": float,
}  # fmt: skip
"""Columns of a table of all rows, each with its type: flags, then figures."""


def search_run(
    run: Run,
    space: Space,
    efficiency: Mapping[str, float] | None = None,
    *,
    progress: Progress | None = None,
    seconds: float = inf,
) -> Found:
    """Every layout of the space that fits; raises ``SpecError`` as :func:`find` does."""
    return find(run, space, efficiency, progress=progress, seconds=seconds)


def answer(
    found: Found,
    space: Space,
    which: Listed = "different",
    most: int | None = 10,
    efficiency: Mapping[str, float] | None = None,
) -> Search:
    """What was found as a result, with up to ``most`` rows (None: all of them)."""
    run = found.run
    assert run.device is not None
    return Search(
        title=run.name,
        model=run.model.model_dump(),
        workload=run.workload.model_dump(),
        training=run.training.model_dump(),
        device=run.device.model_dump(),
        headroom_ratio=run.headroom_ratio,
        framework=str(run.framework),
        gpus=found.gpus,
        considered=found.considered,
        feasible=len(found.peak),
        complete=found.complete,
        planned=False,
        listed=which,
        results=tuple(layout_of(found, int(row)) for row in listed(found, which)[:most]),
        notes=_notes(found, space, efficiency),
    )


def listed(found: Found, which: Listed) -> Indices:
    """The rows to list, the fastest first."""
    order = ordered(found)
    if which == "different":
        return different(found, order)
    return pareto(found, order) if which == "pareto" else order


def layout_of(found: Found, row: int) -> FoundLayout:
    """One row as it is listed."""
    return FoundLayout(
        layout=found.layout(row).model_dump(),
        micro_batch=found.micro_batch(row),
        microbatches=int(found.rows.rounds[row]),
        policy=found.policy(row),
        peak_bytes=int(found.peak[row]),
        step_seconds=float(found.seconds[row]),
        tokens_per_second_per_gpu=float(found.tokens_per_second_per_gpu[row]),
        mfu_ratio=float(found.mfu[row]),
    )


def all_rows(found: Found, rows: Indices) -> Iterator[tuple[Any, ...]]:
    """Rows under ``COLUMNS``."""
    table = found.rows.take(rows)
    figures = zip(
        found.peak[rows].tolist(),
        found.seconds[rows].tolist(),
        found.tokens_per_second_per_gpu[rows].tolist(),
        found.mfu[rows].tolist(),
        strict=True,
    )
    lanes = table.lane.tolist()
    cuts, dps, zeros = found.rows.cut[rows].tolist(), table.dp.tolist(), table.zero.tolist()
    for index, (lane, cut, dp, zero, figure) in enumerate(
        zip(lanes, cuts, dps, zeros, figures, strict=True)
    ):
        split, stages = found.lanes[lane].split, found.cuts[cut]
        yield (
            split.tp, split.sp, stages.pp, stages.vpp, split.cp, split.ep, split.etp, dp, zero,
            stages.fields()["schedule"],
            ",".join(map(str, stages.layers_per_stage)) or None,
            found.lanes[lane].micro_batch, found.choices.name(table, index), *figure,
        )  # fmt: skip


def _notes(found: Found, space: Space, efficiency: Mapping[str, float] | None) -> tuple[str, ...]:
    run = found.run
    notes = list(run.warnings)
    if not found.complete:
        notes.append(
            "Stopped before the end: the layouts looked at until then (--time-limit SECONDS for "
            "more)."
        )
    if space.tp is None and space.tp_within_node and run.device and found.gpus > 1:
        node = run.device.devices_per_node or 1
        notes.append(
            f"tp stays inside a node of {node} GPUs (--tp-across-nodes, or --tp, for more)."
        )
    if run.device:
        notes += [default_note(run.device, efficiency), judged(run).note]
    return tuple(dict.fromkeys(note for note in notes if note))
