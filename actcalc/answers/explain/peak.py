"""The peak of a step, and the plan that fits a memory.

Every number is computed by what computes the answer itself; a closed form is printed beside it,
never instead of it.
"""

from __future__ import annotations

from dataclasses import replace

from actcalc.answers.explain.term import KORTHIKANTI, MCKP, Body, Term, gb
from actcalc.io.devices import load_device
from actcalc.memory.replay import replayed
from actcalc.memory.stage import memory_of
from actcalc.plan.options import Costs
from actcalc.run.staged import StagedRun
from actcalc.specs.numbers import percent


def _peak(staged: StagedRun) -> Body:
    run = staged.run
    lines = [
        "A step is followed moment by moment: each layer's forward, the loss, each layer's "
        "backward with what it re-runs, the optimizer. The peak is the highest moment.",
    ]
    names, results = run.policies or ("none", "full"), []
    for name in names:
        work = memory_of(staged, staged.policy(name))
        figures = [work.figure(stage) for stage in range(run.layout.pp)]
        top = max(figures, key=lambda figure: figure.total_bytes)
        where = f" of stage {top.stage}" if run.layout.pp > 1 else ""
        results.append(f"{name}: {gb(top.total_bytes)}{where}, {top.peak_at}.")
        lines += [
            f"{name}: peak{where} is {top.peak_at}",
            f"    weights {gb(top.weights_bytes)} + gradients {gb(top.gradients_bytes)} + "
            f"optimizer {gb(top.optimizer_bytes)}",
            f"    + stored activations {gb(top.activations_bytes)} ({top.in_flight} micro-batch"
            f"{'es' if top.in_flight != 1 else ''} in flight)",
            f"    + what that moment makes {gb(top.transient_bytes)} + buffers "
            f"{gb(top.buffers_bytes)} + outside the allocator {gb(top.overhead_bytes)}",
            f"    = {top.total_bytes:,} B",
        ]
    lines += [
        "Stored activations are those left at that moment: backward frees layer by layer.",
        "plan's memory models: stored counts no such moment; stored+working adds the largest "
        "working set to all that is stored; timeline follows the order (see: explain plan).",
    ]
    return Body(
        title="the highest moment of a step",
        result=" ".join(results),
        lines=tuple(lines),
        source=f"{KORTHIKANTI}, section 4; torch.cuda.max_memory_allocated",
    )


def _cost(costs: Costs, cost: int) -> str:
    value = costs.value(cost)
    return f"{1e3 * value:.4g} ms" if costs.unit == "seconds" else f"{value:,} FLOPs"


def _plan(staged: StagedRun) -> Body:
    run = staged.run
    from actcalc.plan.figures import certificate_lines
    from actcalc.plan.planner import RunPlanner
    from actcalc.plan.settings import PlanSettings
    from actcalc.solve.layers import layer_options

    device = run.device or load_device("h100-80gb")
    settings = PlanSettings(memory_model="stored+working", activations_only=True)
    planner = RunPlanner(replace(run, device=device), settings)
    main = planner.staged.main.graph
    layer = planner.layer(main)
    options = layer_options(layer)
    budget = planner.smallest + (planner.free - planner.smallest) // 8
    plans = planner.plan(budget)
    cost = sum(plan.cost or 0 for plan in plans)
    lines = [
        "A layer re-runs a set R of its ops. K bytes are stored: what ops outside R save, and what "
        "R reads and does not make. W bytes are made again in its backward. C is R's forward cost.",
        f"This layer: {len(layer.ops)} ops, 2^{len(layer.ops)} sets R, of which "
        f"{len(options.stored)} are not beaten in K, W and C at once: K from "
        f"{min(options.stored):,} to {max(options.stored):,} B, C up to "
        f"{_cost(planner.costs, max(options.cost))}.",
        "Which fit, with m micro-batches in flight and the rest of the GPU beside:",
        "stored: rest + m·ΣK ≤ memory",
        "stored+working: rest + m·ΣK + max W ≤ memory",
        "timeline (default): at every moment of the schedule what actcalc memory counts. While "
        "layer l runs backward that is rest + (m-1)·ΣK + (K of layers before l) + all that is "
        "alive in l: layers after l are freed already.",
        "One way for each layer, at least cost: a multiple-choice knapsack. Mixing ways in "
        "fractions can only be cheaper; that bound and a search of all that could beat the best "
        "plan make the certificate.",
        f"Example on {device.name}, activations alone in {budget:,} B, an eighth of the way from "
        "the least "
        f"({planner.smallest:,}) to all kept ({planner.free:,}): cost "
        f"{_cost(planner.costs, cost)}.",
        *certificate_lines(planner.costs, plans),
        "It is also what the plan is compared with: every named policy in the same memory.",
    ]
    return Body(
        title="plan: a knapsack with a proof",
        result="Of all ways to re-run each layer, plan takes those of least cost that fit, and "
        "proves that none is cheaper.",
        lines=tuple(lines),
        source=f"{MCKP}; torch.utils.checkpoint",
    )


_QUARTER = 4
_WHOLE_GPU = (
    "policy",
    "recompute_method",
    "recompute_num_layers",
    "schedule",
    "zero",
    "global_batch",
    "layers_per_stage",
    "vpp",
    "device",
)
"""Options that what a whole GPU holds depends on."""


