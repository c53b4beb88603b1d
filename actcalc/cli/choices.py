"""How an option is declared: the group it stands in, and the words that it takes.

Help, completion and the parser read one declaration. Words are listed when they are asked for, so
that declaring an option loads nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import typer

WORK, LAYOUT, KERNELS = "Model and workload", "Layout", "Kernels"
RECOMPUTE, TRAINING, DEVICE, OUTPUT = "Recomputation", "Training", "Device", "Output"
TUNING = "Fine-tuning"
PANELS = (WORK, LAYOUT, KERNELS, RECOMPUTE, TRAINING, TUNING, DEVICE, OUTPUT)
"""Groups of help, in its order; a command's own options stand before them."""

SHELLS = ("bash", "zsh", "fish", "powershell")
"""Shells that completion is written for."""

Words = Callable[[], Iterable[str]]
"""Lists the values of an option; one that ends in ``=`` or ``:`` wants more."""


def option(
    *names: str,
    help: str,
    panel: str | None = None,
    metavar: str | None = None,
    words: Words | None = None,
    files: bool = False,
    callback: Callable[..., Any] | None = None,
) -> Any:
    """An option of a command, with what completion offers for it: ``words``, and ``files``.

    ``metavar`` is what help calls the value; without it a number is N, and a text NAME.
    One with a ``callback`` is answered before all others.
    """
    return typer.Option(
        *names,
        help=help,
        metavar=metavar,
        rich_help_panel=panel,
        show_default=False,
        is_eager=callback is not None,
        callback=callback,
        autocompletion=completing(words, files),
    )


def argument(*, help: str, metavar: str, words: Words | None = None, files: bool = False) -> Any:
    """An argument of a command, with what completion offers for it."""
    return typer.Argument(metavar=metavar, help=help, autocompletion=completing(words, files))


def examples(*lines: str) -> str:
    """What a command's help ends with, as the command's ``epilog``: whole command lines."""
    return "\n".join(f"actcalc {line}" for line in lines)


def completing(words: Words | None, files: bool) -> Callable[[str], list[str]]:
    """What Typer asks for completions: of the last of several words joined with , or +."""

    def complete(incomplete: str) -> list[str]:
        cut = max(incomplete.rfind(","), incomplete.rfind("+")) + 1
        before, last = incomplete[:cut], incomplete[cut:]
        known = words() if words is not None else ()
        found = [before + word for word in known if word.startswith(last)]
        return [*found, *(paths(incomplete) if files else ())]

    return complete


def paths(incomplete: str) -> list[str]:
    """Files and folders that begin like ``incomplete``, folders with a slash at the end."""
    folder, slash, start = incomplete.rpartition("/")
    where = os.path.expanduser(folder + slash) or "."
    try:
        with os.scandir(where) as entries:
            found = [
                f"{folder}{slash}{entry.name}" + ("/" if entry.is_dir() else "")
                for entry in entries
                if entry.name.startswith(start) and (start or not entry.name.startswith("."))
            ]
    except OSError:
        return []
    return sorted(found)


def models() -> Iterable[str]:
    """Presets of models and of runs."""
    from actcalc.io import presets

    return (*presets.names("models"), *presets.names("runs"))


def devices() -> Iterable[str]:
    """Presets of devices."""
    from actcalc.io import presets

    return presets.names("devices")


def frameworks() -> Iterable[str]:
    """Profiles."""
    from actcalc.io import presets

    return presets.names("frameworks")


def policies() -> Iterable[str]:
    """Named policies; those that count layers end in a colon."""
    from actcalc.policy.rules import NAMES

    return (name.removesuffix("N") for name in NAMES)


def fields() -> Iterable[str]:
    """Fields of the specs, as --set takes them."""
    from actcalc.io.runs import settable

    return (f"{name}=" for name in settable())


def file_kinds() -> Iterable[str]:
    """Kinds of files that --from forces."""
    from actcalc.io.readers.kinds import NAMES

    return NAMES


def shares() -> Iterable[str]:
    """Presets of shares, and single ones."""
    from actcalc.cost.rates import SHARE_FIELDS, efficiency_presets

    return (*efficiency_presets(), *(f"{name}=" for name in SHARE_FIELDS))


def targets() -> Iterable[str]:
    """What plan --emit writes: a plan for a framework, or the whole run."""
    from actcalc.cli.plan import WHOLE
    from actcalc.plan.emit.targets import TARGETS

    return (*TARGETS, *WHOLE)
