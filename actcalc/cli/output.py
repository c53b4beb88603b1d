"""Printing an answer: to stdout, or to a file that appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from actcalc.cli import drop_output
from actcalc.cli.options import OutputOptions
from actcalc.errors import SpecError
from actcalc.render.sheet import Sheet

FORMATS = ("table", "json", "csv", "markdown", "svg", "html")
_ENDINGS = {
    ".json": "json",
    ".csv": "csv",
    ".md": "markdown",
    ".markdown": "markdown",
    ".svg": "svg",
    ".html": "html",
    ".htm": "html",
    ".txt": "table",
}


def chosen_format(output: OutputOptions) -> str:
    """The format asked for: --json or --format, else the file's ending, else a table."""
    if output.json and output.format not in (None, "json"):
        raise SpecError(f"--json and --format {output.format} contradict", "give one of them")
    name = "json" if output.json else output.format
    if name is not None and name not in FORMATS:
        raise SpecError(f"unknown format {name!r}", "use one of " + ", ".join(FORMATS))
    if output.output is None:
        return name or "table"
    suffix = Path(output.output).suffix.lower()
    ending = _ENDINGS.get(suffix)
    if name is None:
        if ending is None:
            raise SpecError(
                f"-o {output.output}: the ending {suffix!r} names no format",
                "end it in " + ", ".join(_ENDINGS) + ", or add --format",
            )
        return ending
    return name


def check_units(units: str) -> None:
    """Refuse an unknown unit."""
    if units not in ("GB", "GiB"):
        raise SpecError(f"unknown units {units!r}", "use GB (powers of 1000) or GiB (of 1024)")


def emit(
    sheets: Callable[[], list[Sheet]], document: Callable[[], dict[str, Any]], output: OutputOptions
) -> None:
    """Print the answer in the chosen format, to stdout or to the file named with -o.

    Only what the format needs is made: ``document`` for JSON, ``sheets`` for all others.
    """
    name = chosen_format(output)
    if output.output is not None:
        write_whole(Path(output.output), _text(name, sheets, document))
        return
    try:
        if name == "table":
            from actcalc.render.table import print_sheets

            print_sheets(sheets())
        else:
            sys.stdout.write(_text(name, sheets, document))
        sys.stdout.flush()
    except BrokenPipeError:
        drop_output()


def _text(
    name: str, sheets: Callable[[], list[Sheet]], document: Callable[[], dict[str, Any]]
) -> str:
    if name == "json":
        import json

        return json.dumps(document(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if name in ("csv", "markdown"):
        from actcalc.render import text

        return text.csv(sheets()) if name == "csv" else text.markdown(sheets())
    from actcalc.render.table import export

    return export(sheets(), name)


def write_whole(path: Path, text: str) -> None:
    """Write a file through a temporary one beside it, so that it is never half-written."""
    import tempfile

    temporary = None
    try:
        path = path.resolve()
        if path.exists() and not path.is_file():
            # A device or a pipe is written to, never replaced by a file of its name.
            path.write_text(text, encoding="utf-8")
            return
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as stream:
            temporary = stream.name
            stream.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise SpecError(
            f"cannot write {path}: {error.strerror or error}", "name a file in a folder that exists"
        ) from error
