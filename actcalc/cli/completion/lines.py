"""What may stand at the end of an unfinished command line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from actcalc.cli.app import COMMANDS, DEFAULT, build
from actcalc.cli.choices import models, paths

Candidates = Iterable[tuple[str, str]]
"""Words, each with what it means, or nothing."""


def after(words: Sequence[str]) -> Candidates:
    """Candidates for the last of ``words``, which are those after ``actcalc``."""
    *before, last = [_bare(word) for word in words] or [""]
    if before and before[0] == "help":
        return _starting(COMMANDS.items(), last) if len(before) == 1 else ()
    if not before and not last.startswith("-"):
        return (
            *_starting(COMMANDS.items(), last),
            *_starting(((name, "") for name in models()), last),
            *((path, "") for path in paths(last)),
        )
    if not before or before[0].startswith("--"):
        return _options(build(), before, last)
    if before[0] not in COMMANDS:
        before = [DEFAULT, *before]
    return _in_command(before, last)


def _bare(word: str) -> str:
    """A word without the quotes that the shell left around it."""
    return word.strip("'\"") if word[:1] in "'\"" else word.replace("\\", "")


def _starting(known: Iterable[tuple[str, str]], start: str) -> Candidates:
    return [(word, about) for word, about in known if word.startswith(start)]


def _in_command(before: list[str], last: str) -> Candidates:
    """What may follow inside a command, which is imported for what it declares."""
    group = build()
    context = group.context_class(group, info_name="actcalc")
    command, rest = group.get_command(context, before[0]), before[1:]
    inner = getattr(command, "commands", None)
    if inner is not None:
        if not rest:
            return _starting(
                ((name, each.get_short_help_str(60)) for name, each in inner.items()), last
            )
        command, rest = inner.get(rest[0]), rest[1:]
    return () if command is None else _options(command, rest, last)


def _options(command: Any, rest: list[str], last: str) -> Candidates:
    """What may follow ``rest`` among a command's options and arguments."""
    context = command.context_class(command, info_name="actcalc")
    params = command.get_params(context)
    options = {name: each for each in params for name in (*each.opts, *each.secondary_opts)}
    flag, equals, value = last.partition("=")
    if equals and flag in options:  # zsh and fish: --policy=sel is one word
        return [(f"{flag}={word}", "") for word, _ in _values(options[flag], context, value)]
    if rest and rest[-1] == "=" and len(rest) > 1:  # bash: three
        rest = rest[:-1]
    if last == "=" and rest:
        last = ""
    if rest and _takes_value(options.get(rest[-1])):
        return _values(options[rest[-1]], context, last)
    if last.startswith("-"):
        return _flags(params, last, rest)
    argument = _argument(params, options, rest)
    return () if argument is None else _values(argument, context, last)


def _takes_value(param: Any) -> bool:
    return param is not None and param.param_type_name == "option" and not param.is_flag


def _values(param: Any, context: Any, last: str) -> Candidates:
    return [(item.value, item.help or "") for item in param.shell_complete(context, last)]


def _flags(params: Iterable[Any], start: str, given: Sequence[str]) -> Candidates:
    """Options that begin like ``start``, without those that were given and take no second value."""
    found = []
    for each in params:
        if each.param_type_name != "option":
            continue
        names = [*each.opts, *each.secondary_opts]
        if not each.multiple and any(name in given for name in names):
            continue
        about = re.split(r"[.:;](?:\s|$)| \(", each.help or "")[0]
        long = [name for name in names if name.startswith("--") or len(start) < 2]
        found += [(name, about) for name in long if name.startswith(start)]
    return found


def _argument(params: Iterable[Any], options: dict[str, Any], given: Sequence[str]) -> Any:
    """The argument that comes next: the last one where it takes several."""
    arguments = [each for each in params if each.param_type_name == "argument"]
    plain = [
        word
        for index, word in enumerate(given)
        if not word.startswith("-") and not (index and _takes_value(options.get(given[index - 1])))
    ]
    if len(plain) < len(arguments):
        return arguments[len(plain)]
    return arguments[-1] if arguments and arguments[-1].nargs == -1 else None
