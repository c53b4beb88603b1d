"""Plain conversion of command-line words, so that parsing flags does not load Pydantic.

Typer builds a Pydantic adapter for every option of a command, used or not, which costs more than
the answer itself. Options here are whole numbers, numbers, words, switches and lists of words:
:func:`use_plain_conversion` gives those their own converter where this version of Typer has one to
replace, and leaves everything else as it is.
"""

from __future__ import annotations

from typing import Any

import typer

from actcalc.specs.numbers import whole


def _count(text: Any) -> int:
    return text if isinstance(text, int) else whole(str(text))


def _word(text: Any) -> str:
    return str(text)


def _words(values: Any) -> list[str]:
    return [str(value) for value in values]


_KINDS: dict[Any, tuple[Any, str]] = {
    int: (_count, "a whole number"),
    float: (float, "a number"),
    str: (_word, "a word"),
    bool: (bool, "a switch"),
    list[str]: (_words, "words"),
}


class PlainConverter:
    """Stands in for Typer's runtime parameter: same ``coerce``, no adapter."""

    def __init__(self, kind: Any) -> None:
        self.convert, self.noun = _KINDS[kind]

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Convert one parsed value; raises ``typer.BadParameter`` naming it."""
        if value is None:
            return () if getattr(param, "multiple", False) else None
        try:
            return self.convert(value)
        except ValueError:
            raise typer.BadParameter(
                f"{value!r} is not {self.noun}", ctx=ctx, param=param
            ) from None


def plain(params: Any) -> Any:
    """Install plain converters on the parameters of the kinds above; return the parameters."""
    for param in params:
        kind = getattr(getattr(param, "type_descriptor", None), "annotation", None)
        if hasattr(param, "_runtime_param") and kind in _KINDS:
            param._runtime_param = PlainConverter(kind)
    return params


def use_plain_conversion(command: Any) -> None:
    """Make a command convert its options, its help switch included, plainly."""
    listed = command.get_params
    command.get_params = lambda ctx: plain(listed(ctx))
