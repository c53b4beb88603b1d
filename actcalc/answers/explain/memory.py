"""Explanations of the words that ``memory`` and ``plan`` use: states, pipelines, peak, plans.

Every number is computed by what computes the answer itself (:mod:`actcalc.memory`, the schedules,
the planner); a closed form is printed beside it, never instead of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from actcalc.errors import SpecError
from actcalc.io.runs import load_device
from actcalc.layers.adapters import targeted
from actcalc.memory.stage import StageMemory
from actcalc.memory.states import States
from actcalc.plan.options import Costs
from actcalc.policy.rules import NONE
from actcalc.run.schedule import SCHEDULES
from actcalc.run.staged import StagedRun
from actcalc.specs.layout import Layout
from actcalc.specs.run import Run

Body = tuple[str, tuple[str, ...], str]
Explainer = Callable[[StagedRun], Body]

ZERO = "Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054"
ZERO_OFFLOAD = "Ren et al. 2021, ZeRO-Offload, arXiv:2101.06840"
NARAYANAN = (
    "Narayanan et al. 2021, Efficient Large-Scale Training on GPU Clusters, arXiv:2104.04473"
)
KORTHIKANTI = "Korthikanti et al. 2022, Reducing Activation Recomputation, arXiv:2205.05198"
HU = "Hu et al. 2021, LoRA, arXiv:2106.09685"
QI = "Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv:2401.10241"
DEEPSEEK = "DeepSeek-AI 2024, DeepSeek-V3, arXiv:2412.19437"
MCKP = "Sinha and Zoltners 1979, The Multiple-Choice Knapsack Problem, Operations Research 27(3)"

_REPLICAS = 8  # where no --dp is given: the GPUs of one node
_RANK = 16  # of adapters where none is given; Hu et al. 2021 use 1 to 64
_RECIPES = ("megatron", "mixed", "deepspeed", "amp", "fsdp", "pure")


# --- states ---------------------------------------------------------------------------------------


def _held(run: Run, stage: int = 0) -> tuple[States, int]:
    work = StageMemory.of(run)
    return work.beside(stage)[0], work.parameters(stage).total


def _with(run: Run, **fields: Any) -> Run:
    return replace(run, training=run.training.model_copy(update=fields))


def _gb(size: float) -> str:
    return f"{size / 1e9:,.4g} GB"


def _eighteen(staged: StagedRun) -> Body:
    run = staged.run
    plain = replace(run, layout=run.layout.model_copy(update={"zero": 0}))
    kept, count = _held(plain)
    rules = StageMemory.of(plain).rules
    lines = [
        "Every parameter has a weight, a gradient and the optimizer's states; with mixed "
        "precision an fp32 master weight besides.",
        f"{rules.name} states and {run.training.optimizer}: weight {kept.weights / count:g} + "
        f"gradient {kept.gradients / count:g} + master {kept.master / count:g} + moments "
        f"{(kept.optimizer - kept.master) / count:g} = {kept.total / count:g} B a parameter",
        f"x {count:,} parameters on this GPU = {kept.total:,} B",
    ]
    for name in _RECIPES:
        if name == rules.name:
            continue
        try:
            other, _ = _held(_with(plain, recipe=name))
        except SpecError:
            continue
        parts = (other.weights, other.gradients, other.master, other.optimizer - other.master)
        numbers = " + ".join(f"{part / count:g}" for part in parts)
        lines.append(f"{name}: {numbers} = {other.total / count:g} B")
    lines.append(
        "Order: weight, gradient (Megatron sums it in fp32: 4), master, two moments of Adam."
    )
    return (
        "bytes of states for every parameter",
        tuple(lines),
        f"{ZERO}, section 3.1 (16 B); Megatron-LM docs, dist_optimizer (18 B)",
    )


def _zero(staged: StagedRun) -> Body:
    run = staged.run
    layout, lines = run.layout, []
    if layout.dp * layout.cp == 1:
        layout = layout.model_copy(update={"dp": _REPLICAS})
        lines.append(f"No --dp given: {_REPLICAS} replicas are taken.")
    stages = [
        _held(replace(run, layout=layout.model_copy(update={"zero": zero})))
        for zero in range(4)
    ]  # fmt: skip
    whole, count = stages[0]
    parts = [size / count for size in (whole.weights, whole.gradients, whole.optimizer)]
    ranks = layout.dp * layout.cp
    lines.append(
        f"{ranks} replicas hold the same {count:,} parameters. ZeRO splits over them: stage 1 the "
        "optimizer's states, 2 gradients too, 3 weights too."
    )
    experts = StageMemory.of(run).parameters(0).expert.parameters
    for zero, (kept, _) in enumerate(stages):
        split = [i + zero >= 3 for i in range(3)]
        words = " + ".join(
            f"{part:g}/{ranks}" if cut else f"{part:g}"
            for part, cut in zip(parts, split, strict=True)
        )
        formula = "" if experts else f"{words} = "
        lines.append(
            f"ZeRO {zero}: {formula}{kept.total / count:.4g} B a parameter, {_gb(kept.total)} "
            f"(weights {_gb(kept.weights)}, gradients {_gb(kept.gradients)}, optimizer "
            f"{_gb(kept.optimizer)})"
        )
    if experts:
        lines.append("Routed experts have fewer replicas (dp·cp·tp/(ep·etp)) than the rest.")
    lines += [
        "Megatron's distributed optimizer is stage 1: with its 18 B states 6 + 12/dp.",
        "Stages 1 and 2 send no more than plain data parallelism; 3 gathers each layer's weights "
        "again for forward and for backward: 1.5 times the volume.",
    ]
    return (
        "ZeRO: states sharded over replicas",
        tuple(lines),
        f"{ZERO}, sections 5 and 7; Megatron-LM docs, dist_optimizer",
    )


def _lora(staged: StagedRun) -> Body:
    run, graph = staged.run, staged.graph
    rank = run.training.lora_rank or _RANK
    lines = [] if run.training.lora_rank else [f"No lora_rank set: rank {_RANK} is taken."]
    plain = _with(run, lora_rank=0, lora_targets="all", base_bits=16)
    tuned = run if run.training.lora_rank else _with(run, lora_rank=_RANK)
    lines.append(
        f"W stays frozen; W + BA with B (out x r) and A (r x in) trains r·(in + out) numbers of a "
        f"matrix, r = {rank}:"
    )
    layer = StagedRun(plain).main.graph
    for op in layer.ops:
        if op.kind != "linear" or not op.weights or not targeted(op.group, tuned.training):
            continue
        shape = [int(dim.value(graph.sizes)) for dim in op.weights[0].shape]
        if len(shape) == 2:
            lines.append(
                f"{op.name.replace('_', ' ')}: {rank}·({shape[0]:,} + {shape[1]:,}) = "
                f"{rank * sum(shape):,} of {shape[0] * shape[1]:,}"
            )
    before, count = _held(plain)
    after, _ = _held(tuned)
    group = StageMemory.of(tuned).parameters(0)
    trained = group.dense.trained + group.expert.trained
    lines += [
        f"this GPU trains {trained:,} numbers, {trained / count:.2%} of {count:,}",
        f"states {_gb(before.total)} -> {_gb(after.total)}: weights {_gb(after.weights)}, "
        f"gradients {_gb(after.gradients)}, optimizer {_gb(after.optimizer)}",
    ]
    tuned_layer = StagedRun(tuned).main.graph
    sizes = [int(g.bytes_of(g.saved).value(graph.sizes)) for g in (layer, tuned_layer)]
    lines += [
        f"activations of a layer {sizes[0]:,} B -> {sizes[1]:,} B: a frozen matrix needs its input "
        "for no weight gradient, but an adapter beside it reads the same input, and A's product "
        "(r wide) is kept on top.",
        "So adapters save states, not activations: recompute those.",
    ]
    return "LoRA: what adapters save", tuple(lines), f"{HU}, section 4"


def _offload(staged: StagedRun) -> Body:
    run = staged.run
    from actcalc.plan.planner import RunPlanner

    lines = []
    device = run.device
    if device is None:
        device = load_device("h100-80gb")
        lines.append("No --device given: an h100-80gb.")
    planner = RunPlanner(replace(run, device=device))
    layer = planner.staged.main.graph
    if device.host_copy_rate is None:
        raise SpecError(
            f"{device.name} has no known link to its host", "name a --device whose preset has one"
        )
    link = planner.transfer(layer)
    size = planner.layer(layer).total_saved_bytes
    forward, backward, traffic = link.waits(size, 0)
    kept, _ = _held(_with(run, offload="none"))
    lines += [
        f"Copies to the host run at {link.host_rate / 1e9:.4g} GB/s either way, beside kernels.",
        f"Activations: a layer keeps {size:,} B; copying them takes "
        f"{1e3 * size / link.host_rate:.4g} ms, its forward {link.forward / 1e6:.4g} ms, its "
        f"backward {link.backward / 1e6:.4g} ms.",
        f"So forward waits {forward / 1e6:.4g} ms and backward {backward / 1e6:.4g} ms a layer if "
        f"all goes; device memory is busy {traffic / 1e6:.4g} ms with the copies.",
        f"Hidden for free are {link.forward * link.host_rate // 10**9:,} B a layer; plan --offload "
        "weighs every tensor against re-running it.",
        "The tensors of one more layer are on their way while another runs (double buffering).",
        f"States: the optimizer's {_gb(kept.optimizer)} on the host (memory --offload optimizer, "
        f"plan --offload-states optimizer); every step gradients ({_gb(kept.gradients)}) go down "
        f"and weights ({_gb(kept.weights)}) come up.",
    ]
    return (
        "offload: host memory instead of recomputing",
        tuple(lines),
        f"{ZERO_OFFLOAD}, section 4.1; presets/devices/{device.name}",
    )


# --- pipelines ------------------------------------------------------------------------------------


def _pipeline(staged: StagedRun, schedule: str, vpp: int = 1) -> tuple[StagedRun, list[str]]:
    """The run under ``schedule``, and what was assumed for it."""
    run, said = staged.run, []
    pp, depth = run.layout.pp, run.model.depth
    if pp == 1:
        pp = next((n for n in (8, 4, 2) if depth % n == 0), 8 if depth > 16 else 2)
        if depth < 2:
            raise SpecError(f"{depth} layer makes no pipeline", "name a model with more layers")
        said.append(f"No --pp given: p = {pp} stages.")
    layout, work = _cut(run, pp, schedule, vpp), run.workload
    if not work.global_batch:
        batch = 4 * pp * work.micro_batch * layout.dp
        work = work.model_copy(update={"global_batch": batch})
        said.append(f"No --global-batch given: m = {4 * pp} micro-batches, four a stage.")
    return staged.changed(layout=layout, workload=work), said


def _cut(run: Run, pp: int, schedule: str, vpp: int) -> Layout:
    """The layout of that pipeline: split as asked for, else as evenly as the layers allow."""
    layout = run.layout
    bare = {"pp": pp, "vpp": vpp, "schedule": schedule, "microbatch_group": None}
    slices = layout.model_copy(update={**bare, "layers_per_stage": ()}).slices
    counts = layout.layers_per_stage
    if len(counts) != slices:
        each, more = divmod(run.model.depth, slices)
        counts = (each + 1,) * more + (each,) * (slices - more) if more else ()
    return layout.model_copy(update={**bare, "layers_per_stage": counts})


def _chunk_sizes(staged: StagedRun, stage: int = 0) -> tuple[int, ...]:
    return tuple(len(chunk) for chunk in staged.places[stage])


def _flights(staged: StagedRun) -> list[int]:
    """Chunk activations that each stage holds at its fullest moment."""
    return [sum(staged.held(stage)) for stage in range(staged.run.layout.pp)]


def _held_layers(staged: StagedRun) -> int:
    """Layers' activations that stage 0 holds at its fullest moment."""
    return sum(n * size for n, size in zip(staged.held(0), _chunk_sizes(staged), strict=True))


