"""States: bytes per parameter, ZeRO, adapters, offload, each as the run has them.

Every number is computed by what computes the answer itself; a closed form is printed beside it,
never instead of it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from actcalc.answers.explain.term import HU, ZERO, ZERO_OFFLOAD, Body, Term, gb, own_saved
from actcalc.errors import SpecError
from actcalc.io.devices import load_device
from actcalc.layers.adapters import adapts
from actcalc.memory.stage import StageMemory
from actcalc.memory.states import States
from actcalc.run.staged import StagedRun
from actcalc.specs.numbers import percent
from actcalc.specs.recipes import CHOOSABLE
from actcalc.specs.run import Run

_REPLICAS = 8  # where no --dp is given: the GPUs of one node
_RANK = 16  # of adapters where none is given; Hu et al. 2021 use 1 to 64


def _held(run: Run, stage: int = 0) -> tuple[States, int]:
    work = StageMemory.of(run)
    return work.beside(stage)[0], work.parameters(stage).total


def _with(run: Run, **fields: Any) -> Run:
    return replace(run, training=run.training.model_copy(update=fields))


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
    for name in CHOOSABLE:
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
    return Body(
        title="bytes of states for every parameter",
        result=f"{kept.total / count:g} B a parameter, {gb(kept.total)} on this GPU before ZeRO.",
        lines=tuple(lines),
        source=f"{ZERO}, section 3.1 (16 B); Megatron-LM docs, dist_optimizer (18 B)",
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
        now = [size / count for size in (kept.weights, kept.gradients, kept.optimizer)]
        words = " + ".join(
            f"{part:g}" if math.isclose(here, part) else f"{part:g}/{ranks}"
            for part, here in zip(parts, now, strict=True)
        )
        formula = "" if experts else f"{words} = "
        lines.append(
            f"ZeRO {zero}: {formula}{kept.total / count:.4g} B a parameter, {gb(kept.total)} "
            f"(weights {gb(kept.weights)}, gradients {gb(kept.gradients)}, optimizer "
            f"{gb(kept.optimizer)})"
        )
    if experts:
        lines.append("Routed experts have fewer replicas (dp·cp·tp/(ep·etp)) than the rest.")
    lines += [
        "Megatron's distributed optimizer is stage 1: with its 18 B states 6 + 12/dp.",
        "Stages 1 and 2 send no more than plain data parallelism; 3 gathers each layer's weights "
        "again for forward and for backward: 1.5 times the volume.",
    ]
    totals = ", ".join(
        f"{gb(kept.total)} {f'with stage {zero}' if zero else 'without'}"
        for zero, (kept, _) in enumerate(stages)
    )
    return Body(
        title="ZeRO: states sharded over replicas",
        result=f"States on each of {ranks} replicas' GPUs: {totals}.",
        lines=tuple(lines),
        source=f"{ZERO}, sections 5 and 7; Megatron-LM docs, dist_optimizer",
    )


def _lora(staged: StagedRun) -> Body:
    run, graph = staged.run, staged.graph
    rank = run.training.lora_rank or _RANK
    lines = [] if run.training.lora_rank else [f"No lora_rank set: rank {_RANK} is taken."]
    plain = _with(
        run,
        lora_rank=0,
        lora_targets="all",
        lora_dropout=False,
        lora_dtype="auto",
        base_bits=16,
        dora=False,
        train=(),
        freeze=0,
    )
    tuned = run if run.training.lora_rank else _with(run, lora_rank=_RANK)
    lines.append(
        f"W stays frozen; W + BA with B (out x r) and A (r x in) trains r·(in + out) numbers of a "
        f"matrix, r = {rank}:"
    )
    untuned = StagedRun(plain)
    layer = untuned.main.graph
    for op in layer.ops:
        if op.kind != "linear" or not adapts(untuned.graph, op, tuned.training):
            continue
        shape = [int(dim.value(graph.sizes)) for dim in op.weights[0].shape]
        if len(shape) == 2:
            lines.append(
                f"{op.name.replace('_', ' ')}: {rank}·({shape[0]:,} + {shape[1]:,}) = "
                f"{rank * sum(shape):,} of {shape[0] * shape[1]:,}"
            )
    before, count = _held(plain)
    after, _ = _held(tuned)
    trained = StageMemory.of(tuned).parameters(0).trained
    lines += [
        f"this GPU trains {trained:,} numbers, {percent(trained / count, 2)} of {count:,}",
        f"states {gb(before.total)} -> {gb(after.total)}: weights {gb(after.weights)}, "
        f"gradients {gb(after.gradients)}, optimizer {gb(after.optimizer)}",
    ]
    tuned_layer = StagedRun(tuned).main.graph
    sizes = [int(g.bytes_of(own_saved(g)).value(graph.sizes)) for g in (layer, tuned_layer)]
    lines += [
        f"activations of a layer {sizes[0]:,} B -> {sizes[1]:,} B: a frozen matrix needs its input "
        "for no weight gradient, but an adapter beside it reads the same input, and A's product "
        "(r wide) is kept on top.",
        "So adapters save states, not activations: recompute those.",
    ]
    return Body(
        title="LoRA: what adapters save",
        result=f"Adapters of rank {rank} train {percent(trained / count, 2)} of the "
        "numbers: states "
        f"{gb(before.total)} -> {gb(after.total)} on this GPU, activations {sizes[0]:,} B -> "
        f"{sizes[1]:,} B a layer.",
        lines=tuple(lines),
        source=f"{HU}, section 4",
    )


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
        f"States: the optimizer's {gb(kept.optimizer)} on the host (memory --offload optimizer, "
        f"plan --offload-states optimizer); every step gradients ({gb(kept.gradients)}) go down "
        f"and weights ({gb(kept.weights)}) come up.",
    ]
    return Body(
        title="offload: host memory instead of recomputing",
        result=f"Copying all that a layer keeps takes {1e3 * size / link.host_rate:.4g} ms, beside "
        f"{link.forward / 1e6:.4g} ms of its forward.",
        lines=tuple(lines),
        source=f"{ZERO_OFFLOAD}, section 4.1; presets/devices/{device.name}",
    )


TERMS = (
    Term(
        "18",
        "bytes of states for every parameter",
        _eighteen,
        words=("16", "states", "optimizer", "18b", "adam", "weights", "gradients", "parameters"),
        flags=("optimizer", "recipe", "galore_rank"),
        heeds=("vpp", "schedule", "layers_per_stage"),
        layout={"tp": 8, "sp": True, "pp": 8},
    ),
    Term(
        "zero",
        "ZeRO and FSDP: states sharded over replicas",
        _zero,
        words=(
            "6+12/dp",
            "zero-1",
            "zero-2",
            "zero-3",
            "fsdp",
            "sharding",
            "data parallel",
            "distributed optimizer",
            "deepspeed",
        ),
        flags=("zero", "dp", "shards"),
        layout={"tp": 8, "sp": True, "pp": 8},
    ),
    Term(
        "lora",
        "what adapters save",
        _lora,
        words=("adapters", "qlora", "peft", "adapter"),
        flags=("lora_rank", "lora_targets", "dora", "base_bits", "qlora", "train"),
        model="llama-3-8b",
        layout={},
    ),
    Term(
        "offload",
        "host memory instead of recomputing",
        _offload,
        words=("host", "cpu offload", "pcie"),
        flags=("offload", "offload_states"),
        heeds=("device", "peak"),
        layout={"tp": 8, "sp": True, "pp": 8},
    ),
)
"""The terms of this module."""
