"""Time per exact plan, beside a MILP and PyTorch's knapsacks on the same items, from one run.

    python benchmarks/planner.py [--budgets 200] [--milp 8]

Needs scipy; PyTorch's solvers (``torch._functorch._activation_checkpointing.knapsack``) are run if
torch is importable. Nothing is checked against a time; costs are checked against the MILP's.

PyTorch's knapsack chooses items (here: one per layer and op, a saved tensor set with the runtime
its re-run would take) to keep within a memory budget; it knows neither dependencies between ops
nor several options per layer, so its items are the layer's hull steps, which nest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from actcalc.solve import (
    LayerGroup,
    OptionSet,
    PeakModel,
    even_budgets,
    layer_frontier,
    layer_options,
    parse_problem,
    solve_groups,
)

DATA = Path(__file__).parents[1] / "tests" / "data" / "planner_instances.json"


def layers() -> dict[str, Any]:
    """The GPT-3 and Llama-3-8B layers and two made-up ones of the instances."""
    found = {i["id"]: i for i in json.loads(DATA.read_text())["instances"]}
    kinds: dict[str, Any] = {}
    for name in ("I02_gpt3_96_4p8GB", "I06_llama8b_24GB", "I08_dense_moe"):
        kinds |= parse_problem(found[name]).layer_types
    return kinds


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds and result of one call."""
    start = time.perf_counter()
    result = action()
    return time.perf_counter() - start, result


def milp(options: OptionSet, count: int, room: int) -> int | None:
    """The same knapsack by scipy/HiGHS, gap 0: how many layers take each option."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    stored, cost = np.array(options.stored, float), np.array(options.cost, float)
    unit = float(np.gcd.reduce(np.array(options.stored)))
    result = milp(
        cost,
        integrality=np.ones(len(cost)),
        bounds=Bounds(0, count),
        constraints=[
            LinearConstraint(np.ones((1, len(cost))), count, count),
            LinearConstraint((stored / unit)[None, :], -np.inf, room // unit),
        ],
        options={"mip_rel_gap": 0, "time_limit": 60},
    )
    return round(result.fun) if result.status == 0 else None


def hull_items(options: OptionSet, count: int) -> tuple[list[float], list[float]]:
    """Bytes and saved cost of every step along the hull, of every layer."""
    menu = options.menu(options.levels[-1])
    assert menu is not None
    corners = [(menu.ks[i], menu.cs[i]) for i in menu.hull]
    steps = [(k2 - k1, c1 - c2) for (k1, c1), (k2, c2) in pairwise(corners)]
    return [float(k) for k, _ in steps] * count, [float(c) for _, c in steps] * count


def torch_solvers() -> dict[str, Callable[..., Any]]:
    """PyTorch's knapsack functions, if torch is there."""
    try:
        from torch._functorch._activation_checkpointing import knapsack
    except ImportError:
        return {}
    names = ("greedy_knapsack", "ilp_knapsack", "dp_knapsack")
    return {n: getattr(knapsack, n) for n in names if hasattr(knapsack, n)}


def report(
    name: str, model: PeakModel, stages: Sequence[tuple[list[LayerGroup], int]], n: int
) -> None:
    """Median and worst time of planning all stages, over ``n`` budgets."""
    segment = 8 if model == "stored+working+segments" else 1
    setting: dict[str, Any] = {"const_bytes": 0, "peak_model": model, "max_segment": segment}
    budgets = [even_budgets(g, n, inflight=m, **setting) for g, m in stages]
    totals = []
    for i in range(n):
        start = time.perf_counter()
        for (groups, m), of_stage in zip(stages, budgets, strict=True):
            solve_groups(groups, inflight=m, budget_bytes=of_stage[i], **setting)
        totals.append(1e3 * (time.perf_counter() - start))
    p95 = sorted(totals)[int(0.95 * (n - 1))]
    print(f"{name:34s} {model:16s} {statistics.median(totals):9.2f} {p95:9.2f} {max(totals):9.2f}")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--budgets", type=int, default=200)
    parser.add_argument("--milp", type=int, default=8, help="budgets given to the other solvers")
    arguments = parser.parse_args()
    kinds = layers()
    for name, layer in kinds.items():
        seconds, frontier = timed(partial(layer_frontier.__wrapped__, layer))
        print(
            f"layer {name}: {len(layer.ops)} ops, {len(frontier)} options, {1e3 * seconds:.2f} ms"
        )
    sets = {name: layer_options(layer) for name, layer in kinds.items()}

    def run(name: str, count: int) -> LayerGroup:
        return LayerGroup(name, sets[name], count)

    print(
        f"\n{'ms for all stages of the model':34s} {'peak model':16s}    median       95%     worst"
    )
    mixed = [run("dense", 3), run("moe", 58)]
    for model in ("stored", "stored+working", "timeline"):
        peak: PeakModel = model
        report("96 GPT-3 layers, 1 stage", peak, [([run("gpt", 96)], 1)], arguments.budgets)
        stages = [([run("gpt", 6)], 16 - i) for i in range(16)]
        report("96 GPT-3 layers, 16 stages", peak, stages, arguments.budgets)
        report("3 dense + 58 MoE layers, 1 stage", peak, [(mixed, 1)], arguments.budgets)
        first = [run("dense", 3), run("moe", 1)]
        stages = [(first if i == 0 else [run("moe", 4)], 16 - i) for i in range(16)]
        report("3 dense + 61 MoE layers, 16 stages", peak, stages, arguments.budgets)

    whole_models(arguments.budgets)
    against(sets["gpt"], 96, arguments.milp)


