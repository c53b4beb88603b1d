"""Layouts that were published as best fit, and rank among the best that a search finds.

Where one does not, its entry says why: nothing is tuned to it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml

from actcalc.io.runs import resolve
from actcalc.io.sources import Source, source
from actcalc.search.best import ordered
from actcalc.search.find import Found, find
from actcalc.search.space import Space, choice_of
from actcalc.specs.run import Run
from tests.conftest import DATA

PUBLISHED = yaml.safe_load((DATA / "published_layouts.yaml").read_text())
CASES, SOFTWARE = PUBLISHED["cases"], PUBLISHED["software"]
BEST = 0.05
FEWEST = 3  # of a few rows, the best three
GPT = {
    "family": "gpt", "tied": True, "max_positions": 2048, "hidden_dropout": 0.1,
    "attention_dropout": 0.1, "embedding_dropout": 0.1,
}  # fmt: skip


def run_of(case: dict) -> Run:
    asked = dict(case["run"])
    workload = {k: asked[k] for k in ("global_batch", "seq", "attention") if k in asked}
    model = case["model"]
    origin = (
        source(model)
        if isinstance(model, str)
        else Source(name=case["id"], model={"name": case["id"], **GPT, **model})
    )
    return resolve(origin, workload=workload, device=asked["device"], framework=asked["framework"])


def space_of(case: dict) -> Space:
    words = {"policy": "policies", "schedule": "schedules"}
    values = {
        words.get(key, key): tuple(value)
        if key in words
        else value
        if key == "sp"
        else choice_of(value, key)
        for key, value in case["space"].items()
    }
    return Space(gpus=case["run"]["gpus"], **values)


def could(case: dict, found: Found, row: int) -> bool:
    """Whether the source's software could run a row."""
    rules, layout = SOFTWARE.get(case.get("software"), {}), found.layout(row)
    if layout.vpp > 1 and layout.pp < rules.get("interleaves_from", 2):
        return False
    if rules.get("even") and layout.layers_per_stage:
        return False
    return rules.get("accumulates", True) or int(found.rows.rounds[row]) == 1


def ranks(case: dict, found: Found) -> tuple[list[int], int]:
    """Places, from 0, of the rows that have the published degrees, and of how many rows."""
    wanted = case["layout"]
    rows = [row for row in ordered(found).tolist() if could(case, found, row)]
    layouts = [found.layout(row) for row in rows]
    places = [
        place
        for place, layout in enumerate(layouts)
        if all(getattr(layout, key) == value for key, value in wanted.items())
    ]
    return places, len(rows)


def cases() -> Iterator[object]:
    for case in CASES:
        marks = [pytest.mark.sweep] if case.get("slow") else []
        yield pytest.param(case, id=case["id"], marks=marks)


@pytest.mark.parametrize("case", list(cases()))
def test_published_layouts_fit_and_are_among_the_best(case):
    found = find(run_of(case), space_of(case))
    places, count = ranks(case, found)
    assert places, "called infeasible"
    best = places[0] < max(FEWEST, BEST * count)
    assert best == ("why" not in case), f"{places[0] + 1} of {count}"
