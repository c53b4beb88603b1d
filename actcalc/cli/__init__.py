"""The command line: one module per command; they parse, call and print."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn

from actcalc.errors import SpecError


def fail(message: str, hint: str = "") -> NoReturn:
    """Print ``error:`` and ``hint:`` lines to stderr and exit with 2."""
    sys.stderr.write(f"error: {message}\n")
    if hint:
        sys.stderr.write(f"hint: {hint}\n")
    raise SystemExit(2)


def drop_output() -> None:
    """Send what is left of stdout nowhere: its reader has gone (``actcalc ... | head``)."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    """Run the command line of this process; exits 0, 1 (the answer is no) or 2 (bad input)."""
    import gc

    # Imports build long-lived objects only: collecting while they load costs a tenth of start-up.
    gc.disable()
    if "_ACTCALC_COMPLETE" in os.environ:
        from actcalc.cli.completion import answer

        answer(sys.argv[1:])
        raise SystemExit(0)
    from actcalc.cli.app import run
    from actcalc.render.plain import guard

    guard(sys.stdout, sys.stderr)
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except SpecError as error:
        fail(str(error), error.hint)
    except (RuntimeError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        if os.environ.get("ACTCALC_DEBUG"):
            raise
        fail(
            f"internal error: {type(error).__name__}: {error}",
            "please report it with this command line; ACTCALC_DEBUG=1 shows where it happened",
        )
    except BrokenPipeError:
        drop_output()
        code = 0
    except KeyboardInterrupt:
        code = 130
    raise SystemExit(code)


def entry() -> NoReturn:
    """The console script: :func:`main`, then leave at once.

    Taking a hundred modules apart at exit costs a tenth of the run and changes nothing.
    """
    code: object = 0
    try:
        main()
    except SystemExit as stop:
        code = stop.code
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)
