"""What to change where no plan fits, by what fills the GPU: states of the weights, or activations.

Re-running can only lower what layers store. Where weights, gradients and optimizer states are the
larger part, what helps is to shard them (ZeRO: Rajbhandari et al. 2020, section 5), to keep fewer
bytes of them (8-bit moments: Dettmers et al. 2021; adapters: Hu et al. 2021) or to keep them in
host memory (ZeRO-Offload: Ren et al. 2021). Every change is planned, none is guessed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from actcalc.answers.memory import memory_run
from actcalc.errors import SpecError
from actcalc.plan.figures import ChangeFigure
from actcalc.plan.planner import RunPlanner
from actcalc.plan.settings import MemoryModel, PlanSettings, Semantics, default_model
from actcalc.solve.clock import room_for_more
from actcalc.specs.check import check
from actcalc.specs.optimizers import OPTIMIZERS
from actcalc.specs.run import Run

if TYPE_CHECKING:
    from actcalc.answers.plan import RunPlan

_RANK = 16  # of the adapters that are proposed; Hu et al. 2021 use 1 to 64
_REPLICAS = 8  # GPUs of one node, over which states are proposed to be sharded


@dataclass(frozen=True, kw_only=True)
class PlanStates:
    """How the weights of a planned run are trained, and what that keeps on its fullest stage."""

    training: dict[str, Any]
    """Fields of ``specs.Training``."""
    recipe: dict[str, Any]
    """Bytes per parameter of each copy."""
    layout: dict[str, Any]
    """The layout's fields."""
    workload: dict[str, Any]
    """The workload's fields."""
    weights_bytes: int
    """Weights."""
    gradients_bytes: int
    """Gradients."""
    optimizer_bytes: int
    """Optimizer states, master weights among them."""

    @property
    def total_bytes(self) -> int:
        """All three."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes


def states_of(run: Run) -> PlanStates:
    """The states that ``run`` keeps beside its activations, on the stage that keeps most."""
    report = memory_run(replace(run, policies=("none",)))
    most = max(
        report.stages,
        key=lambda one: one.weights_bytes + one.gradients_bytes + one.optimizer_bytes,
    )
    return PlanStates(
        training=report.training,
        recipe=report.recipe,
        layout=report.layout,
        workload=report.workload,
        weights_bytes=most.weights_bytes,
        gradients_bytes=most.gradients_bytes,
        optimizer_bytes=most.optimizer_bytes,
    )


def relieved(run: Run, result: RunPlan) -> RunPlan:
    """An infeasible plan of the whole GPU with the changes that act on what is no recomputation.

    Each is planned as the run itself would be; one that does not lower the least memory, or that
    the run cannot have, is left out. A plan that fits, of activations alone, or by a method to
    compare with, is as it was.
    """
    if result.feasible or result.activations_only or result.method != "optimal":
        return result
    settings = PlanSettings(
        memory_model=cast(MemoryModel, result.memory_model),
        semantics=cast(Semantics, result.semantics),
        offload=result.offload,
    )
    known = {figure.change for figure in result.changes}
    found = list(result.changes)
    least = result.smallest_memory_bytes or 0
    untried = result.notes
    for change, changed in candidates(run):
        if change in known:
            continue
        if not room_for_more():
            untried = tuple(dict.fromkeys((*untried, UNTRIED)))
            break
        with suppress(SpecError):
            check(changed.model, changed.layout, changed.workload)
            needed = RunPlanner(changed, settings).smallest
            if needed < least:
                found.append(ChangeFigure(change=change, smallest_memory_bytes=needed))
    found.sort(key=lambda figure: figure.smallest_memory_bytes)
    return replace(result, changes=tuple(found), notes=untried)


UNTRIED = "The time limit left no room to plan further changes (--time-limit SECONDS)."
"""What is said where not every change was looked at."""


def candidates(run: Run) -> Iterator[tuple[str, Run]]:
    """Runs that keep fewer bytes of states, or have fewer layers or tokens on a GPU.

    Each comes with the flags that make it; not all need be possible.
    """
    yield from _states(run)
    layout, work = run.layout, run.workload
    if run.framework.model_parallel:
        stages = 2 * layout.pp
        if not layout.layers_per_stage:
            yield f"--pp {stages}", replace(run, layout=layout.model_copy(update={"pp": stages}))
    if work.seq % 2 == 0:
        half = work.seq // 2
        yield f"--seq {half}", replace(run, workload=work.model_copy(update={"seq": half}))


def _states(run: Run) -> Iterator[tuple[str, Run]]:
    layout, training = run.layout, run.training
    if layout.dp * layout.cp > 1:
        if layout.zero < 3:
            yield "--zero 3", replace(run, layout=layout.model_copy(update={"zero": 3}))
    else:
        update = {"dp": _REPLICAS, "zero": max(1, layout.zero)}
        for zero in range(update["zero"], 4):
            sharded = layout.model_copy(update={**update, "zero": zero})
            yield f"--dp {_REPLICAS} --zero {zero}", replace(run, layout=sharded)
    changes: list[tuple[str, dict[str, Any]]] = []
    optimizer = OPTIMIZERS[training.optimizer]
    if optimizer.eight_bit:
        smaller = optimizer.eight_bit
        changes.append((f"--optimizer {smaller}", {"optimizer": smaller}))
    if training.offload == "none" and optimizer.updates:
        changes.append(("--offload-states optimizer", {"offload": "optimizer"}))
    if not training.lora_rank:
        changes.append((f"--lora-rank {_RANK}", {"lora_rank": _RANK}))
    for change, fields in changes:
        yield change, replace(run, training=training.model_copy(update=fields))


def planned_changes(planner: RunPlanner) -> tuple[ChangeFigure, ...]:
    """What each change alone would bring the smallest memory to, smallest first."""
    settings, run = planner.settings, planner.run
    found: list[ChangeFigure] = []
    least = planner.smallest

    def note(change: str, changed: RunPlanner) -> None:
        if changed.smallest < least:
            found.append(ChangeFigure(change=change, smallest_memory_bytes=changed.smallest))

    if settings.method != "optimal":
        # What a comparison method needs is not what the exact one needs: nothing else is planned.
        note("--method optimal", RunPlanner(run, replace(settings, method="optimal")))
        return tuple(found)
    if settings.semantics == "module":
        note("--semantics minimal", RunPlanner(run, replace(settings, semantics="minimal")))
    plain = replace(settings, method="optimal", same_on_all_stages=False)
    if not settings.offload:
        with suppress(SpecError):
            moved = default_model("optimal", offload=True, activations_only=False)
            note("--offload", RunPlanner(run, replace(plain, offload=True, memory_model=moved)))
    for change, changed in _changed_runs(planner):
        if not room_for_more():
            break
        try:
            note(change, RunPlanner(changed, plain))
        except SpecError:
            continue
    return tuple(sorted(found, key=lambda figure: figure.smallest_memory_bytes))


def _changed_runs(planner: RunPlanner) -> list[tuple[str, Run]]:
    """Runs that differ in one option, as it is written on the command line."""
    run = planner.run
    layout, work = run.layout, run.workload
    splits = run.framework.model_parallel
    grids: list[dict[str, Any]] = []
    if layout.tp > 1 and not layout.sp:
        grids.append({"sp": True})
    if splits and layout.tp < 8:
        grids.append({"tp": 2 * layout.tp, "sp": True})
    if splits and run.framework.layers != "pytorch":
        grids.append({"cp": 2 * layout.cp})
    if not planner.settings.activations_only and layout.dp * layout.cp > 1 and layout.zero < 3:
        grids.append({"zero": layout.zero + 1})
    works: list[dict[str, Any]] = []
    if work.micro_batch > 1:
        works.append({"micro_batch": work.micro_batch // 2})
    if work.attention == "eager":
        works.append({"attention": "flash"})
    found = [(grid, replace(run, layout=layout.model_copy(update=grid))) for grid in grids]
    found += [(each, replace(run, workload=work.model_copy(update=each))) for each in works]
    valid = []
    for fields, changed in found:
        try:
            check(changed.model, changed.layout, changed.workload)
        except SpecError:
            continue
        valid.append((" ".join(_flag(key, value) for key, value in fields.items()), changed))
    return valid


def _flag(key: str, value: Any) -> str:
    name = "--" + key.replace("_", "-")
    return name if value is True else f"{name} {value}"
