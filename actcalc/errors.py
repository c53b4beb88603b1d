"""The one exception a user can cause: what was wrong, with the values, and what to do."""

from __future__ import annotations

from collections.abc import Sequence


class SpecError(Exception):
    """A description that cannot be computed, or a file that cannot be read as one.

    ``str(error)`` is one line naming the values; ``error.hint`` says what to do. It is not a
    ``ValueError``, so that Pydantic passes it through validators unchanged.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
        if hint:
            self.add_note(f"hint: {hint}")  # which a traceback shows


def shorten(text: object, limit: int = 60) -> str:
    """``text`` quoted, and cut to ``limit`` characters, for an error line."""
    quoted = repr(text)
    return quoted if len(quoted) <= limit else quoted[: limit - 3] + "..."


def suggestion(word: str, known: Sequence[str], *, shortest: int = 2, likeness: float = 0.6) -> str:
    """A hint with the known words that begin like ``word``, else the closest one; "" if none is.

    A beginning of fewer than ``shortest`` letters tells nothing; ``likeness`` is difflib's ratio.
    """
    import difflib

    if len(word) > 100:
        return ""
    begun = [name for name in known if len(word) >= shortest and name.startswith(word.lower())][:4]
    close = begun or difflib.get_close_matches(word.lower(), known, n=1, cutoff=likeness)
    if not close:
        return ""
    *most, last = close
    return f"did you mean {', '.join(most)} or {last}?" if most else f"did you mean {last}?"


class MissingExtraError(SpecError):
    """A command needs an optional dependency that is not installed."""
