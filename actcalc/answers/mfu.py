"""Model and hardware FLOPs utilisation of a step: from its time, or its time from an MFU.

MFU counts what the model needs, HFU also what recomputation adds, both over what the devices could
have done in the step (Korthikanti et al. 2022, section 6.3 and appendix A; Chowdhery et al. 2022,
appendix B).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from actcalc.answers.calibrate import Calibration
from actcalc.answers.header import RunAnswer, header, run_notes
from actcalc.answers.judged import judged
from actcalc.answers.mfu_figures import CountingFigure, Prediction, Training
from actcalc.answers.step_given import Basis, Given, Work
from actcalc.cost.flops import Counting, HardwareFlops, hardware_flops, model_flops
from actcalc.cost.rates import default_note, peak_flops, rates_of
from actcalc.cost.roofline import roofline_of
from actcalc.cost.step import StepTime, check_timed, step_time
from actcalc.errors import SpecError
from actcalc.memory.stage import total_bytes
from actcalc.policy.rules import Policy
from actcalc.run.staged import StagedRun
from actcalc.specs.device import Device
from actcalc.specs.numbers import percent
from actcalc.specs.objectives import OBJECTIVES
from actcalc.specs.run import Run

COUNTINGS: tuple[Counting, ...] = ("full", "causal")


@dataclass(frozen=True, kw_only=True, repr=False)
class Utilisation(RunAnswer):
    """How much of the devices' arithmetic one training step uses."""

    schema_name: ClassVar[str] = "actcalc/mfu/1"

    policy: str
    """The recompute policy."""
    device: dict[str, Any]
    """The device's fields."""
    gpus: int
    """Devices that take part."""
    global_batch: int
    """Sequences in one step."""
    basis: Basis
    """Where the step time is from: measured, from an MFU, or predicted by the roofline."""
    step_seconds: float
    """Seconds of one step."""
    counting: Counting
    """How attention's scores are counted in the figures below."""
    model_flops: int
    """FLOPs of forward and backward of one step, over all devices."""
    hardware_flops: int
    """The same with what recomputation adds, by the convention named, and without the gradients of
    frozen weights (adapters)."""
    hardware_flops_convention: str
    """``ops``: each re-run op once; ``paper``: the published equation for selective."""
    hardware_flops_by_ops: int
    """Model FLOPs plus each re-run op once, whatever the convention."""
    mfu_ratio: float
    """Model FLOPs over what the devices could do in the step."""
    hfu_ratio: float
    """Hardware FLOPs over the same."""
    hfu_by_ops_ratio: float
    """Hardware FLOPs counted op by op over the same."""
    device_bytes: int
    """What the fullest GPU of the layout needs in all, states and buffers included."""
    fits: bool
    """Whether that is within its memory."""
    possible: bool
    """Whether the devices can do it: what must really be computed (with flash attention only the
    scores below a causal diagonal) is within their peak."""
    peak_flops_per_second: float
    """Peak of one device in the run's number format, dense."""
    model_flops_per_second_per_gpu: float
    """Achieved model FLOP/s of one device."""
    hardware_flops_per_second_per_gpu: float
    """Achieved hardware FLOP/s of one device."""
    tokens_per_second: float
    """Tokens per second, all devices."""
    tokens_per_second_per_gpu: float
    """Tokens per second of one device."""
    model_flops_per_token: float
    """Model FLOPs per token, forward and backward."""
    countings: tuple[CountingFigure, ...]
    """Both ways of counting attention's scores."""
    prediction: Prediction | None
    """What the roofline predicts; null where the layout does not use all devices."""
    training: Training | None
    """A whole training run; null unless tokens were given."""
    calibration: Calibration | None = None
    """Efficiencies fitted to measured runs; null unless a file of them was given."""
    notes: tuple[str, ...]
    """Choices made on the way that the reader should know."""


def _positive(name: str, value: float | None) -> None:
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise SpecError(f"{name} {value:g} is not above 0", f"give {name} a value above 0")


def _scaled(flops: int, batch: int, run: Run) -> int:
    """FLOPs of one micro-batch, for ``batch`` sequences (exact: they are linear in b)."""
    return flops * batch // run.workload.micro_batch


