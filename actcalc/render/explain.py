"""An explanation as a sheet of lines."""

from __future__ import annotations

from itertools import zip_longest

from actcalc.answers.explain.listing import Terms
from actcalc.answers.explain.terms import Explanation
from actcalc.render.overhead import overhead_sheets
from actcalc.render.sheet import Column, Row, Sheet, rows_of


def explain_sheets(result: Explanation) -> list[Sheet]:
    """The answer, its derivation line by line, the source; tables last where there are any."""
    tables = [] if result.overhead is None else overhead_sheets(result.overhead)
    return [
        Sheet(
            title=f"{result.term}: {result.title}",
            above=(result.result,),
            columns=(Column("line", result.example, align="left", wrap=True),),
            rows=tuple(Row((line,)) for line in result.lines),
            below=(f"source: {result.source}",),
        ),
        *tables,
    ]


def terms_sheets(result: Terms) -> list[Sheet]:
    """Every term with what it is, subject by subject."""
    columns = (
        Column("subject", "subject", align="left"),
        Column("term", "term", align="left"),
        Column("about", "what it explains", align="left", wrap=True),
        Column("words", "also found as", shown=False, get=lambda row: ", ".join(row.words)),
    )
    named, rows = "", []
    for row, after in zip_longest(result.terms, result.terms[1:]):
        subject = "" if row.subject == named else row.subject
        named = row.subject
        last = after is not None and after.subject != named
        rows.append(Row((subject, row.term, row.about, ""), rule_after=last))
    return [
        Sheet(
            title="",
            columns=columns,
            rows=tuple(rows),
            records=tuple(row.values for row in rows_of(columns, result.terms)),
            below=(
                "actcalc explain TERM [MODEL]: a printed formula, a flag or an everyday word finds "
                "its term, too.",
            ),
        )
    ]
