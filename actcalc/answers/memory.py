"""The whole GPU, per pipeline stage, as a result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from actcalc.answers.header import RunAnswer, header, run_notes
from actcalc.memory.figures import StageFigure
from actcalc.memory.limits import LimitFigure, find_limits
from actcalc.memory.stage import StageMemory, memory_of
from actcalc.memory.states import replicas
from actcalc.run.staged import StagedRun
from actcalc.specs.check import check_sharding
from actcalc.specs.run import Run


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MemoryReport(RunAnswer):
    """The whole GPU, per pipeline stage."""

    schema_name: ClassVar[str] = "actcalc/memory/1"
    lists: ClassVar[Mapping[str, str]] = {
        "runs": "With several models or frameworks: the answer of each."
    }

    training: dict[str, Any]
    """Optimizer, number formats, offload, adapters."""
    policy: str
    """The recompute policy."""
    recipe: dict[str, Any]
    """Bytes per parameter of each copy; ``moments`` is all optimizer moments together over the
    trained parameters, scales of 8-bit ones and factored statistics included."""
    schedule: str
    """The pipeline schedule."""
    parameters: int
    """Parameters of the whole model."""
    stages: tuple[StageFigure, ...]
    """One entry per pipeline stage."""
    peak_bytes: int
    """The largest peak_bytes of any stage: what the framework's allocator holds, without what the
    driver and libraries take beside it (a stage's total_bytes has both, and decides ``fits``)."""
    peak_stage: int
    """The stage it is on (the one with the largest total)."""
    peak_at: str
    """When, in words."""
    fits: bool | None
    """Every stage fits the device (null without one)."""
    limits: tuple[LimitFigure, ...]
    """Largest micro-batch or longest sequence per policy, where asked for."""
    notes: tuple[str, ...]
    """Choices made on the way that the reader should know."""


def memory_run(
    run: Run | StagedRun,
    *,
    limits: Sequence[str] = (),
    timeline: bool = False,
    reserved: bool = False,
) -> MemoryReport:
    """The memory of every stage of a run; raises ``SpecError`` for what it cannot mean.

    ``limits`` names quantities (``micro-batch``, ``seq``) to push as far as the device allows,
    for each policy of the run. ``timeline`` lists every moment of a step. ``reserved`` replays two
    steps of the fullest stage through PyTorch's allocator.
    """
    staged = StagedRun.of(run)
    run = staged.asked
    check_sharding(run.layout, run.training)
    work = memory_of(staged)
    figures, top = work.figures, work.top
    if timeline:
        figures = tuple(work.figure(one.stage, timeline=True) for one in figures)
    if reserved:
        from actcalc.memory.replay import replayed

        figures = tuple(replayed(work, one) if one.stage == top.stage else one for one in figures)
    return MemoryReport(
        **header(staged),
        training=run.training.model_dump(),
        policy=work.policy.name,
        recipe={**work.rules.figures(), "moments": work.moments_bytes_per_parameter},
        schedule=run.layout.pipeline if run.layout.pp > 1 else "none",
        parameters=staged.parameters,
        stages=figures,
        peak_bytes=max(figure.peak_bytes for figure in figures),
        peak_stage=top.stage,
        peak_at=top.peak_at,
        fits=None if run.device is None else all(figure.fits for figure in figures),
        limits=find_limits(staged, limits) if limits else (),
        notes=_notes(work, figures, limits),
    )


def _notes(
    work: StageMemory, figures: Sequence[StageFigure], limits: Sequence[str]
) -> tuple[str, ...]:
    run, notes = work.run, run_notes(work.staged)
    training = run.training
    if run.device is None:
        notes.append(
            "Device context and communicators lie outside the allocator and are not counted "
            "without --device."
        )
    else:
        if run.device.compute_capability is None and run.device.context_bytes is None:
            notes.append(f"Nothing is known of the runtime's own memory on {run.device.title}.")
    if run.layout.zero and replicas(run.layout, training, expert=False) == 1:
        notes.append(f"ZeRO {run.layout.zero} shards over one rank: it changes nothing here.")
    captured = run.workload.kernels.cuda_graphs
    if captured != "none":
        notes.append(
            f"CUDA graphs ({captured}): their private pools and static inputs, which micro-batches "
            "share, are not modelled: figures are those of the run without graphs, and inexact."
        )
    notes += _absent_gradients(figures)
    notes += _offloaded(work)
    if any(figure.last_rank_spare_bytes for figure in figures):
        notes.append(
            "The optimizer gives whole weights to ranks: figures are of the fullest rank; "
            "last_rank_spare_bytes says how much less the last one holds."
        )
    drops = run.framework.drops_sent_outputs and not run.layout.keep_sent_outputs
    if run.layout.pp > 1 and drops:
        notes.append(
            "Pipeline messages: a received input counts as the first layer's, a received gradient "
            "as the last layer's; outputs are dropped once sent."
        )
    if work.staged.microbatches_note:
        notes.append(work.staged.microbatches_note)
    if len(run.policies) > 1:
        notes.append(f"The stages are those of policy {work.policy.name}, the first named.")
    if "micro-batch" in limits and run.workload.global_batch is not None:
        notes.append(
            "--max micro-batch keeps the number of micro-batches per step, "
            f"{work.staged.microbatches}: the global batch grows with the micro-batch from "
            f"{run.workload.global_batch}."
        )
    return tuple(dict.fromkeys(notes))


def _offloaded(work: StageMemory) -> list[str]:
    """How much offloaded modules have in host memory, and which versions hold more here."""
    training = work.run.training
    if training.offload_layers:
        return [
            f"{training.offload_layers} offloaded layers have up to {work.host_bytes(0):,} B in "
            "host memory for each GPU."
        ]
    if not training.offload_modules:
        return []
    stages = range(work.run.layout.pp)
    most = max(stages, key=work.host_bytes)
    host = work.host_bytes(most)
    if not host:
        return [
            "offload_modules moves nothing: no tensor of these modules has "
            f"{training.offload_elements:,} elements, or no layer has such modules."
        ]
    notes = [
        f"Offloaded modules have up to {host:,} B in host memory for each GPU of stage {most}: "
        "every op's own copy of what it saved."
    ]
    if any(work.host_bytes(stage) and not work.ahead(stage) for stage in stages):
        layer = max(p.host for stage in stages for chunk in work.parts(stage) for p in chunk)
        notes.append(
            "The last chunk of a stage has no layers: there a tensor comes back when backward asks "
            "for it, as in Megatron's first versions. Newer ones look for the last layer in all "
            f"chunks and may bring groups back ahead: up to {layer:,} B more for each layer."
        )
    return notes


def _absent_gradients(figures: Sequence[StageFigure]) -> list[str]:
    """Which gradients the stages' totals are without, and why."""
    lacking = [figure for figure in figures if figure.gradients_absent_bytes]
    if not lacking:
        return []
    why = "one micro-batch per step, gradients dropped between steps"
    if any(figure.gradients_bytes for figure in lacking):
        return [
            f"At the highest moment part of the gradients is not made yet ({why}): the total has "
            "those that exist."
        ]
    return [f"At the highest moment no gradient is made yet ({why}): the total has none."]
