"""How long the searches inside may take, and whether one of them gave up.

A search that has used its time ends with the best it has found; what it then claims is no more than
its relaxation proves. The time is one for all that is asked inside :func:`limited`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(eq=False)
class Effort:
    """The time that is left, and whether everything that was begun was also finished."""

    until: float = float("inf")
    complete: bool = True
    started: float = 0.0


_CURRENT: ContextVar[Effort] = ContextVar("effort", default=Effort())  # noqa: B039


@contextmanager
def limited(seconds: float | None = None) -> Iterator[Effort]:
    """Searches inside end after ``seconds``, or when those outside must, whichever is first.

    What stays incomplete inside is so outside, too.
    """
    outer = _CURRENT.get()
    end = float("inf") if seconds is None else time.monotonic() + seconds
    effort = Effort(min(outer.until, end), started=outer.started or time.monotonic())
    token = _CURRENT.set(effort)
    try:
        yield effort
    finally:
        _CURRENT.reset(token)
        outer.complete = outer.complete and effort.complete


def until() -> float:
    """When searches have to end, as ``time.monotonic`` counts."""
    return _CURRENT.get().until


def spent() -> bool:
    """Whether the time is over."""
    effort = _CURRENT.get()
    return effort.until < float("inf") and time.monotonic() > effort.until


def room_for_more() -> bool:
    """Whether as much time is left as was used: what is begun now can still be finished."""
    effort = _CURRENT.get()
    now = time.monotonic()
    return now - effort.started <= effort.until - now


def give_up() -> None:
    """Say that something was left out: what is found is no proof any more."""
    _CURRENT.get().complete = False
