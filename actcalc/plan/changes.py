"""Changes of a run: fields by their path, applied and checked, and the flags that make them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from actcalc.errors import SpecError
from actcalc.specs.base import Spec
from actcalc.specs.check import check, check_profile, check_training
from actcalc.specs.layout import Layout
from actcalc.specs.run import Run

Change = Mapping[str, Any]
"""New values by path: ``layout.tp``, ``workload.kernels.cuda_graphs``, ``policy``."""

_SECTIONS = ("layout", "workload", "training")
_FLAGS = (
    "layout.tp", "layout.sp", "layout.pp", "layout.vpp", "layout.cp", "layout.ep", "layout.etp",
    "layout.dp", "layout.zero", "layout.schedule", "workload.seq", "workload.micro_batch",
    "workload.global_batch", "workload.attention", "training.optimizer", "training.loss",
    "training.lora_rank", "training.base_bits", "training.offload",
)  # fmt: skip
"""Fields with a flag of their own name; the others are given with --set."""
_GRID = ("layout.tp", "layout.pp", "layout.cp")
_STEP = (*_GRID, "layout.vpp", "workload.micro_batch")
"""Fields that change how many micro-batches a step has, unless its global batch is stated."""


def changed_run(run: Run, global_batch: int, change: Change) -> Run:
    """The run with other values, on as many devices and with as many sequences in a step.

    Replicas follow from tp, pp and cp where ``change`` does not give them; ``global_batch`` is what
    a step has as it is, stated or not. Raises ``SpecError`` where there is no such run.
    """
    fields: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
    kernels: dict[str, Any] = {}
    for path, value in change.items():
        section, _, name = path.partition(".")
        if name.startswith("kernels."):
            kernels[name.partition(".")[2]] = value
        elif name:
            fields[section][name] = value
    if kernels:
        fields["workload"]["kernels"] = run.workload.kernels.model_copy(update=kernels)
    if "layout.dp" not in change and any(path in change for path in _GRID):
        fields["layout"]["dp"] = _replicas(run.layout, change)
    implied = run.workload.global_batch is None and "workload.global_batch" not in change
    if implied and any(path in change for path in _STEP):
        more = max(1, change.get("layout.dp", 1) // run.layout.dp)
        fields["workload"]["global_batch"] = global_batch * more
    policies = (change["policy"],) if "policy" in change else run.policies
    parts = {
        section: getattr(run, section).model_copy(update=values)
        for section, values in fields.items()
        if values
    }
    made = replace(run, policies=policies, **parts)
    _check(made)
    return made


def _replicas(layout: Layout, change: Change) -> int:
    """Replicas of the same devices under other degrees; ``SpecError`` where they do not divide."""
    inside = 1
    for path in _GRID:
        name = path.partition(".")[2]
        inside *= change.get(path, getattr(layout, name))
    if layout.devices % inside:
        raise SpecError(
            f"tp x pp x cp = {inside} does not divide the run's {layout.devices} devices",
            "choose degrees that do",
        )
    return layout.devices // inside


def _check(run: Run) -> None:
    layout = run.layout
    check(run.model, layout, run.workload)
    check_profile(run.framework, layout, run.workload)
    check_training(run.model, layout, run.training)
    inside = layout.ep * layout.expert_tp
    if layout.ep > 1 and (layout.tp * layout.cp * layout.dp) % inside:
        raise SpecError(
            f"ep x etp = {inside} does not divide the ranks of a stage", "use a smaller --ep"
        )


def difference(run: Run, other: Run) -> dict[str, Any]:
    """Fields of ``other`` that differ from ``run``'s, by path, ``policy`` last."""
    found = {
        path: value
        for section in _SECTIONS
        for path, value in _differing(section, getattr(run, section), getattr(other, section))
    }
    before, after = ((each.policies or ("none",))[0] for each in (run, other))
    return found if before == after else {**found, "policy": after}


def _differing(path: str, one: Spec, other: Spec) -> Iterator[tuple[str, Any]]:
    for name in one.field_names():
        old, new = getattr(one, name), getattr(other, name)
        if old == new:
            continue
        if isinstance(new, Spec):
            yield from _differing(f"{path}.{name}", old, new)
        else:
            yield f"{path}.{name}", new


def words(change: Change, names: Mapping[str, str] | None = None) -> list[str]:
    """The words on the command line that make a change.

    ``names`` has flags that a command spells otherwise, by the field's path; one that is empty is
    given with --set.
    """
    found: list[str] = []
    for path, value in change.items():
        name = path.partition(".")[2]
        flag = (names or {}).get(path, "--" + name.replace("_", "-"))
        if path == "policy":
            found += ["--policy", value]
        elif path not in _FLAGS or value is None or not flag:
            found += ["--set", f"{name}={_plain(value)}"]
        elif isinstance(value, bool):
            found.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            found += [flag, str(value)]
    return found


def _plain(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_plain, value))
    return (
        str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
    )
