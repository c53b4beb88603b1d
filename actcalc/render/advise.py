"""Advice as sheets: a table of remedies and the cheapest combination, or what spare memory buys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from actcalc.answers.advise import AdviceReport, CombinationFigure, FirstAdvice, RemedyFigure
from actcalc.plan.advice import ALIKE
from actcalc.render.compare import run_lines
from actcalc.render.room import less
from actcalc.render.sheet import Column, Sheet, bytes_column, fits_column, rows_of
from actcalc.render.units import count, digits, percent, size

_TRAINED = {
    "adapters": "adapters alone are trained",
    "moved": "activations wait in host memory",
    "host": "states wait in host memory",
    "data": "sequences are shorter",
}
"""What a combination does not leave as it is, in a clause."""


def advise_sheets(result: AdviceReport, units: str) -> list[Sheet]:
    """The verdict and the combination first, then every remedy alone, then the run's own time."""
    answer, *told = verdict(result, units)
    above = (
        *run_lines(result.model, result.layout, result.workload, result.framework),
        f"policy {result.policy}  peak on stage {result.peak_stage}, {result.peak_at}"
        if result.layout["pp"] > 1
        else f"policy {result.policy}  peak {result.peak_at}",
    )
    sheets = [
        replace(
            _remedies(result, units, above), answer=answer, fits=result.fits, advice=tuple(told)
        )
    ]
    if result.spare:
        sheets.append(_spare(result, units))
    return sheets


def verdict(result: AdviceReport, units: str) -> tuple[str, ...]:
    """Whether it fits, and what to do about it: the lines that every command prints first."""
    usable = f"{size(result.budget_bytes, units)}"
    if result.headroom_ratio:
        usable += f" ({less(result.device_bytes, result.headroom_ratio, units)})"
    name, need = (result.device or {}).get("title"), size(result.total_bytes, units)
    said = f"{name}: a GPU needs {need} of {usable}."
    if result.fits:
        return (f"Fits {said}",)
    return (f"Does not fit {said}", *advice_lines(result, units))


def advice_lines(result: AdviceReport | FirstAdvice, units: str) -> tuple[str, ...]:
    """At most three lines on what to change: the cheapest that fits, what else does, what frees
    most."""
    lines: list[str] = []
    gpus = "1 GPU" if result.gpus == 1 else f"{result.gpus} GPUs"
    best = result.combination
    if best is None:
        lines.append(f"Nothing that {result.framework} offers makes it fit on {gpus}.")
    else:
        lines.append(f"Cheapest that fits: {_said(best, units)}.")
    others = [_said(one, units) for one in result.alternatives]
    if result.more_gpus is not None:
        more = result.more_gpus
        flags = " ".join(more.changes)
        others.append(f"on {more.gpus} GPUs {flags}: {size(more.total_bytes, units)} each")
    if others:
        lines.append(("Or " if best else "But ") + "; or ".join(others) + ".")
    alone = _alone(result, units)
    return (*lines, *([alone] if alone else []))


def _said(one: CombinationFigure, units: str) -> str:
    """A combination in one clause: flags, bytes, time."""
    trained = f" ({_TRAINED[one.keeps]})" if one.keeps in _TRAINED else ""
    known = one.slowdown_ratio is not None
    time = f", {slower(one.slowdown_ratio, least=one.slowdown_at_least)}" if known else ""
    return f"{' '.join(one.changes)}: {size(one.total_bytes, units)}{time}{trained}"


def _alone(result: AdviceReport | FirstAdvice, units: str) -> str:
    """Remedies that are enough alone, or else those that free most of each kind."""
    known = [one for one in result.remedies if one.total_bytes and one.keeps != "data"]
    taken = result.combination.changes if result.combination else ()
    if result.combination and len(taken) == 1:
        enough = [one for one in known if one.enough and one.change not in taken]
        return f"Enough alone too: {_listed(enough[:3], units)}." if enough else ""
    if all(one.slowdown_ratio is None for one in known):
        most = sorted(known, key=lambda one: -(one.freed_bytes or 0))[:3]
        return f"Frees most alone: {_listed(most, units)}." if most else ""
    free = [one for one in known if not _costs(one)]
    costly = sorted((one for one in known if _costs(one)), key=lambda one: -(one.freed_bytes or 0))
    parts = []
    if free:
        most = sorted(free, key=lambda one: -(one.freed_bytes or 0))[:2]
        parts.append(f"Costs no time: {_listed(most, units)}")
    if costly:
        time = slower(costly[0].slowdown_ratio, least=costly[0].slowdown_at_least)
        parts.append(f"frees most: {_listed(costly[:1], units)}, {time}")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _listed(remedies: Sequence[RemedyFigure], units: str) -> str:
    return ", ".join(f"{one.name} ({size(one.freed_bytes or 0, units)})" for one in remedies)


