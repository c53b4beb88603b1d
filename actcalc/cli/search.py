"""``actcalc search MODEL``: the fastest layouts on so many GPUs that fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actcalc.cli.choices import LAYOUT, examples, option
from actcalc.cli.given import check_time_limit
from actcalc.cli.options import ModelArguments, OutputOptions, RunOptions, TimeOptions, with_options
from actcalc.cli.output import check_units, chosen_format, emit
from actcalc.cli.progress import bar
from actcalc.cli.training import MemoryOptions
from actcalc.errors import SpecError
from actcalc.io.sources import Source
from actcalc.specs.run import Run

if TYPE_CHECKING:
    from actcalc.answers.search import Listed, Search
    from actcalc.render.charts.chart import Chart
    from actcalc.search.find import Found, Progress
    from actcalc.search.space import Space

    Text = Any  # where RunOptions has a number
else:
    Text = str | None

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_PANEL = "Search"
SECONDS = 60.0
"""Time of a search unless another is given; one over arrays takes a few of them."""
DEGREES = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp", "zero", "micro_batch")
"""Options of which a search takes several values."""
_OWN = ("schedule", "sp", *DEGREES)
_POINTS = 300
"""Layouts beside the front that a chart has."""
MACHINES = ("csv", "parquet")
"""Formats that list every row."""


def _degree(flag: str, help: str) -> Any:
    return option(flag, help=help, panel=LAYOUT, metavar="CHOICE")


@dataclass(frozen=True, eq=False, repr=False)
class SearchRunOptions(RunOptions):
    """A run whose layout is looked for: every degree is a choice."""

    micro_batch: Annotated[
        Text, _degree("--micro-batch", "Sequences per micro-batch: 1,2 or ..8.")
    ] = None
    tp: Annotated[Text, _degree("--tp", "Tensor-parallel ranks (t): 1,2,4,8 or ..16.")] = None
    pp: Annotated[Text, _degree("--pp", "Pipeline stages (p): 8 or ..16.")] = None
    vpp: Annotated[Text, _degree("--vpp", "Chunks of layers per stage (v).")] = None
    cp: Annotated[Text, _degree("--cp", "Context-parallel ranks (c).")] = None
    ep: Annotated[Text, _degree("--ep", "Expert-parallel ranks.")] = None
    etp: Annotated[
        Text, _degree("--etp", "Tensor-parallel ranks inside experts (default: tp and 1).")
    ] = None
    dp: Annotated[Text, _degree("--dp", "Data-parallel replicas.")] = None
    zero: Annotated[
        Text, _degree("--zero", "ZeRO stages (default: those that the framework has).")
    ] = None

    def run_on(self, origin: Source, gpus: int, training: dict[str, Any] | None) -> Run:
        """The run whose layout is looked for, on one GPU."""
        own = dict.fromkeys(_OWN)
        plain = RunOptions(**{**vars(self), **own})
        name = self.framework or origin.framework or origin.profile
        return plain.run(origin, name or ("megatron" if gpus > 1 else None), training)

    def space(self, gpus: int, *, across: bool) -> Space:
        """What is to be searched."""
        from actcalc.search.space import Space, choice_of
        from actcalc.specs.schedules import SCHEDULES

        names = tuple(name.strip() for name in (self.schedule or "").split(",") if name.strip())
        for name in names:
            if name not in SCHEDULES:
                raise SpecError(
                    f"unknown pipeline schedule {name!r}",
                    "the schedules are " + ", ".join(SCHEDULES),
                )
        flags = {name: "--" + name.replace("_", "-") for name in DEGREES}
        degrees: dict[str, Any] = {
            name: choice_of(getattr(self, name), flag) for name, flag in flags.items()
        }
        return Space(
            gpus=gpus,
            sp=self.sp,
            schedules=names,
            policies=self.policies(),
            tp_within_node=not across,
            **degrees,
        )


@dataclass(frozen=True, eq=False, repr=False)
class SearchOptions:
    """What is searched for, and what is listed."""

    gpus: Annotated[int | None, option("--gpus", help="GPUs of every layout.", panel=_PANEL)] = None
    max_tp_within_node: Annotated[
        bool,
        option(
            "--max-tp-within-node/--tp-across-nodes",
            help="Tensor parallelism stays inside a node (default), unless --tp says otherwise.",
            panel=_PANEL,
        ),
    ] = True
    pareto: Annotated[
        str | None,
        option(
            "--pareto",
            help="memory,time: list what nothing tops in both.",
            panel=_PANEL,
            metavar="WHAT",
            words=lambda: ("memory,time",),
        ),
    ] = None
    plan: Annotated[
        bool,
        option(
            "--plan",
            help="Plan the best layouts' recomputation, layer by layer, and rank them anew.",
            panel=_PANEL,
        ),
    ] = False
    time_limit: Annotated[
        float,
        option(
            "--time-limit",
            help="Seconds after which the layouts looked at until then are all (default: "
            f"{SECONDS:g}).",
            panel=_PANEL,
        ),
    ] = SECONDS
    top: Annotated[
        int, option("--top", help="Layouts listed (default: 10); files hold all.", panel=_PANEL)
    ] = 10

    def shown(self) -> Listed:
        """Which rows are listed; ``SpecError`` for a front of other figures."""
        if self.pareto is None:
            return "different"
        if self.plan:
            raise SpecError("--plan ranks by time alone", "drop --plan or --pareto")
        words = sorted(word.strip() for word in self.pareto.split(","))
        if words != ["memory", "time"]:
            raise SpecError(f"--pareto {self.pareto!r} is no pair", "use --pareto memory,time")
        return "pareto"


def found(
    origin: Source,
    options: SearchRunOptions,
    memory: MemoryOptions,
    timing: TimeOptions,
    search: SearchOptions,
    progress: Progress | None = None,
) -> tuple[Found, Space, dict[str, float]]:
    """What a search finds, what was searched, and the shares of peaks that were given."""
    from actcalc.answers.search import search_run

    if search.gpus is None or search.gpus < 1:
        raise SpecError("a search needs to know how many GPUs there are", "add --gpus 1024")
    check_time_limit(search.time_limit)
    run = options.run_on(origin, search.gpus, memory.training())
    shares = timing.shares(run)
    space = options.space(search.gpus, across=not search.max_tp_within_node)
    result = search_run(run, space, shares, progress=progress, seconds=search.time_limit)
    return result, space, shares


@app.command(
    epilog=examples(
        "search gpt3-175b --gpus 1024 --device a100-80gb --global-batch 1536",
        "search llama-3-8b --gpus 64 --device h100-80gb --global-batch 512 --tp ..8 -o all.csv",
    )
)
@with_options(SearchOptions, SearchRunOptions, MemoryOptions, TimeOptions, OutputOptions)
def search(
    models: ModelArguments,
    options: SearchRunOptions,
    memory: MemoryOptions,
    timing: TimeOptions,
    output: OutputOptions,
    search: SearchOptions,
) -> int:
    """The fastest layouts on so many GPUs that fit, by the rules of memory and compare.

    Every legal tp, sp, pp, vpp, schedule, cp, ep, etp, dp, ZeRO stage, micro-batch and policy is
    looked at. The table has the best of each set of degrees; a file (-o all.csv) every one that
    fits, best first.
    """
    check_units(output.units)
    name = chosen_format(output)
    shown = search.shown()
    if search.top < 1:
        raise SpecError(f"--top {search.top} lists nothing", "use 1 or more")
    with bar("searching") as progress:
        origin = options.origin(models)
        result, space, shares = found(origin, options, memory, timing, search, progress)
    from actcalc.answers.search import all_rows, answer, listed
    from actcalc.render.search import search_sheets

    whole = output.output is not None and name == "json" and shown == "different"

    refined: Search | None = None
    if search.plan:
        from actcalc.answers.search_planned import planned

        with bar("planning") as progress:
            refined = planned(result, space, search.top, shares, progress)

    def short() -> Search:
        if refined is not None:
            return refined
        if whole:
            return answer(result, space, "all", None, shares)
        return answer(result, space, shown, search.top, shares)

    def sheets() -> Any:
        every = all_rows(result, listed(result, "all" if shown == "different" else shown))
        return search_sheets(short(), output.units, every if name in MACHINES else None)

    def pareto() -> Chart:
        from actcalc.render.charts.search import pareto_chart

        front = answer(result, space, "pareto", None, shares)
        others = answer(result, space, "different", _POINTS, shares)
        return pareto_chart(front, others, output.units)

    charts = {"pareto": pareto} if len(result.peak) else {}
    emit(sheets, lambda: short().document(), output, charts)
    return 0
