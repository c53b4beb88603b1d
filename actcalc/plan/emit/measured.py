"""A measured layer under PyTorch's selective checkpoint: what that can do, and code that does it.

The layer runs under ``torch.utils.checkpoint`` with a policy that keeps the results of chosen ops.
In backward every other op runs again, up to the one that made or read the last saved tensor (early
stop). Kept results are all stored, whether backward needs them or not; besides them only what the
layer is called with is. Ops are told apart by name and by how many of that name came before.

Only ops with FLOPs are worth keeping. Three kinds cannot be: an op in place (its readers look at
the storage, not at its result), a result that a later op changes, and an op that draws random
numbers (skipping it would leave the generator behind). Results that a second run could change
(top-k, sort) are always kept; where that cannot be, as with a buffer of the model that counts
steps, or where the layer changes its input in place, there is no checkpoint to choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from actcalc.plan.emit.targets import Expressed, figure_of
from actcalc.plan.emit.torch import code
from actcalc.plan.figures import EmittedFigure
from actcalc.plan.measured.ops import MeasuredOps, short
from actcalc.plan.measured.planner import LayerPlanner, module_option
from actcalc.plan.named import Fit
from actcalc.solve.frontier import pareto
from actcalc.solve.options import Option, OptionSet

_ATTENTION = "scaled_dot_product"


@dataclass(frozen=True)
class KeptOps:
    """Which ops' results one layer keeps: call numbers by op name; None: no checkpoint."""

    calls: tuple[tuple[str, tuple[int, ...]], ...] | None
    names: tuple[str, ...] = ()


def family(op: str) -> str:
    """What the emitted policy calls an op: fused attentions share a name, a GPU picks among them.

    Its base name otherwise, since ``addmm`` has but one overload that a model calls.
    """
    name = short(op)
    return "attention" if _ATTENTION in name else name


def keepable(ops: MeasuredOps) -> tuple[int, ...]:
    """Indices of the ops whose results are worth keeping and may be."""
    changed = _changed_later(ops)
    return tuple(
        index
        for index, op in enumerate(ops.layer.ops[: ops.layer.ops_to_last_save])
        if op.forward_flops
        and op.rerunnable
        and not op.random
        and not op.writes
        and not changed & set(op.outputs)
    )


def required(ops: MeasuredOps) -> tuple[int, ...] | None:
    """Indices of the ops whose results must be kept; None where that cannot be done."""
    changed = _changed_later(ops)
    found = []
    for index, op in enumerate(ops.layer.ops[: ops.layer.ops_to_last_save]):
        if op.rerunnable:
            continue
        in_place = op.writes or not op.outputs
        if op.random or in_place or changed & set(op.outputs):
            return None
        found.append(index)
    return tuple(found)


def _changed_later(ops: MeasuredOps) -> set[int]:
    return {storage for op in ops.layer.ops for storage in op.writes}


def selective_options(ops: MeasuredOps) -> OptionSet:
    """Every way to run one layer: no checkpoint, or one that keeps the results of some ops."""
    none = module_option(ops, ())
    found = [replace(none, payload=KeptOps(None))]
    always = required(ops)
    if always is None or ops.changes_input:
        return OptionSet.of(found)
    stored, _, cost = np.zeros((3, 1), dtype=np.int64)
    extra = np.zeros(1, dtype=np.int64)
    picks: list[tuple[int, ...]] = [()]
    for index in keepable(ops):
        outputs = set(ops.layer.ops[index].outputs)
        size = ops.bytes_of(outputs)
        beside = ops.bytes_of(outputs - ops.saved)
        stored = np.concatenate([stored, stored + size])
        extra = np.concatenate([extra, extra + beside])
        cost = np.concatenate([cost, cost - ops.costs[index]])
        picks += [(*pick, index) for pick in picks]
        alive = pareto(stored, extra, cost)
        stored, extra, cost = stored[alive], extra[alive], cost[alive]
        picks = [picks[i] for i in alive]
    found += [selective_option(ops, tuple(sorted((*pick, *always)))) for pick in picks]
    return OptionSet.of(found)


