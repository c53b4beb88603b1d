"""Stages moment by moment: the formula of the peak, and the exact search, against everything."""

from __future__ import annotations

import random
from itertools import accumulate, product
from typing import Any

import pytest

from actcalc.errors import SpecError
from actcalc.solve.fit import least_peak, solve_stage
from actcalc.solve.order import Aim, search
from actcalc.solve.stage import (
    Ends,
    Gpu,
    Held,
    Moment,
    StageProblem,
    Way,
    Ways,
    layers_at_peak,
    line,
    peak,
)
from tests.sweeps import sampled


def random_ways(rng: random.Random) -> Ways:
    found = []
    for _ in range(rng.randint(1, 4)):
        stored = rng.randint(0, 30)
        alive = (stored + rng.randint(0, 20), stored + rng.randint(0, 40))
        found.append(Way(stored, *alive, rng.randint(0, 20)))
    return Ways(found)


def random_ends(rng: random.Random, layers: int) -> Ends:
    def part() -> Held:
        stored = rng.randint(0, 10)
        return Held(stored, stored + rng.randint(0, 30), stored + rng.randint(0, 30))

    before = tuple(part() for _ in range(rng.randint(0, 1)))
    after = tuple(part() for _ in range(rng.randint(0, 2)))
    count = len(before) + layers + len(after)
    lacking = accumulate(rng.randint(0, 15) for _ in range(count))
    early = tuple(rng.randint(-10, 10) for _ in range(count))
    return Ends(
        before,
        after,
        tuple(lacking) if rng.random() < 0.5 else (),
        early if rng.random() < 0.5 else (),
    )


def random_moments(rng: random.Random, chunks: int) -> tuple[Moment, ...]:
    found = []
    for _ in range(rng.randint(1, 6)):
        held = [rng.randint(0, 4) for _ in range(chunks)]
        kind, chunk = rng.choice("FFBBIW"), rng.randrange(chunks)
        held[chunk] = max(1, held[chunk])
        found.append(Moment(kind, chunk, tuple(held)))
    return tuple(found)


def random_stage(rng: random.Random) -> StageProblem:
    chunks = rng.randint(1, 3)
    kinds = [random_ways(rng) for _ in range(rng.randint(1, 2))]
    layers = tuple(
        tuple(rng.choice(kinds) for _ in range(rng.randint(0, 3))) for _ in range(chunks)
    )
    gpus = tuple(
        Gpu(
            random_moments(rng, chunks),
            tuple(random_ends(rng, len(row)) for row in layers),
            base=rng.randint(0, 20),
            floor=rng.randint(0, 60),
        )
        for _ in range(rng.randint(1, 2))
    )
    return StageProblem(layers, gpus)


def choices(problem: StageProblem) -> list[list[list[int]]]:
    every = [range(len(ways)) for row in problem.layers for ways in row]
    found = []
    for picks in product(*every):
        left = iter(picks)
        found.append([[next(left) for _ in row] for row in problem.layers])
    return found


def by_hand(gpu: Gpu, rows: list[list[Way]]) -> int:
    """The module's formula written out: every moment, every part, nothing shared between them."""
    parts = [[*e.before, *row, *e.after] for e, row in zip(gpu.chunks, rows, strict=True)]
    totals = [gpu.floor]
    for kind, chunk, held in gpu.moments:
        every = sum(n * sum(p.stored for p in row) for n, row in zip(held, parts, strict=True))
        if kind == "W":
            totals.append(gpu.base + every)
            continue
        own = parts[chunk]
        if not own:
            totals.append(gpu.base + every)
        for j, part in enumerate(own):
            rest = gpu.base + every - sum(p.stored for p in own[j:])
            absent, early = gpu.chunks[chunk].absent, gpu.chunks[chunk].absent_forward
            if kind == "F":
                totals.append(rest + part.forward - (early[j] if early else 0))
            else:
                totals.append(rest + part.backward - (absent[j] if absent else 0))
    return max(totals)


