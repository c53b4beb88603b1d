"""The library's calls: each command as a function that returns its answer as a typed object.

Keyword arguments have the flags' names (``memory("llama-3-8b", device="h100-80gb")``). A call
raises :class:`~actcalc.errors.SpecError` for what the command line would refuse; where the command
exits with 1 because the answer is no, the call returns that answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Unpack, cast, overload

from actcalc.answers.breakdown import Breakdown
from actcalc.answers.compare import Comparison
from actcalc.answers.explain.terms import Explanation
from actcalc.answers.memory import MemoryReport
from actcalc.answers.mfu import Utilisation
from actcalc.api.keywords import (
    Efficiency,
    MemoryKeywords,
    Names,
    PlanKeywords,
    RunKeywords,
    bundles,
    documented,
)
from actcalc.api.models import Described, Plain, described, load_layer, load_model
from actcalc.cli.options import RunOptions, TimeOptions
from actcalc.cli.training import MemoryOptions, PlanTrainingOptions
from actcalc.errors import SpecError
from actcalc.render import shown
from actcalc.specs import Layout, Workload
from actcalc.specs.result import Result, Shown

if TYPE_CHECKING:
    from actcalc.answers.explain.listing import Terms
    from actcalc.answers.measure.figures import Measurement
    from actcalc.answers.measured_layer import LayerComparison
    from actcalc.answers.plan import RunPlan
    from actcalc.measure.layer import MeasuredLayer

Result.shown = cast(Shown, shown)
__all__ = [
    "breakdown",
    "compare",
    "explain",
    "load_layer",
    "load_model",
    "measure",
    "memory",
    "mfu",
    "plan",
]


@overload
def compare(model: MeasuredLayer, **options: Unpack[RunKeywords]) -> LayerComparison: ...


@overload
def compare(
    model: Described,
    layout: Layout | None = None,
    workload: Workload | None = None,
    *,
    policies: Names = (),
    efficiency: Efficiency = None,
    **options: Unpack[RunKeywords],
) -> Comparison: ...


@documented(RunKeywords, RunOptions)
def compare(
    model: Described | MeasuredLayer,
    layout: Layout | None = None,
    workload: Workload | None = None,
    *,
    policies: Names = (),
    efficiency: Efficiency = None,
    **options: Unpack[RunKeywords],
) -> Comparison | LayerComparison:
    """Recompute policies side by side: bytes stored, freed, brought back, and extra FLOPs.

    Sizes are bytes on one rank, FLOPs of one micro-batch over all ranks; with a device there are
    seconds, too. Of a measured layer, which ``load_layer`` reads, its own modules are compared.

    Args:
        model: A preset's name, a hub id, a path (run file, config.json, launch file; a list of the
            files of one run), a run file's mapping, a ``Model``, or what ``load_model`` returned.
        layout: Parallel degrees; keywords win over them.
        workload: What a step is made of: what it names replaces the model's usual workload.
        policies: The same as ``policy``.
        efficiency: Shares of a device's peaks (``{"gemm": 0.8}``), or presets and files of them.
    """
    from actcalc.cli import compare as command

    named = options.get("policy") or policies or None
    chosen, timing = bundles(
        {**options, "policy": named, "efficiency": efficiency}, RunOptions, TimeOptions
    )
    if not isinstance(model, Plain):
        return command.layer_answer(model, chosen, timing)
    (result,) = command.answer(described(model, layout, workload, chosen.from_), chosen, timing)
    return result


@documented(RunKeywords, RunOptions)
def breakdown(
    model: Described,
    layout: Layout | None = None,
    workload: Workload | None = None,
    **options: Unpack[RunKeywords],
) -> Breakdown:
    """Every tensor that one layer keeps under a policy: op, shape, formula, bytes.

    Args:
        model: As :func:`compare` takes it.
        layout: Parallel degrees; keywords win over them.
        workload: What it names replaces the model's usual workload.
    """
    from actcalc.cli import breakdown as command

    (chosen,) = bundles(options, RunOptions)
    (result,) = command.answer(described(model, layout, workload, chosen.from_), chosen)
    return result


@documented(MemoryKeywords, RunOptions, MemoryOptions)
def memory(
    model: Described,
    layout: Layout | None = None,
    workload: Workload | None = None,
    *,
    max: Names = (),
    timeline: bool = False,
    **options: Unpack[MemoryKeywords],
) -> MemoryReport:
    """The whole GPU of every pipeline stage: weights, gradients, optimizer, activations, the rest.

    ``fits`` says whether it is within the device's memory; None without a device.

    Args:
        model: As :func:`compare` takes it.
        layout: Parallel degrees; keywords win over them.
        workload: What it names replaces the model's usual workload.
        max: What to push as far as the device allows: ``micro-batch``, ``seq``.
        timeline: Also list every moment of a step, with bytes by kind.
    """
    from actcalc.cli import memory as command

    chosen, held = bundles(options, RunOptions, MemoryOptions)
    (result,) = command.answer(
        described(model, layout, workload, chosen.from_),
        chosen,
        held,
        largest=[max] if isinstance(max, str) else max,
        timeline=timeline,
    )
    return result


@documented(MemoryKeywords, RunOptions, MemoryOptions)
def mfu(
    model: Described,
    layout: Layout | None = None,
    workload: Workload | None = None,
    *,
    step_time: float | str | None = None,
    gpus: int | None = None,
    mfu: float | None = None,
    flops: str = "full",
    tokens: float | str | None = None,
    price_per_gpu_hour: float | None = None,
    calibrate: str | None = None,
    efficiency: Efficiency = None,
    **options: Unpack[MemoryKeywords],
) -> Utilisation:
    """MFU and HFU of a measured step, or the step that an MFU (or the roofline) promises.

    Args:
        model: As :func:`compare` takes it.
        layout: Parallel degrees; keywords win over them.
        workload: What it names replaces the model's usual workload.
        step_time: Measured seconds of one step: 1.1, or ``"980ms"``.
        gpus: Devices that take part.
        mfu: Instead of a time: the MFU that the step is to have.
        flops: Count attention's scores ``full`` or ``causal``.
        tokens: Tokens to train on: 300e9, or ``"15T"``.
        price_per_gpu_hour: Price of one GPU for one hour.
        calibrate: A file of measured runs, to which the shares of the peaks are fitted.
        efficiency: Shares of a device's peaks (``{"gemm": 0.8}``), or presets and files of them.
    """
    from actcalc.cli import mfu as command

    chosen, held, timing = bundles(
        {**options, "efficiency": efficiency}, RunOptions, MemoryOptions, TimeOptions
    )
    return command.answer(
        described(model, layout, workload, chosen.from_),
        chosen,
        held,
        timing,
        command.StepOptions(
            step_time=None if step_time is None else str(step_time),
            gpus=gpus,
            mfu=mfu,
            flops=flops,
            tokens=None if tokens is None else str(tokens),
            price_per_gpu_hour=price_per_gpu_hour,
            calibrate=calibrate,
        ),
    )


@documented(PlanKeywords, RunOptions, PlanTrainingOptions)
def plan(
    model: Described | MeasuredLayer,
    layout: Layout | None = None,
    workload: Workload | None = None,
    *,
    memory: str | None = None,
    memory_model: str | None = None,
    activations_only: bool = False,
    semantics: str | None = None,
    method: str = "optimal",
    frontier: bool = False,
    points: int | None = None,
    same_on_all_stages: bool = False,
    offload: bool = False,
    emit: str | None = None,
    **options: Unpack[PlanKeywords],
) -> RunPlan:
    """The cheapest recompute plan that fits a memory budget, with a proof that none is cheaper.

    ``feasible`` says whether there is one. Of a measured layer, which ``load_layer`` reads, the
    plan is of its ops (a ``LayerPlan``).

    Args:
        model: As :func:`compare` takes it.
        layout: Parallel degrees; keywords win over them.
        workload: What it names replaces the model's usual workload.
        memory: Budget of one GPU: ``"70GiB"``, ``"6GB"``; the device's where it is left out.
        memory_model: ``timeline`` (default: exact), ``stored`` or ``stored+working``.
        activations_only: The budget is for the layers' activations alone.
        semantics: ``minimal`` (op by op, default) or ``module`` (whole modules).
        method: ``optimal``, ``sqrt`` or ``greedy``.
        frontier: Also memory against cost, over the whole range.
        points: Points of the frontier (default 20).
        same_on_all_stages: One plan for all pipeline stages.
        offload: Kept tensors may also go to host memory (needs a device).
        emit: ``emitted.text`` is the plan as settings of megatron, torch, torchtitan, ...
    """
    from actcalc.cli import plan as command

    chosen, trained = bundles(options, RunOptions, PlanTrainingOptions)
    how = command.PlanOptions(
        memory=memory,
        memory_model=memory_model,
        activations_only=activations_only,
        semantics=semantics,
        method=method,
        frontier=frontier,
        points=points,
        same_on_all_stages=same_on_all_stages,
        offload=offload,
        emit=emit,
    )
    how.check(chosen.headroom)
    if emit is not None:
        from actcalc.plan.emit.targets import check_target

        check_target(emit)
    if not isinstance(model, Plain):
        return command.layer_answer(model, chosen, trained, how)
    origin = described(model, layout, workload, chosen.from_)
    return command.answer(chosen.runs(origin, trained.training()), trained, how)


@documented(RunKeywords, RunOptions)
def measure(
    model: str | None = None,
    *,
    module: str | Callable[[], Any] | None = None,
    save: str | None = None,
    **options: Unpack[RunKeywords],
) -> Measurement:
    """What PyTorch really keeps for backward, beside the prediction, tensor by tensor.

    Needs ``actcalc[torch]``, else raises ``MissingExtraError``.

    Args:
        model: A preset, a config.json or its folder.
        module: Instead of a model: a function that returns ``(module, inputs)``, or
            ``"path.py:function"``, whose file is run.
        save: Keep the measured layer in this file (.json or .yaml), for ``load_layer``.
    """
    from actcalc.cli import measure as command

    (chosen,) = bundles(options, RunOptions)
    result, found = command.answer(model, module, chosen, keep_layer=save is not None)
    if save is not None and found.layer is not None:
        from actcalc.measure.layer import write_layer

        write_layer(found.layer, save)
    return result


@overload
def explain() -> Terms: ...


@overload
def explain(
    term: str,
    model: Described | None = None,
    layout: Layout | None = None,
    workload: Workload | None = None,
    *,
    efficiency: Efficiency = None,
    **options: Unpack[RunKeywords],
) -> Explanation: ...


@documented(RunKeywords, RunOptions)
def explain(
    term: str | None = None,
    model: Described | None = None,
    layout: Layout | None = None,
    workload: Workload | None = None,
    *,
    efficiency: Efficiency = None,
    **options: Unpack[RunKeywords],
) -> Explanation | Terms:
    """How a number is derived, with its source; without a term, all that can be explained.

    Args:
        term: A term, a printed formula, a flag or an everyday word: ``"34"``, ``"c*"``, ``"oom"``.
        model: Whose numbers, as :func:`compare` takes it; the term's own example where none is.
        layout: Parallel degrees; keywords win over them.
        workload: What it names replaces the model's usual workload.
        efficiency: Shares of a device's peaks, for the terms that are of times.
    """
    from actcalc.cli import explain as command

    if term is None:
        return command.listing()
    chosen, timing = bundles({**options, "efficiency": efficiency}, RunOptions, TimeOptions)
    named = layout is not None or workload is not None
    origin = described(model, layout, workload, chosen.from_) if model is not None else None
    if named and origin is None:
        raise SpecError("a layout or workload is of a model", "name the model too")
    return command.answer(term, origin, chosen, timing)
