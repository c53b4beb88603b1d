"""The library's calls: the command line's answers as typed objects."""

from __future__ import annotations

from collections.abc import Sequence

from actcalc.answers.breakdown import Breakdown, breakdown_run
from actcalc.answers.compare import Comparison, compare_run
from actcalc.io.runs import resolve
from actcalc.io.sources import Source, source
from actcalc.specs import Layout, Model, Workload
from actcalc.specs.run import Run


def load_model(name: str) -> Source:
    """What a preset's name or a path describes: a model with its usual workload.

    Raises ``SpecError`` when it names nothing.
    """
    return source(name)


def _run(
    model: Source | Model | str,
    layout: Layout | None,
    workload: Workload | None,
    framework: str | None,
    policies: Sequence[str],
) -> Run:
    if isinstance(model, str):
        origin = source(model)
    elif isinstance(model, Model):
        origin = Source(name=model.name, model=model.model_dump())
    else:
        origin = model
    return resolve(
        origin,
        layout=layout.model_dump() if layout else None,
        workload=workload.model_dump() if workload else None,
        framework=framework,
        policies=policies,
    )


def compare(
    model: Source | Model | str,
    layout: Layout | None = None,
    workload: Workload | None = None,
    *,
    framework: str | None = None,
    policies: Sequence[str] = (),
) -> Comparison:
    """Recompute policies side by side, as ``actcalc compare`` prints them.

    Without a workload the model's usual one is taken; sizes are bytes on one rank. Raises
    ``SpecError`` for contradictions, naming the values.
    """
    return compare_run(_run(model, layout, workload, framework, policies))


def breakdown(
    model: Source | Model | str,
    layout: Layout | None = None,
    workload: Workload | None = None,
    *,
    framework: str | None = None,
    policy: str = "none",
) -> Breakdown:
    """Every tensor one layer keeps under ``policy``, as ``actcalc breakdown`` lists them."""
    return breakdown_run(_run(model, layout, workload, framework, (policy,)))
