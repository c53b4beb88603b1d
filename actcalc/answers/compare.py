"""Policies side by side: what each stores, brings back while re-running, and computes again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

from actcalc.answers.header import RunAnswer, header, run_notes
from actcalc.answers.judged import judged
from actcalc.cost.flops import (
    forward_flops,
    hardware_flops,
    layers_forward_flops,
    model_flops,
)
from actcalc.layers.model import ModelGraph, parameters
from actcalc.policy.checkpoints import checkpoint_optimum
from actcalc.policy.rules import NONE, Policy
from actcalc.policy.stage import StagePolicy
from actcalc.run.staged import StagedRun
from actcalc.specs.framework import Framework
from actcalc.specs.numbers import percent
from actcalc.specs.recompute import ALIASES
from actcalc.specs.run import Run


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LayerFigure:
    """One kind of layer under one policy."""

    kind: str
    """What the layer is: dense, moe, sliding, ..."""
    count: int
    """How many the model has."""
    stored_bytes: int
    """Bytes it keeps for one micro-batch on one rank."""
    formula: str
    """The same as a formula."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PolicyFigure:
    """One policy: memory on one rank, FLOPs of one micro-batch over all ranks."""

    policy: str
    """Its name."""
    formula: str
    """Stored bytes of one layer (of the most frequent kind) as a formula."""
    stored_bytes_per_layer: int
    """Bytes one layer keeps from forward to backward for one micro-batch (mean over a segment)."""
    stored_bytes: int
    """Bytes the first pipeline stage keeps: all its layers, all microbatches in flight."""
    saved_ratio: float
    """Share of ``none``'s stored bytes that is freed."""
    transient_bytes: int
    """Bytes made again, at most, while one segment is re-run."""
    peak_bytes: int
    """Stored and transient bytes together."""
    recompute_flops: int
    """Forward FLOPs run again for one micro-batch, each re-run op counted once, over all ranks."""
    recompute_forward_ratio: float
    """Re-run FLOPs over the forward FLOPs of all layers (1 is one more forward)."""
    recompute_flops_per_model_flops_ratio: float
    """Re-run FLOPs over model FLOPs."""
    hardware_flops_per_model_flops_ratio: float
    """Hardware over model FLOPs, by the convention named beside it."""
    hardware_flops_convention: str
    """``ops``: 1 + re-run/model FLOPs; ``paper``: the published equation for selective."""
    layers: tuple[LayerFigure, ...]
    """The same for each kind of layer."""
    note: str = ""
    """Why the policy changes nothing, or what to mind."""
    layer_forward_seconds: float | None = None
    """With a device, else null: one layer's forward, one micro-batch, one rank."""
    layer_backward_seconds: float | None = None
    """With a device, else null: its backward, re-run included."""
    step_seconds: float | None = None
    """With a device, else null: one optimizer step."""
    slowdown_ratio: float | None = None
    """With a device, else null: step time over that of ``none``, less one."""
    tokens_per_second_per_gpu: float | None = None
    """With a device, else null: tokens per second of one GPU."""
    device_bytes: int | None = None
    """With a device, else null: what the fullest GPU needs in all, states and buffers included."""
    fits: bool | None = None
    """With a device, else null: whether that is within its memory."""
    largest_micro_batch: int | None = None
    """With a device, else null: sequences in the largest micro-batch that fits; 0 if none does."""
    largest_step_seconds: float | None = None
    """With a device: one step with it, of as many micro-batches; null if none fits."""
    largest_samples_per_second: float | None = None
    """With a device: sequences per second with it, over all GPUs; null if none fits."""
    largest_tokens_per_second_per_gpu: float | None = None
    """With a device: tokens per second of one GPU with it; null if none fits."""
    relative_throughput_ratio: float | None = None
    """With a device: throughput with it over that of the first policy; null if either is not."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class OptimumFigure:
    """How many checkpoints would be best with full re-running of segments."""

    input_bytes: int
    """A_in: one layer's input on one rank."""
    layer_bytes: int
    """A_int: what one layer saves without recomputation."""
    layer_bytes_per_input_bytes_ratio: float
    """A_int / A_in."""
    layers: int
    """l: layers that are cut into segments."""
    in_flight: float
    """m: microbatches whose checkpoints are kept at once, mean over the stage's layers."""
    continuous: float
    """c* = √(l·A_int/(m·A_in))."""
    continuous_bytes: float
    """m·c*·A_in + (l/c*)·A_int: a bound, not a plan."""
    integer: int
    """Checkpoints of the best plan with whole layers."""
    layers_per_segment: int
    """Layers in its longest segment."""
    stored_bytes: int
    """What its checkpoints store, m·c·A_in."""
    segment_bytes: int
    """What its longest segment holds while re-run, ⌈l/c⌉·A_int."""
    total_bytes: int
    """Both together: memory(c) of that plan."""
    peak_bytes: int
    """The same, as a policy's peak_bytes: its first input, which is stored, counted once."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Comparison(RunAnswer):
    """Policies side by side for one run."""

    schema_name: ClassVar[str] = "actcalc/compare/1"
    lists: ClassVar[Mapping[str, str]] = {
        "frameworks": "With several frameworks: the answer of each.",
        "models": "With several models: the answer of each.",
    }

    training: dict[str, Any]
    """Optimizer, number formats, offload, adapters."""
    parameters: int
    """Parameters of the whole model."""
    stage: int
    """The pipeline stage the figures are of."""
    stage_layers: int
    """Layers on that stage."""
    chunks: int
    """Model chunks of that stage (vpp of them, or 2 in V shapes and DualPipe)."""
    in_flight: int
    """Activations that stage holds at its peak, each of one microbatch on one chunk; with one
    chunk, its microbatches."""
    forward_flops: int
    """Forward FLOPs of one micro-batch, over all ranks."""
    model_flops: int
    """Model FLOPs of one micro-batch (forward and backward), over all ranks."""
    policies: tuple[PolicyFigure, ...]
    """One entry per policy; ratios are against ``none``."""
    checkpoint_optimum: OptimumFigure
    """c* and the best plan with whole layers."""
    advice: str
    """One sentence: which policy to look at first."""
    notes: tuple[str, ...]
    """Choices made on the way that the reader should know."""


def compare_run(
    run: Run | StagedRun, efficiency: Mapping[str, float] | None = None, *, beside: bool = False
) -> Comparison:
    """Compare the run's policies (or the usual ones); raises ``SpecError`` for an unknown one.

    ``efficiency`` overrides shares of the device's peaks; ``beside`` sets the usual policies beside
    the run's own.
    """
    staged = StagedRun.of(run)
    run = staged.asked
    chunks = staged.places[0]
    usual = staged.usual_policies
    policies = [staged.policy(name) for name in run.policies or usual]
    if beside:
        policies = _beside(policies, (staged.policy(name) for name in usual))
    stored_none = staged.stored_bytes(0, NONE)
    figures = tuple(_figure(staged, policy, stored_none) for policy in policies)
    if run.device:
        figures = _with_times(staged, policies, figures, efficiency)
    return Comparison(
        **header(staged),
        training=run.training.model_dump(),
        parameters=staged.parameters,
        stage=0,
        stage_layers=sum(len(chunk) for chunk in chunks),
        chunks=run.layout.chunks,
        in_flight=sum(staged.held(0)),
        forward_flops=forward_flops(staged.graph),
        model_flops=model_flops(staged.graph),
        policies=figures,
        checkpoint_optimum=optimum(staged),
        advice=_advice(figures, run.framework),
        notes=_notes(staged, figures, efficiency),
    )


def _beside(own: list[Policy], usual: Iterable[Policy]) -> list[Policy]:
    """``own`` policies, and the usual ones that are not the same under another name."""

    def rules(policy: Policy) -> dict[str, object]:
        return {**vars(policy), "name": "", "note": ""}

    seen = [rules(policy) for policy in own]
    return [*own, *(policy for policy in usual if rules(policy) not in seen)]


def _with_times(
    staged: StagedRun,
    policies: Sequence[Policy],
    figures: Sequence[PolicyFigure],
    efficiency: Mapping[str, float] | None,
) -> tuple[PolicyFigure, ...]:
    """The figures with what each policy costs in time on the run's device."""
    from dataclasses import replace

    from actcalc.answers.policy_times import time_policies

    times = time_policies(staged, policies, efficiency)
    first = times[0].largest_samples_per_second
    return tuple(
        replace(
            figure,
            **vars(time),
            relative_throughput_ratio=(
                time.largest_samples_per_second / first
                if first and time.largest_samples_per_second
                else None
            ),
        )
        for figure, time in zip(figures, times, strict=True)
    )