@pytest.mark.parametrize("seed", range(150))
def test_the_cheapest_choice_is_found_and_proven(seed: int) -> None:
    """Chunks, ends, absent gradients, several GPUs, cutoffs: against every choice there is."""
    rng = random.Random(seed)
    problem = random_stage(rng)
    known: list[tuple[int, int]] = []
    for choice in choices(problem):
        rows = [
            [ways.ways[i] for ways, i in zip(row, picks, strict=True)]
            for row, picks in zip(problem.layers, choice, strict=True)
        ]
        high = problem.peak(choice)
        assert high == max(by_hand(gpu, rows) for gpu in problem.gpus)
        limits = [limit.highest(choice, problem)[0] for limit in problem.limits]
        assert high == max(*limits, *(gpu.floor for gpu in problem.gpus))
        known.append((high, problem.cost(choice)))
    lowest = min(high for high, _ in known)
    found, choice = least_peak(problem)
    assert found == lowest == problem.peak(choice)
    for _ in range(4):
        budget = rng.randint(lowest - 2, max(high for high, _ in known) + 1)
        below = rng.choice([None, None, rng.randint(0, 80)])
        best = min((cost for high, cost in known if high <= budget), default=None)
        solved = solve_stage(problem, budget, below=below)
        if best is not None and (below is None or best < below):
            assert solved is not None
            assert solved.choice is not None
            assert solved.relaxed <= solved.cost == best == solved.bound
            assert problem.cost(solved.choice) == best
            assert problem.peak(solved.choice) <= budget
        elif below is None:
            assert solved is None
        else:
            assert solved is not None
            assert solved.choice is None
            assert solved.bound == below


def random_large(rng: random.Random) -> StageProblem:
    kind = Ways(
        Way(k, k + rng.randint(0, 300), k + rng.randint(0, 900), 40_000 // (k + 40))
        for k in rng.sample(range(1000), 30)
    )
    gpu = Gpu(
        (Moment("F", 0, (3, 2)), Moment("B", 0, (3, 2)), Moment("B", 1, (2, 3))), (Ends(), Ends())
    )
    return StageProblem(((kind,) * 12, (kind,) * 12), (gpu,))


@pytest.mark.parametrize("seed", sampled(range(3), (0,)))
def test_out_of_time_is_said(seed: int) -> None:
    """Without time there is a plan that fits all the same, and a bound that is not its cost."""
    problem = random_large(random.Random(seed))
    low, _ = least_peak(problem, seconds=0.0)
    nothing = [[ways.cheapest for ways in row] for row in problem.layers]
    budget = (low + problem.peak(nothing)) // 2
    solved = solve_stage(problem, budget, seconds=0.0)
    assert solved is not None
    assert solved.choice is not None
    assert problem.peak(solved.choice) <= budget
    assert solved.bound <= solved.cost == problem.cost(solved.choice)
    longer = solve_stage(problem, budget, seconds=3.0)
    assert longer is not None
    assert solved.bound <= longer.bound <= longer.cost <= solved.cost


def test_a_beam_is_no_proof() -> None:
    problem = random_large(random.Random(7))
    found = search(problem, Aim(problem.peak([[0] * 12, [0] * 12]), None, 3))
    assert not found.complete


@pytest.mark.parametrize("seed", range(40))
def test_layers_at_the_peak(seed: int) -> None:
    """Without fixed parts and absent gradients all but the base is the layers'."""
    rng = random.Random(seed)
    problem = random_stage(rng)
    rows = [[ways.ways[0] for ways in row] for row in problem.layers]
    gpu = problem.gpus[0]
    bare = Gpu(gpu.moments, tuple(Ends() for _ in gpu.chunks), gpu.base, gpu.floor)
    high = peak(bare, rows)
    mine = layers_at_peak(bare, rows)
    assert mine == high - gpu.base or (mine == 0 and high == gpu.floor)
    without: Any = [[Held(0, 0, 0)] * len(row) for row in rows]
    assert layers_at_peak(gpu, without) == 0


def test_bad_ways_are_refused() -> None:
    with pytest.raises(SpecError, match="without a way"):
        Ways([])
    with pytest.raises(SpecError, match="stored"):
        Ways([Way(-1, 0, 0, 0)])
    with pytest.raises(SpecError, match="chunks"):
        StageProblem(((), ()), (line(1),))