def _costs(one: RemedyFigure) -> bool:
    return (one.slowdown_ratio or 0.0) > ALIKE or one.keeps == "host"


def slower(ratio: float | None, *, least: bool = False) -> str:
    """What a change costs in time, in words."""
    if ratio is None:
        return "time not known"
    if abs(ratio) <= ALIKE and not least:
        return "as fast"
    if ratio < 0:
        return f"{percent(-ratio)} less time"
    return f"{'at least ' if least else ''}{percent(ratio)} slower"


def _share(ratio: float | None) -> str:
    return "not known" if ratio is None else "0 %" if abs(ratio) < 5e-4 else percent(ratio)


def _remedies(result: AdviceReport, units: str, above: tuple[str, ...]) -> Sheet:
    sizes = [one.total_bytes or 0 for one in result.remedies]
    columns = (
        Column("name", "remedy", align="left", wrap=True),
        Column("change", "flags", align="left", wrap=True),
        bytes_column("freed_bytes", "frees", sizes, units),
        bytes_column("total_bytes", "then", sizes, units),
        Column("slowdown_ratio", "slower\n ", _share),
        Column(
            "slowdown_at_least", "at\nleast", lambda value: "at least" if value else "",
            shown=False,
        ),
        fits_column("enough", shown=not result.fits),
        Column("keeps", "keeps", shown=False),
    )  # fmt: skip
    least = any(one.slowdown_at_least for one in result.remedies)
    return Sheet(
        title=f"{result.title}: what to change on {(result.device or {}).get('name')}",
        columns=columns,
        rows=rows_of(columns, result.remedies),
        above=above,
        below=(
            *_commands(result),
            *_planned(result, units),
            *_range(result, units),
            *_time(result),
            *(
                ["Host memory: its transfers are timed, the host's own work is not."]
                if least
                else []
            ),
        ),
        notes=result.notes,
    )


def _commands(result: AdviceReport) -> tuple[str, ...]:
    """The combination as a command, and as the framework's own words."""
    best = result.combination or result.more_gpus
    if best is None:
        return ()
    lines = [f"Shown by: {best.command}"]
    if best.launch_file is not None:
        lines.append(f"Written for {best.launch_file}: {'  '.join(best.launch_changes)}")
    return tuple(lines)


def _planned(result: AdviceReport, units: str) -> tuple[str, ...]:
    """Planned recomputation, where it is faster."""
    one = result.planned
    if one is None:
        return ()
    beside = f" beside {' '.join(one.changes)}" if one.changes else ""
    return (
        f"Recomputation planned layer by layer{beside}: {size(one.total_bytes, units)}, "
        f"{slower(one.slowdown_ratio)}. Shown by: {one.command}",
    )


def _range(result: AdviceReport, units: str) -> tuple[str, ...]:
    """Between which sizes published peaks put such a one."""
    found = result.memory_range
    return (
        f"A GPU has {size(found.predicted_bytes, units)} {found.metric}; by {found.judged_runs} "
        f"published peaks {size(found.low_bytes, units)} to {size(found.high_bytes, units)}.",
    )


def _time(result: AdviceReport) -> tuple[str, ...]:
    """The run's own step, and its whole training where tokens were given."""
    time, whole = result.time, result.training_run
    if time is None:
        return ()
    judged = (
        f"{time.low_seconds:.2g} to {time.high_seconds:.2g} s by {time.judged_runs} published"
        if time.judged_runs
        else "no published run of its kind judges it"
    )
    lines = [
        f"One step as it is: {digits(time.step_seconds)} s ({judged}), "
        f"{time.tokens_per_second:,.0f} tokens a second, {count(time.tokens_per_day)} a day."
    ]
    if whole is not None:
        price = "" if whole.price is None else f", price {whole.price:,.0f}"
        lines.append(
            f"{count(whole.tokens)} tokens: {digits(whole.days)} days, "
            f"{whole.gpu_hours:,.0f} GPU-hours{price}."
        )
    return tuple(lines)


def _spare(result: AdviceReport, units: str) -> Sheet:
    sizes = [one.total_bytes for one in result.spare]
    columns = (
        Column("name", "what", align="left"),
        Column("change", "flags", align="left", wrap=True),
        bytes_column("total_bytes", "then", sizes, units),
        Column("gain_ratio", "tokens/s\ngained", _share),
    )
    return Sheet(
        title="what the memory left free buys, each alone",
        columns=columns,
        rows=rows_of(columns, result.spare),
    )