def _figure(staged: StagedRun, policy: Policy, stored_none: int) -> PolicyFigure:
    stage = staged.under(policy)
    stored = staged.stored_bytes(0, policy)
    transient = stage.transient_bytes(staged.places[0])
    useful = model_flops(staged.graph)
    hardware = hardware_flops(staged, policy)
    rerun = hardware.rerun
    layers = tuple(
        LayerFigure(
            kind=kind.label,
            count=kind.count,
            stored_bytes=stage.layer_bytes(kind.graph).stored,
            formula=stage.outcome(kind.graph).stored_size.formula(),
        )
        for kind in staged.kinds
    )
    main = next(layer for layer in layers if layer.kind == staged.main.label)
    return PolicyFigure(
        policy=policy.name,
        formula=main.formula + (" per segment" if policy.segmented else ""),
        stored_bytes_per_layer=stored_per_layer(staged, policy),
        stored_bytes=stored,
        saved_ratio=1 - stored / stored_none if stored_none else 0.0,
        transient_bytes=transient,
        peak_bytes=stored + transient,
        recompute_flops=rerun,
        recompute_forward_ratio=rerun / layers_forward_flops(staged.graph),
        recompute_flops_per_model_flops_ratio=rerun / useful,
        hardware_flops_per_model_flops_ratio=hardware.flops / useful,
        hardware_flops_convention=hardware.convention,
        layers=layers,
        note=_note(staged.graph, policy, stage, stored, stored_none),
    )


