"""Times of many pipelines at once are those of one: by events, and where no run is needed."""

from __future__ import annotations

import numpy as np
import pytest

from actcalc.cost.makespans import Durations, makespans
from actcalc.cost.pipeline import makespan
from actcalc.errors import SpecError
from actcalc.run.schedule import moments
from actcalc.run.schedule.held import fullest
from actcalc.run.schedule.shape import shape_of
from actcalc.specs.schedules import SCHEDULES

RUNS = 6


def table(rng, pp, chunks, kind):
    """Durations by [stage][chunk]: alike but for the ends, or all different."""

    def one(forward, backward):
        backward = np.asarray(backward)
        return Durations(np.asarray(forward), backward, backward * 0.45)

    plain = one(rng.uniform(0.5, 2, RUNS), rng.uniform(1, 5, RUNS))
    if kind == "different":
        return [
            [one(rng.uniform(0.1, 2, RUNS), rng.uniform(0.1, 4, RUNS)) for _ in range(chunks)]
            for _ in range(pp)
        ]
    rows = [[plain] * chunks for _ in range(pp)]
    more, most = (0.3, 2.0) if kind == "head" else (2.0, 0.3)
    rows[0][0] = one(
        plain.forward + rng.uniform(0, more, RUNS), plain.backward + rng.uniform(0, more, RUNS)
    )
    rows[-1][-1] = one(
        plain.forward + rng.uniform(0, most, RUNS), plain.backward + rng.uniform(0, most, RUNS)
    )
    return rows


def runs(schedule, pp, microbatches, vpp):
    try:
        shape_of(schedule, pp, microbatches, vpp, None)
    except SpecError:
        return False
    return True


@pytest.mark.parametrize("kind", ["head", "embedding", "different"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_many_steps_are_each_its_own(schedule, kind):
    rng = np.random.default_rng(len(schedule) + len(kind))
    compared = 0
    for pp in (2, 3, 4, 6):
        for vpp in (2, 3) if not SCHEDULES[schedule].chunks else (1,):
            chunks = table(rng, pp, SCHEDULES[schedule].chunk_count(vpp), kind)
            counts = [
                count
                for count in (1, pp - 1, pp, 2 * pp, 3 * pp, 5 * pp, 12 * pp, 12 * pp + 2)
                if runs(schedule, pp, count, vpp)
            ]
            if not counts:
                continue
            every = np.repeat(counts, RUNS)
            which = np.tile(np.arange(RUNS), len(counts))
            found = makespans(schedule, pp, every, vpp, chunks, which).reshape(-1, RUNS)
            for row, microbatches in zip(found, counts, strict=True):
                for run in range(RUNS):
                    alone = makespan(
                        schedule, pp, microbatches, vpp,
                        forward_seconds=[[float(c.forward[run]) for c in s] for s in chunks],
                        backward_seconds=[[float(c.backward[run]) for c in s] for s in chunks],
                        weight_seconds=[[float(c.weight[run]) for c in s] for s in chunks],
                    )  # fmt: skip
                    assert row[run] == pytest.approx(alone.total_seconds, rel=1e-11)
                    compared += 1
    assert compared >= 60


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_fullest_moments_are_the_fullest_of_all(schedule):
    rng = np.random.default_rng(7)
    compared = 0
    for pp in (2, 4, 6):
        for vpp in (2, 3) if not SCHEDULES[schedule].chunks else (1,):
            chunks = SCHEDULES[schedule].chunk_count(vpp)
            for microbatches in (pp, 2 * pp, 9 * pp):
                alike = [0] * chunks
                alike[0] = int(rng.integers(0, 2)) if chunks > 1 else 0
                alike[-1] = max(alike) + 1 if chunks > 1 else 0
                for stage in range(pp):
                    compared += same_highest(
                        (schedule, pp, microbatches, vpp), stage, tuple(alike), rng
                    )
    assert compared >= 12


def same_highest(asked, stage, alike, rng):
    sizes = rng.integers(1, 100, max(alike) + 1).tolist()
    best, got = {}, {}
    try:
        every = moments(*asked, stage=stage)
    except SpecError:
        return 0
    for moment in every:
        held = zip(alike, moment.held.activations, moment.held.stashes, strict=True)
        total = sum((a + w) * sizes[kind] for kind, a, w in held)
        key = moment.kind, alike[moment.chunk]
        best[key] = max(best.get(key, 0), total)
    for moment in fullest(*asked, stage=stage, alike=alike):
        total = sum(n * size for n, size in zip(moment.held.activations, sizes, strict=True))
        key = moment.kind, moment.chunk
        got[key] = max(got.get(key, 0), total)
    assert got == best
    return 1
