"""Shell completion: what a shell asks, and the words that could come next.

A script of :mod:`actcalc.cli.completion.shells` calls ``actcalc`` with the variable
``_ACTCALC_COMPLETE`` set and the words of the line, up to the one under the cursor, as arguments
(or joined with newlines in ``_ACTCALC_WORDS``). Answered are lines of a word and, after a tab, what
it means. Nothing is parsed or checked: a line that is not finished is never an error.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Sequence

from actcalc.cli.completion.lines import after
from actcalc.errors import SpecError

WORDS = "_ACTCALC_WORDS"


def answer(arguments: Sequence[str]) -> None:
    """Print what may follow, one candidate a line; nothing where the line makes no sense."""
    joined = os.environ.get(WORDS)
    words = list(arguments) if joined is None else joined.split("\n")
    found: Iterable[tuple[str, str]] = ()
    with contextlib.suppress(SpecError, OSError, ValueError, LookupError):
        found = after(words)
    lines = [f"{word}\t{about}" if about else word for word, about in found]
    if lines:
        sys.stdout.buffer.write(("\n".join(lines) + "\n").encode())
        sys.stdout.buffer.flush()
