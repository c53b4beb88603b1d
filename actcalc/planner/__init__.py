"""Exact recompute plans: which ops to re-run and which tensors to keep, layer by layer.

Plan a graph of your own::

    from actcalc.planner import parse_problem, solve

    plan = solve(parse_problem(json.load(open("problem.json"))))

``problem`` says what a problem is, ``frontier`` finds every sensible way to run one layer,
``knapsack``, ``timeline`` and ``chains`` choose one for each layer, ``stack`` puts them together,
and ``methods`` has the heuristics to compare with.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actcalc.planner.chains import Chain
    from actcalc.planner.frontier import LayerFrontier, LayerOption, layer_frontier
    from actcalc.planner.knapsack import Option, OptionSet
    from actcalc.planner.methods import greedy, sqrt
    from actcalc.planner.problem import (
        PEAK_MODELS,
        PeakModel,
        PlanLayer,
        PlanOp,
        Problem,
        parse_problem,
    )
    from actcalc.planner.stack import (
        Certificate,
        LayerGroup,
        Plan,
        PlanGroup,
        TradeOff,
        even_budgets,
        layer_chain,
        layer_options,
        problem_groups,
        smallest_budget,
        solve,
        solve_groups,
        trade_off,
    )

_HOMES = {
    "Certificate": "actcalc.planner.stack",
    "Chain": "actcalc.planner.chains",
    "LayerFrontier": "actcalc.planner.frontier",
    "LayerGroup": "actcalc.planner.stack",
    "LayerOption": "actcalc.planner.frontier",
    "Option": "actcalc.planner.knapsack",
    "OptionSet": "actcalc.planner.knapsack",
    "PEAK_MODELS": "actcalc.planner.problem",
    "PeakModel": "actcalc.planner.problem",
    "Plan": "actcalc.planner.stack",
    "PlanGroup": "actcalc.planner.stack",
    "PlanLayer": "actcalc.planner.problem",
    "PlanOp": "actcalc.planner.problem",
    "Problem": "actcalc.planner.problem",
    "TradeOff": "actcalc.planner.stack",
    "even_budgets": "actcalc.planner.stack",
    "greedy": "actcalc.planner.methods",
    "layer_chain": "actcalc.planner.stack",
    "layer_frontier": "actcalc.planner.frontier",
    "layer_options": "actcalc.planner.stack",
    "parse_problem": "actcalc.planner.problem",
    "problem_groups": "actcalc.planner.stack",
    "smallest_budget": "actcalc.planner.stack",
    "solve": "actcalc.planner.stack",
    "solve_groups": "actcalc.planner.stack",
    "sqrt": "actcalc.planner.methods",
    "trade_off": "actcalc.planner.stack",
}

__all__ = [
    "PEAK_MODELS",
    "Certificate",
    "Chain",
    "LayerFrontier",
    "LayerGroup",
    "LayerOption",
    "Option",
    "OptionSet",
    "PeakModel",
    "Plan",
    "PlanGroup",
    "PlanLayer",
    "PlanOp",
    "Problem",
    "TradeOff",
    "even_budgets",
    "greedy",
    "layer_chain",
    "layer_frontier",
    "layer_options",
    "parse_problem",
    "problem_groups",
    "smallest_budget",
    "solve",
    "solve_groups",
    "sqrt",
    "trade_off",
]


def __getattr__(name: str) -> Any:
    # The solvers need NumPy, which the comparison of policies in this package does not.
    if name in _HOMES:
        found = getattr(import_module(_HOMES[name]), name)
        # One name is a module and its function: the function wins, as it would in a plain import.
        globals()[name] = found
        return found
    raise AttributeError(f"module 'actcalc.planner' has no attribute {name!r}")