def selective_option(ops: MeasuredOps, kept: Sequence[int]) -> Option:
    """One layer under a checkpoint that keeps the results of the ops with these indices."""
    held = {*ops.given, *ops.arriving, *(i for at in kept for i in ops.layer.ops[at].outputs)}
    again = [at for at in range(ops.layer.ops_to_last_save) if at not in kept]
    return Option(
        ops.bytes_of(held),
        ops.bytes_of(ops.saved - held),
        sum(ops.costs[at] for at in again),
        KeptOps(_calls(ops, kept), tuple(ops.names[at] for at in kept)),
    )


def _calls(ops: MeasuredOps, kept: Sequence[int]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    numbers: dict[str, int] = {}
    found: dict[str, list[int]] = {}
    for at, op in enumerate(ops.layer.ops):
        name = family(op.op)
        number = numbers.get(name, 0)
        numbers[name] = number + 1
        if at in kept:
            found.setdefault(name, []).append(number)
    return tuple((name, tuple(calls)) for name, calls in found.items())


def emitted_layers(planner: LayerPlanner, budget: int) -> EmittedFigure:
    """The best plan a selective checkpoint can express within ``budget`` bytes, as code."""
    settings = replace(planner.settings, semantics="module", method="optimal")
    chosen = LayerPlanner(planner.layer, planner.count, settings, options=selective_options)
    plan = chosen.plan(budget)
    exact = LayerPlanner(planner.layer, planner.count, replace(settings, semantics="minimal")).plan(
        budget
    )
    return figure_of(
        "torch",
        _expressed(chosen, budget) if plan.feasible else _unfit(planner),
        exact.cost,
        planner.costs,
        planner.layer.name,
    )


def _unfit(planner: LayerPlanner) -> Expressed:
    text = "# lower the micro-batch, or shard the module"
    return Expressed(text, "no plan fits", Fit((), None, None), _notes(planner))


def _expressed(planner: LayerPlanner, budget: int) -> Expressed:
    plan = planner.plan(budget)
    rows: list[tuple[int, KeptOps]] = []
    for group in plan.groups:
        assert isinstance(group.payload, KeptOps)
        rows.append((group.count, group.payload))
    fit = Fit(("selective checkpoint",), plan.cost, plan.peak_bytes)
    words = "selective checkpoint, layer by layer"
    if all(kept.calls is None for _, kept in rows):
        words = "no checkpoint"
    return Expressed(snippet(rows), words, fit, _notes(planner))


def _notes(planner: LayerPlanner) -> tuple[str, ...]:
    ops = planner.ops
    notes = [f"Ops are counted as torch {planner.layer.torch_version} runs them on a GPU."]
    if ops.changes_input:
        notes.append("The layer changes its input in place: a second run would see another one.")
    elif required(ops) is None:
        fixed = [
            name for name, op in zip(ops.names, ops.layer.ops, strict=True) if not op.rerunnable
        ]
        notes.append(
            f"A second run of {', '.join(fixed)} could differ, and its result, changed in place "
            "later or random, cannot be kept: no checkpoint is possible."
        )
    return tuple(notes)


_POLICY = """# (layers, results kept: for each op, which of its calls in the layer, from 0).
# None: no checkpoint; {}: the layer runs again whole.
PLAN = {
@PLAN@
}


def name_of(op):
    name = str(op).split(".")[1] if "." in str(op) else str(op)
    return "attention" if "scaled_dot_product" in name else name


def policy(kept):
    calls = {False: {}, True: {}}

    def decide(ctx, op, *args, **kwargs):
        seen, name = calls[ctx.is_recompute], name_of(op)
        seen[name] = seen.get(name, -1) + 1
        if seen[name] in kept.get(name, ()):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return decide"""


def snippet(rows: Sequence[tuple[int, KeptOps]]) -> str:
    """Code that applies a plan: (layers, what they keep) in order."""
    lines = ["    0: ["]
    for count, kept in rows:
        names = f"  # {', '.join(kept.names)}" if kept.names else ""
        calls = None if kept.calls is None else dict(kept.calls)
        lines.append(f"        ({count}, {calls!r}),{names}")
    lines.append("    ],")
    return code(_POLICY, "\n".join(lines))