def utilisation(
    run: Run,
    *,
    gpus: int | None = None,
    step_seconds: float | None = None,
    mfu: float | None = None,
    hfu: float | None = None,
    tokens_per_second: float | None = None,
    tflops: float | None = None,
    counting: Counting = "full",
    tokens: int | None = None,
    price_per_gpu_hour: float | None = None,
    efficiency: Mapping[str, float] | None = None,
) -> Utilisation:
    """MFU and HFU of one step of ``run`` on ``gpus`` devices.

    The step time is given, follows from a rate or a share (:class:`Given`), or is predicted. Raises
    ``SpecError`` without a device, for numbers that are not above 0, when several say how long a
    step is, or for devices that do not divide into whole replicas of tp·pp·cp.
    """
    given = Given(step_seconds, tokens_per_second, tflops, mfu, hfu)
    given.check()
    _check_given(run, tokens, gpus, price_per_gpu_hour, counting)
    longest, count = StagedRun(run), _devices(run, gpus)
    run, whole = _average(run), longest.only_policy
    staged = StagedRun(run) if run.workload.lengths else longest
    policy, batch = staged.only_policy, staged.global_batch
    prediction = _predict(staged, policy, count, efficiency)
    peak = peak_flops(_device(run), run.workload.arithmetic)
    useful = _scaled(model_flops(staged.graph, counting), batch, run)
    hardware = hardware_flops(staged, policy, counting)
    done = _scaled(hardware.flops, batch, run)
    step_tokens = batch * run.workload.seq * OBJECTIVES[run.training.objective].sequences
    work = Work(step_tokens, useful, done, count, peak)
    basis, seconds = given.seconds(work) or _predicted(prediction)
    available, by_ops = seconds * count * peak, _scaled(hardware.op_flops, batch, run)
    least = _scaled(hardware_flops(staged, policy, _computed(run)).op_flops, batch, run) / available
    needed = total_bytes(longest, whole)
    impossible = _impossible(useful / available, least, frozen=run.training.tunes)
    return Utilisation(
        **header(staged),
        policy=policy.name,
        gpus=count,
        global_batch=batch,
        basis=basis,
        step_seconds=seconds,
        counting=counting,
        model_flops=useful,
        hardware_flops=done,
        hardware_flops_convention=hardware.convention,
        hardware_flops_by_ops=by_ops,
        mfu_ratio=useful / available,
        hfu_ratio=done / available,
        hfu_by_ops_ratio=by_ops / available,
        device_bytes=needed,
        fits=needed <= (run.budget_bytes or 0),
        possible=least <= 1,
        peak_flops_per_second=peak,
        **_rates(work, seconds),
        countings=tuple(_counted(staged, policy, each, available) for each in COUNTINGS),
        prediction=_prediction(
            prediction, run, seconds if basis == "measured" else None, efficiency
        ),
        training=training_run(tokens, step_tokens, seconds, count, price_per_gpu_hour),
        notes=_notes(staged, prediction, impossible, hardware, by_ops / available, efficiency),
    )


def _average(run: Run) -> Run:
    """The run at the length that its micro-batches are padded to on average."""
    seq = run.workload.mean_seq
    return run if seq == run.workload.seq else replace(
        run, workload=run.workload.model_copy(update={"seq": seq})
    )  # fmt: skip


_PLAUSIBLE = {"--tokens": (1, 10**24), "--gpus": (1, 2**40), "--price-per-gpu-hour": (0, 1e9)}
"""What figures of a run may be: tokens, devices, any currency."""


def _rates(work: Work, seconds: float) -> dict[str, Any]:
    """What a step of ``seconds`` does in a second."""
    devices = seconds * work.devices
    return {
        "model_flops_per_second_per_gpu": work.model_flops / devices,
        "hardware_flops_per_second_per_gpu": work.hardware_flops / devices,
        "tokens_per_second": work.tokens / seconds,
        "tokens_per_second_per_gpu": work.tokens / devices,
        "model_flops_per_token": work.model_flops / work.tokens,
    }


def _predicted(prediction: StepTime | str) -> tuple[Basis, float]:
    """The roofline's step; ``SpecError`` with what keeps it from one."""
    if isinstance(prediction, StepTime):
        return "predicted", prediction.total
    raise SpecError(f"no step time to judge: {prediction}", "add --step-time or --mfu")