def _greedy(staged: StagedRun) -> Body:
    from actcalc.plan.planner import RunPlanner
    from actcalc.plan.settings import Method, PlanSettings

    methods: tuple[Method, ...] = ("optimal", "greedy")
    costs: dict[str, int] = {}
    planner, proven = None, True
    for method in methods:
        settings = PlanSettings(memory_model="stored", activations_only=True, method=method)
        planner = RunPlanner(staged.run, settings)
        budget = planner.smallest + (planner.free - planner.smallest) // _QUARTER
        plans = planner.plan(budget)
        costs[method] = sum(plan.cost or 0 for plan in plans)
        proven = proven and (method != "optimal" or all(p.cost == p.lower_bound for p in plans))
    assert planner is not None
    proof = "with its proof" if proven else "as far as found"
    shown = {method: _cost(planner.costs, cost) for method, cost in costs.items()}
    more = costs["greedy"] / costs["optimal"] - 1 if costs["optimal"] else 0.0
    lines = (
        f"Here: activations in {budget:,} B, a quarter of the way from the least "
        f"({planner.smallest:,}) to all kept ({planner.free:,}).",
        f"greedy: {shown['greedy']} run again; optimal, {proof}: {shown['optimal']}.",
        "Taking what frees most bytes for each FLOP first is best where every piece can be taken "
        "in part: then it is the bound that the proof uses. Pieces are whole, so that the last one "
        "taken frees more than is needed.",
        "And pieces are not independent: what an op re-runs from must be kept, or re-run as well, "
        "so that an op's ratio depends on what else is taken.",
        "A ratio of a layer's own, by which equal layers are sorted, ranks nothing: they tie.",
    )
    return Body(
        title="greedy by ratio: cheapest bytes first",
        result=f"Greedy by ratio costs {shown['greedy']} where the best plan costs "
        f"{shown['optimal']}: {percent(more, 1)} more.",
        lines=lines,
        source=f"{MCKP}; plan --method greedy",
    )


def _reserved(staged: StagedRun) -> Body:
    run = staged.run
    lines = [
        "Tensors live in segments that PyTorch's allocator takes from the device and keeps. What "
        "tensors use is allocated; all segments together are reserved: out of memory is said of "
        "these, and the driver shows them with what lies outside the allocator.",
        "A request is rounded to 512 B. Up to 1 MiB it comes from segments of 2 MiB, below 10 MiB "
        "from segments of 20 MiB, above from one of its own size, rounded to 2 MiB. The smallest "
        "free block that is large enough is taken and its rest split off; free neighbours of one "
        "segment join, those of two segments never do. That is fragmentation.",
        "The requests of two steps are replayed by these rules, each stream with blocks of its "
        "own; where the device has no more, free segments go back to it first.",
    ]
    results = []
    for name in run.policies or ("none", "full"):
        work = memory_of(staged, staged.policy(name))
        figures = [work.figure(stage) for stage in range(run.layout.pp)]
        top = replayed(work, max(figures, key=lambda figure: figure.total_bytes))
        most, expandable = top.reserved_bytes, top.reserved_expandable_bytes
        if most is None or expandable is None:
            lines.append(f"{name}: a step of too many layers to be replayed.")
            continue
        where = f" on stage {top.stage}" if run.layout.pp > 1 else ""
        results.append(f"{name}: {gb(most)} reserved{where}.")
        lines += [
            f"{name}: {top.peak_bytes:,} B allocated at most{where}, {most:,} B reserved "
            f"({percent(most / top.peak_bytes - 1, 1)} more)",
            f"    with expandable_segments {expandable:,} B "
            f"({percent(expandable / top.peak_bytes - 1, 1)} more): a pool is one segment that "
            "grows, so that all free neighbours join",
        ]
    return Body(
        title="what the allocator takes from the device",
        result=" ".join(results) or "Too many layers in a step to be replayed.",
        lines=tuple(lines),
        source="PyTorch, c10/cuda/CUDACachingAllocator.cpp; torch.cuda.max_memory_reserved",
    )


TERMS = (
    Term(
        "peak",
        "the highest moment of a step",
        _peak,
        words=(
            "timeline",
            "moments",
            "oom",
            "out of memory",
            "cuda out of memory",
            "fit",
            "fits",
            "does not fit",
            "memory",
            "gpu memory",
            "vram",
        ),
        flags=("device", "device_memory", "headroom", "max"),
        heeds=_WHOLE_GPU,
        layout={"tp": 8, "sp": True, "pp": 8},
    ),
    Term(
        "reserved",
        "what the allocator takes from the device",
        _reserved,
        words=(
            "fragmentation",
            "allocator",
            "caching allocator",
            "expandable_segments",
            "expandable segments",
            "reserved memory",
            "max_memory_reserved",
            "nvidia-smi",
        ),
        heeds=_WHOLE_GPU,
        model="llama-3-8b",
        layout={"tp": 2, "sp": True},
    ),
    Term(
        "plan",
        "the cheapest plan, with a proof",
        _plan,
        words=(
            "knapsack",
            "certificate",
            "stored+working",
            "memory model",
            "memory-model",
            "frontier",
            "knapsack problem",
            "optimal",
        ),
        flags=(
            "memory",
            "memory_model",
            "activations_only",
            "semantics",
            "method",
            "frontier",
            "points",
            "same_on_all_stages",
            "emit",
        ),
        heeds=("device", "peak", "schedule", "global_batch", "layers_per_stage", "vpp"),
    ),
    Term(
        "greedy",
        "greedy by ratio, and what it misses",
        _greedy,
        words=("greedy by ratio", "ratio", "compute/memory ratio", "heuristic"),
        heeds=("device", "peak"),
        model="bert-base",
        layout={},
    ),
)
"""The terms of this module."""
