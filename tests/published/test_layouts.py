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

CASES = yaml.safe_load((DATA / "published_layouts.yaml").read_text())
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


def ranks(case: dict, found: Found) -> Iterator[int]:
    """Places of the rows that have the published degrees, from 0."""
    wanted = case["layout"]
    for place, row in enumerate(ordered(found).tolist()):
        layout = found.layout(row)
        if all(getattr(layout, key) == value for key, value in wanted.items()):
            yield place


def cases() -> Iterator[object]:
    for case in CASES:
        marks = [pytest.mark.sweep] if case.get("slow") else []
        yield pytest.param(case, id=case["id"], marks=marks)


@pytest.mark.parametrize("case", list(cases()))
def test_published_layouts_fit_and_are_among_the_best(case):
    found = find(run_of(case), space_of(case))
    place = next(ranks(case, found), None)
    assert place is not None, "called infeasible"
    if "why" not in case:
        assert place < max(FEWEST, BEST * len(found.peak)), f"{place} of {len(found.peak)}"
