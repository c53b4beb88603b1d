"""``actcalc plan MODEL``: the cheapest recompute plan within a memory budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actcalc.cli.choices import argument, examples, option, targets
from actcalc.cli.choices import models as known_models
from actcalc.cli.options import OutputOptions, RunOptions, flag_of, refuse_given, with_options
from actcalc.cli.output import check_units, chosen_format, draws, emit, emit_text
from actcalc.cli.training import PlanTrainingOptions
from actcalc.errors import SpecError, say
from actcalc.io.sources import measured_layer
from actcalc.solve.clock import limited

if TYPE_CHECKING:
    from actcalc.answers.plan import RunPlan
    from actcalc.answers.plan_changes import PlanStates
    from actcalc.measure.layer import MeasuredLayer
    from actcalc.render.charts.chart import Chart, Charts
    from actcalc.render.sheet import Sheet
    from actcalc.specs.run import Run

app = typer.Typer(add_completion=False, rich_markup_mode=None)

WHOLE = ("fsdp", "axolotl", "yaml")
"""Targets of ``answers.planned_run``, which help must not load."""
SECONDS = 5.0
"""How long plans are looked for where --time-limit does not say."""
MODELS = ("stored", "stored+working", "timeline")
SEMANTICS = ("minimal", "module")
METHODS = ("optimal", "sqrt", "greedy")
_PROBLEM_MARKS = {"layer_types", "stack", "budget_bytes", "peak_model"}
"""Keys of a planning problem, of which any one tells it from a model's description."""


@dataclass(frozen=True, eq=False, repr=False)
class PlanOptions:
    """How a plan is made, and what is printed of it."""

    memory: Annotated[
        str | None,
        option(
            "--memory",
            help="Budget of one GPU: 70GiB, 24G (default: the device's).",
            metavar="SIZE",
        ),
    ] = None
    memory_model: Annotated[
        str | None,
        option(
            "--memory-model",
            help="timeline (default: exact), stored or stored+working.",
            words=lambda: MODELS,
        ),
    ] = None
    activations_only: Annotated[
        bool,
        option("--activations-only", help="The budget is for the layers' activations alone."),
    ] = False
    semantics: Annotated[
        str | None,
        option(
            "--semantics",
            help="minimal (op by op, default) or module (whole modules).",
            words=lambda: SEMANTICS,
        ),
    ] = None
    method: Annotated[
        str, option("--method", help="optimal, sqrt or greedy.", words=lambda: METHODS)
    ] = "optimal"
    frontier: Annotated[
        bool, option("--frontier", help="Memory against cost, over the whole range.")
    ] = False
    points: Annotated[
        int | None, option("--points", help="Points of the frontier (default: 20).")
    ] = None
    same_on_all_stages: Annotated[
        bool, option("--same-on-all-stages", help="One plan for all pipeline stages.")
    ] = False
    offload: Annotated[
        bool,
        option(
            "--offload",
            help="Kept tensors may also go to host memory (needs --device); for weights and "
            "optimizer states see --offload-states.",
        ),
    ] = False
    time_limit: Annotated[
        float | None,
        option(
            "--time-limit",
            help="Seconds after which the best plan found is given, with its proven bound "
            "(default 5).",
            metavar="SECONDS",
        ),
    ] = None
    emit: Annotated[
        str | None,
        option(
            "--emit",
            help="Ready to paste: megatron, torch, torchtitan, deepspeed, transformers; the whole "
            "run: fsdp, axolotl, yaml.",
            words=targets,
        ),
    ] = None

    def given(self) -> list[str]:
        """Flags that were given, but --method and --time-limit."""
        return [
            f"--{field.name.replace('_', '-')}"
            for field in fields(self)
            if field.name not in ("method", "time_limit")
            and getattr(self, field.name) not in (None, False)
        ]

    def check(self, headroom: str | None = None) -> None:
        """Refuse values that are not known, and a budget beside a share of the device's memory."""
        if self.memory is not None and headroom is not None:
            raise SpecError(
                f"--memory {self.memory} is a budget, taken as it is: --headroom {headroom} is a "
                "share of the device's memory",
                "drop one of them",
            )
        limit = self.time_limit
        if limit is not None and not 0.1 <= limit <= 3600:
            raise SpecError(f"--time-limit {limit:g}", "give 0.1 to 3600 seconds")
        for flag, value, known in (
            ("--memory-model", self.memory_model, MODELS),
            ("--semantics", self.semantics, SEMANTICS),
            ("--method", self.method, METHODS),
        ):
            if value is not None and value not in known:
                raise SpecError(f"{flag} {value!r} is not known", "use one of " + ", ".join(known))

    @property
    def seconds(self) -> float:
        """How long plans are looked for."""
        return SECONDS if self.time_limit is None else self.time_limit

    def asked(self) -> dict[str, Any]:
        """What every plan is asked for; ``SpecError`` for points of no frontier."""
        if self.points is not None and not self.frontier:
            raise SpecError(f"--points {self.points} without --frontier", "add --frontier")
        points = 20 if self.points is None else self.points
        return {
            "memory_model": self.memory_model,
            "semantics": self.semantics or "minimal",
            "method": self.method,
            "points": points if self.frontier else 0,
            "emit": self.emit,
        }


