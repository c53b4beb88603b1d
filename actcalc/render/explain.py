"""An explanation as a sheet of lines."""

from __future__ import annotations

from actcalc.answers.explain.terms import Explanation
from actcalc.render.overhead import overhead_sheets
from actcalc.render.sheet import Column, Row, Sheet


def explain_sheets(result: Explanation) -> list[Sheet]:
    """The derivation line by line, then the source; tables first where there are any."""
    tables = [] if result.overhead is None else overhead_sheets(result.overhead)
    return [
        *tables,
        Sheet(
            title=f"{result.term}: {result.title}",
            columns=(Column("line", result.example, align="left", wrap=True),),
            rows=tuple(Row((line,)) for line in result.lines),
            below=(f"source: {result.source}",),
        ),
    ]
