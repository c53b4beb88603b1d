"""Options that were given: refused where they say nothing, and read where they are lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from actcalc.errors import SpecError
from actcalc.io.sources import Source


def only_given(**values: Any) -> dict[str, Any]:
    """The values that are not None."""
    return {key: value for key, value in values.items() if value is not None}


def accumulated(origin: Source, steps: int, batch: int | None) -> Source:
    """The source with so many micro-batches of a replica in a step."""
    if batch is not None:
        raise SpecError(
            f"--grad-accum {steps} and --global-batch {batch} say the same thing twice",
            "give one: the batch is micro-batch x steps x replicas",
        )
    if steps < 1:
        raise SpecError(f"--grad-accum is {steps}", "use a value of at least 1")
    return replace(origin, accumulation=steps)


def flag_of(name: str) -> str:
    """The flag that a field of options is given with."""
    return "--" + name.rstrip("_").replace("_", "-")


def refuse_given(options: Any, what: str, *, keep: Sequence[str]) -> None:
    """Refuse options that ``what`` cannot heed; those named in ``keep`` it can."""
    for field in fields(options):
        if field.name not in keep and getattr(options, field.name) is not None:
            raise SpecError(
                f"{what} takes no {flag_of(field.name)}: its sizes are its own",
                "drop it, or measure again with other sizes",
            )


def refuse_idle(options: Any, command: str, names: Sequence[str]) -> None:
    """Refuse options that cannot change a command's answer, so that none is silently ignored."""
    for name in names:
        if getattr(options, name) is not None:
            flag = name.replace("_", "-")
            others = "compare and plan do" if name == "peak" else "compare and memory do"
            raise SpecError(f"{command} does not depend on --{flag}", f"drop --{flag}; {others}")


_DAY = 86_400


def check_time_limit(seconds: float) -> None:
    """Refuse a --time-limit that is no time, or longer than a day."""
    if not 0 < seconds <= _DAY:
        raise SpecError(f"--time-limit {seconds:g}", f"give seconds above 0, up to {_DAY:,}")


def split_policies(texts: list[str] | None) -> tuple[str, ...]:
    """Policies from repeated options, each of which may list several with commas."""
    names = [name.strip() for text in texts or () for name in text.split(",")]
    if not all(names):
        raise SpecError("--policy is empty", "name one, e.g. --policy selective")
    return tuple(dict.fromkeys(names))


def parse_split(text: str | None) -> tuple[int, ...] | None:
    """``7,8x14,7`` as sixteen numbers; ``SpecError`` if it does not read like that."""
    if text is None:
        return None
    counts: list[int] = []
    for part in text.replace(" ", "").split(","):
        count, times, repeat = part.partition("x")
        if not count.isdigit() or (times and not repeat.isdigit()) or len(part) > 12:
            raise SpecError(
                f"--layers-per-stage {text!r}: {part!r} is no count",
                "write counts joined with commas, repeats as 8x14: 7,8x14,7",
            )
        if times and int(repeat) > 4096:
            raise SpecError(f"--layers-per-stage {text!r}: too many stages", "use at most 4096")
        counts += [int(count)] * (int(repeat) if times else 1)
    return tuple(counts)


def given_words(models: Sequence[str], *bundles: Any) -> list[str]:
    """``models`` and the flags of each bundle of options that was given, as on a command line."""
    found = list(models)
    for bundle in bundles:
        for field in fields(bundle):
            value, flag = getattr(bundle, field.name), flag_of(field.name)
            if value is None:
                continue
            if isinstance(value, bool):
                found.append(flag if value else flag.replace("--", "--no-", 1))
            else:
                for one in value if isinstance(value, list) else [value]:
                    found += [flag, str(one)]
    return found
