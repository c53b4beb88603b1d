"""What holds on every legal run, whatever its numbers are; asked through the command line."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from actcalc.io import presets
from tests.fuzz.asking import ask, place

Broken = Iterator[str]


class RefusedError(Exception):
    """The run is no legal one."""


def answer(args: list[str]) -> dict[str, Any]:
    """The JSON of one command line."""
    asked = ask([*args, "--json"])
    if asked.error is not None:
        raise asked.error
    if asked.code == 2:
        raise RefusedError(asked.message)
    found: dict[str, Any] = json.loads(asked.out)
    return found


def legal(rng: random.Random) -> list[str]:
    """A model and flags that go together."""
    args = [rng.choice(presets.names("models")), "--layers", str(rng.choice((2, 4, 8)))]
    args += ["--seq", str(rng.choice((256, 1024))), "--micro-batch", str(rng.choice((1, 2)))]
    if rng.random() < 0.5:
        args += ["--attention", rng.choice(("eager", "flash"))]
    if rng.random() < 0.5:
        args += ["--framework", "megatron", "--tp", rng.choice(("1", "2")), "--pp", "2"]
        args += rng.choice(([], ["--schedule", rng.choice(("gpipe", "zb-h1", "zb-v"))]))
    if rng.random() < 0.4:
        args += ["--dp", rng.choice(("2", "8")), "--zero", rng.choice(("0", "1", "3"))]
    return args


def sums(rng: random.Random, run: list[str]) -> Broken:
    """Parts add up: tensors to a layer, a stage's parts to its total, stages to the peak."""
    policy = rng.choice(("none", "selective", "full"))
    listed = answer(["breakdown", *run, "--policy", policy])
    for layer in listed["layers"]:
        total = sum(t["bytes"] for t in listed["tensors"] if t["layer"] == layer["layer"])
        same = [each for each in listed["layers"] if each["layer"] == layer["layer"]]
        if len(same) == 1 and total != layer["bytes"]:
            yield "the tensors of a layer do not sum to it"
    report = answer(["memory", *run, "--policy", policy])
    names = ("weights", "gradients", "optimizer", "activations", "transient", "buffers", "overhead")
    for stage in report["stages"]:
        if sum(stage[f"{name}_bytes"] for name in names) != stage["total_bytes"]:
            yield "the parts of a stage do not sum to it"
    if max(stage["peak_bytes"] for stage in report["stages"]) != report["peak_bytes"]:
        yield "the peak is not the largest stage's"


def ladder(rng: random.Random, run: list[str]) -> Broken:
    """Re-running more stores less, and none saves nothing."""
    found = answer([*run, "--policy", "none,selective,full"])["policies"]
    by_name = {figure["policy"]: figure for figure in found}
    for figure in found:
        if "stores more than none" in figure["note"]:
            return
        if not 0 <= figure["saved_ratio"] <= 1:
            yield "a saved share is outside 0 to 1"
    if by_name["none"]["saved_ratio"] or by_name["none"]["recompute_flops"]:
        yield "none saves or re-runs something"
    if by_name["full"]["stored_bytes"] > by_name["none"]["stored_bytes"]:
        yield "full stores more than none"


def planned(rng: random.Random, run: list[str]) -> Broken:
    """A plan keeps to its budget, its bound is below its cost, and more memory costs no more."""
    base = ["plan", *run, "--time-limit", "1", "--memory"]
    wide = answer([*base, "100TB"])
    costs = []
    for part in (1.0, rng.uniform(0.5, 1.0)):
        budget = int(wide["peak_bytes"] * part)
        found = answer([*base, f"{budget}B"])
        if not found["feasible"]:
            continue
        cost = found["cost_flops"] if found["cost_flops"] is not None else found["cost_seconds"]
        if found["peak_bytes"] > budget:
            yield "a plan is over its budget"
        if found["lower_bound"] > cost or found["optimal"] != (found["lower_bound"] == cost):
            yield "a bound and a cost contradict each other"
        if found["optimal"]:
            costs.append((budget, cost))
    costs.sort()
    if any(low[1] < high[1] for low, high in itertools.pairwise(costs)):
        yield "more memory costs more"


def sharded(rng: random.Random, run: list[str]) -> Broken:
    """Sharding over more replicas never needs more memory for states."""
    kept = []
    base = [word for word in run if word not in ("--dp", "--zero")]
    if len(base) != len(run):
        return
    for zero in (0, 1, 2, 3):
        stages = answer(["memory", *run, "--dp", "8", "--zero", str(zero)])["stages"]
        kept.append(max(s["weights_bytes"] + s["gradients_full_bytes"] + s["optimizer_bytes"]
                        for s in stages))  # fmt: skip
    if kept != sorted(kept, reverse=True):
        yield "more ZeRO needs more states"


CHECKS: dict[str, Callable[[random.Random, list[str]], Broken]] = {
    "sums": sums, "ladder": ladder, "planned": planned, "sharded": sharded,
}  # fmt: skip


def check(name: str, seed: int, number: int) -> list[str] | str:
    """What broke on the run of that number; a text where the run was refused."""
    rng = random.Random(f"{seed}:{name}:{number}")
    try:
        return list(CHECKS[name](rng, legal(rng)))
    except RefusedError as error:
        return str(error) or "refused"
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return [f"{type(error).__name__} at {place(error)}"]
