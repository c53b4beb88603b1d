"""Judges that share no code with the planner: a MILP on ops and tensors, and a plan checker."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import numpy as np

Data = dict[str, Any]


def random_layer(rng: random.Random, ops: int, *, sizes: int = 12, costs: int = 15) -> Data:
    tensors = {"x": rng.randint(0 if rng.random() < 0.1 else 1, sizes)}
    made: list[Data] = []
    for i in range(ops):
        inputs = sorted(set(rng.choices(list(tensors)[-4:], k=rng.choice([1, 1, 2, 3]))))
        outputs = [f"t{i}_{j}" for j in range(rng.choice([1, 1, 1, 2, 0] if i else [1]))]
        tensors |= {t: rng.randint(0, sizes) for t in outputs}
        cost = rng.randint(0, costs)
        made.append({"name": f"op{i}", "inputs": inputs, "outputs": outputs, "cost": cost})
    rng.shuffle(made)
    layer: Data = {
        "input": "x",
        "tensors": tensors,
        "saved_for_backward": [t for t in tensors if rng.random() < 0.6],
        "ops": made,
    }
    if rng.random() < 0.4:
        layer["forbid_recompute"] = [rng.choice(made)["name"]]
    return layer


def random_problem(
    rng: random.Random, model: str, *, layers: int = 5, ops: int = 5, kinds: int = 2
) -> Data:
    types = {f"kind{i}": random_layer(rng, rng.randint(1, ops)) for i in range(kinds)}
    if model == "stored+working+segments":
        for layer in types.values():
            layer.pop("forbid_recompute", None)
    names = [rng.choice(list(types)) for _ in range(rng.randint(1, layers))]
    stack: list[list[Any]] = []
    for name in names:
        if stack and stack[-1][0] == name and rng.random() < 0.8:
            stack[-1][1] += 1
        else:
            stack.append([name, 1])
    inflight, const = rng.choice([1, 1, 2, 3, 5]), rng.choice([0, 7])
    full = sum(_saved(types[n]) for n in names) * inflight
    return {
        "peak_model": model,
        "inflight": inflight,
        "const_bytes": const,
        "budget_bytes": max(1, const + int(full * rng.uniform(0.1, 1.1))),
        "layer_types": types,
        "stack": stack,
        "max_segment": rng.randint(1, 4),
    }


def _saved(layer: Data) -> int:
    return sum(layer["tensors"][t] for t in {*layer["saved_for_backward"], layer["input"]})


def _layers(data: Data) -> list[Data]:
    return [data["layer_types"][kind] for kind, count in data["stack"] for _ in range(count)]


def every_option(layer: Data) -> set[tuple[int, int, int]]:
    """(K, W, cost) of every executable choice of re-run ops and kept tensors."""
    ops, size = layer["ops"], layer["tensors"]
    others = [t for t in size if t != layer["input"]]
    found = set()
    for bits in product((0, 1), repeat=len(ops)):
        again = [op for op, bit in zip(ops, bits, strict=True) if bit]
        if any(op["name"] in layer.get("forbid_recompute", ()) for op in again):
            continue
        made = {t for op in again for t in op["outputs"]}
        needed = set(layer["saved_for_backward"]) | {t for op in again for t in op["inputs"]}
        must = [t for t in others if t in needed and t not in made]
        may = [t for t in others if t not in must]
        for keep in product((0, 1), repeat=len(may)):
            kept = {*must, *(t for t, k in zip(may, keep, strict=True) if k)}
            stored = size[layer["input"]] + sum(size[t] for t in kept)
            working = sum(
                size[t]
                for t in layer["saved_for_backward"]
                if t not in kept and t != layer["input"]
            )
            found.add((stored, working, sum(op["cost"] for op in again)))
    return found


class Rows:
    """A MILP under construction."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.upper: list[float] = []
        self.integer: list[int] = []
        self.rows: list[tuple[dict[int, float], float]] = []

    def variable(self, cost: float = 0, *, binary: bool = True) -> int:
        self.cost.append(cost)
        self.upper.append(1 if binary else np.inf)
        self.integer.append(int(binary))
        return len(self.cost) - 1

    def at_least(self, row: dict[int, float], bound: float) -> None:
        self.rows.append((row, bound))

    def solve(self) -> int | None:
        from scipy.optimize import Bounds, LinearConstraint, milp

        matrix = np.zeros((len(self.rows), len(self.cost)))
        for i, (row, _) in enumerate(self.rows):
            for j, value in row.items():
                matrix[i, j] += value
        result = milp(
            self.cost,
            integrality=self.integer,
            bounds=Bounds(0, self.upper),
            constraints=LinearConstraint(matrix, [b for _, b in self.rows], np.inf),
            options={"mip_rel_gap": 0},
        )
        assert result.status in (0, 2), result.message
        return round(result.fun) if result.status == 0 else None


