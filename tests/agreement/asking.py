"""Asking the command line in this process, as a user would, and reading its JSON."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from actcalc.errors import SpecError

Args = list[str]


class RefusedError(Exception):
    """The command line refused the run (exit 2); ``str`` is its error line."""


class CrashedError(Exception):
    """The command line ended in another exception than its own: its text, and the words."""

    def __str__(self) -> str:
        return str(self.args[0])


@cache
def _run() -> Callable[[Sequence[str]], int]:
    """The console script's ``run``, on a group that builds each of its commands once.

    Building a command's parser takes longer than most answers.
    """
    from actcalc.cli import app

    group = app.build()
    build = type(group).get_command
    made: dict[str, Any] = {}

    def command(context: Any, name: str) -> Any:
        if name not in made:
            made[name] = build(group, context, name)
        return made[name]

    group.get_command = command

    def run(args: Sequence[str]) -> int:
        original, app.build = app.build, lambda: group
        try:
            return app.run(args)
        finally:
            app.build = original

    return run


def answer(args: Sequence[object]) -> str:
    """What a command line prints; ``RefusedError`` for bad input, whatever its exit code else."""
    words = [str(word) for word in args]
    out = io.StringIO()
    run = _run()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        try:
            run(words)
        except SpecError as error:
            raise RefusedError(str(error)) from None
        except Exception as error:
            raise CrashedError(f"{type(error).__name__}: {error}", words) from error
    return out.getvalue()


def ask(*args: object) -> dict[str, Any]:
    """The JSON of a command line."""
    document: dict[str, Any] = json.loads(answer([*args, "--json"]))
    return document


def command(*args: object) -> str:
    """A command line to paste."""
    return shlex.join(["actcalc", *(str(word) for word in args)])
