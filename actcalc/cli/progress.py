"""How far a long command is, on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_AFTER_SECONDS = 1.0
_WIDTH = 30


@contextmanager
def bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Says how much of the work is done once it has taken a second, if someone looks on."""
    began, drawn = time.monotonic(), False

    def tell(done: int, whole: int) -> None:
        nonlocal drawn
        if time.monotonic() - began < _AFTER_SECONDS or not sys.stderr.isatty():
            return
        drawn, share = True, done / max(1, whole)
        filled = int(_WIDTH * share)
        line = "#" * filled + "." * (_WIDTH - filled)
        sys.stderr.write(f"\r{what} [{line}] {share:4.0%}  (Ctrl-C keeps what there is)")
        sys.stderr.flush()

    try:
        yield tell
    finally:
        if drawn:
            sys.stderr.write("\r" + " " * (len(what) + _WIDTH + 40) + "\r")
            sys.stderr.flush()
