"""The command group: commands are imported when they are called, and compare is the default."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from actcalc import __version__
from actcalc.cli.choices import SHELLS, examples, option
from actcalc.cli.convert import plain, use_plain_conversion
from actcalc.cli.words import meant, plainly
from actcalc.errors import SpecError, file_error, shorten, suggestion
from actcalc.io import presets

COMMANDS = {
    "compare": "policies side by side (the default command)",
    "breakdown": "every saved tensor: op, shape, formula, bytes",
    "memory": "the whole GPU, per pipeline stage: fits or not",
    "plan": "the cheapest recompute plan that fits a memory budget, proven",
    "search": "the fastest layouts on so many GPUs that fit",
    "sweep": "one row for each combination of varied values",
    "advise": "it does not fit (or does): what to change, cheapest first",
    "check": "predicted beside a real run's log",
    "mfu": "MFU and HFU from a step time, or the step time they promise",
    "explain": "how a number is derived, with its source",
    "measure": "real saved bytes from PyTorch, beside the prediction",
    "calibrate": "this GPU's shares of its peaks, measured, for --efficiency",
    "report": "one self-contained page about a run",
    "web": "the calculator as a local page",
    "presets": "list or show models, devices and framework profiles",
    "schema": "JSON Schema of the input and of each output",
    "help": "this, or the help of one command",
}
DEFAULT = "compare"
_OWN_OPTIONS = ("--help", "-h", "--version")
_SHELL_OPTIONS = ("--install-completion", "--show-completion")
"""Options whose value may be left out."""


def command_names() -> tuple[str, ...]:
    """Every command; a preset may not be called like one."""
    return tuple(COMMANDS)


class LazyGroup(TyperGroup):
    """Loads a command's module when it is called; routes a model's name to compare."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Commands in the order help lists them."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import and build one command, or None if there is none."""
        if cmd_name not in COMMANDS:
            return None
        app = import_module(f"actcalc.cli.{cmd_name}").app
        command = typer.main.get_command(app)
        command.name = cmd_name
        for each in (command, *getattr(command, "commands", {}).values()):
            use_plain_conversion(each)
            each.get_help = partial(_help, each)
        return command

    def get_help(self, ctx: Any) -> str:
        """The commands, listed without importing them, and how to begin."""
        from actcalc.cli.help import help_text

        return help_text(self, ctx, COMMANDS)

    def get_params(self, ctx: Any) -> Any:
        """The group's own options, converted plainly."""
        return plain(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Insert the default command before a model's name or its options."""
        return super().parse_args(ctx, _flag_asked(args) or route(plainly(args)))


def _help(command: Any, ctx: Any) -> str:
    """The help of a command, or of a group inside this one."""
    from actcalc.cli.help import help_text

    inner = getattr(command, "commands", None)
    listed = inner and {name: each.get_short_help_str(90) for name, each in inner.items()}
    return help_text(command, ctx, listed)


def _flag_asked(args: list[str]) -> list[str] | None:
    """``explain --FLAG``: a flag alone is the term asked for, no option of the command."""
    if len(args) != 2 or args[0] != "explain" or not args[1].startswith("--"):
        return None
    from actcalc.answers.explain.terms import explains

    flag = meant(args[1])
    return ["explain", "--", flag] if explains(flag) else None


def route(args: list[str]) -> list[str]:
    """Arguments with the default command put first where no command is named; help turned round.

    Raises ``SpecError`` when the first word is neither a command, a preset nor a path: with a
    did-you-mean over all three.
    """
    if not args:
        return args
    first = args[0]
    if first == "help":
        from actcalc.cli.help import asked

        return asked(args[1:], COMMANDS)
    if first in _SHELL_OPTIONS:
        return [first, args[1] if len(args) > 1 else ""]
    if first in COMMANDS or first in _OWN_OPTIONS:
        return args
    if first.startswith("-") or not first.strip():  # an option, standard input, or no name
        return [DEFAULT, *args]
    models = (*presets.names("models"), *presets.names("runs"))
    if first in models or _looks_like_path(first):
        return [DEFAULT, *args]
    close = presets.suggestion(first, [*COMMANDS, *models])
    hint = close or "`actcalc presets list` lists the models"
    raise SpecError(f"{shorten(first)} is no command, no preset and no file", hint)


def _looks_like_path(word: str) -> bool:
    if "/" in word or re.search(r"\.(ya?ml|json|toml|sh)$", word):
        return True
    from actcalc.io.yamlfile import is_there

    return is_there(word)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"actcalc {__version__}")
        raise typer.Exit


def _install(value: str | None) -> None:
    if value is not None:
        from actcalc.cli.completion.shells import install

        typer.echo(install(value))
        raise typer.Exit


