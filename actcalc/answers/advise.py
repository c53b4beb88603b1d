"""What to change where a run does not fit, cheapest first; where it does, what spare memory buys.

One document for who plans capacity: the run, whether it fits, its time and price, and the plan. Its
schema says what every key means: keys are added, never renamed or given another meaning, without a
new number in ``schema``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from actcalc.answers.advise_planned import PlannedFigure, planned_figure
from actcalc.answers.command_words import replaced, run_words
from actcalc.answers.header import RunAnswer, header, run_notes
from actcalc.answers.judged import judged
from actcalc.answers.judged_memory import MemoryRange, memory_range
from actcalc.answers.mfu import training_run
from actcalc.answers.mfu_figures import Training
from actcalc.cost.rates import default_note, rates_of
from actcalc.cost.rounding import growth
from actcalc.errors import SpecError
from actcalc.io.writers.changed import changed_words
from actcalc.memory.figures import StageFigure
from actcalc.memory.replay import replayed
from actcalc.memory.stage import memory_of
from actcalc.plan.advice import ALIKE, NOTHING, Advice, Combination, Single
from actcalc.plan.changes import Change, difference, words
from actcalc.plan.remedies import Remedy
from actcalc.plan.spare import Bought, spare
from actcalc.plan.trials import Trials
from actcalc.run.staged import StagedRun
from actcalc.specs.run import Run


@dataclass(frozen=True, kw_only=True)
class RemedyFigure:
    """One remedy alone."""

    name: str
    """What it is called."""
    change: str
    """The flags, or the setting of the environment, that make it."""
    about: str
    """What it does."""
    freed_bytes: int | None
    """Bytes that the fullest stage needs less; of a remedy that only changes what the allocator
    cannot use, bytes that it takes less from the device (null where no replay says it)."""
    total_bytes: int | None
    """What the fullest stage then needs in all; null where only the allocator's waste changes."""
    slowdown_ratio: float | None
    """Time of as many tokens on as many GPUs over that of the run as it is, less one; below zero it
    is faster. Null where no time can be derived."""
    slowdown_at_least: bool
    """More than that: transfers to host memory are timed, the host's own work is not."""
    enough: bool
    """Whether the run fits with it alone."""
    keeps: str
    """training: the run trains as before; adapters: it trains adapters alone; host: it takes host
    memory; data: it sees shorter sequences."""
    source: str
    """Where it is from."""


@dataclass(frozen=True, kw_only=True)
class CombinationFigure:
    """Remedies together, with which the run fits."""

    changes: tuple[str, ...]
    """The flags of each remedy."""
    command: str
    """The command that shows the run with them."""
    keeps: str
    """What they leave as it is, as of a remedy."""
    gpus: int
    """GPUs that the run then takes."""
    peak_bytes: int
    """The largest peak of any stage in the framework's allocator, as ``memory`` says it."""
    total_bytes: int
    """What the fullest stage needs in all: it fits."""
    slowdown_ratio: float | None
    """As of a remedy."""
    slowdown_at_least: bool
    """As of a remedy."""
    step_seconds: float | None
    """One step of it; null where no time can be derived."""
    launch_file: str | None
    """The framework's file that says it (``--emit``); null where none can."""
    launch_changes: tuple[str, ...]
    """What to change in that file: flags or keys; one that is dropped begins with "- "."""
    layout: dict[str, Any]
    """The layout's fields."""
    workload: dict[str, Any]
    """The workload's fields."""
    training: dict[str, Any]
    """The training's fields."""
    policy: str
    """The recompute policy."""


@dataclass(frozen=True, kw_only=True)
class SpareFigure:
    """One thing that the memory left free would buy."""

    name: str
    """What it is."""
    change: str
    """The flags that make it."""
    total_bytes: int
    """What the fullest stage then needs in all."""
    gain_ratio: float | None
    """Tokens a second over those of the run as it is, less one; null where no time is known."""


@dataclass(frozen=True, kw_only=True)
class TimeFigure:
    """One step, as the roofline predicts it."""

    step_seconds: float
    """One optimizer step."""
    low_seconds: float
    """The step, were it as much off as the fastest tenth of published runs of its kind."""
    high_seconds: float
    """The same of the slowest tenth."""
    judged_runs: int
    """Published runs of its kind that say so; 0 if none: the three are then equal."""
    tokens_per_second: float
    """Tokens per second, all GPUs."""
    tokens_per_second_per_gpu: float
    """Tokens per second of one GPU."""
    tokens_per_day: float
    """Tokens in 24 hours, all GPUs."""
    efficiency: dict[str, float]
    """The shares of the device's peaks it is computed with."""


