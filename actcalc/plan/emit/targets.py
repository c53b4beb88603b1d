"""The best plan a training framework can express, as settings or code to paste.

Each target has a space of plans of its own, searched whole: every plan its flags can name is
evaluated (Megatron-LM, torchtitan, DeepSpeed, transformers), or the exact planner runs on what the
target can do with one layer (PyTorch's selective checkpoint). So the plan is the best of that
target, and its distance from the optimum is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

from actcalc.errors import SpecError, visible
from actcalc.plan.named import Fit, Rivals
from actcalc.plan.options import Costs
from actcalc.plan.planner import RunPlanner
from actcalc.specs.recompute import MODULES

if TYPE_CHECKING:
    from actcalc.plan.figures import EmittedFigure

TARGETS = ("megatron", "torch", "torchtitan", "deepspeed", "transformers")


@dataclass(frozen=True)
class Expressed:
    """A target's best plan: its text, its words, and how it fits (costs in planner units)."""

    text: str
    plan: str
    fit: Fit
    notes: tuple[str, ...] = ()


def check_target(name: str) -> None:
    """Refuse an unknown target."""
    if name not in TARGETS:
        raise SpecError(f"--emit {name!r} is not known", "use one of " + ", ".join(TARGETS))


def emitted(target: str, planner: RunPlanner, budget: int) -> EmittedFigure:
    """The best plan ``target`` can express within ``budget`` bytes of each GPU.

    Its distance is to the exact optimum of single ops (``--semantics minimal``), which no target
    can beat with the same kernels.
    """
    check_target(target)
    makers: dict[str, Callable[[RunPlanner, int], Expressed]] = {
        "megatron": _megatron,
        "torchtitan": _torchtitan,
        "deepspeed": _deepspeed,
        "transformers": _transformers,
        "torch": _torch,
    }
    found = makers[target](planner, budget)
    return figure_of(target, found, optimum(planner, budget), planner.costs, planner.run.model.name)


def figure_of(
    target: str, found: Expressed, best: int | None, costs: Costs, name: str
) -> EmittedFigure:
    """A target's best plan beside the optimum ``best`` (costs in planner units, None: none fits).

    Its text begins with comments: ``name``, the plan in words, how far it is from the optimum.
    """
    from actcalc.plan.figures import EmittedFigure

    cost = found.fit.cost
    value = None if cost is None else costs.value(cost)
    least = None if best is None else costs.value(best)
    ratio = value / least if value is not None and least else None
    if cost is None:
        far = f"nothing {target} can express fits"
    elif best is None:
        far = "beyond single ops"
    elif cost == best:
        far = "the optimum"
    elif value == least:
        far = "as many FLOPs as the optimum"
    elif ratio is None:
        far = "the optimum re-runs " + ("nothing" if best == 0 else "no FLOPs")
    else:
        far = f"{ratio:.2f} times the cost of the optimum"
    head = (f"# {name}: {found.plan} ({far})", *(f"# {visible(note)}" for note in found.notes))
    return EmittedFigure(
        target=target,
        text="\n".join((*head, found.text)) + "\n",
        plan=found.plan,
        feasible=cost is not None,
        cost_seconds=value if costs.unit == "seconds" else None,
        cost_flops=value if isinstance(value, int) else None,
        peak_bytes=found.fit.peak_bytes,
        cost_per_optimum_cost_ratio=ratio,
        notes=found.notes,
    )


def optimum(planner: RunPlanner, budget: int) -> int | None:
    """Cost of the cheapest plan of single ops, each stage by itself; None if none fits."""
    settings = replace(
        planner.settings, semantics="minimal", method="optimal", same_on_all_stages=False
    )
    plans = RunPlanner(planner.run, settings).plan(budget)
    if not all(plan.feasible for plan in plans):
        return None
    return planner.total(plan.cost for plan in plans)


def _nothing(text: str, notes: tuple[str, ...] = ()) -> Expressed:
    return Expressed(text, "no plan fits", Fit((), None, None), notes)


def _shortest(planner: RunPlanner) -> int:
    """Layers of the shortest chunk: more layers in one segment or block mean nothing there."""
    sizes = [len(chunk) for stage in planner.chunks for chunk in stage]
    return min((size for size in sizes if size), default=1)


# --- Megatron-LM ----------------------------------------------------------------------------------


def megatron_policies(planner: RunPlanner) -> tuple[str, ...]:
    """Every policy Megatron-LM's flags can name for this model, by our names."""
    tags = {tag for kind in planner.model.kinds for op in kind.graph.ops for tag in op.modules}
    modules = [name for name, row in MODULES.items() if row.megatron and row.tag in tags]
    names = ["none"]
    for size in range(1, len(modules) + 1):
        names += ["+".join(chosen) for chosen in combinations(modules, size)]
    longest = _shortest(planner)
    names += [f"uniform:{k}" for k in range(1, longest + 1)]
    names += [f"block:{n}" for n in range(1, longest + 1)]
    return tuple(names)


def _megatron(planner: RunPlanner, budget: int) -> Expressed:
    fit = Rivals(planner).best_of(megatron_policies(planner), budget)
    if fit is None:
        return _nothing("# (no flags: raise --memory, or split the model further)")
    (name,) = fit.names
    return Expressed(megatron_flags(name), _named(name), fit)


def megatron_flags(policy: str) -> str:
    """Megatron-LM's command-line flags for a policy of :func:`megatron_policies`."""
    if policy == "none":
        return "# no recompute flags"
    method, _, count = policy.partition(":")
    if count:
        return (
            "--recompute-granularity full \\\n"
            f"--recompute-method {method} \\\n--recompute-num-layers {count}"
        )
    modules = " ".join(MODULES[name].megatron for name in policy.split("+"))
    return f"--recompute-granularity selective \\\n--recompute-modules {modules}"


def _named(policy: str) -> str:
    method, _, count = policy.partition(":")
    if method == "uniform":
        return "full re-run" + ("" if count == "1" else f" in segments of {count} layers")
    if method == "block":
        return f"full re-run of the first {count} layers of each chunk"
    if policy == "none":
        return "nothing re-run"
    return f"re-run {policy.replace('+', ', ')}"


# --- torchtitan, DeepSpeed, transformers ----------------------------------------------------------


def _torchtitan(planner: RunPlanner, budget: int) -> Expressed:
    from actcalc.plan.emit.torchtitan import best_setting, notes_of, text_of

    best = best_setting(planner, budget)
    if best is None:
        return _nothing('[activation_checkpoint]\nmode = "full"')
    return Expressed(text_of(best), best.plan, best.fit, notes_of(planner, best))


def _named_whole(name: str) -> str:
    return "nothing re-run" if name == "none" else "full re-run of every layer"


def _deepspeed(planner: RunPlanner, budget: int) -> Expressed:
    longest = _shortest(planner)
    layout = planner.run.layout
    names = ["none", *(f"uniform:{k}" for k in range(1, longest + 1))]
    if layout.tp > 1 and not layout.sp:
        names.append("full-sharded")
    fit = Rivals(planner).best_of(names, budget)
    if fit is None:
        return _nothing("# lower the micro-batch, or split the model further")
    (name,) = fit.names
    _, _, count = name.partition(":")
    interval = 0 if name == "none" else int(count or 1)
    split = "true" if name == "full-sharded" else "false"
    text = (
        f"# PipelineModule(..., activation_checkpoint_interval={interval})\n"
        "# and in the JSON configuration:\n"
        '{\n  "activation_checkpointing": {\n'
        f'    "partition_activations": {split},\n'
        '    "cpu_checkpointing": false\n  }\n}'
    )
    plan = "full re-run, inputs split over tp" if name == "full-sharded" else _named(name)
    return Expressed(text, plan, fit)


def _transformers(planner: RunPlanner, budget: int) -> Expressed:
    fit = Rivals(planner).best_of(("none", "full"), budget)
    if fit is None:
        return _nothing("# lower per_device_train_batch_size, or shard the model")
    if fit.names == ("none",):
        return Expressed(
            "TrainingArguments(gradient_checkpointing=False)", _named_whole("none"), fit
        )
    text = (
        "TrainingArguments(\n    gradient_checkpointing=True,\n"
        '    gradient_checkpointing_kwargs={"use_reentrant": False},\n)'
    )
    return Expressed(text, _named_whole("full"), fit)


# --- PyTorch --------------------------------------------------------------------------------------


def _torch(planner: RunPlanner, budget: int) -> Expressed:
    from actcalc.plan.emit.torch import Kept, selective_options, snippet

    settings = replace(
        planner.settings, semantics="module", method="optimal", same_on_all_stages=False
    )
    chosen = RunPlanner(planner.run, settings, options=selective_options)
    plans = chosen.plan(budget)
    notes = _torch_notes(planner)
    if not all(plan.feasible for plan in plans):
        return _nothing("# lower the micro-batch, or split the model further", notes)
    stages: list[list[tuple[int, Any]]] = []
    for plan in plans:
        rows: list[tuple[int, Any]] = []
        for group in plan.groups:
            kept = group.payload
            assert isinstance(kept, Kept)
            rows.append((group.count, kept))
        stages.append(rows)
    fit = Fit(
        ("selective checkpoint",),
        planner.total(plan.cost for plan in plans),
        max(plan.peak_bytes or 0 for plan in plans),
    )
    return Expressed(snippet(stages), "selective checkpoint, layer by layer", fit, notes)


def _torch_notes(planner: RunPlanner) -> tuple[str, ...]:
    if planner.run.framework.op_by_op:
        return ()
    return (
        f"Products are counted in the order of the {planner.run.framework} profile;",
        "kernels outside ATen (Transformer Engine) are not seen by this policy.",
    )
