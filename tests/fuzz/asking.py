"""One command line run in this process, and what it is held to."""

from __future__ import annotations

import contextlib
import io
import json
import math
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from actcalc.errors import SpecError

SECONDS = 10.0
"""Of a processor, not of a clock: a busy machine makes no finding."""
BYTES = 500_000_000
SIGNED = {"difference_bytes", "margin_bytes", "saved_ratio", "error_ratio", "difference_ratio",
          "freed_bytes", "left_bytes", "slowdown_ratio", "gain_ratio"}  # fmt: skip
"""Keys of JSON that may be below 0."""
ROUNDING = {"_seconds": 1e-15, "_ratio": 1e-13}
"""Below so much a figure of that unit is what rounding left of a difference."""
BROKEN = {"continuous_bytes"}
"""Keys of bytes that need not be whole."""


class TooLongError(BaseException):
    """Raised by the alarm; nothing of the product's catches it."""


@dataclass
class Asked:
    """What one command line did."""

    args: list[str]
    code: int | None = None
    out: str = ""
    message: str = ""
    hint: str = ""
    error: BaseException | None = None
    seconds: float = 0.0
    grown: int = 0


def _ring(signum: int, frame: Any) -> None:
    raise TooLongError


def most_bytes() -> int:
    """The most memory that this process has had; 0 where the system does not say (Windows)."""
    try:
        import resource
    except ImportError:
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


@contextlib.contextmanager
def _alarm() -> Iterator[None]:
    """Raise ``TooLongError`` inside after the time, where the system has such an alarm."""
    if not hasattr(signal, "setitimer"):
        yield
        return
    signal.signal(signal.SIGPROF, _ring)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def ask(args: list[str]) -> Asked:
    """Run ``args`` as the console script would."""
    from actcalc.cli.app import run

    asked = Asked(args)
    out, began, before = io.StringIO(), time.process_time(), most_bytes()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()), _alarm():
            asked.code = run(args)
    except SpecError as error:
        asked.code, asked.message, asked.hint = 2, str(error), error.hint
    except SystemExit as stop:
        asked.code = stop.code if isinstance(stop.code, int) else 1
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        asked.error = error
    asked.seconds = time.process_time() - began
    asked.grown = most_bytes() - before
    asked.out = out.getvalue()
    return asked


def place(error: BaseException) -> str:
    """The innermost line of the package that an exception passed."""
    found = [f for f in traceback.extract_tb(error.__traceback__) if "/actcalc/" in f.filename]
    return f"{found[-1].filename.rsplit('/actcalc/', 1)[1]}:{found[-1].lineno}" if found else "?"


def faults(asked: Asked) -> Iterator[str]:
    """The promises that one command line broke, each as a kind."""
    if isinstance(asked.error, TooLongError):
        yield f"more than {SECONDS:g} s at {place(asked.error)}"
    elif asked.error is not None:
        yield f"{type(asked.error).__name__} at {place(asked.error)}"
    elif asked.grown > BYTES:
        yield "more than 500 MB"
    elif asked.code == 2:
        yield from _refusal(asked)
    elif asked.code in (0, 1):
        yield from _answer(asked)
    else:
        yield f"exit code {asked.code}"


def _refusal(asked: Asked) -> Iterator[str]:
    if not asked.message:
        yield "exit 2 without an error"
        return
    if asked.out:
        yield "an error beside an answer"
    if not asked.hint:
        yield f"no hint: {asked.message[:40]}"
    for text in (asked.message, asked.hint):
        if not text.isprintable():
            yield "an error with control characters"
        if len(text) > 1000:
            yield "an error of more than 1000 characters"


def _no_number(word: str) -> Any:
    raise ValueError(word)


def _answer(asked: Asked) -> Iterator[str]:
    if not asked.out.replace("\n", "").isprintable():
        yield "an answer with control characters"
    if "--json" not in asked.args:
        if not asked.out.strip() and "-o" not in asked.args:
            yield "no answer"
        return
    try:
        document = json.loads(asked.out, parse_constant=_no_number)
    except ValueError:
        yield "JSON that is none"
        return
    for key, value in leaves(document):
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not math.isfinite(value):
            yield f"{key} is not finite"
        elif value < 0 and key not in SIGNED:
            yield f"{key} is negative"
        elif key.endswith("_bytes") and isinstance(value, float) and key not in BROKEN:
            yield f"{key} is no whole number"
        elif any(key.endswith(unit) and 0 < abs(value) < least for unit, least in ROUNDING.items()):
            yield f"{key} is rounding"


def leaves(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a document with the key it stands under."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield from leaves(value, name)
    elif isinstance(node, list):
        for value in node:
            yield from leaves(value, key)
    else:
        yield key, node