@app.command(
    epilog=examples(
        "plan gpt3-175b --tp 8 --sp --memory 20GB --activations-only",
        "plan llama-3-8b --device h100-80gb --emit torch",
    )
)
@with_options(RunOptions, PlanTrainingOptions, PlanOptions, OutputOptions)
def plan(
    models: Annotated[
        list[str],
        argument(
            metavar="MODEL...",
            help="Preset, hub id, run file, config.json, launch files of one run, a measured "
            "layer, or a planning problem (JSON).",
            words=known_models,
            files=True,
        ),
    ],
    options: RunOptions,
    trained: PlanTrainingOptions,
    how: PlanOptions,
    output: OutputOptions,
) -> int:
    """The cheapest recompute plan that fits a memory budget, with a proof that none is cheaper.

    Chooses for every layer which ops to re-run and which tensors to keep, per pipeline stage.
    """
    check_units(output.units)
    how.check(options.headroom)
    if how.emit in WHOLE:
        return _emit_run(models, options, trained, how, output)
    pasted = _pasted(how.emit, how.frontier, output)
    if not pasted and draws(output):
        how = replace(how, frontier=True)  # what the chart is of
    model = models[0] if len(models) == 1 else ""
    data = problem_in(model)
    if data is not None:
        given = [*how.given(), *trained.given()]
        return _plan_problem(model, data, how, given, options, output)
    layer = measured_layer(model)
    states: PlanStates | None = None
    runs: tuple[Run, ...] = ()
    if layer is not None:
        result = layer_answer(layer, options, trained, how)
    else:
        from actcalc.answers.plan_changes import states_of

        runs = options.runs(options.origin(models), trained.training())
        result = answer(runs, trained, how)
        states = None if how.activations_only or pasted else states_of(runs[0])
    if result.emitted is not None and pasted:
        emit_text(result.emitted.text, output)
        return 0 if result.emitted.feasible else 1
    from actcalc.render.plan import plan_sheets

    def sheets() -> list[Sheet]:
        advice = _advice(runs[0], result, output) if runs else ()
        return plan_sheets(result, output.units, states, advice)

    emit(
        sheets,
        result.document,
        output,
        _charts(result, output),
    )
    return 0 if result.feasible else 1


def _advice(run: Run, result: RunPlan, output: OutputOptions) -> tuple[str, ...]:
    """What to change where no plan of the whole GPU fits, in a few lines."""
    if result.feasible or result.activations_only:
        return ()
    from actcalc.answers.plan_changes import FLAGS
    from actcalc.cli.advise import first_lines

    return first_lines(run, output, budget=result.memory_bytes, names=FLAGS)


def _charts(result: RunPlan, output: OutputOptions) -> Charts:
    """Memory against cost, with the named policies."""

    def frontier() -> Chart:
        from actcalc.render.charts.plan import frontier_chart

        return frontier_chart(result, output.units)

    return {"frontier": frontier} if result.frontier else {}


def _emit_run(
    models: Sequence[str],
    options: RunOptions,
    trained: PlanTrainingOptions,
    how: PlanOptions,
    output: OutputOptions,
) -> int:
    """The run under the cheapest policy that fits, as a framework's file."""
    from actcalc.answers.planned_run import planned_run
    from actcalc.io.writers import written

    idle = [flag for flag in how.given() if flag not in ("--memory", "--emit")]
    idle += [f"--{name}" for name in ("json", "format", "plot") if getattr(output, name)]
    if idle:
        what = idle[0]
        raise SpecError(
            f"--emit {how.emit} writes a run under one policy: {what} has no effect on it",
            f"drop {what}",
        )
    target = str(how.emit)
    run = options.run(options.origin(models), options.frameworks()[0], trained.training())
    with limited(how.seconds):
        chosen = planned_run(run, how.memory, target)
    if chosen is None:
        say(f"no policy that {target} can say fits; plan without --emit says what is missing")
        return 1
    emit_text(written(chosen, target), output)
    return 0


def layer_answer(
    layer: MeasuredLayer, options: RunOptions, trained: PlanTrainingOptions, how: PlanOptions
) -> RunPlan:
    """The plan of a measured layer."""
    from actcalc.answers.measured_plan import plan_layer_command

    refuse_for_layer(options, trained, how.same_on_all_stages, how.offload)
    asked = {**how.asked(), "memory_model": how.memory_model or "stored+working"}
    with limited(how.seconds):
        return plan_layer_command(layer, how.memory, layers=options.layers, **asked)


