"""Printing an answer: to stdout, or to a file that appears whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from actcalc.cli import drop_output
from actcalc.cli.choices import OUTPUT, option
from actcalc.errors import SpecError, file_error
from actcalc.render.formats import ENDINGS, FORMATS, Parts, named_by
from actcalc.render.plain import ascii_text, takes_signs
from actcalc.render.sheet import Sheet, brief
from actcalc.render.units import SBH_T

if TYPE_CHECKING:
    from actcalc.render.charts.chart import Charts


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
    plot: Annotated[
        str | None,
        option(
            "--plot",
            help="Which chart of the answer to draw, with -o FILE.svg.",
            panel=OUTPUT,
            metavar="NAME",
        ),
    ] = None
    units: Annotated[
        str,
        option(
            "--units",
            help="GB (powers of 1000), GiB (of 1024); compare and breakdown also sbh/t.",
            panel=OUTPUT,
            words=lambda: UNITS,
        ),
    ] = "GB"

    def __post_init__(self) -> None:
        check_units(self.units, of_run=True)


def chosen_format(output: OutputOptions) -> str:
    """The format asked for: --json or --format, else the file's ending, else a table."""
    if output.json and output.format not in (None, "json"):
        raise SpecError(f"--json and --format {output.format} contradict", "give one of them")
    name = "json" if output.json else output.format
    if name is not None and name not in FORMATS:
        raise SpecError(f"unknown format {name!r}", "use one of " + ", ".join(FORMATS))
    if name is None and output.output is not None:
        name = named_by(output.output)
        if name is None:
            raise SpecError(
                f"-o {output.output}: the ending {Path(output.output).suffix.lower()!r} names no "
                "format",
                "end it in " + ", ".join(ENDINGS) + ", or add --format",
            )
    name = name or "table"
    if output.plot is not None and not (FORMATS[name].drawn or name == "html"):
        raise SpecError(
            f"--plot {output.plot} is a picture, {name} holds none",
            f"name a file for it: -o {output.plot}.svg (or .png, .html, .vl.json)",
        )
    return name


def draws(output: OutputOptions) -> bool:
    """Whether charts are wanted of the answer."""
    name = chosen_format(output)
    return FORMATS[name].drawn or name == "html"


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
    sheets: Callable[[], list[Sheet]],
    document: Callable[[], dict[str, Any]],
    output: OutputOptions,
    charts: Charts | None = None,
) -> None:
    """Print the answer in the chosen format, to stdout or to the file named with -o.

    Only what the format needs is made: ``document`` for JSON, ``charts`` for pictures, ``sheets``
    for all others.
    """
    name = chosen_format(output)
    form = FORMATS[name]

    def wanted() -> list[Sheet]:
        return brief(sheets()) if form.brief and not output.verbose else sheets()

    parts = Parts(wanted, document, _wanted(name, output.plot, charts or {}))
    if output.output is not None:
        write_whole(Path(output.output), form.write(parts))
    elif name == "table":
        from actcalc.render.table import print_sheets

        with _printing():
            print_sheets(wanted())
    else:
        write_out(form.write(parts), form.escape)


def _wanted(name: str, plot: str | None, charts: Charts) -> Charts:
    """The charts to draw: the one named with --plot, else all there are."""
    if not charts and (FORMATS[name].drawn or plot is not None):
        others = ", ".join(row.name for row in FORMATS.values() if not row.drawn)
        raise SpecError(f"{name}: there is no chart of this answer", f"use {others} without --plot")
    if plot is None:
        return charts
    if plot not in charts:
        raise SpecError(
            f"--plot {plot!r} names no chart of this answer", "it has " + ", ".join(charts)
        )
    return {plot: charts[plot]}


def emit_text(text: str, output: OutputOptions) -> None:
    """Print what is to be pasted or kept as a file, and nothing else."""
    if output.output is not None:
        write_whole(Path(output.output), text)
    else:
        write_out(text)


def write_out(content: str | bytes, escape: Callable[[str], str] = ascii_text) -> None:
    """Write to stdout; ``SpecError`` where it is closed, or its disk full.

    ``escape`` makes ASCII of text for a stream that is not UTF-8.
    """
    with _printing():
        if isinstance(content, str):
            sys.stdout.write(content if takes_signs(sys.stdout.encoding) else escape(content))
        else:
            sys.stdout.flush()
            sys.stdout.buffer.write(content)


@contextlib.contextmanager
def _printing() -> Iterator[None]:
    """Stdout, written to inside; a reader that has gone is no error (``actcalc ... | head``)."""
    what = "write the answer to standard output"
    if sys.stdout is None:
        raise file_error(what, OSError(errno.EBADF, "it is closed"))
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        drop_output()
    except OSError as error:
        raise file_error(what, error) from error


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file through a temporary one beside it, so that it is never half-written.

    A file that is there keeps who may read it; a device or a pipe is written to, never replaced by
    a file of its name. Raises ``SpecError`` for what cannot be written.
    """
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    try:
        try:
            known = path.stat()
        except FileNotFoundError:
            known = None
        if known is not None and not stat.S_ISREG(known.st_mode):
            path.write_bytes(data)
        else:
            _replace(Path(os.path.realpath(path)), known, data)
    except BrokenPipeError:
        return
    except (OSError, ValueError) as error:
        raise file_error(f"write {path}", error) from error


def _replace(path: Path, known: os.stat_result | None, data: bytes) -> None:
    """Put ``data`` where ``path`` is, at once, with the mode of the file that was there."""
    import tempfile

    if known is not None and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    mode = 0o666 & ~_umask() if known is None else stat.S_IMODE(known.st_mode)
    number, temporary = tempfile.mkstemp(prefix=".actcalc-", dir=path.parent)
    try:
        with open(number, "wb") as stream:
            stream.write(data)
        if known is not None:
            with contextlib.suppress(OSError):
                os.chown(temporary, known.st_uid, known.st_gid)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask
