"""The best layouts of a search, their recomputation planned."""

from __future__ import annotations

import pytest

from actcalc import search
from actcalc.cost.roofline import roofline_of
from actcalc.cost.step import step_time
from actcalc.errors import SpecError
from actcalc.io.runs import load_run
from actcalc.plan.planner import RunPlanner
from actcalc.plan.settings import PlanSettings
from actcalc.plan.timed import planned_step

ANY = 2**60


@pytest.mark.parametrize("vpp", [1, 2])
@pytest.mark.parametrize("name", ["none", "selective", "attention", "full"])
def test_a_plan_that_is_a_named_policy_takes_its_time(name, vpp):
    run = load_run(
        "gpt-22b", layout={"tp": 2, "sp": True, "pp": 4, "vpp": vpp}, device="a100-80gb",
        workload={"global_batch": 16}, framework="megatron",
    )  # fmt: skip
    planner = RunPlanner(run, PlanSettings())
    policy = planner.staged.policy(name)
    plans = [
        planner._made(stage, ANY, planner.laid(stage, policy), 0, None) for stage in planner.stages
    ]
    roofline = roofline_of(planner.staged)
    found = planned_step(planner, plans, roofline)
    named = step_time(policy, roofline)
    assert found.total == pytest.approx(named.total, rel=1e-6)


def test_planned_layouts_fit_and_are_no_slower_than_by_a_name():
    asked = {"gpus": 16, "device": "a100-40gb", "global_batch": 64, "tp": "8", "vpp": 1, "top": 3}
    named, planned = search("gpt-22b", **asked), search("gpt-22b", plan=True, **asked)
    assert planned.planned
    assert not named.planned
    assert planned.results[0].step_seconds <= named.results[0].step_seconds
    refined = [one for one in planned.results if one.policy == "planned"]
    assert refined, "nothing was gained here: the test says nothing"
    for one in refined:
        assert one.step_seconds < one.named_step_seconds
        assert one.plan_command.startswith("actcalc plan gpt-22b --tp 8")


def test_a_plan_ranks_by_time_alone():
    with pytest.raises(SpecError, match="time alone"):
        search("gpt-22b", gpus=8, device="a100-80gb", global_batch=8, plan=True,
               pareto="memory,time")  # fmt: skip