def answer(runs: Sequence[Run], trained: PlanTrainingOptions, how: PlanOptions) -> RunPlan:
    """The plan of a run, with what to change where none fits."""
    from actcalc.answers.plan import plan_command

    if how.activations_only:
        refuse_idle_training(trained)
    with limited(how.seconds):
        return plan_command(
            runs,
            how.memory,
            activations_only=how.activations_only,
            same_on_all_stages=how.same_on_all_stages,
            offload=how.offload,
            **how.asked(),
        )


def _pasted(target: str | None, frontier: bool, output: OutputOptions) -> bool:
    """Whether the answer is text to paste; ``SpecError`` for a format that text cannot have.

    Without --json or --format a file takes the text whatever its ending, unless that is .json and
    the text is none: then it takes the whole result.
    """
    if target is None:
        chosen_format(output)
        return False
    from actcalc.plan.emit.targets import check_target

    check_target(target)
    if output.plot is not None:
        raise SpecError(
            f"--emit {target} is text to paste, --plot {output.plot} a picture",
            "drop one of them",
        )
    if output.format is None and not output.json and output.output is not None:
        ending = Path(output.output).suffix.lower()
        form = "json" if ending == ".json" else "table"
    else:
        form = chosen_format(output)
    if form not in ("table", "json"):
        raise SpecError(
            f"--emit {target} is text to paste, --format {form} a table",
            "drop one of them, or take --json, which has both",
        )
    if form == "table" and frontier:
        raise SpecError(
            f"--emit {target} prints text to paste, --frontier a table",
            "drop one of them, or add --json, which has both",
        )
    return form == "table"


def refuse_idle_training(trained: PlanTrainingOptions) -> None:
    """Refuse what changes only the rest of the GPU where activations alone are planned.

    Adapters change what the layers keep, too.
    """
    inside = {flag_of(name) for name in trained.changes_layers()}
    for flag in trained.given():
        if flag in inside:
            continue
        raise SpecError(
            f"{flag} changes what a GPU holds beside its layers' activations, which "
            "--activations-only leaves out",
            f"drop {flag}, or drop --activations-only",
        )


def refuse_for_layer(
    options: RunOptions, trained: PlanTrainingOptions, same_on_all_stages: bool, offload: bool
) -> None:
    """Refuse what a measured layer cannot heed: it has sizes of its own, no times, one stage."""
    if options.device is not None:
        raise SpecError(
            f"--device {options.device}: a measured layer has FLOPs, no times",
            "give --memory alone",
        )
    if offload:
        raise SpecError("--offload: a measured layer has no times to hide copies", "drop --offload")
    if same_on_all_stages:
        raise SpecError(
            "--same-on-all-stages: measured layers are one stage", "drop --same-on-all-stages"
        )
    for flag in trained.given():
        raise SpecError(
            f"{flag}: of a measured layer only activations are known, no states", f"drop {flag}"
        )
    refuse_given(options, "a measured layer", keep=("layers",))


def problem_in(model: str) -> Mapping[str, Any] | None:
    """The planning problem in the file ``model``, or None if it is something else.

    Raises ``SpecError`` for one that is malformed.
    """
    from actcalc.io.yamlfile import is_there, largest, parse_json, read_text

    path = Path(model)
    if path.suffix != ".json" or not is_there(model) or path.stat().st_size > largest(path):
        return None
    text = read_text(path)
    marked = any(f'"{mark}"' in text for mark in _PROBLEM_MARKS)
    if not marked and '"instances"' not in text:
        return None
    data = parse_json(text, model)
    if not isinstance(data, dict) or "model_type" in data:
        return None
    if _PROBLEM_MARKS & data.keys():
        return data
    if "instances" in data:
        raise SpecError(
            f"{model} holds several planning problems", "write one of its instances to a file"
        )
    return None


def _plan_problem(
    model: str,
    data: Mapping[str, Any],
    how: PlanOptions,
    given: Sequence[str],
    options: RunOptions,
    output: OutputOptions,
) -> int:
    from actcalc.answers.plan_problem import plan_problem
    from actcalc.render.plan_problem import problem_sheets
    from actcalc.solve import parse_problem

    idle = [*given]
    idle += [flag_of(name) for name, value in vars(options).items() if value is not None]
    if idle:
        raise SpecError(
            f"{model} is a planning problem of its own: {', '.join(idle)} would have no effect",
            "its budget_bytes, peak_model and inflight are fields of the file",
        )
    with limited(how.seconds):
        result = plan_problem(parse_problem(data), how.method)
    emit(lambda: problem_sheets(result, output.units), result.document, output)
    return 0 if result.feasible else 1
