"""What the browser's page asks: a question as JSON, answered as JSON by the commands' own answers.

Runs in Pyodide with the standard library alone: neither Typer nor YAML nor NumPy is loaded (a test
holds it). A question's flags have the command line's names; what each answer's command would be is
part of it, and its JSON is what that command prints.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

from actcalc import __version__
from actcalc.answers.compare import compare_run
from actcalc.answers.memory import memory_run
from actcalc.errors import SpecError
from actcalc.io import presets
from actcalc.io.runs import resolve
from actcalc.io.sources import source
from actcalc.render.charts.chart import Chart
from actcalc.render.formats import FORMATS, Parts
from actcalc.render.sheet import Sheet
from actcalc.run.staged import StagedRun
from actcalc.specs.layout import Layout
from actcalc.specs.objectives import OBJECTIVES
from actcalc.specs.optimizers import OPTIMIZERS
from actcalc.specs.recipes import CHOOSABLE
from actcalc.specs.recompute import ALIASES, MODULES
from actcalc.specs.run import Run
from actcalc.specs.schedules import SCHEDULES
from actcalc.specs.training import Loss, Training
from actcalc.specs.workload import Attention, Precision, Workload

_SECTIONS = {"layout": Layout, "workload": Workload, "training": Training}
FLAGS: Mapping[str, str] = {
    "layers": "model",
    **dict.fromkeys(
        ("tp", "sp", "pp", "vpp", "schedule", "cp", "ep", "etp", "dp", "zero"), "layout"
    ),
    **dict.fromkeys(("seq", "micro_batch", "global_batch", "precision", "attention"), "workload"),
    **dict.fromkeys(("optimizer", "recipe", "loss"), "training"),
    **dict.fromkeys(("lora_rank", "lora_targets", "base_bits", "objective"), "training"),
    **dict.fromkeys(("framework", "device", "policy"), "run"),
}
"""What the page asks for, by where it belongs."""


def answered(question: str) -> str:
    """The answer to a question, or its ``error`` and ``hint``; never raises for bad input.

    A question is ``{"of": "memory" or "compare", "model": NAME or null, "config": TEXT of a
    config.json or null, "flags": {...}, "units": "GB", "width": PIXELS of charts}``.
    """
    try:
        return json.dumps(_answer(json.loads(question)), ensure_ascii=False)
    except SpecError as error:
        return json.dumps({"error": str(error), "hint": error.hint}, ensure_ascii=False)
    except (TypeError, ValueError, ArithmeticError, LookupError) as error:
        said = f"{type(error).__name__}: {error}"
        return json.dumps({"error": said, "hint": "the command line says more of such a value"})


def choices() -> str:
    """What the page offers, as JSON: presets, devices, profiles, words of flags."""
    words = {
        "framework": presets.names("frameworks"),
        "attention": get_args(Attention),
        "precision": get_args(Precision),
        "optimizer": tuple(OPTIMIZERS),
        "recipe": CHOOSABLE,
        "loss": get_args(Loss)[1:],
        "objective": tuple(OBJECTIVES),
        "schedule": tuple(SCHEDULES),
        "zero": (0, 1, 2, 3),
        "base_bits": (4, 8),
        "policy": ("none", *ALIASES, *MODULES, "full", "full-sharded", "sqrt", "op"),
    }
    return json.dumps(
        {
            "version": __version__,
            "models": presets.names("models"),
            "devices": presets.names("devices"),
            "words": words,
        }
    )


def _answer(question: Mapping[str, Any]) -> dict[str, Any]:
    flags = {key: value for key, value in question["flags"].items() if value not in (None, "")}
    units, width = question.get("units", "GB"), int(question.get("width", 720))
    name = _named(question)
    staged = _staged(name, question.get("config"), json.dumps(flags, sort_keys=True))
    if question["of"] == "memory":
        return {**_memory(name, staged, flags, units, width), "emitted": _emitted(staged.asked)}
    return _compare(name, staged, flags, units, width)


@lru_cache(maxsize=2)
def _staged(name: str, config: str | None, flags: str) -> StagedRun:
    """The run that is asked about, laid out once for both answers (``config`` is in the file)."""
    return StagedRun(_run(name, json.loads(flags)))


def _named(question: Mapping[str, Any]) -> str:
    """The preset asked for, or the file that a config.json was written to."""
    text = question.get("config")
    if not text:
        return str(question["model"])
    path = Path("model") / "config.json"  # the folder's name is the model's
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


def _run(name: str, flags: Mapping[str, Any]) -> Run:
    parts: dict[str, dict[str, Any]] = {"model": {}, "layout": {}, "workload": {}, "training": {}}
    for key, value in flags.items():
        if key not in FLAGS:
            raise SpecError(f"the page has no {key!r}", "use the command line")
        if FLAGS[key] in parts:
            parts[FLAGS[key]][key] = value
    policy = flags.get("policy")
    # Types are those of presets and of the page's own fields, or checked by the reader of
    # config.json: the specs' own checks are enough, and Pydantic, which is no Python, stays away.
    return resolve(
        replace(source(name), vetted=True),
        model=parts["model"],
        layout=parts["layout"],
        workload=parts["workload"],
        training=parts["training"],
        framework=flags.get("framework"),
        device=flags.get("device"),
        policies=(policy,) if policy else (),
    )


def _command(words: Sequence[str], flags: Mapping[str, Any], *, own: Sequence[str] = ()) -> str:
    """A command line; what the command has no flag for (outside ``own``) is set as a field."""
    parts = ["actcalc", *words]
    for key, value in flags.items():
        if FLAGS[key] == "training" and key not in own:
            parts += ["--set", f"{key}={value}"]
        elif value is True or value is False:
            parts.append(f"--{'' if value else 'no-'}{key.replace('_', '-')}")
        else:
            parts += [f"--{key.replace('_', '-')}", str(value)]
    return shlex.join(parts)


def _memory(
    name: str, staged: StagedRun, flags: Mapping[str, Any], units: str, width: int
) -> dict[str, Any]:
    from actcalc.answers.step_memory import step_memory
    from actcalc.render.charts.memory import stages_chart, step_chart
    from actcalc.render.memory import memory_sheets

    result = memory_run(staged, reserved=True)
    return _told(
        "memory",
        _command(("memory", name), flags, own=tuple(FLAGS)),
        Parts(lambda: memory_sheets(result, units), result.document, {}),
        (lambda: stages_chart(result, units), lambda: step_chart(step_memory(staged), units)),
        width,
        verdict=None if result.fits is None else "fits" if result.fits else "does not fit",
    )


def _compare(
    name: str, staged: StagedRun, flags: Mapping[str, Any], units: str, width: int
) -> dict[str, Any]:
    """Policies side by side; in time too, where there is a device."""
    from actcalc.answers.layer_picture import layer_picture
    from actcalc.render.charts.compare import layer_chart, timeline_chart
    from actcalc.render.compare import compare_sheets

    staged = staged.naming()
    result = compare_run(staged)
    names = tuple(figure.policy for figure in result.policies)
    picture = layer_picture(staged, names)
    return _told(
        "compare",
        _command((name,), {key: value for key, value in flags.items() if key != "policy"}),
        Parts(lambda: compare_sheets(result, units), result.document, {}),
        (lambda: layer_chart(picture, units), lambda: timeline_chart(picture)),
        width,
    )


def _told(
    kind: str,
    command: str,
    parts: Parts,
    charts: Sequence[Callable[[], Chart]],
    width: int,
    **more: Any,
) -> dict[str, Any]:
    drawn = [make() for make in charts]
    return {
        "kind": kind,
        "command": command,
        "json": FORMATS["json"].write(parts),
        "sheets": [_sheet(sheet) for sheet in parts.sheets() if sheet.visible],
        "charts": [
            {
                "name": chart.name,
                "title": chart.title,
                "about": chart.about,
                "lines": chart.lines,
                "spec": chart.spec(width, titled=False),
            }
            for chart in drawn
        ],
        **more,
    }


def _sheet(sheet: Sheet) -> dict[str, Any]:
    return {
        "title": sheet.title,
        "above": sheet.above,
        "below": sheet.below,
        "notes": sheet.notes,
        "columns": [
            {"title": column.words, "align": column.align} for column in sheet.shown_columns
        ],
        "rows": [{"cells": sheet.shown(row), "style": row.style} for row in sheet.rows],
    }


_TARGETS = ("megatron", "torchtitan", "deepspeed", "transformers", "fsdp")
"""Targets that are written and read back without Pydantic."""


def _emitted(run: Run) -> dict[str, str]:
    """The run as flags or a file of each framework that can say it."""
    from actcalc.io.writers import written

    found = {}
    for target in _TARGETS:
        try:
            found[target] = written(run, target, vetted=True)
        except SpecError:
            continue
    return found