def milp_optimum(data: Data) -> int | None:
    """Cheapest cost by scipy/HiGHS with gap 0, on one variable per op and tensor of every layer."""
    milp, layers, m = Rows(), _layers(data), data["inflight"]
    model = data["peak_model"]
    segments = model == "stored+working+segments"
    single = [milp.variable() for _ in layers]
    stored: list[dict[int, float]] = []
    working: list[dict[int, float]] = []
    for layer, alone in zip(layers, single, strict=True):
        size, entry = layer["tensors"], layer["input"]
        again = {op["name"]: milp.variable(op["cost"]) for op in layer["ops"]}
        keep = {t: milp.variable() for t in size if t != entry}
        maker = {t: again[op["name"]] for op in layer["ops"] for t in op["outputs"]}
        for t in layer["saved_for_backward"]:
            if t != entry:
                milp.at_least({keep[t]: 1, maker[t]: 1, alone: -1}, 0)
        for op in layer["ops"]:
            for t in set(op["inputs"]) - {entry}:
                milp.at_least({keep[t]: 1, maker[t]: 1, again[op["name"]]: -1}, 0)
        for name in layer.get("forbid_recompute", ()):
            milp.at_least({again[name]: -1}, 0)
        stored.append({alone: size[entry]} | {v: size[t] for t, v in keep.items()})
        remade = [t for t in layer["saved_for_backward"] if t != entry]
        working.append({alone: sum(size[t] for t in remade)} | {keep[t]: -size[t] for t in remade})
    covers: list[dict[int, float]] = [{v: 1} for v in single]
    chains: list[tuple[dict[int, float], dict[int, float]]] = []
    longest = data["max_segment"] if segments else 1
    for start in range(len(layers)):
        for k in range(2, min(longest, len(layers) - start) + 1):
            part = layers[start : start + k]
            chain = milp.variable(sum(op["cost"] for layer in part for op in layer["ops"]))
            head = part[0]["tensors"][part[0]["input"]]
            chains.append(({chain: head}, {chain: sum(map(_saved, part)) - head}))
            for i in range(start, start + k):
                covers[i][chain] = 1
    for cover in covers:
        milp.at_least(cover, 1)
        milp.at_least(dict.fromkeys(cover, -1), -1)
    room = data["budget_bytes"] - data["const_bytes"]
    total: dict[int, float] = {}
    for row in [*stored, *(s for s, _ in chains)]:
        for v, b in row.items():
            total[v] = total.get(v, 0) - m * b
    if model == "stored":
        milp.at_least(total, -room)
    elif model == "timeline":
        for at, row in enumerate(working):
            limit = {v: b * (m - 1) / m for v, b in total.items()}
            for k in stored[: at + 1]:
                for v, b in k.items():
                    limit[v] = limit.get(v, 0) - b
            for v, b in row.items():
                limit[v] = limit.get(v, 0) - b
            milp.at_least({v: round(b, 6) for v, b in limit.items()}, -room)
    else:
        largest = milp.variable(binary=False)
        for row in [*working, *(w for _, w in chains)]:
            milp.at_least({largest: 1} | {v: -b for v, b in row.items()}, 0)
        milp.at_least(total | {largest: -1}, -room)
    return milp.solve()


