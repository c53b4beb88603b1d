"""Exact recompute plans: which ops to re-run and which tensors to keep, layer by layer.

Plan a graph of your own::

    from actcalc.solve import parse_problem, solve

    plan = solve(parse_problem(json.load(open("problem.json"))))

``problem`` says what a problem is, ``frontier`` finds every sensible way to run one layer,
``knapsack``, ``timeline`` and ``chains`` choose one for each layer, ``stack`` puts them together,
and ``methods`` has the heuristics to compare with.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actcalc.solve.frontier import LayerFrontier, LayerOption, layer_frontier
    from actcalc.solve.heuristics import greedy, sqrt
    from actcalc.solve.knapsack import Option, OptionSet
    from actcalc.solve.problem import (
        PEAK_MODELS,
        PeakModel,
        PlanLayer,
        PlanOp,
        Problem,
        parse_problem,
    )
    from actcalc.solve.segments import Chain
    from actcalc.solve.stack import (
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
    "Certificate": "actcalc.solve.stack",
    "Chain": "actcalc.solve.segments",
    "LayerFrontier": "actcalc.solve.frontier",
    "LayerGroup": "actcalc.solve.stack",
    "LayerOption": "actcalc.solve.frontier",
    "Option": "actcalc.solve.knapsack",
    "OptionSet": "actcalc.solve.knapsack",
    "PEAK_MODELS": "actcalc.solve.problem",
    "PeakModel": "actcalc.solve.problem",
    "Plan": "actcalc.solve.stack",
    "PlanGroup": "actcalc.solve.stack",
    "PlanLayer": "actcalc.solve.problem",
    "PlanOp": "actcalc.solve.problem",
    "Problem": "actcalc.solve.problem",
    "TradeOff": "actcalc.solve.stack",
    "even_budgets": "actcalc.solve.stack",
    "greedy": "actcalc.solve.heuristics",
    "layer_chain": "actcalc.solve.stack",
    "layer_frontier": "actcalc.solve.frontier",
    "layer_options": "actcalc.solve.stack",
    "parse_problem": "actcalc.solve.problem",
    "problem_groups": "actcalc.solve.stack",
    "smallest_budget": "actcalc.solve.stack",
    "solve": "actcalc.solve.stack",
    "solve_groups": "actcalc.solve.stack",
    "sqrt": "actcalc.solve.heuristics",
    "trade_off": "actcalc.solve.stack",
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
    raise AttributeError(f"module 'actcalc.solve' has no attribute {name!r}")
