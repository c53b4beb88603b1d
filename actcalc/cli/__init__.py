"""The command line: one module per command; they parse, call and print."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # what a script needs before it can say that it was interrupted is little
if TYPE_CHECKING:
    from typing import NoReturn


def fail(message: str, hint: str = "") -> NoReturn:
    """Print ``error:`` and ``hint:`` lines to stderr and exit with 2."""
    from actcalc.errors import say

    say(f"error: {message}")
    if hint:
        say(f"hint: {hint}")
    raise SystemExit(2)


def drop_output() -> None:
    """Send what is left of stdout nowhere: its reader has gone (``actcalc ... | head``)."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    """Run the command line of this process; exits 0, 1 (the answer is no) or 2 (bad input)."""
    from actcalc.errors import SpecError

    try:
        import gc

        # Imports build long-lived objects only: collecting while they load costs a tenth of
        # start-up.
        gc.disable()
        from actcalc.render.plain import guard

        guard(sys.stdout, sys.stderr)
        if "_ACTCALC_COMPLETE" in os.environ:
            from actcalc.cli.completion import answer

            answer(sys.argv[1:])
            raise SystemExit(0)
        from actcalc.cli.app import run

        code = run(sys.argv[1:])
        if sys.stdout is not None:
            sys.stdout.flush()
    except SpecError as error:
        fail(str(error), error.hint)
    except BrokenPipeError:
        drop_output()
        code = 0
    except Exception as error:
        if os.environ.get("ACTCALC_DEBUG"):
            raise
        fail(
            f"internal error: {type(error).__name__}: {str(error)[:300]}",
            "please report it with this command line; ACTCALC_DEBUG=1 shows where it happened",
        )
    except KeyboardInterrupt:
        code = 130
    raise SystemExit(code)


def _occupy() -> None:
    """Put nothing where a stream is closed: a file opened later must not become the stream."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def entry() -> NoReturn:
    """The console script: :func:`main`, then leave at once.

    Taking a hundred modules apart at exit costs a tenth of the run and changes nothing.
    """
    code: object = 0
    try:
        _occupy()
        main()
    except SystemExit as stop:
        code = stop.code
    except KeyboardInterrupt:
        code = 130
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue
    os._exit(code if isinstance(code, int) else 2)