@dataclass(frozen=True, kw_only=True)
class FirstAdvice:
    """What to change on a run that does not fit: what other answers say of it in a few lines."""

    framework: str
    """The framework profile, whose remedies they are."""
    gpus: int
    """GPUs that the run takes."""
    remedies: tuple[RemedyFigure, ...]
    """As of an advice."""
    combination: CombinationFigure | None
    """As of an advice."""
    alternatives: tuple[CombinationFigure, ...]
    """As of an advice."""
    more_gpus: CombinationFigure | None
    """As of an advice."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class AdviceReport(RunAnswer):
    """What to change, cheapest first."""

    schema_name: ClassVar[str] = "actcalc/advise/1"

    training: dict[str, Any]
    """Optimizer, number formats, offload, adapters."""
    policy: str
    """The recompute policy."""
    gpus: int
    """GPUs that the run takes."""
    fits: bool
    """Whether every stage fits the device with the headroom left free."""
    peak_bytes: int
    """The largest peak of any stage in the framework's allocator, as ``memory`` says it."""
    total_bytes: int
    """What the fullest stage needs in all, with what lies outside the allocator: has to fit."""
    device_bytes: int
    """Memory of the device that a process can use."""
    budget_bytes: int
    """The same less the headroom: what has to hold the total."""
    reserved_bytes: int | None
    """Of the fullest stage the most that PyTorch's allocator takes from the device; null where the
    requests are too many to replay."""
    reserved_expandable_bytes: int | None
    """The same with expandable segments."""
    memory_range: MemoryRange
    """What a GPU may need, by how far published peaks were from predicted ones."""
    peak_stage: int
    """The fullest stage."""
    peak_at: str
    """When it is fullest, in words."""
    remedies: tuple[RemedyFigure, ...]
    """What helps, each alone: what costs no time first, then by what it costs, then what takes host
    memory or other data."""
    combination: CombinationFigure | None
    """The cheapest that fits; null where the run fits, or nothing makes it."""
    alternatives: tuple[CombinationFigure, ...]
    """Others that fit where the first changes what is trained: with host memory, say."""
    planned: PlannedFigure | None
    """Recomputation planned layer by layer; null where no plan is faster than the combination."""
    more_gpus: CombinationFigure | None
    """As few GPUs as hold it trained as it is: the fewest times its replicas, or powers of two of
    tp and pp; null where that was not needed, or none do."""
    spare: tuple[SpareFigure, ...]
    """Where it fits: what the memory left free buys, each alone."""
    time: TimeFigure | None
    """One step as it is; null where no time can be derived."""
    training_run: Training | None
    """The whole training run as it is; null unless tokens were given."""
    notes: tuple[str, ...]
    """What is assumed, and choices made on the way."""


def advise_run(
    run: Run,
    *,
    given: Sequence[str] | None = None,
    efficiency: Mapping[str, float] | None = None,
    tokens: int | None = None,
    price_per_gpu_hour: float | None = None,
) -> AdviceReport:
    """What to change on ``run``, or what its spare memory buys.

    ``given`` are the words that name the run on a command line. Raises ``SpecError`` without a
    device, and where a whole run is to be timed or priced and cannot be.
    """
    if run.budget_bytes is None:
        raise SpecError("advice is about a device's memory, and there is none", "add --device")
    trials = Trials(run, efficiency)
    staged = trials.staged
    work = memory_of(staged)  # refuses what no remedy changes
    advice = Advice(trials, run.budget_bytes)
    figure = replayed(work, work.figure(advice.need.stage))
    line = list(given) if given is not None else run_words(run)
    first = _first(advice, line)
    time = _time(advice, efficiency)
    if tokens is not None and time is None:
        raise SpecError("--tokens need a step time, and none can be derived", "drop --tokens")
    if price_per_gpu_hour is not None and tokens is None:
        raise SpecError("--price-per-gpu-hour prices a training run", "add --tokens")
    step_tokens = staged.global_batch * run.workload.seq
    return AdviceReport(
        **header(staged),
        training=run.training.model_dump(),
        policy=staged.first_policy.name,
        gpus=run.layout.devices,
        fits=advice.fits,
        peak_bytes=advice.need.peak_bytes,
        total_bytes=advice.need.total_bytes,
        device_bytes=run.device.usable_bytes if run.device else 0,
        budget_bytes=advice.budget,
        reserved_bytes=figure.reserved_bytes,
        reserved_expandable_bytes=figure.reserved_expandable_bytes,
        memory_range=memory_range(figure),
        peak_stage=advice.need.stage,
        peak_at=figure.peak_at,
        remedies=tuple(_worth(advice, first.remedies, figure)),
        combination=first.combination,
        alternatives=first.alternatives,
        planned=planned_figure(advice, line, efficiency),
        more_gpus=first.more_gpus,
        spare=tuple(_bought(advice, one) for one in spare(advice)),
        time=time,
        training_run=None
        if time is None
        else training_run(
            tokens, step_tokens, time.step_seconds, run.layout.devices, price_per_gpu_hour
        ),
        notes=_notes(advice, first, efficiency),
    )


