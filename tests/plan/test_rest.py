"""What else a GPU holds, moment by moment: the searches against trying every choice."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest

from actcalc.errors import SpecError
from actcalc.solve import LayerGroup, Option, OptionSet, smallest_budget, solve_groups
from actcalc.solve.rest import Rest, rest_within


def peak_by_hand(
    model: str, rest: Rest, rows: list[tuple[int, int, int]], beside: tuple[int, ...]
) -> int:
    """Memory at every moment, said directly: (stored, working, micro-batches) of each layer."""
    everything = sum(m * k for k, _, m in rows)
    moments = [rest.floor, rest.head + everything]
    if model == "stored+working":
        largest = max(w for _, w, _ in rows)
        moments.append(rest.work + everything + largest + (rest.again if largest else 0))
    if model == "timeline":
        others = sum((m - 1) * k for k, _, m in rows)
        moments += [
            beside[at]
            + others
            + sum(k for k, _, _ in rows[: at + 1])
            + w
            + (rest.again if w else 0)
            for at, (_, w, _) in enumerate(rows)
        ]
        moments.append(rest.tail + others)
    return max(moments)


@pytest.mark.parametrize("model", ["stored", "stored+working", "timeline"])
@pytest.mark.parametrize("seed", range(120))
def test_every_moment_counts(model: Any, seed: int) -> None:
    rng = random.Random(seed)
    sets = [
        OptionSet.of(
            [Option(rng.randint(0, 9), rng.randint(0, 9), rng.randint(0, 20)) for _ in range(3)]
        )
        for _ in range(2)
    ]
    runs = [(rng.randrange(2), rng.randint(1, 2), rng.choice([None, 1, 3])) for _ in range(3)]
    groups = [LayerGroup(f"k{i}", sets[i], n, inflight=m) for i, n, m in runs]
    layers = [(sets[i], m or 2) for i, n, m in runs for _ in range(n)]
    beside = tuple(rng.randint(0, 25) for _ in layers)
    again = rng.choice([0, rng.randint(0, 9)])
    rest = Rest(rng.randint(0, 25), rng.randint(0, 25), beside, rng.randint(0, 25), 8, again=again)
    best: dict[int, int] = {}
    for chosen in product(*(range(len(options)) for options, _ in layers)):
        picked = [(o, i, m) for (o, m), i in zip(layers, chosen, strict=True)]
        rows = [(o.stored[i], o.working[i], m) for o, i, m in picked]
        peak = peak_by_hand(model, rest, rows, beside)
        cost = sum(o.cost[i] for o, i, _ in picked)
        best[peak] = min(cost, best.get(peak, cost))
    setting: dict[str, Any] = {"inflight": 2, "const_bytes": rest, "peak_model": model}
    assert smallest_budget(groups, **setting) == min(best)
    for budget in range(min(best) - 1, max(best) + 2, 2):
        expected = min((c for peak, c in best.items() if peak <= budget), default=None)
        plan = solve_groups(groups, budget_bytes=budget, **setting)
        assert plan.cost == expected
        if expected is not None:
            assert plan.optimal
            assert plan.peak_bytes is not None
            assert plan.peak_bytes <= budget


@pytest.mark.parametrize("seed", range(30))
def test_the_unordered_rest_is_no_less_than_the_timeline(seed: int) -> None:
    """Layers store at least the bytes that ``work`` takes off, so that models stay nested."""
    rng = random.Random(seed)
    count = rng.randint(1, 5)
    stored = [rng.randint(3, 9) for _ in range(count)]
    least = [rng.randint(0, k) for k in stored]
    beside = [rng.randint(0, 40) for _ in range(count)]
    rest = rest_within(beside, least, rng.randint(0, 30), rng.randint(0, 40), 0)
    working = [rng.randint(0, 9) for _ in range(count)]
    rows = [(k, w, 1) for k, w in zip(stored, working, strict=True)]
    ordered = peak_by_hand("timeline", rest, rows, rest.layers)
    assert rest.peak(sum(stored), None) <= ordered <= rest.peak(sum(stored), max(working))


def test_a_rest_of_one_number() -> None:
    assert Rest.of(5) == Rest(head=5, work=5)
    assert Rest.of(5).of_layers(2) == (5, 5)
    with pytest.raises(SpecError, match="const_bytes is -1"):
        Rest.of(-1)
    with pytest.raises(SpecError, match="head"):
        Rest(head=-1)