def _listed(counts: list[int]) -> str:
    return ", ".join(str(count) for count in counts)


def _stage_zero(staged: StagedRun) -> str:
    """What stage 0 holds: chunks in flight times their layers, in bytes."""
    layers, depth = _held_layers(staged), staged.run.model.depth
    each = staged.under(NONE).layer_bytes(staged.main.graph).stored
    return (
        f"stage 0: {layers} layers' activations x {each:,} B = {layers * each:,} B, "
        f"{layers / depth:.4g} times all {depth} layers of one micro-batch"
    )


def _overhead(staged: StagedRun) -> float:
    """Idle over busy time of a step: equal layers, backward twice forward, half of it weights'."""
    from actcalc.run.schedule import makespan

    layout = staged.run.layout
    rows = [[float(size) for size in _chunk_sizes(staged, stage)] for stage in range(layout.pp)]
    return makespan(
        layout.pipeline,
        layout.pp,
        staged.microbatches,
        layout.vpp,
        forward_seconds=rows,
        backward_seconds=[[2 * size for size in row] for row in rows],
        weight_seconds=rows,
    ).overhead_ratio


def _one_f_one_b(staged: StagedRun) -> Body:
    piped, lines = _pipeline(staged, "1f1b")
    p, count = piped.run.layout.pp, piped.microbatches
    gpipe = piped.changed(layout=piped.run.layout.model_copy(update={"schedule": "gpipe"}))
    lines += [
        "One forward, one backward in turn: stage r starts with p - r - 1 forwards and then frees "
        "a micro-batch for each new one. It holds min(p - r, m).",
        f"p = {p}, m = {count}, counted by running the schedule: stages 0 to {p - 1} hold "
        f"{_listed(_flights(piped))}",
        _stage_zero(piped),
        f"p stages deep x l/p layers each: stage 0 holds as much as all l = "
        f"{staged.run.model.depth} layers, whatever p is. Only later stages hold less."
        if count >= p
        else "With fewer micro-batches than stages it never fills.",
        f"GPipe, all forwards first, holds m = {sum(gpipe.held(0))} on every stage.",
        f"idle (p-1)/m = {p - 1}/{count} = {(p - 1) / count:.4g} of the busy time; run: "
        f"{_overhead(piped):.4g}",
    ]
    return (
        "1F1B: micro-batches in flight, min(p - r, m)",
        tuple(lines),
        f"{NARAYANAN}, section 2.2; {KORTHIKANTI}, section 4.2.3",
    )