def stored_per_layer(staged: StagedRun, policy: Policy) -> int:
    """What one layer stores; the mean over the stage where its layers are not treated alike."""
    stage, chunks = staged.under(policy), staged.places[0]
    if not (policy.segmented or policy.block is not None or policy.every > 1):
        return stage.layer_bytes(staged.main.graph).stored
    one = sum(stage.stored_bytes(chunk) for chunk in chunks)
    return round(one / max(1, sum(len(chunk) for chunk in chunks)))


def _note(
    graph: ModelGraph, policy: Policy, stage: StagePolicy, stored: int, stored_none: int
) -> str:
    if policy.name == "none":
        return ""
    if not any(stage.outcome(run.graph).rerun for run in graph.kinds):
        return "changes nothing here: no op of these layers belongs to it"
    if stored > stored_none:
        return "stores more than none: the inputs it keeps are larger than what it frees"
    flash = any(op.kernel.startswith("flash") for r in graph.kinds for op in r.graph.ops)
    if policy.modules == ("core_attn",) and flash:
        return "saves next to nothing here: flash attention keeps no s x s tensor, only statistics"
    if policy.boundary == "split" and graph.context.tp and not graph.context.layout.sp:
        return "needs Megatron's --distribute-saved-activations, which gathers the input again"
    return "" if stored < stored_none else "saves nothing here: it needs as much as it frees"


def idle_settings(run: Run, *, one_layer: bool) -> list[str]:
    """A note for settings that do not change an activation table, so that none is ignored silently.

    ``one_layer`` says that the table is of single layers, whatever the pipeline holds.
    """
    layout, idle = run.layout, []
    if layout.dp > 1 and (one_layer or run.workload.global_batch is None):
        idle.append(f"dp {layout.dp}")
    if layout.zero:
        idle.append(f"ZeRO {layout.zero}")
    if one_layer and layout.pp > 1:
        idle.append(f"pp {layout.pp}")
    if run.workload.global_batch is not None and (one_layer or layout.pp == 1):
        idle.append(f"global batch {run.workload.global_batch}")
    if not idle:
        return []
    return [f"No effect on this table: {', '.join(idle)} (see: actcalc memory)."]