def first_advice(
    run: Run,
    budget: int,
    efficiency: Mapping[str, float] | None = None,
    names: Mapping[str, str] | None = None,
) -> FirstAdvice:
    """What to change so that every GPU of ``run`` needs at most ``budget`` bytes.

    ``names`` has flags that a command spells otherwise than ``memory``, by the field's path.
    """
    return _first(Advice(Trials(run, efficiency), budget), (), names)


def _first(
    advice: Advice, given: Sequence[str], names: Mapping[str, str] | None = None
) -> FirstAdvice:
    made = [_combined(advice, given, one, names) for one in advice.combinations]
    kept = bool(made) and made[0].keeps == "training"
    more = None if advice.fits or kept else advice.more_gpus
    return FirstAdvice(
        framework=str(advice.trials.run.framework),
        gpus=advice.trials.run.layout.devices,
        remedies=_remedies(advice),
        combination=made[0] if made else None,
        alternatives=tuple(made[1:]),
        more_gpus=None if more is None else _combined(advice, given, more, names),
    )


# --- remedies ---------------------------------------------------------------------------------


def _remedies(advice: Advice) -> tuple[RemedyFigure, ...]:
    singles = [_single(advice, one) for one in advice.singles]
    device = advice.trials.run.device
    cuda = device is not None and device.compute_capability is not None
    outside = [_outside(advice, one) for one in advice.remedies if one.environment and cuda]
    at = next((i for i, one in enumerate(singles) if _costs(one)), len(singles))
    return (*singles[:at], *outside, *singles[at:])


def _costs(figure: RemedyFigure) -> bool:
    return (figure.slowdown_ratio or 0.0) > ALIKE or figure.keeps in ("host", "data")


def _single(advice: Advice, one: Single) -> RemedyFigure:
    return RemedyFigure(
        name=one.remedy.name,
        change=_flags(advice, one.change),
        about=one.remedy.about,
        freed_bytes=advice.need.total_bytes - one.need.total_bytes,
        total_bytes=one.need.total_bytes,
        slowdown_ratio=_slower(advice, one.seconds),
        slowdown_at_least=one.remedy.keeps == "host",
        enough=one.need.total_bytes <= advice.budget,
        keeps=one.remedy.keeps,
        source=one.remedy.source,
    )


def _outside(advice: Advice, remedy: Remedy) -> RemedyFigure:
    """What changes no byte that is counted: enough where the run lacks the headroom alone."""
    device = advice.trials.run.device
    return RemedyFigure(
        name=remedy.name,
        change=remedy.environment,
        about=remedy.about,
        freed_bytes=None,
        total_bytes=None,
        slowdown_ratio=0.0 if advice.seconds is not None else None,
        slowdown_at_least=False,
        enough=device is not None and advice.need.total_bytes <= device.usable_bytes,
        keeps=remedy.keeps,
        source=remedy.source,
    )


def _worth(
    advice: Advice, remedies: Sequence[RemedyFigure], figure: StageFigure
) -> Iterator[RemedyFigure]:
    """The remedies; of one that only changes what the allocator cannot use, what its replay says,
    if it says that it helps."""
    most, least = figure.reserved_bytes, figure.reserved_expandable_bytes
    for one in remedies:
        if one.total_bytes is not None or most is None or least is None:
            yield one
            continue
        device = advice.trials.run.device
        room = device.usable_bytes if device else 0
        enough = least + figure.overhead_bytes <= room
        if most > least and (enough or most - least > NOTHING * most):
            yield replace(one, freed_bytes=most - least, enough=enough)