def _chunks(run: Run, pp: int) -> int:
    """Chunks a stage as asked for, else the first of 3, 2, 4, ... that divides its layers."""
    if run.layout.vpp > 1:
        return run.layout.vpp
    return next((v for v in (3, 2, 4, 5, 6, 7) if run.model.depth % (pp * v) == 0), 2)


def _interleaved(staged: StagedRun) -> Body:
    plain, _ = _pipeline(staged, "1f1b")
    chunks = _chunks(staged.run, plain.run.layout.pp)
    piped, lines = _pipeline(staged, "interleaved", chunks)
    layout, count, depth = piped.run.layout, piped.microbatches, staged.run.model.depth
    p, v = layout.pp, layout.vpp
    if staged.run.layout.vpp == 1:
        lines.append(f"No --vpp given: v = {v} chunks a stage.")
    lines += [
        f"Each stage has v = {v} chunks of l/(pv) = {depth / (p * v):.4g} layers and runs p "
        "micro-batches of one chunk before the next chunk.",
        "It holds min(2(p - r - 1) + (v - 1)p + 1, mv) chunks at its fullest moment.",
        f"counted by running the schedule: stages 0 to {p - 1} hold {_listed(_flights(piped))}",
        f"stage 0: pv + p - 1 chunks of l/(pv) layers = l(1 + (p-1)/(pv)) = "
        f"{depth}·(1 + {p - 1}/{p * v}) = {depth * (1 + (p - 1) / (p * v)):.4g} layers"
        if count >= 2 * p
        else "With so few micro-batches it never fills.",
        _stage_zero(piped),
        f"1F1B there: {depth} layers. The price of a bubble v times smaller: (p-1)/(mv) = "
        f"{(p - 1) / (count * v):.4g}; run: {_overhead(piped):.4g}",
    ]
    return (
        "interleaved pipeline: l(1 + (p-1)/(pv))",
        tuple(lines),
        f"{NARAYANAN}, section 2.2.2; {KORTHIKANTI}, section 4.2.3",
    )


