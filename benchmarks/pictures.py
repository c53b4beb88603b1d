"""Draws the pictures of README and docs: each as a Vega-Lite file and as SVG in docs/images.

python -m benchmarks.pictures
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from actcalc.answers.layer_picture import layer_picture
from actcalc.answers.memory import memory_run
from actcalc.answers.plan import plan_run
from actcalc.answers.step_memory import step_memory
from actcalc.io.runs import resolve
from actcalc.io.sources import source
from actcalc.plan.settings import PlanSettings
from actcalc.render.charts.chart import Chart
from actcalc.render.charts.check import Pair, accuracy_chart
from actcalc.render.charts.compare import layer_chart, timeline_chart
from actcalc.render.charts.draw import svg_file, vega_lite
from actcalc.render.charts.memory import stages_chart, step_chart
from actcalc.render.charts.plan import frontier_chart
from actcalc.specs.run import Run
from tests.conftest import ROOT
from tests.published.memory_cases import ci_cases, published_cases
from tests.published.step_times import outcomes

FOLDER = ROOT / "docs" / "images"
FEW = ("none", "selective", "full", "full-sharded")


def gpt3(**more: object) -> Run:
    """GPT-3 as in the main job, tensor parallel over 8 GPUs."""
    layout = {"tp": 8, "sp": True, **more}
    return resolve(source("gpt3-175b"), layout=layout)


def piped() -> Run:
    """The same over 512 GPUs with a pipeline of 8."""
    layout = {"tp": 8, "sp": True, "pp": 8, "dp": 8, "zero": 1}
    return resolve(
        source("gpt3-175b"),
        layout=layout,
        workload={"global_batch": 128},
        device="a100-80gb",
        policies=("selective",),
    )


_SOURCES = {"bridge-rc": "Megatron-Bridge", "lomo": "LOMO's paper"}
"""Sources of published peaks whose short names say little."""


def memory_pairs() -> Iterator[Pair]:
    """Published peaks above a gigabyte that an allocator counted."""
    for case in ci_cases():
        if not case.left_out and case.measured > 1e9:
            yield Pair(case.name, "Megatron-LM's CI", case.measured / 1e9, case.predicted / 1e9)
    for case in published_cases():
        words = case.metric.split(",")[0].split(" ")[0]
        if not case.left_out and words in ("allocated", "active", "activations"):
            group = case.name.split("/")[0]
            group = _SOURCES.get(group, group)
            yield Pair(case.name, group, case.measured / 1e9, case.predicted / 1e9)


def time_pairs() -> Iterator[Pair]:
    """Published step times, those of complete sources apart."""
    for one in outcomes():
        group = "configuration known in full" if one.known else "known in part"
        yield Pair(str(one.row["id"]), group, one.measured, one.predicted)


def _frontier() -> Chart:
    run = resolve(source("gpt3-175b"), layout={"tp": 8, "sp": True}, device="a100-80gb")
    settings = PlanSettings(memory_model="stored+working", activations_only=True)
    return frontier_chart(plan_run(run, 16 * 10**9, settings, points=20), "GB")


PICTURES: Mapping[str, Callable[[], Chart]] = {
    "layer": lambda: layer_chart(layer_picture(gpt3(), FEW), "GB"),
    "timeline": lambda: timeline_chart(layer_picture(gpt3(), FEW)),
    "stages": lambda: stages_chart(memory_run(piped()), "GB"),
    "step": lambda: step_chart(step_memory(piped()), "GB"),
    "frontier": _frontier,
    "memory": lambda: accuracy_chart(list(memory_pairs()), "Peak memory", "GB"),
    "times": lambda: accuracy_chart(list(time_pairs()), "Step time", "s"),
}


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, make in PICTURES.items():
        chart = make()
        (FOLDER / f"{name}.vl.json").write_text(vega_lite(chart), encoding="utf-8")
        (FOLDER / f"{name}.svg").write_text(svg_file(chart), encoding="utf-8")


if __name__ == "__main__":
    main()
