"""An explanation as a sheet of lines."""

from __future__ import annotations

from actcalc.planner.explain import Explanation
from actcalc.render.sheet import Column, Row, Sheet


def explain_sheets(result: Explanation) -> list[Sheet]:
    """The derivation line by line, then the source."""
    return [
        Sheet(
            title=f"{result.term}: {result.title}",
            columns=(Column("line", result.example, align="left", wrap=True),),
            rows=tuple(Row((line,)) for line in result.lines),
            below=(f"source: {result.source}",),
        )
    ]