def _bubble(staged: StagedRun) -> Body:
    piped, lines = _pipeline(staged, "1f1b")
    p, count, depth = piped.run.layout.pp, piped.microbatches, staged.run.model.depth
    lines += [
        "Stages wait for the first micro-batch to arrive and for the last gradients to return.",
        f"Idle over busy time, p = {p}, m = {count}, equal layers, backward twice the forward:",
    ]
    plain = f"(p-1)/m = {(p - 1) / count:.4g}"
    closed: Mapping[str, str] = {"gpipe": plain, "1f1b": plain}
    chunks = staged.run.layout.vpp if staged.run.layout.vpp > 1 else 2
    for name in SCHEDULES:
        try:
            shape, _ = _pipeline(staged, name, chunks if name == "interleaved" else 1)
            idle, first = _overhead(shape), _held_layers(shape)
        except SpecError:
            continue
        form = closed.get(name, "")
        if name == "interleaved":
            name = f"interleaved, v = {chunks}"
            form = f"(p-1)/(mv) = {(p - 1) / (count * chunks):.4g}"
        lines.append(
            f"{name}: {idle:.4g}{f', closed form {form}' if form else ''}; stage 0 holds "
            f"{first / depth:.4g} l layers"
        )
    lines.append("More micro-batches shrink it; memory under 1F1B does not grow with them.")
    return "pipeline bubble: (p-1)/m", tuple(lines), f"{NARAYANAN}, section 2.2; {QI}, table 2"


