"""Bad problems are refused with the values and a way out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from actcalc.errors import SpecError
from actcalc.solve import parse_problem, problem_groups, solve
from actcalc.solve.stack import solve_groups

GOOD: dict[str, Any] = {
    "id": "mine",
    "description": "two layers",
    "peak_model": "stored",
    "inflight": 1,
    "const_bytes": 0,
    "budget_bytes": 100,
    "optimal_cost": 0,
    "one_optimal_solution": [],
    "oracle": {},
    "stack": [["a", 2]],
    "layer_types": {
        "a": {
            "input": "x",
            "tensors": {"x": 1, "y": 2, "z": 3},
            "saved_for_backward": ["x", "z"],
            "ops": [
                {"name": "g", "inputs": ["y", "y"], "outputs": ["z"], "cost": 4},
                {"name": "f", "inputs": ["x"], "outputs": ["y"], "cost": 5},
            ],
            "forbid_recompute": [],
        }
    },
}


def layer(data: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = data["layer_types"]["a"]
    return found


def op(data: dict[str, Any], index: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = layer(data)["ops"][index]
    return found


def test_ops_may_come_in_any_order() -> None:
    problem = parse_problem(GOOD)
    assert problem.layer_types["a"].order == (1, 0)
    assert solve(problem).stored_bytes == 8


BAD: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no budget": (lambda d: d.pop("budget_bytes"), "lacks 'budget_bytes'"),
    "budget 0": (lambda d: d.update(budget_bytes=0), "budget_bytes is 0"),
    "negative budget": (lambda d: d.update(budget_bytes=-5), "budget_bytes is -5"),
    "budget text": (lambda d: d.update(budget_bytes="70 potatoes"), "70 potatoes"),
    "budget float": (lambda d: d.update(budget_bytes=1e9), "not an integer"),
    "budget absurd": (lambda d: d.update(budget_bytes=10**30), "budget_bytes is 10"),
    "inflight 0": (lambda d: d.update(inflight=0), "inflight is 0"),
    "inflight bool": (lambda d: d.update(inflight=True), "inflight is True"),
    "negative const": (lambda d: d.update(const_bytes=-1), "const_bytes is -1"),
    "peak model": (lambda d: d.update(peak_model="guess"), "unknown peak_model 'guess'"),
    "peak model list": (lambda d: d.update(peak_model=[]), "unknown peak_model"),
    "no max_segment": (
        lambda d: d.update(peak_model="stored+working+segments"),
        "without max_segment",
    ),
    "max_segment 0": (lambda d: d.update(max_segment=0), "max_segment is 0"),
    "typo": (lambda d: d.update(budgett=1), "unknown keys 'budgett'"),
    "empty stack": (lambda d: d.update(stack=[]), "stack is empty"),
    "stack text": (lambda d: d.update(stack="aa"), "stack is 'aa', not a list"),
    "stack pair": (lambda d: d.update(stack=[["a"]]), "an entry of stack"),
    "stack kind": (lambda d: d.update(stack=[["b", 1]]), "unknown layer type 'b'"),
    "stack count": (lambda d: d.update(stack=[["a", 0]]), "count of 'a' in stack is 0"),
    "stack bool": (lambda d: d.update(stack=[["a", True]]), "True, not an integer"),
    "stack long": (lambda d: d.update(stack=[["a", 90000]] * 2), "180000 layers"),
    "no kinds": (lambda d: d.update(layer_types={}), "layer_types is empty"),
    "layer list": (lambda d: d.update(layer_types=[1]), "not a mapping"),
    "layer typo": (lambda d: layer(d).update(forbid=[]), "unknown keys 'forbid'"),
    "layer lacks": (lambda d: layer(d).pop("ops"), "lacks 'ops'"),
    "input unknown": (lambda d: layer(d).update(input="q"), "input 'q'"),
    "negative size": (lambda d: layer(d)["tensors"].update(y=-2), "size of tensor 'y'"),
    "float size": (lambda d: layer(d)["tensors"].update(y=2.5), "2.5, not an integer"),
    "bool size": (lambda d: layer(d)["tensors"].update(y=False), "False, not an integer"),
    "absurd size": (lambda d: layer(d)["tensors"].update(y=2**70), "size of tensor 'y'"),
    "absurd sum": (lambda d: layer(d)["tensors"].update(y=2**60 - 1), "2\\*\\*60"),
    "orphan": (lambda d: layer(d)["tensors"].update(q=1), "produces 'q'"),
    "saved unknown": (lambda d: layer(d).update(saved_for_backward=["q"]), "unknown tensor 'q'"),
    "saved twice": (lambda d: layer(d).update(saved_for_backward=["z", "z"]), "'z' twice"),
    "saved text": (lambda d: layer(d).update(saved_for_backward="xz"), "'xz', not a list"),
    "forbid unknown": (lambda d: layer(d).update(forbid_recompute=["q"]), "unknown op 'q'"),
    "op input": (lambda d: op(d).update(inputs=["q"]), "unknown tensor 'q'"),
    "op output input": (lambda d: op(d).update(outputs=["x"]), "produces the layer input"),
    "two producers": (lambda d: op(d, 1).update(outputs=["y", "z"]), "two producers"),
    "cycle": (lambda d: op(d, 1).update(inputs=["z"]), "cycle among 'f', 'g'"),
    "op name": (lambda d: op(d).update(name="f"), "two ops"),
    "op no name": (lambda d: op(d).update(name=3), "not a name"),
    "op cost": (lambda d: op(d).update(cost=-1), "cost of op 'g'"),
    "op cost float": (lambda d: op(d).update(cost=float("nan")), "nan, not an integer"),
    "op cost absurd": (
        lambda d: [o.update(cost=2**59) for o in layer(d)["ops"]],
        "add up to 2\\*\\*60",
    ),
    "stack absurd": (
        lambda d: (op(d).update(cost=2**58), d.update(stack=[["a", 4]])),
        "re-run cost add up",
    ),
    "bytes absurd": (
        lambda d: (layer(d)["tensors"].update(y=2**58), d.update(inflight=4)),
        "bytes in flight add up",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_problem(case: str) -> None:
    data = copy.deepcopy(GOOD)
    change, message = BAD[case]
    change(data)
    with pytest.raises(SpecError, match=message) as caught:
        parse_problem(data)
    assert caught.value.hint


@pytest.mark.parametrize("value", [None, 3, "text", [GOOD]])
def test_not_a_problem(value: Any) -> None:
    with pytest.raises(SpecError, match="not a mapping"):
        parse_problem(value)


def test_groups_are_checked() -> None:
    groups = problem_groups(parse_problem(GOOD))
    with pytest.raises(SpecError, match="budget_bytes is -1"):
        solve_groups(groups, inflight=1, const_bytes=0, budget_bytes=-1, peak_model="stored")
    with pytest.raises(SpecError, match="no layers"):
        solve_groups([], inflight=1, const_bytes=0, budget_bytes=1, peak_model="stored")
    with pytest.raises(SpecError, match="unknown layer types"):
        problem_groups(parse_problem(GOOD), same=["b"])
