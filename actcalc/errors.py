"""The one exception a user can cause: what was wrong, with the values, and what to do."""

from __future__ import annotations


class SpecError(Exception):
    """A description that cannot be computed, or a file that cannot be read as one.

    ``str(error)`` is one line naming the values; ``error.hint`` says what to do. It is not a
    ``ValueError``, so that Pydantic passes it through validators unchanged.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def shorten(text: object, limit: int = 60) -> str:
    """``text`` quoted, and cut to ``limit`` characters, for an error line."""
    quoted = repr(text)
    return quoted if len(quoted) <= limit else quoted[: limit - 3] + "..."


class MissingExtraError(SpecError):
    """A command needs an optional dependency that is not installed."""