def _split(staged: StagedRun, name: str) -> list[str]:
    """A schedule that splits the backward: what each stage holds and how long it idles."""
    from actcalc.run.schedule import in_flight_by_chunk

    piped, _ = _pipeline(staged, name)
    layout = piped.run.layout
    moments = in_flight_by_chunk(name, layout.pp, piped.microbatches)
    stash = max(sum(moment.stashes) for moment in moments)
    return [
        f"{name}: chunks of {_chunk_sizes(piped)[0]} layers, {layout.chunks} a stage; stages "
        f"0 to {layout.pp - 1} hold {_listed(_flights(piped))}"
        + (f" (up to {stash} of them only for their weight gradients)" if stash else ""),
        f"{name}, " + _stage_zero(piped),
        f"{name} idles {_overhead(piped):.4g} of its busy time",
    ]


def _zero_bubble(staged: StagedRun) -> Body:
    plain, lines = _pipeline(staged, "1f1b")
    lines += [
        "A backward is two products: the input's gradient, which the stage before waits for, and "
        "the weight's, which nobody does. The second fills what would be idle.",
        *_split(staged, "zb-h1"),
        *_split(staged, "zb-v"),
        f"1f1b idles {_overhead(plain):.4g} and holds {_listed(_flights(plain))}",
        "Until its weight gradient is made, a layer keeps the inputs of its matrices and the "
        "gradients of their outputs.",
    ]
    return "zero-bubble schedules", tuple(lines), f"{QI}, sections 2 and 6"