def check_plan(data: Data, plan: Any) -> None:
    """Assert that a feasible plan is executable, costs what it says and fits."""
    layers, m = _layers(data), data["inflight"]
    names = [kind for kind, count in data["stack"] for _ in range(count)]
    at = cost = 0
    stored: list[int] = []
    working: list[int] = []
    for group in plan.groups:
        assert group.count == group.segment * group.segments
        for _ in range(group.segments):
            part = layers[at : at + group.segment]
            if len(set(names[at : at + group.segment])) == 1:
                assert group.layer_type == names[at]
            at += group.segment
            if group.segment == 1:
                k, w, c = _run(part[0], set(group.recompute), set(group.kept))
            else:
                assert group.segment <= data["max_segment"]
                k = part[0]["tensors"][part[0]["input"]]
                w = sum(map(_saved, part)) - k
                c = sum(op["cost"] for layer in part for op in layer["ops"])
            assert (k, w, c) == (group.stored_bytes, group.working_bytes, group.cost)
            stored.append(k)
            working.append(w)
            cost += c
    assert at == len(layers)
    assert cost == plan.cost
    peak = m * sum(stored)
    assert peak == plan.stored_bytes
    if data["peak_model"] == "timeline":
        peak = max(
            (m - 1) * sum(stored) + sum(stored[: i + 1]) + working[i] for i in range(len(stored))
        )
    elif data["peak_model"] != "stored":
        peak += max(working)
    assert data["const_bytes"] + peak == plan.peak_bytes <= data["budget_bytes"]


def _run(layer: Data, recompute: set[str], kept: set[str]) -> tuple[int, int, int]:
    size, entry = layer["tensors"], layer["input"]
    again = [op for op in layer["ops"] if op["name"] in recompute]
    assert len(again) == len(recompute)
    assert not recompute & set(layer.get("forbid_recompute", ()))
    made = {t for op in again for t in op["outputs"]}
    for t in layer["saved_for_backward"]:
        assert t == entry or t in kept or t in made
    for op in again:
        for t in op["inputs"]:
            assert t == entry or t in kept or t in made
    return (
        size[entry] + sum(size[t] for t in kept - {entry}),
        sum(size[t] for t in layer["saved_for_backward"] if t != entry and t not in kept),
        sum(op["cost"] for op in again),
    )


def option_milp(
    kinds: list[list[tuple[int, int, int]]],
    counts: list[int],
    same: list[bool],
    inflight: int,
    room: int,
    *,
    working: bool,
) -> int | None:
    """Cheapest cost of ``counts`` layers of each kind, one (K, W, cost) each; scipy/HiGHS, gap 0.

    ``same`` kinds take one option for all their layers.
    """
    milp = Rows()
    largest = milp.variable(binary=False)
    total: dict[int, float] = {largest: -1.0 if working else 0.0}
    for options, n, alike in zip(kinds, counts, same, strict=True):
        picks = []
        for k, w, c in options:
            times, used = n if alike else 1, milp.variable()
            number = used if alike else milp.variable(c)
            if alike:
                milp.cost[used] = c * n
            else:
                milp.upper[number] = n
                milp.at_least({used: n, number: -1}, 0)
            total[number] = -inflight * k * times
            milp.at_least({largest: 1, used: -w}, 0)
            picks.append(number)
        milp.at_least(dict.fromkeys(picks, 1), 1 if alike else n)
        milp.at_least(dict.fromkeys(picks, -1), -1 if alike else -n)
    milp.at_least(total, -room)
    return milp.solve()