def _check_given(
    run: Run,
    tokens: int | None,
    gpus: int | None,
    price_per_gpu_hour: float | None,
    counting: Counting,
) -> None:
    """Refuse numbers that mean nothing, alone or together."""
    _device(run)
    _check_counting(run, counting)
    given = {
        "--tokens": tokens,
        "--gpus": gpus,
        "--price-per-gpu-hour": price_per_gpu_hour,
    }
    for name, value in given.items():
        _positive(name, value)
        low, high = _PLAUSIBLE[name]
        if value is not None and not low <= value <= high:
            raise SpecError(
                f"{name} {value:g} is beyond anything real", f"give {low:g} to {high:g}"
            )
    if price_per_gpu_hour is not None and tokens is None:
        raise SpecError("--price-per-gpu-hour prices a training run", "add --tokens")


def _check_counting(run: Run, counting: Counting) -> None:
    if counting == "causal" and not run.model.causal:
        raise SpecError(
            f"{run.model.name} attends in both directions: no score is masked",
            "drop --flops causal",
        )


def _device(run: Run) -> Device:
    if run.device is None:
        raise SpecError("utilisation is a share of a device's peak: no device", "add --device")
    return run.device


def _devices(run: Run, gpus: int | None) -> int:
    """Devices that take part: as many as given, in whole replicas of the layout."""
    layout = run.layout
    count = gpus or layout.devices
    replica = layout.tp * layout.pp * layout.cp
    if count % replica:
        raise SpecError(
            f"{count} GPUs hold no whole number of replicas: tp {layout.tp} x pp {layout.pp} x "
            f"cp {layout.cp} = {replica} GPUs each",
            f"use --gpus {-(-count // replica) * replica}, or lower --tp, --pp or --cp",
        )
    return count


def _computed(run: Run) -> Counting:
    """The scores that the attention kernels compute: flash attention skips those masked out."""
    return "full" if run.workload.attention == "eager" else "causal"


def _impossible(mfu: float, least: float, *, frozen: bool) -> str:
    """What to say of a utilisation above 1; empty for one that can be."""
    if least > 1:
        return (
            f"Impossible: the ops of such a step are {100 * least:.4g} % of what the GPUs can do "
            "in its time. Check step time, GPUs, batch, policy and device."
        )
    if mfu > 1:
        counted = "masked scores that flash attention never computes"
        if frozen:
            counted = "gradients of frozen weights, and masked scores, that are never computed"
        return (
            f"An MFU of {100 * mfu:.4g} % counts {counted}; what is computed is "
            f"{100 * least:.4g} % of the peak."
        )
    return ""


def _counted(
    staged: StagedRun, policy: Policy, counting: Counting, available: float
) -> CountingFigure:
    run, batch = staged.run, staged.global_batch
    useful = _scaled(model_flops(staged.graph, counting), batch, run)
    done = _scaled(hardware_flops(staged, policy, counting).flops, batch, run)
    return CountingFigure(
        counting=counting,
        model_flops=useful,
        hardware_flops=done,
        mfu_ratio=useful / available,
        hfu_ratio=done / available,
    )


def _predict(
    staged: StagedRun, policy: Policy, gpus: int, efficiency: Mapping[str, float] | None
) -> StepTime | str:
    """The predicted step, or why there is none."""
    run, layout, batch = staged.run, staged.run.layout, staged.global_batch
    if layout.devices != gpus:
        return (
            f"the layout (tp {layout.tp} x pp {layout.pp} x cp {layout.cp} x dp {layout.dp}) "
            f"uses {layout.devices} devices, not {gpus}"
        )
    count, rest = divmod(batch, run.workload.micro_batch * layout.dp)
    if rest or not count:
        return (
            f"global batch {batch} is no multiple of micro-batch {run.workload.micro_batch} x "
            f"dp {layout.dp}"
        )
    try:
        check_timed(run.training)
        return step_time(policy, roofline_of(staged, efficiency))
    except SpecError as error:
        return f"{error} ({error.hint})" if error.hint else str(error)


def _prediction(
    step: StepTime | str,
    run: Run,
    measured: float | None,
    efficiency: Mapping[str, float] | None,
) -> Prediction | None:
    if isinstance(step, str):
        return None
    shares = rates_of(_device(run), run.workload.arithmetic, efficiency).shares
    range_ = judged(run)
    return Prediction(
        step_seconds=step.total,
        low_seconds=step.total * range_.low,
        high_seconds=step.total * range_.high,
        judged_runs=range_.runs,
        pipeline_seconds=step.pipeline,
        host_seconds=step.host,
        exchange_seconds=step.exchange,
        gradients_seconds=step.gradients,
        optimizer_seconds=step.optimizer,
        bubble_ratio=step.bubble_ratio,
        microbatches=step.microbatches,
        error_ratio=step.total / measured - 1 if measured else None,
        efficiency={key: float(value) for key, value in vars(shares).items()},
    )


