"""The library's calls that choose: what to change, and in which layout to run."""

from __future__ import annotations

from typing import Unpack

from actcalc.answers.advise import AdviceReport
from actcalc.answers.search import Search
from actcalc.api.keywords import (
    Efficiency,
    MemoryKeywords,
    SearchKeywords,
    bundles,
    documented,
)
from actcalc.api.models import Described, described
from actcalc.cli import advise as advising
from actcalc.cli import search as searching
from actcalc.cli.options import RunOptions, TimeOptions
from actcalc.cli.training import MemoryOptions
from actcalc.errors import SpecError
from actcalc.specs import Layout, Workload


@documented(MemoryKeywords, RunOptions, MemoryOptions)
def advise(
    model: Described,
    layout: Layout | None = None,
    workload: Workload | None = None,
    *,
    gpus: int | None = None,
    tokens: float | str | None = None,
    price_per_gpu_hour: float | None = None,
    efficiency: Efficiency = None,
    **options: Unpack[MemoryKeywords],
) -> AdviceReport:
    """What to change so that a run fits its device, cheapest first; what spare memory would buy.

    ``fits`` says whether it fits as it is.

    Args:
        model: As :func:`compare` takes it.
        layout: Parallel degrees; keywords win over them.
        workload: What it names replaces the model's usual workload.
        gpus: GPUs of the run, where dp is not given.
        tokens: Tokens to train on: 300e9, or ``"15T"``.
        price_per_gpu_hour: Price of one GPU for one hour.
        efficiency: Shares of a device's peaks (``{"gemm": 0.8}``), or presets and files of them.
    """
    chosen, held, timing = bundles(
        {**options, "efficiency": efficiency}, RunOptions, MemoryOptions, TimeOptions
    )
    more = advising.AdviseOptions(
        gpus=gpus,
        tokens=None if tokens is None else str(tokens),
        price_per_gpu_hour=price_per_gpu_hour,
    )
    origin = described(model, layout, workload, chosen.from_)
    return advising.answer(origin, chosen, held, timing, more)


@documented(SearchKeywords, searching.SearchRunOptions, MemoryOptions)
def search(
    model: Described,
    layout: Layout | None = None,
    workload: Workload | None = None,
    *,
    gpus: int,
    top: int | None = 10,
    pareto: str | None = None,
    plan: bool = False,
    max_tp_within_node: bool = True,
    time_limit: float = searching.SECONDS,
    efficiency: Efficiency = None,
    **options: Unpack[SearchKeywords],
) -> Search:
    """The fastest layouts on so many GPUs that fit, by the rules of :func:`memory`, best first.

    Every legal degree, schedule, ZeRO stage, micro-batch and policy is looked at, or those that
    are given (``tp="..8"``, ``pp=4``).

    Args:
        model: As :func:`compare` takes it.
        layout: Degrees of the run beside those that are searched.
        workload: What it names replaces the model's usual workload.
        gpus: GPUs of every layout.
        top: How many are listed, the best of each set of degrees; None lists all that fit.
        pareto: ``"memory,time"``: list what nothing tops in both.
        plan: Plan the best layouts' recomputation, layer by layer, and rank them anew.
        max_tp_within_node: Tensor parallelism stays inside a node.
        time_limit: Seconds after which the layouts looked at until then are all.
        efficiency: Shares of a device's peaks (``{"gemm": 0.8}``), or presets and files of them.
    """
    from actcalc.answers.search import answer

    given = {
        name: str(value) if isinstance(value, int) and not isinstance(value, bool) else value
        for name, value in options.items()
        if name in searching.DEGREES
    }
    chosen, held, timing = bundles(
        {**options, **given, "efficiency": efficiency},
        searching.SearchRunOptions,
        MemoryOptions,
        TimeOptions,
    )
    more = searching.SearchOptions(
        gpus=gpus,
        max_tp_within_node=max_tp_within_node,
        pareto=pareto,
        plan=plan,
        top=top or 1,
        time_limit=time_limit,
    )
    shown = more.shown()
    origin = described(model, layout, workload, chosen.from_)
    result, space, shares = searching.found(origin, chosen, held, timing, more)
    if plan:
        from actcalc.answers.search_planned import planned

        if top is None:
            raise SpecError("a search plans the best layouts, not all", "give top a number")
        return planned(result, space, top, shares)
    if top is None and shown == "different":
        return answer(result, space, "all", None, shares)
    return answer(result, space, shown, top, shares)