def optimum(staged: StagedRun) -> OptimumFigure:
    """c* and the best whole number of checkpoints for the layers of the first stage."""
    chunks = staged.places[0]
    layers = sum(len(chunk) for chunk in chunks)
    held_layers = sum(len(c) * n for c, n in zip(chunks, staged.held(0), strict=True))
    held_count = max(Fraction(1), Fraction(held_layers, max(1, layers)))
    graph = staged.main.graph
    input_bytes = staged.graph.tensor_bytes[graph][graph.input]
    best = checkpoint_optimum(
        layers=max(1, layers),
        input_bytes=input_bytes,
        layer_bytes=staged.under(NONE).layer_bytes(graph).saved,
        counted_bytes=input_bytes if graph.input in graph.saved else 0,
        in_flight=held_count,
    )
    return OptimumFigure(
        input_bytes=best.input_bytes,
        layer_bytes=best.layer_bytes,
        layer_bytes_per_input_bytes_ratio=best.ratio,
        layers=best.layers,
        in_flight=int(held_count) if held_count.denominator == 1 else float(held_count),
        continuous=best.continuous,
        continuous_bytes=best.continuous_bytes,
        integer=best.integer,
        layers_per_segment=best.layers_per_segment,
        stored_bytes=best.stored_bytes,
        segment_bytes=best.segment_bytes,
        total_bytes=best.total_bytes,
        peak_bytes=best.total_bytes,
    )


NEARLY_FREE = 0.05
"""Share of a step's model FLOPs below which a policy is worth trying first."""


def _advice(figures: Sequence[PolicyFigure], framework: Framework) -> str:
    """The policy that frees most for next to nothing of a step, and the lowest peak.

    Of those that the framework has a setting for: what is advised must be something to switch on.
    """
    useful = [figure for figure in figures if figure.saved_ratio > 0.01]
    if not useful:
        if len(figures) < 2:
            return (
                "One policy alone: repeat --policy (none, selective, full) to see others beside it."
            )
        return "None of these policies frees memory here: shrink the micro-batch or split further."
    useful = [figure for figure in useful if _has_setting(framework, figure.policy)]
    if not useful:
        return f"The {framework} profile has no setting for any of these that frees memory."
    low = min(useful, key=lambda f: (f.peak_bytes, f.recompute_flops))
    cheap = [f for f in useful if f.recompute_flops_per_model_flops_ratio < NEARLY_FREE]
    if not cheap:
        return (
            f"No setting here is nearly free: {low.policy} frees {percent(low.saved_ratio)} for "
            f"{_price(low)}."
        )
    first = max(cheap, key=lambda f: (f.saved_ratio, -f.recompute_flops))
    text = f"Try {first.policy} first: it frees {percent(first.saved_ratio)} for {_price(first)}"
    lowest = f"; {low.policy} has the lowest peak, for {_price(low)}"
    return f"{text}{'' if first is low else lowest}."


def _price(figure: PolicyFigure) -> str:
    again = figure.recompute_flops_per_model_flops_ratio
    return f"{percent(again)} more FLOPs" if again else "no more FLOPs"


def _has_setting(framework: Framework, policy: str) -> bool:
    """Whether an option of the framework says the policy, whole or module by module."""
    words = policy.partition(":")[0].split("+")
    return {ALIASES.get(word, word) for word in words} <= set(framework.recompute_settings)


def _notes(
    staged: StagedRun,
    figures: Sequence[PolicyFigure],
    efficiency: Mapping[str, float] | None,
) -> tuple[str, ...]:
    run, graph, notes = staged.run, staged.graph, run_notes(staged)
    if graph.mtp is not None:
        extra = int(parameters(graph, staged.whole_sizes, mtp=True)) - staged.parameters
        notes.append(
            f"The multi-token-prediction layer adds {extra:,} parameters; it is counted in FLOPs "
            "and in memory, not in the parameters above or the layers below."
        )
    if run.workload.fp8_products:
        notes.append(
            "fp8 quantises matrix products' inputs on the fly; saved activations are counted in "
            "their own type here."
        )
    notes += idle_settings(run, one_layer=False)
    notes += [staged.microbatches_note]
    if run.device:
        from actcalc.cost.rates import default_note

        notes.append(default_note(run.device, efficiency))
        if any(figure.step_seconds is not None for figure in figures):
            notes.append(judged(run).note)
        if run.training.offload == "activations" or run.training.offload_modules:
            notes.append(
                "Times leave out the transfers of offloaded activations: `actcalc plan --offload` "
                "times them."
            )
    for figure in figures:
        if figure.hardware_flops_convention != "ops":
            notes.append(
                f"The paper's equation puts {figure.policy} at "
                f"{figure.hardware_flops_per_model_flops_ratio:.4f} times the model FLOPs; the "
                f"ops that re-run add {percent(figure.recompute_flops_per_model_flops_ratio)} "
                "(see: actcalc explain selective)."
            )
    return tuple(dict.fromkeys(note for note in notes if note))
