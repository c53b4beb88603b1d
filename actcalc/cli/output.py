"""Printing an answer: to stdout, or to a file that appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from actcalc.cli import drop_output
from actcalc.cli.choices import OUTPUT, option
from actcalc.errors import SpecError
from actcalc.render.formats import ENDINGS, FORMATS
from actcalc.render.plain import ascii_text, takes_signs
from actcalc.render.sheet import Sheet, brief
from actcalc.render.units import SBH_T


@dataclass(frozen=True, eq=False, repr=False)
class OutputOptions:
    """Where and how the answer is printed."""

    format: Annotated[
        str | None,
        option(
            "--format",
            help=f"{', '.join(FORMATS)} (default: table, or as -o says).",
            panel=OUTPUT,
            words=lambda: FORMATS,
        ),
    ] = None
    json: Annotated[bool, option("--json", help="Same as --format json.", panel=OUTPUT)] = False
    output: Annotated[
        str | None,
        option(
            "-o",
            "--output",
            help=f"Write to a file; its ending says the format: {', '.join(ENDINGS)}.",
            panel=OUTPUT,
            metavar="FILE",
            files=True,
        ),
    ] = None
    verbose: Annotated[
        bool,
        option("-v", "--verbose", help="Proofs, buffers and every line, too.", panel=OUTPUT),
    ] = False
    units: Annotated[
        str,
        option(
            "--units",
            help="GB (powers of 1000), GiB (of 1024); compare and breakdown also sbh/t.",
            panel=OUTPUT,
            words=lambda: UNITS,
        ),
    ] = "GB"


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
    ending = ENDINGS.get(suffix)
    if name is None:
        if ending is None:
            raise SpecError(
                f"-o {output.output}: the ending {suffix!r} names no format",
                "end it in " + ", ".join(ENDINGS) + ", or add --format",
            )
        return ending
    return name


UNITS = ("GB", "GiB", SBH_T)


def check_units(units: str, *, of_run: bool = False) -> None:
    """Refuse an unknown unit; ``of_run`` says that sizes may be told in those of the run."""
    known = UNITS if of_run else UNITS[:2]
    if units not in known:
        hint = "use GB (powers of 1000) or GiB (of 1024)"
        raise SpecError(
            f"units {units} are those of compare and breakdown"
            if units in UNITS
            else f"unknown units {units!r}",
            f"{hint}, or sbh/t" if of_run else hint,
        )


def emit(
    sheets: Callable[[], list[Sheet]], document: Callable[[], dict[str, Any]], output: OutputOptions
) -> None:
    """Print the answer in the chosen format, to stdout or to the file named with -o.

    Only what the format needs is made: ``document`` for JSON, ``sheets`` for all others.
    """
    name = chosen_format(output)
    form = FORMATS[name]

    def wanted() -> list[Sheet]:
        return brief(sheets()) if form.for_people and not output.verbose else sheets()

    if output.output is not None:
        write_whole(Path(output.output), form.write(wanted, document))
        return
    try:
        if name == "table":
            from actcalc.render.table import print_sheets

            print_sheets(wanted())
        else:
            _print(form.write(wanted, document), form.escape)
        sys.stdout.flush()
    except BrokenPipeError:
        drop_output()


def emit_text(text: str, output: OutputOptions) -> None:
    """Print what is to be pasted or kept as a file, and nothing else."""
    if output.output is not None:
        write_whole(Path(output.output), text)
        return
    try:
        _print(text, ascii_text)
        sys.stdout.flush()
    except BrokenPipeError:
        drop_output()


def _print(content: str | bytes, escape: Callable[[str], str]) -> None:
    if isinstance(content, str):
        sys.stdout.write(content if takes_signs(sys.stdout.encoding) else escape(content))
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(content)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file through a temporary one beside it, so that it is never half-written."""
    import tempfile

    temporary = None
    data = content.encode() if isinstance(content, str) else content
    try:
        path = path.resolve()
        if path.exists() and not path.is_file():
            # A device or a pipe is written to, never replaced by a file of its name.
            path.write_bytes(data)
            return
        with tempfile.NamedTemporaryFile(
            "wb", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as stream:
            temporary = stream.name
            stream.write(data)
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