def _dualpipe(staged: StagedRun) -> Body:
    plain, lines = _pipeline(staged, "1f1b")
    double, _ = _pipeline(staged, "dualpipe")
    pp = double.run.layout.pp
    first, middle = double.held(0), double.held(pp // 2)
    lines += [
        "Micro-batches enter at both ends at once. Stage r has slice r for one direction and slice "
        f"p - 1 - r for the other: {double.run.layout.chunks} slices, weights and states twice.",
        f"p = {pp}, m = {double.microbatches}, counted by running the schedule: stage 0 holds "
        f"{' + '.join(str(n) for n in first)} = {sum(first)} micro-batches of a slice, "
        f"p + 1 = {pp + 1} at most; the middle "
        f"{' + '.join(str(n) for n in middle)}",
        _stage_zero(double),
        f"dualpipe idles {_overhead(double):.4g} of its busy time, 1F1B {_overhead(plain):.4g}",
        *_split(staged, "dualpipe-v"),
        "A forward and a backward run side by side, so that one's communication hides behind the "
        "other's products.",
    ]
    return "DualPipe: both ends at once", tuple(lines), f"{DEEPSEEK}, section 3.2.1 and table 2"


# --- peak and plan --------------------------------------------------------------------------------


def _peak(staged: StagedRun) -> Body:
    run = staged.run
    lines = [
        "A step is followed moment by moment: each layer's forward, the loss, each layer's "
        "backward with what it re-runs, the optimizer. The peak is the highest moment.",
    ]
    names = run.policies or ("none", "full")
    for name in names:
        work = StageMemory(staged, staged.policy(name))
        figures = [work.figure(stage) for stage in range(run.layout.pp)]
        top = max(figures, key=lambda figure: figure.total_bytes)
        where = f" of stage {top.stage}" if run.layout.pp > 1 else ""
        lines += [
            f"{name}: peak{where} is {top.peak_at}",
            f"    weights {_gb(top.weights_bytes)} + gradients {_gb(top.gradients_bytes)} + "
            f"optimizer {_gb(top.optimizer_bytes)}",
            f"    + stored activations {_gb(top.activations_bytes)} ({top.in_flight} micro-batch"
            f"{'es' if top.in_flight != 1 else ''} in flight)",
            f"    + what that moment makes {_gb(top.transient_bytes)} + buffers "
            f"{_gb(top.buffers_bytes)} + outside the allocator {_gb(top.overhead_bytes)}",
            f"    = {top.total_bytes:,} B",
        ]
    lines += [
        "Stored activations are those left at that moment: backward frees layer by layer.",
        "plan's memory models: stored counts no such moment; stored+working adds the largest "
        "working set to all that is stored; timeline follows the order (see: explain plan).",
    ]
    return (
        "the highest moment of a step",
        tuple(lines),
        f"{KORTHIKANTI}, section 4; torch.cuda.max_memory_allocated",
    )


def _cost(costs: Costs, cost: int) -> str:
    value = costs.value(cost)
    return f"{1e3 * value:.4g} ms" if costs.unit == "seconds" else f"{value:,} FLOPs"


def _plan(staged: StagedRun) -> Body:
    run = staged.run
    from actcalc.answers.plan import certificate_lines
    from actcalc.plan.planner import RunPlanner
    from actcalc.solve.stack import layer_options

    device = run.device or load_device("h100-80gb")
    planner = RunPlanner(replace(run, device=device))
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
        "stored+working (default): rest + m·ΣK + max W ≤ memory",
        "timeline: at every layer l, rest + (m-1)·ΣK + (K of layers up to l) + W of l ≤ memory: "
        "layers after l are freed already.",
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
    return "plan: a knapsack with a proof", tuple(lines), f"{MCKP}; torch.utils.checkpoint"


EXPLAINERS: Mapping[str, Explainer] = {
    "18": _eighteen,
    "zero": _zero,
    "lora": _lora,
    "offload": _offload,
    "1f1b": _one_f_one_b,
    "interleaved": _interleaved,
    "bubble": _bubble,
    "zero-bubble": _zero_bubble,
    "dualpipe": _dualpipe,
    "peak": _peak,
    "plan": _plan,
}
"""Terms of this module."""

ALIASES: Mapping[str, str] = {
    "16": "18",
    "states": "18",
    "optimizer": "18",
    "recipe": "18",
    "18 b": "18",
    "6+12/dp": "zero",
    "6 + 12/dp": "zero",
    "zero-1": "zero",
    "zero-2": "zero",
    "zero-3": "zero",
    "fsdp": "zero",
    "adapters": "lora",
    "qlora": "lora",
    "in-flight": "1f1b",
    "in flight": "1f1b",
    "in_flight": "1f1b",
    "held": "1f1b",
    "pp": "1f1b",
    "pipeline": "1f1b",
    "gpipe": "1f1b",
    "vpp": "interleaved",
    "l(1+(p-1)/(pv))": "interleaved",
    "(p-1)/m": "bubble",
    "zb-h1": "zero-bubble",
    "zb-v": "zero-bubble",
    "dualpipe-v": "dualpipe",
    "timeline": "peak",
    "moments": "peak",
    "knapsack": "plan",
    "certificate": "plan",
    "stored+working": "plan",
    "memory model": "plan",
    "memory-model": "plan",
    "frontier": "plan",
}
"""Other words for them."""

HEEDS: Mapping[str, tuple[str, ...]] = {
    "zero": (),
    "18": ("vpp", "schedule", "layers_per_stage"),
    "lora": (),
    "offload": ("device",),
    "1f1b": ("global_batch", "layers_per_stage"),
    "interleaved": ("global_batch", "layers_per_stage", "vpp"),
    "bubble": ("global_batch", "layers_per_stage", "vpp"),
    "zero-bubble": ("global_batch", "layers_per_stage"),
    "dualpipe": ("global_batch", "layers_per_stage"),
    "peak": (
        "policy",
        "recompute_method",
        "recompute_num_layers",
        "schedule",
        "zero",
        "global_batch",
        "layers_per_stage",
        "vpp",
        "device",
    ),
    "plan": ("device", "schedule", "global_batch", "layers_per_stage", "vpp"),
}
"""Options of the command line that change a term's numbers and no other term's."""

EXAMPLES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "lora": ("llama-3-8b", {}),
    "plan": ("gpt3-175b", {"tp": 8, "sp": True}),
    "offload": ("gpt3-175b", {"tp": 8, "sp": True, "pp": 8}),
    "zero": ("gpt3-175b", {"tp": 8, "sp": True, "pp": 8}),
    "18": ("gpt3-175b", {"tp": 8, "sp": True, "pp": 8}),
    "peak": ("gpt3-175b", {"tp": 8, "sp": True, "pp": 8}),
}
"""Whose numbers a term takes where no model is named, and in which layout."""
