"""What a search has found as a table: the layouts that really differ, or all rows for machines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from actcalc.answers.search import COLUMNS, FoundLayout, Search
from actcalc.render.room import room
from actcalc.render.sheet import Column, Sheet, ranked, rows_of, share_column, sizes_column
from actcalc.render.units import digits, percent

_USUAL = {"sp": False, "vpp": 1, "cp": 1, "ep": 1, "etp": None, "zero": 0}
_LISTED = {
    "different": "best of each tp, cp, ep, pp; all that fit: -o all.csv",
    "pareto": "none of the others needs less memory and less time",
    "all": "all that fit",
}
_PLANNED = "best of each tp, cp, ep, pp, its recomputation planned"


def search_sheets(
    result: Search, units: str, records: Iterable[tuple[Any, ...]] | None = None
) -> list[Sheet]:
    """The layouts listed; ``records`` are all rows for machines."""
    columns = _columns(result, units)
    work, usable = result.workload, room(result.device, result.headroom_ratio, units)
    return [
        Sheet(
            answer=_answer(result),
            fits=None if result.results else False,
            title=f"{result.title}: layouts on {result.gpus} x {result.device['name']}, fastest "
            "first",
            columns=columns,
            rows=rows_of(columns, result.results),
            above=(
                f"s {work['seq']:,}  {work['precision']}  {work['attention']} attention  "
                f"{result.framework} kernels  {work['global_batch']} sequences per step",
                f"{result.considered:,} layouts, of which {result.feasible:,} fit {usable}; "
                f"{_PLANNED if result.planned else _LISTED[result.listed]}",
            ),
            notes=result.notes,
            keys=tuple(COLUMNS) if records is not None else None,
            types=COLUMNS,
            records=None if records is None else tuple(records),
        )
    ]


_ONE = dict.fromkeys(("tp", "pp", "vpp", "cp", "ep", "etp", "dp"), 1) | {"sp": False}


def _answer(result: Search) -> str:
    """The fastest layout that fits, in words."""
    if not result.results and not result.complete:
        return "Of the layouts looked at none fits; others may."
    if not result.results:
        return "Does not fit: more GPUs, a smaller sequence, or what `actcalc advise` says."
    best = result.results[0]
    words = [
        name if value is True else f"{name} {value}"
        for name, value in best.layout.items()
        if name in _ONE and value and value != _ONE[name]
    ]
    return (
        f"Fastest: {' '.join(words) or 'one GPU'}, {best.policy} at micro-batch "
        f"{best.micro_batch}: {digits(best.step_seconds)} s a step, {percent(best.mfu_ratio)} MFU."
    )


def _columns(result: Search, units: str) -> tuple[Column, ...]:
    found = result.results

    def degree(name: str) -> Column:
        def get(one: FoundLayout) -> Any:
            return one.layout[name]

        usual = name in _USUAL and all(get(one) in (_USUAL[name], None) for one in found)
        show = (lambda value: "yes" if value else "") if name == "sp" else str
        return Column(name, name, show, shown=not usual, get=get)

    return (
        *(degree(name) for name in ("tp", "sp", "pp", "vpp", "cp", "ep", "etp", "dp", "zero")),
        Column(
            "layers_per_stage",
            "layers\nper slice",
            _split,
            align="left",
            get=lambda one: one.layout["layers_per_stage"] or None,
            shown=any(one.layout["layers_per_stage"] for one in found),
        ),
        Column(
            "schedule",
            "schedule",
            align="left",
            get=lambda one: one.layout["schedule"],
            shown=any(one.layout["schedule"] not in (None, "1f1b", "interleaved") for one in found),
        ),
        Column("micro_batch", "micro-\nbatch"),
        Column("policy", "policy", align="left"),
        Column(
            "named_policy",
            "else",
            lambda name: name or "",
            align="left",
            shown=result.planned,
        ),
        sizes_column("peak_bytes", "a GPU", found, units),
        Column("step_seconds", "step\ns", digits),
        Column(
            "named_step_seconds",
            "else\ns",
            lambda seconds: "" if seconds is None else digits(seconds),
            shown=result.planned,
        ),
        Column("tokens_per_second_per_gpu", "tokens/s\nper GPU", digits, rank=2),
        ranked(1, share_column("mfu_ratio", "MFU\n ")),
    )


def _split(counts: Sequence[int]) -> str:
    """Layers of each slice as ``--layers-per-stage`` takes them: ``0,1x12,0``."""
    runs = [(count, sum(1 for _ in same)) for count, same in groupby(counts)]
    return ",".join(f"{count}x{times}" if times > 1 else str(count) for count, times in runs)
