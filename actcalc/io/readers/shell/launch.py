"""Which program a script launches, with which options, on how many processes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from actcalc.io.readers.shell.expand import MARK, Variables
from actcalc.io.readers.shell.script import Command, Script

_PROCESSES = ("nproc-per-node", "num-gpus", "ntasks-per-node", "gpus-per-node")
_NODES = ("nnodes", "num-nodes", "nodes")
_TOTAL = ("num-processes",)
_LAUNCHERS = ("torchrun", "deepspeed", "accelerate", "srun", "mpirun", "python", "python3", "ray",
              "llamafactory-cli", "axolotl", "tune", "trl", "uv", "colossalai",
              "swift")  # fmt: skip
_SUBCOMMANDS = {"llamafactory-cli": ("train",), "axolotl": ("train",), "tune": ("run",),
                "trl": ("sft", "dpo", "grpo", "kto", "reward")}  # fmt: skip
_ELASTIC = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_MOST_TOLD = 12
_OPTION = re.compile(r"--?[A-Za-z]|[+~]{0,2}[A-Za-z_]\w*(\.\w+)+=")
"""How an option begins, or a dotted override."""


@dataclass
class Launch:
    """One launched program."""

    program: str
    """The Python file, module or tool that trains; empty where only options are written."""
    options: dict[str, Any] = field(default_factory=dict)
    """Its options: by name without dashes; ``name=value`` words by their dotted name."""
    files: list[str] = field(default_factory=list)
    """Words that are no options: configuration files, mostly."""
    devices: int | None = None
    """Processes that are started in all, where the launcher is told."""
    launcher: dict[str, Any] = field(default_factory=dict)
    """Options of the launcher itself."""
    unknown: tuple[str, ...] = ()
    """What of it only the run would know, each with its line."""
    lacking: frozenset[str] = frozenset()
    """Names of options whose value only the run would know."""
    sure: bool = True


def launches(script: Script, text: str) -> list[Launch]:
    """Every command of a script that launches a program with options.

    Last come the options that its variables hold, as if a command took them all: a file of
    MODEL_ARGS launches nothing.
    """
    found = [launch for each in script.commands if (launch := _launch(each, script.variables))]
    options, files, unknown = _options(_held(script.variables), script.variables)
    if options:
        lacking = _lacking(unknown)
        found.append(Launch("", options, files, unknown=unknown, lacking=lacking, sure=False))
    batch = _batch_lines(text)
    for launch in found:
        if launch.devices is None:
            launch.devices = _devices({**batch, **launch.launcher})
        if launch.devices is None:
            world = script.variables.known("WORLD_SIZE")
            launch.devices = int(world) if world and world.isdigit() else None
    return found


def _held(variables: Variables) -> list[str]:
    """Words of every array and text that holds options."""
    texts = (text.split() for text in variables.texts.values() if "--" in text)
    return [
        word
        for words in (*variables.arrays.values(), *texts)
        if _holds_options(words) and str(words[0]).startswith("--")
        for word in words
    ]


def _holds_options(words: Sequence[str]) -> bool:
    named = [word for word in words if re.match(r"--[A-Za-z]", word)]
    return len(named) > 1 or any(re.match(r"[a-z_]+\.[\w.]+=", word) for word in words)


def _launch(command: Command, variables: Variables) -> Launch | None:
    words = command.words
    if not words:
        return None
    start = words[0].rsplit("/", 1)[-1]
    bare = start.startswith("--") or bool(re.fullmatch(r"[+a-z_][\w.]*\.[\w.]+=.*", start, re.S))
    if bare:
        place, program = 0, ""
    else:
        tools = {word.rsplit("/", 1)[-1] for word in words}
        if not tools & set(_LAUNCHERS) and MARK not in words[0]:
            return None
        if start == "ray" and words[1:2] != ["job"]:
            return None
        place, program = _program(words)
        if not program:
            return None
    launcher, _, _ = _options(words[1 : max(1, place - 1)], variables)
    options, files, unknown = _options(words[place:], variables)
    if not options and not files and not unknown:
        return None
    return Launch(program, options, files, None, launcher, unknown, _lacking(unknown), command.sure)


def _program(words: Sequence[str]) -> tuple[int, str]:
    """Where the options of the program begin, and what it is; (0, "") where there is none."""
    for index, word in enumerate(words):
        name = word.rsplit("/", 1)[-1]
        if word == "-m" and index + 1 < len(words) and words[index + 1] not in _ELASTIC:
            return index + 2, words[index + 1]
        if name.endswith(".py") and MARK not in name:
            return index + 1, name
        subcommands = _SUBCOMMANDS.get(name, ())
        if subcommands and index + 1 < len(words) and words[index + 1] in subcommands:
            return index + 2, f"{name} {words[index + 1]}"
    for index, word in enumerate(words):  # a program in a variable, behind the launcher's options
        if MARK in word and index + 1 < len(words) and words[index + 1].startswith("--"):
            return index + 1, "a program"
    return 0, ""


def _options(
    words: Sequence[str], variables: Variables
) -> tuple[dict[str, Any], list[str], tuple[str, ...]]:
    """Options and what belongs to them, other words, and what is not known."""
    options: dict[str, Any] = {}
    files: list[str] = []
    unknown: list[str] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        assigned = re.fullmatch(r"(?:--|\+{0,2})([A-Za-z_][\w.-]*)=(.*)", word, re.S)
        if assigned:
            name, values = assigned[1], [assigned[2]]
        elif re.match(r"--?[A-Za-z]", word):
            name, values = word.lstrip("-"), []
            while at < len(words) and not _OPTION.match(words[at]):
                values.append(words[at])
                at += 1
        else:
            _positional(word, files, unknown, variables)
            continue
        _put(name, values, options, unknown, variables)
    return options, files, tuple(unknown)


def _put(
    name: str, values: list[str], options: dict[str, Any], unknown: list[str], variables: Variables
) -> None:
    """One option; a value that is not known is told, and the option left as its default.

    An array that is not known may hold options of its own, and is no value of this one.
    """
    known: list[str] = []
    lacking = False
    for value in values:
        for reason in variables.reasons(value):
            apart = reason.what.endswith("[@]}")
            lacking = lacking or not apart
            unknown.append(f"{'' if apart else f'--{name} '}{reason.what} (line {reason.line})")
        if MARK not in value:
            known.append(value)
    if lacking and not known:
        return
    options[name] = True if not known else known[0] if len(known) == 1 else known


def _lacking(unknown: Sequence[str]) -> frozenset[str]:
    return frozenset(each[2:].split()[0] for each in unknown if each.startswith("--"))


def _positional(word: str, files: list[str], unknown: list[str], variables: Variables) -> None:
    reasons = variables.reasons(word)
    if reasons:
        unknown += [f"{reason.what} (line {reason.line})" for reason in reasons]
    else:
        files.append(word)


_PLACES = re.compile(
    r"--(?!.*(model|tokenizer|config))([\w.-]*[-_.])?(paths?|dir|folder|files?|save|load|root|names?"
    r"|addr|address|port|rank|endpoint|id|url|prefix|data|project|key|token|ip|host|iters|steps|lr"
    r"|rdzv[\w-]*|master[\w-]*|tensorboard[\w-]*|wandb[\w-]*) "
)
"""Options that say where things are, or how long and how fast is learned: they are told last."""


def of_place(unknown: str) -> bool:
    """Whether what is not known is where something is, or how long is learned."""
    return _PLACES.match(unknown) is not None


def unknown_note(unknown: Sequence[str]) -> tuple[str, ...]:
    """One note on what only running the script would tell, what may matter here first."""
    if not unknown:
        return ()
    told = sorted(dict.fromkeys(unknown), key=of_place)
    more = f" and {len(told) - _MOST_TOLD} more" if len(told) > _MOST_TOLD else ""
    return (
        f"Known only when it runs, and left at its default: {', '.join(told[:_MOST_TOLD])}{more}.",
    )


def _batch_lines(text: str) -> dict[str, Any]:
    """Options of ``#SBATCH`` lines."""
    found = re.findall(r"^#SBATCH\s+--([\w-]+)(?:=|\s+)(\S+)", text, re.M)
    short = re.findall(r"^#SBATCH\s+-N\s*(\d+)", text, re.M)
    return {**dict(found), **({"nodes": short[0]} if short else {})}


def _devices(options: Mapping[str, Any]) -> int | None:
    plain = {name.replace("_", "-"): value for name, value in options.items()}
    total = _first(plain, _TOTAL)
    if total is not None:
        return total
    each = _first(plain, _PROCESSES)
    if each is None:
        return None
    return each * (_first(plain, _NODES) or 1)


def _first(options: Mapping[str, Any], names: Sequence[str]) -> int | None:
    for name in names:
        text = str(options.get(name, "")).rsplit(":", 1)[-1]
        if text.isdigit() and 0 < int(text) < 2**20:
            return int(text)
    return None
