"""All that can be explained, by subject."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from actcalc.answers.explain.terms import SUBJECTS
from actcalc.specs.result import Result


@dataclass(frozen=True, kw_only=True)
class TermLine:
    """One term."""

    subject: str
    """What it belongs to."""
    term: str
    """Its name."""
    about: str
    """What it is, in a few words."""
    words: tuple[str, ...]
    """Other words that find it."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Terms(Result):
    """Every term, by subject."""

    schema_name: ClassVar[str] = "actcalc/terms/1"

    terms: tuple[TermLine, ...]
    """The terms, subject by subject."""


def terms() -> Terms:
    """Every term, by subject."""
    return Terms(
        terms=tuple(
            TermLine(subject=subject, term=row.name, about=row.about, words=row.words)
            for subject, rows in SUBJECTS.items()
            for row in rows
        )
    )
