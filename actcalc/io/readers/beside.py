"""Files that a configuration names: looked for beside it and where the command runs."""

from __future__ import annotations

from pathlib import Path

from actcalc.io.readers.document import Document, document


def beside(where: Document, name: str) -> Document | None:
    """The file that ``where`` names, or None where it is not there."""
    path = Path(name)
    folders = [Path(), *([where.folder] if where.folder else [])]
    tried = [path] if path.is_absolute() else [folder / path for folder in folders]
    if where.folder:
        tried.append(where.folder / path.name)
    for candidate in tried:
        try:
            if candidate.is_file():
                return document(str(candidate))
        except (OSError, ValueError):
            continue
    return None


def missing(where: Document, name: str, option: str) -> str:
    """What is said of a file that is not there."""
    return (
        f"{where.name}: {option} names {name}, which is not here: nothing of it is counted (name "
        "the file beside this one)."
    )