WHOLE = (
    ("gpt3-175b", {"tp": 8, "sp": True}),
    ("gpt3-175b", {"tp": 8, "sp": True, "pp": 16}),
    ("llama-3.1-405b", {"tp": 8, "sp": True, "pp": 14}),
    ("llama-3.1-405b", {"tp": 8, "sp": True, "pp": 16, "layers_per_stage": (7, *[8] * 14, 7)}),
    ("deepseek-v3", {"pp": 16, "ep": 8, "dp": 8, "layers_per_stage": (*[4] * 15, 1)}),
    ("deepseek-v3", {"pp": 16, "ep": 64, "dp": 64, "layers_per_stage": (*[4] * 15, 1)}),
)


def whole_models(budgets: int) -> None:
    """Every stage of real models on one device, in process, over their whole range of budgets."""
    from actcalc.io.runs import load_run
    from actcalc.plan.planner import RunPlanner
    from actcalc.plan.settings import PlanSettings

    head = "whole models, op by op, h100-80gb"
    print(f"\n{head:34s} {'peak model':16s}    median       95%     worst")
    models: tuple[Any, ...] = ("stored", "stored+working", "timeline")
    for name, layout in WHOLE:
        run = load_run(name, layout=layout, device="h100-80gb")
        for model in models:
            planner = RunPlanner(run, PlanSettings(memory_model=model))
            low, high = planner.smallest, planner.free
            times = []
            for i in range(budgets):
                budget = low + (high - low) * i // max(1, budgets - 1)
                seconds, plans = timed(partial(planner.plan, budget))
                assert all(plan.optimal for plan in plans)
                times.append(1e3 * seconds)
            p95 = sorted(times)[int(0.95 * (budgets - 1))]
            label = f"{name}, {len(planner.stages)} stages"
            print(
                f"{label:34s} {model:16s} {statistics.median(times):9.2f} {p95:9.2f} "
                f"{max(times):9.2f}"
            )


def against(options: OptionSet, count: int, budgets: int) -> None:
    """The same items through every solver: time, ratio to the planner, cost over the optimum."""
    groups = [LayerGroup("gpt", options, count)]
    setting: dict[str, Any] = {"inflight": 1, "const_bytes": 0, "peak_model": "stored"}
    points = even_budgets(groups, budgets + 2, **setting)[1:-1]
    rows: dict[str, list[tuple[float, float]]] = {}
    # PyTorch's budget is a fraction of the items' bytes; its dynamic program rounds that memory.
    memory, runtime = hull_items(options, count)
    for budget in points:
        seconds, plan = timed(partial(solve_groups, groups, budget_bytes=budget, **setting))
        rows.setdefault("planner", []).append((seconds, 1.0))
        seconds, cost = timed(partial(milp, options, count, budget))
        rows.setdefault("scipy milp (HiGHS, gap 0)", []).append((seconds, cost / plan.cost))
        assert cost is None or cost == plan.cost, (budget, cost, plan.cost)
        room = budget - count * min(options.stored)
        for name, solver in torch_solvers().items():
            share = [m / sum(memory) for m in memory]
            seconds, found = timed(partial(solver, share, runtime, room / sum(memory)))
            # Returned are the runtime kept, the items kept, and the items to re-run.
            again = sum(runtime[i] for i in found[2])
            rows.setdefault(f"torch {name}", []).append((seconds, again / plan.cost))
    print(f"\n{count} GPT-3 layers, stored bytes, {len(points)} budgets, the same items")
    print(f"{'':28s} {'median ms':>10s} {'x planner':>10s} {'cost / optimum':>15s}")
    base = statistics.median(s for s, _ in rows["planner"])
    for name, values in rows.items():
        seconds = statistics.median(s for s, _ in values)
        worst = max(ratio for _, ratio in values)
        print(f"{name:28s} {1e3 * seconds:10.2f} {seconds / base:10.1f} {worst:15.4f}")


if __name__ == "__main__":
    main()