def training_run(
    tokens: int | None, step_tokens: int, seconds: float, gpus: int, price: float | None
) -> Training | None:
    """A whole training run of ``tokens`` at steps of ``seconds``; None without tokens."""
    if tokens is None:
        return None
    steps = -(-tokens // step_tokens)
    hours = steps * seconds * gpus / 3600
    return Training(
        tokens=tokens,
        steps=steps,
        seconds=steps * seconds,
        days=steps * seconds / 86400,
        gpu_hours=hours,
        price=None if price is None else hours * price,
    )


def _notes(
    staged: StagedRun,
    prediction: StepTime | str,
    impossible: str,
    hardware: HardwareFlops,
    by_ops: float,
    efficiency: Mapping[str, float] | None,
) -> tuple[str, ...]:
    run = staged.run
    notes = [*run_notes(staged), impossible, staged.microbatches_note]
    if hardware.convention != "ops":
        notes.append(
            "HFU by the paper's equation, which adds s/6h; the ops that re-run alone make it "
            f"{percent(by_ops)} (see: actcalc explain selective)."
        )
    if isinstance(prediction, str):
        notes.append(f"No predicted time: {prediction}.")
    else:
        notes += [
            range_note(run, prediction),
            *host_notes(run, prediction),
            *_time_notes(run),
            default_note(run.device, efficiency) if run.device else "",
        ]
    return tuple(dict.fromkeys(note for note in notes if note))


def range_note(run: Run, step: StepTime) -> str:
    """Between which times published runs of the same kind put such a step."""
    found = judged(run)
    if not found.runs:
        return f"No published run of this kind ({found.kind}) judges the predicted time."
    low, high = step.total * found.low, step.total * found.high
    return f"{found.words}: {low:.2g} to {high:.2g} s."


def host_notes(run: Run, step: StepTime) -> list[str]:
    """What the host's launches add to a predicted step, and what would help."""
    notes = []
    captured = run.workload.kernels.cuda_graphs
    if step.host > 0.02 * step.total:
        remedies = ["a larger --micro-batch"]
        if captured != "full" and run.framework.layers != "pytorch":
            more = "full" if captured == "attention" or not run.model.moe else "attention"
            remedies.insert(0, f"--cuda-graphs {more}")
        notes.append(
            f"The host launches kernels more slowly than the GPU runs them: it waits "
            f"{percent(step.host / step.total)} of the step. Remedies: {', '.join(remedies)}."
        )
    if captured != "none":
        notes.append(
            f"CUDA graphs ({captured}): their static inputs and private pools are not in the "
            "memory figures."
        )
    return notes


def _time_notes(run: Run) -> list[str]:
    """What of the run's training the predicted time leaves out."""
    training, notes = run.training, []
    if training.offload in ("optimizer", "weights"):
        notes.append(
            "Offloaded states: the predicted step has their transfers over the host's link, not "
            "the host's own arithmetic."
        )
    if training.loss == "chunked":
        notes.append("A chunked loss moves the same bytes: it does not change the time.")
    if training.lora_rank:
        notes.append(
            "Adapters alone are trained: MFU counts a whole backward by convention; HFU and the "
            "predicted step count no gradients of frozen weights; the step has the adapters' own "
            "products, and making a quantised base whole again."
        )
    elif training.tunes:
        notes.append(
            "Some weights are frozen: MFU counts a whole backward by convention; HFU and the "
            "predicted step count no gradients of them, and no backward where none passes."
        )
    if OBJECTIVES[training.objective].plain_forwards or training.reference_runs:
        notes.append(
            "Forward passes without gradients (a reference's, mismatched pairs) are in the "
            "predicted step; MFU and HFU count the trained model's own passes."
        )
    own = run.framework.recipe
    if training.recipe not in ("auto", own):
        notes.append(
            f"Recipe {training.recipe} sums weight gradients otherwise than {own}, "
            f"{run.framework}'s own: what each micro-batch moves for them is in the time."
        )
    return notes
