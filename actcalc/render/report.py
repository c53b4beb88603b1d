"""A report as one page: the answer in a sentence, inputs, tables, charts, assumptions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

from actcalc.answers.memory import MemoryReport
from actcalc.answers.report import Assumption, Report
from actcalc.render.charts.chart import Chart
from actcalc.render.charts.compare import layer_chart, timeline_chart
from actcalc.render.charts.memory import stages_chart, step_chart
from actcalc.render.charts.plan import frontier_chart
from actcalc.render.compare import compare_sheets, run_lines
from actcalc.render.memory import memory_sheets
from actcalc.render.page import page, pictures, section, table, text
from actcalc.render.plan import plan_sheets
from actcalc.render.room import room
from actcalc.render.sheet import Column, Row, Sheet
from actcalc.render.training import training_lines
from actcalc.render.units import count, digits, size


def report_page(report: Report, command: str, units: str) -> str:
    """The whole page; ``command`` is the command line that made it."""
    memory = report.memory
    parts = [
        f"<main>\n<h1>{text(memory.title)}: memory and time of training</h1>\n",
        f'<p class="answer">{text(sentence(report, units))}</p>\n',
        _contents(report),
        _section("inputs", "Inputs", *_inputs(memory)),
        _section("memory", "Memory of one GPU", *_memory(report, units)),
        _section("policies", "Recompute policies side by side", *_policies(report, units)),
        _section("plan", "The cheapest plan that fits", *_plan(report, units)),
        _section("assumptions", "Assumptions and their sources", *_assumptions(report)),
        _section(
            "command",
            "The command",
            f"<pre><code>{text(command)}</code></pre>\n"
            '<p class="soft">The same figures for machines: the commands compare, memory and plan '
            "with --json.</p>\n",
        ),
        "</main>\n",
    ]
    return page(f"{memory.title}: memory and time of training", "".join(parts))


def sentence(report: Report, units: str) -> str:
    """The answer in one sentence: whether it fits, under which policy, how long a step takes."""
    memory = report.memory
    top = memory.stages[memory.peak_stage]
    need = size(top.total_bytes, units)
    how = f"with the policy {report.policy}"
    if memory.device is None:
        return (
            f"{how.capitalize()} one GPU needs {need} in its allocator. {report.comparison.advice}"
        )
    usable = room(memory.device, memory.headroom_ratio, units)
    where = f"of {usable} on {memory.device['title']}"
    if not memory.fits:
        least = " even" if report.chosen else ""
        return f"It does not fit:{least} {how} one GPU needs {need} {where}.{_remedy(report)}"
    figure = next(f for f in report.comparison.policies if f.policy == report.policy)
    time = "" if figure.step_seconds is None else (
        f"; a step takes {digits(figure.step_seconds)} s, predicted"
    )  # fmt: skip
    return f"It fits: {how} one GPU needs {need} {where}{time}."


def _remedy(report: Report) -> str:
    """What the planner finds where no named policy fits."""
    plan = report.plan
    if plan is None or report.comparison.device is None:
        return ""
    if plan.feasible:
        return " A plan of single ops does fit, see below."
    if plan.changes:
        return f" {plan.changes[0].change} would bring it lowest, see below."
    return ""


def _contents(report: Report) -> str:
    names = {
        "inputs": "Inputs",
        "memory": "Memory",
        "policies": "Policies",
        "plan": "Plan",
        "assumptions": "Assumptions",
        "command": "Command",
    }
    links = " · ".join(
        f'<a href="#{name}">{title}</a>'
        for name, title in names.items()
        if name != "plan" or report.plan or report.unplanned
    )
    return f'<nav aria-label="On this page">{links}</nav>\n'


def _section(name: str, title: str, *parts: str) -> str:
    body = "".join(parts)
    return f'<section id="{name}">\n<h2>{text(title)}</h2>\n{body}</section>\n' if body else ""


_LEFT_OUT = ("name",)


def _inputs(memory: MemoryReport) -> Iterator[str]:
    """The run in a few lines, and every field of it on demand."""
    first, second, *_ = run_lines(memory.model, memory.layout, memory.workload, memory.framework)
    states = training_lines(memory.training, memory.recipe, memory.layout, memory.workload)
    rows = {
        "model": f"{memory.model['name']}: {count(memory.parameters)} parameters, {first}",
        "work and layout": second,
        "training": "; ".join(states),
        "policy": memory.policy,
        "device": memory.device["title"] if memory.device else "none given: no times, no limit",
    }
    short = (Column("key", "of", align="left"), Column("value", "value", align="left", wrap=True))
    yield table(Sheet(title="inputs", columns=short, rows=tuple(map(Row, rows.items()))))
    every = _fields(memory)
    yield f"<details>\n<summary>every field: {len(every.rows)}</summary>\n{table(every)}"
    yield "</details>\n"


def _fields(memory: MemoryReport) -> Sheet:
    """Every field of model, layout, workload and training that says something."""
    parts: Mapping[str, Mapping[str, Any]] = {
        "model": memory.model,
        "layout": memory.layout,
        "workload": memory.workload,
        "training": memory.training,
    }
    rows = [
        Row((part, key.replace("_", " "), _shown(value)))
        for part, fields in parts.items()
        for key, value in fields.items()
        if key not in _LEFT_OUT and value not in (None, "", [], (), {})
    ]
    columns = (
        Column("part", "of", align="left"),
        Column("key", "field", align="left"),
        Column("value", "value", align="left", wrap=True),
    )
    return Sheet(title="every field", columns=columns, rows=tuple(rows))


def _shown(value: Any) -> str:
    if value is True:
        return "yes"
    if value is False:
        return "no"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(each)}" for key, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    return f"{value:,}" if isinstance(value, int) and value >= 10000 else str(value)


def _memory(report: Report, units: str) -> Iterator[str]:
    first, *others = memory_sheets(report.memory, units)
    yield section(replace(first, above=()), heading=False)
    yield pictures(_charts(lambda: stages_chart(report.memory, units),
                           lambda: step_chart(report.step, units)), level=3)  # fmt: skip
    yield from (section(sheet, level=3) for sheet in others)


def _policies(report: Report, units: str) -> Iterator[str]:
    first, *others = compare_sheets(report.comparison, units)
    yield section(replace(first, above=()), heading=False)
    yield from (section(sheet, level=3) for sheet in others if sheet.visible)
    yield pictures(_charts(lambda: layer_chart(report.picture, units),
                           lambda: timeline_chart(report.picture)), level=3)  # fmt: skip


def _plan(report: Report, units: str) -> Iterator[str]:
    if report.plan is None:
        if report.unplanned:
            yield f'<p class="note">{text(report.unplanned)}.</p>\n'
        return
    plan = report.plan
    shown = [sheet for sheet in plan_sheets(plan, units) if sheet.visible]
    for at, sheet in enumerate(shown):
        yield section(sheet, heading=at > 0, level=3)
    if plan.frontier:
        yield pictures(_charts(lambda: frontier_chart(plan, units)), level=3)


def _charts(*makers: Callable[[], Chart]) -> list[Chart]:
    return [make() for make in makers]


def _assumptions(report: Report) -> Iterator[str]:
    notes = dict.fromkeys((*report.memory.notes, *report.comparison.notes))
    yield from (f'<p class="note">{text(note)}</p>\n' for note in notes)
    for of, same in groupby(report.assumptions, key=lambda one: one.of):
        rows = list(same)
        yield (
            f"<details>\n<summary>{text(of)}: {len(rows)} values, each with its source</summary>\n"
            f"{table(_assumed(of, rows))}</details>\n"
        )


def _assumed(of: str, rows: Iterable[Assumption]) -> Sheet:
    columns = (
        Column("key", "value of", align="left", wrap=True),
        Column("value", "value", align="left", wrap=True),
        Column("source", "source", align="left", wrap=True),
    )
    return Sheet(
        title=of,
        columns=columns,
        rows=tuple(Row((one.key, _number(one.value), one.source)) for one in rows),
    )


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else _shown(value)
