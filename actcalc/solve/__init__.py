"""Exact recompute plans: which ops to re-run and which tensors to keep, layer by layer.

Plan a graph of your own::

    from actcalc.solve import parse_problem, solve

    plan = solve(parse_problem(json.load(open("problem.json"))))

``problem`` says what a problem is, ``frontier`` finds every sensible way to run one layer, and
``stack`` chooses one for each layer: by stored bytes and the largest working set (``unordered``),
with chains of layers (``chained``), or moment by moment (``stage`` says what a GPU holds at every
moment of a step, ``fit`` and ``order`` search it). ``heuristics`` has methods to compare with.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actcalc.solve.frontier import LayerFrontier, LayerOption, layer_frontier
    from actcalc.solve.heuristics import greedy, sqrt
    from actcalc.solve.layers import LayerGroup, layer_chain, layer_options, problem_groups
    from actcalc.solve.options import Option, OptionSet
    from actcalc.solve.plans import Certificate, Plan, PlanGroup, TradeOff
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
        even_budgets,
        smallest_budget,
        solve,
        solve_groups,
        trade_off,
    )

_HOMES = {
    "Certificate": "actcalc.solve.plans",
    "Chain": "actcalc.solve.segments",
    "LayerFrontier": "actcalc.solve.frontier",
    "LayerGroup": "actcalc.solve.layers",
    "LayerOption": "actcalc.solve.frontier",
    "Option": "actcalc.solve.options",
    "OptionSet": "actcalc.solve.options",
    "PEAK_MODELS": "actcalc.solve.problem",
    "PeakModel": "actcalc.solve.problem",
    "Plan": "actcalc.solve.plans",
    "PlanGroup": "actcalc.solve.plans",
    "PlanLayer": "actcalc.solve.problem",
    "PlanOp": "actcalc.solve.problem",
    "Problem": "actcalc.solve.problem",
    "TradeOff": "actcalc.solve.plans",
    "even_budgets": "actcalc.solve.stack",
    "greedy": "actcalc.solve.heuristics",
    "layer_chain": "actcalc.solve.layers",
    "layer_frontier": "actcalc.solve.frontier",
    "layer_options": "actcalc.solve.layers",
    "parse_problem": "actcalc.solve.problem",
    "problem_groups": "actcalc.solve.layers",
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