def _slower(advice: Advice, seconds: float | None) -> float | None:
    if advice.seconds is None or seconds is None:
        return None
    return growth(seconds, advice.seconds)


def _flags(advice: Advice, change: Change) -> str:
    """The flags of a change, replicas and batch that follow from it among them."""
    run = advice.trials.run
    return " ".join(words(difference(run, advice.trials.changed(change))))


# --- combinations -----------------------------------------------------------------------------


def _combined(
    advice: Advice, given: Sequence[str], one: Combination, names: Mapping[str, str] | None
) -> CombinationFigure:
    run = advice.trials.run
    other = advice.trials.changed(one.change)
    made = words(difference(run, other))
    staged = advice.trials.made(one.change)
    ratio = _slower(advice, one.seconds)
    try:
        file, launch = changed_words(run, other, run.framework.launch_files)
    except SpecError:
        file, launch = None, ()
    return CombinationFigure(
        changes=_parts(advice, one, names),
        command=" ".join(["actcalc", "memory", *replaced(given, made)]),
        keeps=one.keeps,
        gpus=other.layout.devices,
        peak_bytes=one.need.peak_bytes,
        total_bytes=one.need.total_bytes,
        slowdown_ratio=ratio,
        slowdown_at_least=one.keeps == "host",
        step_seconds=_step_seconds(advice, one, staged),
        launch_file=file,
        launch_changes=launch,
        layout=other.layout.model_dump(),
        workload=other.workload.model_dump(),
        training=other.training.model_dump(),
        policy=(other.policies or ("none",))[0],
    )


def _step_seconds(advice: Advice, one: Combination, staged: StagedRun | None) -> float | None:
    """Seconds of a step of the changed run itself, of its own tokens on its own GPUs."""
    if one.seconds is None or staged is None:
        return None
    return one.seconds / advice.trials.gpu_seconds_per_token(staged)


def _parts(advice: Advice, one: Combination, names: Mapping[str, str] | None) -> tuple[str, ...]:
    """The flags of each remedy; what follows from several stands with the last of them."""
    done: dict[str, Any] = {}
    found: list[str] = []
    run = advice.trials.run
    final = difference(run, advice.trials.changed(one.change))
    for part in one.parts:
        own = {path: final[path] for path in part if path in final and path not in done}
        done |= own
        found.append(" ".join(words(own, names)))
    rest = {path: value for path, value in final.items() if path not in done}
    if rest and found:
        found[-1] = " ".join([found[-1], *words(rest, names)])
    return tuple(text for text in found if text)


# --- the rest ---------------------------------------------------------------------------------


def _bought(advice: Advice, one: Bought) -> SpareFigure:
    return SpareFigure(
        name=one.about,
        change=_flags(advice, one.change),
        total_bytes=one.need.total_bytes,
        gain_ratio=one.gain,
    )


def _time(advice: Advice, efficiency: Mapping[str, float] | None) -> TimeFigure | None:
    run, staged, seconds = advice.trials.run, advice.trials.staged, advice.seconds
    if seconds is None or run.device is None:
        return None
    found = judged(run)
    rate = staged.global_batch * run.workload.seq / seconds
    shares = rates_of(run.device, run.workload.arithmetic, efficiency).shares
    return TimeFigure(
        step_seconds=seconds,
        low_seconds=seconds * found.low,
        high_seconds=seconds * found.high,
        judged_runs=found.runs,
        tokens_per_second=rate,
        tokens_per_second_per_gpu=rate / run.layout.devices,
        tokens_per_day=rate * 86400,
        efficiency={key: float(value) for key, value in vars(shares).items()},
    )


def _notes(
    advice: Advice, first: FirstAdvice, efficiency: Mapping[str, float] | None
) -> tuple[str, ...]:
    staged, run = advice.trials.staged, advice.trials.run
    notes = [*run_notes(staged), staged.microbatches_note]
    if advice.seconds is None:
        notes.append("No time can be derived for this run: remedies are in their usual order.")
    elif run.device:
        notes.append(default_note(run.device, efficiency))
    if len(run.policies) > 1:
        notes.append(f"The run is looked at under {run.policies[0]}, the first policy named.")
    best = first.combination
    if best is not None and best.launch_file is None and run.framework.launch_files:
        notes.append(f"No launch file of {run.framework} can say all of it: see the flags above.")
    return tuple(dict.fromkeys(note for note in notes if note))
