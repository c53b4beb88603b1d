"""Files that a configuration names: looked for beside it and where the command runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from actcalc.errors import SpecError
from actcalc.io.readers.document import Document, document
from actcalc.io.readers.shell.expand import MARK
from actcalc.io.sources import hidden


def beside(where: Document, name: str) -> Document | None:
    """The file that ``where`` names, or None where it is not there."""
    path = Path(name)
    folders = [Path(), *([where.folder] if where.folder else [])]
    tried = [path] if path.is_absolute() else [folder / path for folder in folders]
    if where.folder:
        tried.append(where.folder / path.name)
    for candidate in tried:
        try:
            if not candidate.is_file():
                continue
        except (OSError, ValueError):
            continue
        try:
            found = document(str(candidate))
        except SpecError:
            raise hidden(where.name, name) from None
        if found.mapping is None:
            raise hidden(where.name, name)
        return found
    return None


def missing(where: Document, name: str, option: str) -> str:
    """What is said of a file that is not there."""
    return (
        f"{where.name}: {option} names {name}, which is not here: nothing of it is counted (name "
        "the file beside this one)."
    )


def beside_script(where: Document) -> Callable[[str], str | None]:
    """Looks up scripts that ``where`` reads in: those in its folder and in the one around it.

    What only the run would know of a path (the folder of the script, mostly) is dropped.
    """

    def look_up(written: str) -> str | None:
        path = written.rsplit(MARK, 1)[-1].lstrip("/") if MARK in written else written
        if where.folder is None or not path.endswith((".sh", ".bash", ".env")):
            return None
        found = (where.folder / path).resolve()
        if not found.is_relative_to(where.folder.parent) or not found.is_file():
            return None
        try:
            return document(str(found)).text
        except SpecError:
            return None

    return look_up
