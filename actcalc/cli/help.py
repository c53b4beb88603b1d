"""Help: what a command answers, two examples, its arguments, and its options in groups.

Read from how the options are declared; defaults are those of the specs that the options override.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any

from actcalc.cli.choices import PANELS
from actcalc.cli.words import WORDS
from actcalc.errors import SpecError, suggestion

WIDEST = 100
_NAMES = 26
"""Columns for the names of options; a longer one has a line of its own."""


def asked(words: list[str], commands: Iterable[str]) -> list[str]:
    """``help plan`` as ``plan --help``; ``SpecError`` where the word is no command."""
    known = tuple(commands)
    if words and words[0] not in known and not words[0].startswith("-"):
        raise SpecError(
            f"help {words[0]}: there is no such command",
            suggestion(words[0], known) or "commands: " + ", ".join(known),
        )
    return [*(word for word in words if not word.startswith("-")), "--help"]


def help_text(command: Any, context: Any, commands: Mapping[str, str] | None = None) -> str:
    """The help of one command, or of a group with its ``commands``."""
    width = min(WIDEST, shutil.get_terminal_size().columns)
    params = [param for param in command.get_params(context) if not getattr(param, "hidden", False)]
    arguments = [param for param in params if param.param_type_name == "argument"]
    options = [param for param in params if param.param_type_name == "option"]
    usage = " ".join(
        ["Usage:", context.command_path, *([_metavar(each) for each in arguments])]
        + (["COMMAND ..."] if commands else [])
        + ["[OPTIONS]"]
    )
    parts = [
        textwrap.wrap(usage, width, subsequent_indent="  "),
        *_prose(command.help or "", width),
    ]
    if commands:
        parts.append(["Commands:", *_columns(commands.items(), width)])
    if command.epilog:
        parts.append(["Examples:", *(f"  {line}" for line in command.epilog.splitlines())])
    if arguments:
        rows = [(_metavar(each), each.help or "") for each in arguments]
        parts.append(["Arguments:", *_columns(rows, width)])
    parts += _groups(options, command.name or "", context, width)
    known = {name for each in options for name in each.opts}
    words = [(", ".join(row.words[:1]), row.text) for row in WORDS if row.means[0] in known]
    if words and not commands:
        parts.append(["Other words for them:", *_columns(words, width)])
    return "\n\n".join("\n".join(lines) for lines in parts)


def _prose(text: str, width: int) -> Iterator[list[str]]:
    """A docstring's paragraphs."""
    for paragraph in textwrap.dedent(text).strip().split("\n\n"):
        yield textwrap.wrap(" ".join(paragraph.split()), width)


def _groups(options: list[Any], name: str, context: Any, width: int) -> Iterator[list[str]]:
    """The options group by group: a command's own first, then those that commands share."""
    shared = any(each.rich_help_panel in PANELS for each in options)
    own = name.capitalize() if shared else "Options"
    groups: dict[str, list[Any]] = {}
    for each in options:
        last = each.name == "help" and "Output" in groups
        panel = "Output" if last else each.rich_help_panel or own
        groups.setdefault(panel, []).append(each)
    names = [_flags(each) for each in options]
    order = [*(panel for panel in groups if panel not in PANELS), *PANELS]
    said = False
    for panel in (panel for panel in order if panel in groups):
        rows = [(_flags(each), _about(each, context)) for each in groups[panel]]
        lines = [f"{panel}:", *_columns(rows, width, names)]
        if panel in PANELS and not said and panel != "Output":
            said = True
            note = "Given options override MODEL; [defaults] hold where it says nothing."
            lines[1:1] = textwrap.wrap(note, width, initial_indent="  ", subsequent_indent="  ")
        yield lines


def _metavar(param: Any) -> str:
    return str(param.metavar or param.name.upper())


def _flags(param: Any) -> str:
    names = ", ".join(sorted(param.opts, key=len))
    if param.secondary_opts:
        return f"{names}/{', '.join(param.secondary_opts)}"
    return names if param.is_flag else f"{names} {_value(param)}"


def _value(param: Any) -> str:
    """What the value is called: N for a whole number, X for another, else NAME."""
    kind = str(getattr(getattr(param, "type_descriptor", None), "annotation", ""))
    plain = "N" if "int" in kind else "X" if "float" in kind else "NAME"
    return str(param.metavar or plain)


def _about(param: Any, context: Any) -> str:
    """What an option does, the words it takes, and its default."""
    text = param.help or ""
    if "{words}" in text:
        words = (item.value for item in param.shell_complete(context, ""))
        text = text.replace("{words}", ", ".join(words))
    default = _default(param)
    return f"{text} [{default}]" if default and "default" not in text else text


def _default(param: Any) -> str:
    """The default as it would be given, empty where there is none."""
    value = param.default
    if param.is_flag and not param.secondary_opts:
        return ""
    if value in (None, False, (), []):
        value = _spec_defaults().get(param.name)
    if isinstance(value, bool):
        names = param.opts if value else param.secondary_opts
        return str(names[0]) if param.secondary_opts else ""
    return "" if value in (None, "", "auto", ()) or callable(value) else str(value)


def _spec_defaults() -> dict[str, Any]:
    """Defaults of the fields that options override, by name."""
    from actcalc.io.runs import SECTIONS

    return {
        field.name: field.default
        for section, kind in SECTIONS.items()
        if section != "model"
        for field in fields(kind)  # type: ignore[arg-type]
        if field.default is not MISSING
    }


def _columns(
    rows: Iterable[tuple[str, str]], width: int, names: Iterable[str] | None = None
) -> list[str]:
    """Names and what they mean, in two columns; one below the other where that is too narrow.

    ``names`` are those of all tables of which this is one, so that their columns are alike.
    """
    rows = list(rows)
    all_names = [name for name, _ in rows] if names is None else names
    longest = max((len(name) for name in all_names if len(name) <= _NAMES), default=0)
    indent = longest + 4 if width >= 60 else 6
    lines = []
    for name, about in rows:
        text = textwrap.wrap(about, max(20, width - indent), break_on_hyphens=False)
        if len(name) + 4 > indent or not text:
            lines.append(f"  {name}")
        else:
            lines.append(f"  {name:<{indent - 2}}{text.pop(0)}")
        lines += [" " * indent + line for line in text]
    return lines
