"""``actcalc sweep MODEL --vary KEY=A,B``: one row for each combination of varied values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from actcalc.cli.bundles import annotated
from actcalc.cli.choices import examples, option
from actcalc.cli.given import check_time_limit
from actcalc.cli.options import ModelArguments, OutputOptions, RunOptions, TimeOptions, with_options
from actcalc.cli.output import check_units, chosen_format, emit
from actcalc.cli.progress import bar
from actcalc.cli.training import MemoryOptions
from actcalc.cli.values import count_of, replicas
from actcalc.errors import SpecError, suggestion
from actcalc.io.runs import settable
from actcalc.specs.numbers import whole

if TYPE_CHECKING:
    from actcalc.answers.sweep import Sweep
    from actcalc.specs.run import Run

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_PANEL = "Sweep"
MOST_ROWS = 100_000
SECONDS = 600.0
_OWN = ("model", "gpus")
_SWITCHES = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


@dataclass(frozen=True, eq=False, repr=False)
class SweepOptions:
    """What is varied, and what each row is asked for."""

    vary: Annotated[
        list[str] | None,
        option(
            "--vary",
            help="Values of a flag, a field of --set, model or gpus: seq=4096,8192. Repeatable: "
            "every combination is a row.",
            panel=_PANEL,
            metavar="KEY=VALUES",
        ),
    ] = None
    group_by: Annotated[
        str | None,
        option("--group-by", help="Rows of one value together.", panel=_PANEL, metavar="KEY"),
    ] = None
    gpus: Annotated[
        int | None,
        option("--gpus", help="Devices that take part; replicas fill them.", panel=_PANEL),
    ] = None
    tokens: Annotated[
        str | None,
        option("--tokens", help="Tokens to train on: 300e9, 15T.", panel=_PANEL, metavar="COUNT"),
    ] = None
    price_per_gpu_hour: Annotated[
        float | None,
        option("--price-per-gpu-hour", help="Price of one GPU for one hour.", panel=_PANEL),
    ] = None
    watts_per_gpu: Annotated[
        float | None,
        option(
            "--watts-per-gpu",
            help="Power of one GPU with its share of host, network and cooling.",
            panel=_PANEL,
        ),
    ] = None

    time_limit: Annotated[
        float,
        option(
            "--time-limit",
            help=f"Seconds after which the rows until then are all (default: {SECONDS:g}).",
            panel=_PANEL,
        ),
    ] = SECONDS

    def varied(self) -> dict[str, list[Any]]:
        """Every key with its values, as its flag reads them; ``SpecError`` for one of no run."""
        found: dict[str, list[Any]] = {}
        for text in self.vary or ():
            key, equals, values = text.partition("=")
            key = key.strip().replace("-", "_")
            words = [word.strip() for word in values.split(",")]
            if not equals or not all(words):
                raise SpecError(f"--vary {text!r} names no values", "write --vary seq=4096,8192")
            if key in found:
                raise SpecError(f"--vary {key} is given twice", "join its values with commas")
            found[key] = list(dict.fromkeys(_value(key, word) for word in words))
        if not found:
            raise SpecError("a sweep varies something", "add --vary seq=4096,8192")
        rows = 1
        for each in found.values():
            rows *= len(each)
        if rows > MOST_ROWS:
            raise SpecError(f"{rows:,} combinations are too many", f"vary up to {MOST_ROWS:,}")
        return found

    def check(self) -> None:
        """Refuse numbers that mean nothing, alone or together."""
        for flag, value in (
            ("--price-per-gpu-hour", self.price_per_gpu_hour),
            ("--watts-per-gpu", self.watts_per_gpu),
        ):
            if value is not None and not 0 < value < 1e9:
                raise SpecError(f"{flag} {value:g} is not above 0", "give a number above 0")
            if value is not None and self.tokens is None:
                raise SpecError(f"{flag} is of a training run", "add --tokens 1T")
        check_time_limit(self.time_limit)


def _flags() -> dict[str, Any]:
    """The flags that can be varied, and the kind of each."""
    found = {}
    for bundle in (RunOptions, MemoryOptions):
        for field in fields(bundle):
            kinds = get_args(get_args(annotated(bundle)[field.name])[0])
            found[field.name] = next(kind for kind in kinds if kind is not type(None))
    return found


def _value(key: str, word: str) -> Any:
    """One value of a flag as it reads it; of a field of --set, the text."""
    kind = _flags().get(key)
    try:
        if key == "gpus" or kind is int:
            return whole(word)
        if kind is float:
            return float(word)
        if kind is bool:
            return _SWITCHES[word.lower()]
    except (ValueError, KeyError):
        raise SpecError(f"--vary {key}={word}: no such value", f"see --{key}") from None
    if kind is None and key not in _OWN and key.split(".")[0] not in settable():
        known = [*_flags(), *_OWN, *settable()]
        hint = suggestion(key, known) or "flags and fields of --set can be varied"
        raise SpecError(f"--vary {key}: no such flag or field", hint)
    return word


def answer(
    models: Sequence[str],
    options: RunOptions,
    memory: MemoryOptions,
    timing: TimeOptions,
    asked: SweepOptions,
    progress: Any = None,
) -> Sweep:
    """Every combination of what is varied, evaluated."""
    from actcalc.answers.sweep import sweep_runs

    asked.check()
    varied = asked.varied()
    origin = options.origin(models)
    lists = {field.name for field in fields(RunOptions) if _flags()[field.name] == list[str]}
    lists |= {"offload"}

    def run_of(values: Mapping[str, Any]) -> Run:
        flags = {key: value for key, value in values.items() if key in _flags()}
        flags = {key: [value] if key in lists else value for key, value in flags.items()}
        others = [f"{k}={v}" for k, v in values.items() if k not in flags and k not in _OWN]
        own = {field.name for field in fields(RunOptions)}
        chosen = replace(options, **{k: v for k, v in flags.items() if k in own})
        chosen = replace(chosen, set=[*(chosen.set or []), *others] or None)
        held = replace(memory, **{k: v for k, v in flags.items() if k not in own})
        source = options.origin([str(values["model"])]) if "model" in values else origin
        run = chosen.run(source, training=held.training())
        return replicas(run, values.get("gpus", asked.gpus), described=True)

    combinations = [dict(zip(varied, values, strict=True)) for values in product(*varied.values())]
    first = options.run(origin, training=memory.training())
    return sweep_runs(
        first.name,
        varied,
        combinations,
        run_of,
        gpus=None if "gpus" in varied else asked.gpus,
        group_by=asked.group_by.replace("-", "_") if asked.group_by else None,
        tokens=count_of(asked.tokens),
        price_per_gpu_hour=asked.price_per_gpu_hour,
        watts_per_gpu=asked.watts_per_gpu,
        efficiency=timing.shares(first) if first.device else None,
        progress=progress,
        seconds=asked.time_limit,
    )


@app.command(
    epilog=examples(
        "sweep llama-3-8b --vary seq=4096,8192,16384 --vary policy=none,full --device h100-80gb",
        "sweep llama-3-8b --gpus 64 --vary tp=1,2,4 --vary micro-batch=1,2 --global-batch 512 "
        "--device h100-80gb --tokens 15T --price-per-gpu-hour 2 --group-by tp",
    )
)
@with_options(SweepOptions, RunOptions, MemoryOptions, TimeOptions, OutputOptions)
def sweep(
    models: ModelArguments,
    options: RunOptions,
    memory: MemoryOptions,
    timing: TimeOptions,
    output: OutputOptions,
    asked: SweepOptions,
) -> int:
    """One row for each combination of varied values: memory, step, days, GPU-hours, price, energy.

    What does not fit, or is no run at all, is a row that says so. Exit 1 where none fits.
    """
    check_units(output.units)
    chosen_format(output)
    with bar("sweeping") as progress:
        result = answer(models, options, memory, timing, asked, progress)
    from actcalc.render.sweep import sweep_sheets

    emit(lambda: sweep_sheets(result, output.units), result.document, output)
    runs = [row for row in result.rows if row.problem is None]
    return 0 if any(row.fits is not False for row in runs) else 1