def _show(value: str | None) -> None:
    if value is not None:
        from actcalc.cli.completion.shells import script

        typer.echo(script(value), nl=False)
        raise typer.Exit


def _callback(
    version: bool = typer.Option(
        False, "--version", is_eager=True, callback=_version, help="Print the version and exit."
    ),
    install_completion: Annotated[
        str | None,
        option(
            "--install-completion",
            help="Complete commands, presets and options in this shell, or in: {words}.",
            metavar="[SHELL]",
            words=lambda: SHELLS,
            callback=_install,
        ),
    ] = None,
    show_completion: Annotated[
        str | None,
        option(
            "--show-completion",
            help="Print the script that does so.",
            metavar="[SHELL]",
            words=lambda: SHELLS,
            callback=_show,
        ),
    ] = None,
) -> None:
    """Memory and FLOPs of transformer training, before the job is launched.

    How many bytes of activations a step keeps, whether it fits, what to recompute, and what that
    costs. MODEL is a preset's name, a hub id, a YAML run file, a config.json, or the files a run is
    launched with; without a command, its policies are compared.
    """


def build() -> Any:
    """The command group."""
    app = typer.Typer(
        cls=LazyGroup,
        epilog=examples(
            "gpt3-175b --tp 8 --sp",
            "memory llama-3-8b --device h100-80gb",
            "plan llama-3-8b --device h100-80gb",
            "help memory",
        ),
        add_completion=False,
        no_args_is_help=True,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_callback)
    return typer.main.get_command(app)


def run(args: Sequence[str]) -> int:
    """Run one command line and return its exit code; ``SpecError`` for bad input."""
    usage_error: type[Exception] = typer.BadParameter.__mro__[1]  # typer exports no UsageError
    try:
        result = build().main(list(args), prog_name="actcalc", standalone_mode=False)
    except typer.Exit as stop:
        return int(stop.exit_code)
    except typer.Abort:
        return 130
    except usage_error as error:
        raise _usage(error) from None
    except BrokenPipeError:
        raise
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # Typer makes an exit of 1 of it
            raise stop.__context__ from None
        raise
    except OSError as error:
        doing = f"read {error.filename}" if error.filename else "write the answer"
        raise file_error(doing, error) from error
    return result if isinstance(result, int) else 0


def _elsewhere(message: str, context: Any) -> str:
    """Who takes an option that a command does not have, and how to say it here."""
    unknown = re.match(r"no such option: (--?[a-z0-9-]+)", message, re.IGNORECASE)
    if unknown is None or context is None:
        return ""
    flag, field = unknown.group(1), unknown.group(1).lstrip("-").replace("-", "_")
    own = {name for param in context.command.params for name in param.opts}
    if not flag.startswith("--"):
        dashed = [word for word in sys.argv[1:] if word.startswith(flag) and "-" + word in own]
        return f"did you mean -{dashed[0]}?" if dashed else ""
    takers = _takers(flag)
    if not takers:
        return ""
    names = ", ".join(takers[:-1]) + " and " + takers[-1] if len(takers) > 1 else takers[0]
    who = f"{names} take{'s' * (len(takers) == 1)} {flag}"
    from actcalc.specs.training import Training

    settable = "--set" in own and field in Training.__dataclass_fields__
    return f"use --set {field}=VALUE here; {who}" if settable else who


def _takers(flag: str) -> list[str]:
    """The commands that have an option."""
    group = LazyGroup(name="actcalc")
    found = []
    for name in COMMANDS:
        command = group.get_command(None, name) if name != "help" else None
        params = command.params if command is not None else ()
        if any(flag in param.opts for param in params):
            found.append(name)
    return found


def _usage(error: Exception) -> SpecError:
    """A parser's complaint in the form of every other error."""
    if type(error).__name__ == "NoArgsIsHelpError":
        context = getattr(error, "ctx", None)
        typer.echo(context.get_help() if context else "")
        raise SystemExit(2)
    format_message = getattr(error, "format_message", None)
    text = (format_message() if format_message else str(error)).strip().rstrip(".")
    message, _, extra = text.partition(" Did you mean ")
    message = message.partition(" (Possible options: ")[0]
    possibilities = getattr(error, "possibilities", None) or ()
    hint = f"did you mean {extra.rstrip('?')}?" if extra else ""
    if possibilities and not hint:
        wanted = str(getattr(error, "option_name", ""))
        close = suggestion(wanted, list(possibilities), likeness=0.0)
        hint = close or "did you mean " + ", ".join(sorted(possibilities)) + "?"
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "actcalc"
    hint = _elsewhere(message, context) or hint
    message = message.rstrip(".")
    return SpecError(message[0].lower() + message[1:], hint or f"`{command} --help` lists options")
