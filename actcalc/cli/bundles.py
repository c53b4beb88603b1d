"""Bundles of options: one dataclass, several flags of a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Any


def with_options(*bundles: type[Any]) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a command the options of each bundle; it receives one object per bundle.

    The command's parameter annotated with a bundle receives it; Typer sees all fields as separate
    options.
    """

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        every = inspect.signature(command, eval_str=True).parameters.values()
        keywords = {each.annotation: each.name for each in every if each.annotation in bundles}
        own = [each for each in every if each.annotation not in bundles]
        names = {bundle: [field.name for field in fields(bundle)] for bundle in bundles}

        def wrapper(**values: Any) -> int:
            made = {
                keywords[bundle]: bundle(
                    **{name: values.pop(f"{_key(name)}") for name in names[bundle]}
                )
                for bundle in bundles
            }
            return command(**values, **made)

        extra = [
            inspect.Parameter(
                _key(field.name),
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=annotated(bundle)[field.name],
            )
            for bundle in bundles
            for field in fields(bundle)
        ]
        own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
        wrapper.__signature__ = inspect.Signature([*own, *extra])  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in [*own, *extra]}
        wrapper.__doc__ = command.__doc__
        wrapper.__name__ = command.__name__
        return wrapper

    return decorate


def help_of(bundle: type[Any]) -> dict[str, str]:
    """What each field of a bundle means: the help of its flag, without lists of known words."""
    notes = annotated(bundle)
    return {
        field.name: str(getattr(notes[field.name].__metadata__[0], "help", "")).replace(
            ": {words}", ""
        )
        for field in fields(bundle)
    }


def _annotated(bundle: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for base in reversed(bundle.__mro__[:-1]):
        found.update(inspect.get_annotations(base, eval_str=True))
    return found


annotated: Callable[[Any], dict[str, Any]] = cache(_annotated)
"""The evaluated annotations of a bundle's fields, inherited ones among them."""


def _key(name: str) -> str:
    """A parameter name that shadows nothing."""
    return name + "_" if name in ("set", "format") else name
