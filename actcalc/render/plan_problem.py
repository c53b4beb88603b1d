"""The plan of a problem of the user's own as a sheet."""

from __future__ import annotations

from dataclasses import replace

from actcalc.answers.plan_problem import ProblemPlan
from actcalc.render.sheet import Column, Row, Sheet, bytes_column
from actcalc.render.units import size


def problem_sheets(result: ProblemPlan, units: str) -> list[Sheet]:
    """The plan of a user's own problem; the same columns for machines where none fits."""
    title = f"{result.method} plan, {size(result.budget_bytes, units)}, {result.peak_model}"
    groups = result.groups
    each = "a segment" if any(group["segment"] > 1 for group in groups) else "each"
    stored = [group["stored_bytes"] for group in groups]
    columns = (
        Column("layer_type", "kind", align="left"),
        Column("count", "layers"),
        Column("segment", "layers a\nsegment"),
        Column("recompute", "re-run in backward", align="left", wrap=True),
        bytes_column("stored_bytes", f"stored\n{each}", stored, units),
        Column("cost", f"cost\n{each}", lambda value: f"{value:,}"),
        Column("feasible", "feasible", shown=False),
        Column("smallest_memory_bytes", "smallest", shown=False),
    )
    least = result.smallest_memory_bytes
    if not result.feasible:
        line = "Does not fit: no plan does."
        if least is not None:
            line = f"Does not fit: {least:,} bytes would do ({size(least, units)})."
        return [
            Sheet(
                title=title,
                columns=tuple(replace(column, shown=False) for column in columns),
                rows=(),
                answer=line,
                fits=False,
                records=((*(None,) * 6, False, least),),
            )
        ]
    rows = tuple(
        Row(
            (
                group["layer_type"],
                group["count"],
                group["segment"],
                ", ".join(group["recompute"]) or "nothing",
                group["stored_bytes"],
                group["cost"],
                True,
                least,
            )
        )
        for group in groups
    )
    proof = "proven optimal" if result.optimal else f"lower bound {result.lower_bound:,}"
    return [
        Sheet(
            title=title,
            columns=columns,
            rows=rows,
            answer=f"Fits: cost {result.cost:,} ({proof}), "
            f"stored {size(result.stored_bytes or 0, units)}, "
            f"peak {size(result.peak_bytes or 0, units)}, of all layers together.",
            fits=True,
        )
    ]
