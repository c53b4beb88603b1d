"""Every number that explain prints is one of the engine's, or follows from those it prints.

Each term is read for a matrix of models and layouts. A number of four digits or more must be a
figure of the run's own answers (compare, breakdown, memory, mfu, the model's fields), or the value
of the sum, product or quotient that the sentence states; what the sentence states as an equation
must hold; what only GPT's layers have must be said of GPT.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any

import pytest

from actcalc.answers.breakdown import breakdown_run
from actcalc.answers.compare import compare_run
from actcalc.answers.explain.flops import gap
from actcalc.answers.explain.pipelines import _pipeline
from actcalc.answers.explain.terms import TERMS, Explanation, explain_term
from actcalc.answers.explain.tuning import _plain
from actcalc.answers.memory import memory_run
from actcalc.answers.plan import plan_run
from actcalc.cost.flops import (
    forward_flops,
    head_forward_flops,
    layers_forward_flops,
    model_flops,
    paper_model_flops,
    prediction_forward_flops,
    rerun_flops,
)
from actcalc.errors import SpecError
from actcalc.io.devices import load_device
from actcalc.io.runs import load_run
from actcalc.memory.stage import StageMemory
from actcalc.plan.planner import RunPlanner
from actcalc.plan.settings import PlanSettings
from actcalc.policy.outcome import layer_outcome
from actcalc.policy.rules import NONE
from actcalc.run.staged import StagedRun
from actcalc.solve.layers import layer_options
from actcalc.specs.layout import Layout
from actcalc.specs.run import Run

RUNS: dict[str, dict[str, Any]] = {
    "gpt3-175b": {},
    "gpt3-175b tp8": {"layout": {"tp": 8}},
    "gpt3-175b tp8 sp pp8 vpp3": {
        "layout": {"tp": 8, "sp": True, "pp": 8, "vpp": 3}, "workload": {"global_batch": 64},
    },
    "gpt-22b megatron flash": {
        "layout": {"tp": 8, "sp": True}, "framework": "megatron",
        "workload": {"attention": "flash", "dropout": False},
    },
    "gpt2": {},
    "gpt2 transformers": {"framework": "transformers"},
    "bert-large": {"workload": {"dropout": False}},
    "llama-3-8b": {},
    "llama-3-8b tp2 cp2": {"layout": {"tp": 2, "sp": True, "cp": 2}},
    "llama-3-8b torchtitan": {"layout": {"dp": 8, "zero": 3}, "framework": "torchtitan"},
    "mixtral-8x7b": {},
    "mixtral-8x7b ep8": {"layout": {"ep": 8, "dp": 8}},
    "deepseek-v3": {"model": {"layers": 8}, "layout": {"tp": 4, "sp": True, "pp": 2}},
    "nemotron-h-56b": {"layout": {"tp": 4, "sp": True}},
    "gemma-2-9b": {},
    "t5-base": {},
}  # fmt: skip
SLOW = {"plan", "greedy"}  # plans of whole models, read for small ones alone
SMALL = {"gpt2", "bert-large", "gpt2 transformers"}
GPT_ALONE = re.compile(r"34sbh(?! =)|5as|72b|10sbh(?! =)|24/t|s/6h|s/18h|v/12hl|96·B|11\+5as")
"""Forms of the paper's layer, which other layers do not have."""


@cache
def run_of(name: str) -> Run:
    return load_run(name.split()[0], **RUNS[name])


@cache
def staged_of(name: str) -> StagedRun:
    return StagedRun(run_of(name))


@cache
def explained(term: str, name: str) -> Explanation | None:
    """What is said; None where the model has nothing of that kind, which must be said too."""
    try:
        return explain_term(term, run_of(name))
    except SpecError:
        return None


CASES = [
    (term, name) for name in RUNS for term in sorted(TERMS) if term not in SLOW or name in SMALL
]


def numbers_in(value: Any) -> Iterator[float]:
    """Every number of a document."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from numbers_in(each)
    else:
        for each in value:
            yield from numbers_in(each)


@cache
def figures(name: str) -> frozenset[float]:
    """What the engine's other answers say of a run, and of the same run with other layouts."""
    run, staged = run_of(name), staged_of(name)
    graph, found = staged.graph, set()
    found |= set(numbers_in(compare_run(run).document()))
    found |= set(numbers_in(memory_run(run).document()))
    found |= set(numbers_in(breakdown_run(run).document()))
    found |= set(graph.sizes.values())
    for policy in staged.usual_policies:
        outcome = layer_outcome(graph, staged.main.graph, staged.policy(policy))
        found |= set(outcome.sizes(graph))
        flops = graph.op_flops[staged.main.graph]
        found.add(sum(flops[op.name] for op in outcome.rerun))
        found.add(rerun_flops(staged, staged.policy(policy)))
    heads = head_forward_flops(graph), prediction_forward_flops(graph)
    found |= {forward_flops(graph), layers_forward_flops(graph), model_flops(graph), *heads}
    found |= {sum(heads), staged.parameters, *map(abs, gap(staged).values())}
    found.add(paper_model_flops(run.model, run.workload.seq, run.workload.micro_batch))
    return frozenset(found)


INTEGER = re.compile(r"(?<![\w.,])\d{1,3}(?:,\d{3})+(?![\w,]|\.\d)|(?<![\w.,])\d{4,}(?![\w,]|\.\d)")
EQUATION = re.compile(r"([-\d.,()+/*·x√ ]*\d[-\d.,()+/*·x√ ]*) = (-?\d[\d,]*(?:\.\d+)?)(%?)")


FORMULA = re.compile(r"(?<![\w/.(])([-\w²()/+·.]*[a-zA-Z²][-\w²()/+·.]*) = ([\d,]+) B")
ASSUMED = re.compile(r"No --\w+ given: (\w) = (\d+)")
TOKEN = re.compile(r"\d+(?:\.\d+)?|[a-zA-Z]|²|[-+/*·()]")


def value_of(expression: str) -> float | None:
    """The value of a printed sum of numbers; None if it is none."""
    text = expression.strip().replace(",", "").replace("·", "*").replace("x", "*")
    if not re.search(r"[-+*/(]", text) or "√" in text or text[0] in "+*/":
        return None
    try:
        return float(eval(text, {"__builtins__": {}}))
    except (SyntaxError, TypeError, ZeroDivisionError):
        return None


def formula_of(text: str, sizes: dict[str, int]) -> float | None:
    """The value of a printed formula at ``sizes``: letters side by side are a product."""
    parts: list[str] = []
    for token in TOKEN.findall(text):
        operand = token.isalnum() or token == "("
        if token == "²":
            parts.append("**2")
            continue
        if operand and parts and (parts[-1][-1].isalnum() or parts[-1] == ")"):
            parts.append("*")
        if token.isalpha() and token not in sizes:
            return None
        parts.append(f"sizes[{token!r}]" if token.isalpha() else token.replace("·", "*"))
        if token.isalpha():
            parts[-1] = f"({parts[-1]})"
    joined = re.sub(r"\)\(", ")*(", "".join(parts))
    try:
        return float(eval(joined, {"sizes": sizes, "__builtins__": {}}))
    except (SyntaxError, TypeError):
        return None


@pytest.mark.parametrize(("term", "name"), CASES)
def test_equations_hold(term, name):
    said = explained(term, name)
    for line in [said.result, *said.lines] if said else []:
        for left, right, percent in EQUATION.findall(line):
            value = value_of(left)
            if value is None:
                continue
            printed = float(right.replace(",", "")) / (100 if percent else 1)
            digits = len(right.partition(".")[2]) + (2 if percent else 0)
            rounding = max(0.6 * 10**-digits, 6e-4 * abs(value) if "." in right else 0)
            assert abs(value - printed) <= rounding, f"{left} = {right}{percent} in: {line}"


STATE = {5056, 5072}
"""Bytes of generators' states: a test of the policies compares them with PyTorch's."""
PRODUCT = re.compile(r"(\d[\d,]*)[^\d=]* x (\d[\d,]*) B = (\d[\d,]*) B")
MATRIX = re.compile(r"(\d+)·\((\d[\d,]*) \+ (\d[\d,]*)\) = (\d[\d,]*) of (\d[\d,]*)")
STATES = re.compile(r"= ([\d.]+) B a parameter")
COUNTED = re.compile(r"x (\d[\d,]*) parameters on this GPU = (\d[\d,]*) B")


def whole(text: str) -> int:
    return int(text.replace(",", ""))


def stated(lines: list[str], sizes: dict[str, int]) -> set[float]:
    """Integers that the explanation's own equations yield; each is checked on the way."""
    found: set[float] = set()
    for line in lines:
        for left, right, _ in EQUATION.findall(line):
            if value_of(left) is not None and "." not in right:
                found.add(whole(right))
        for left, right in FORMULA.findall(line):
            value = formula_of(left, sizes)
            if value is not None:
                assert abs(value - whole(right)) < 64, line  # terms are rounded up, each
                found.add(whole(right))
        for one, other, product in PRODUCT.findall(line):
            assert whole(one) * whole(other) == whole(product), line
            found.add(whole(product))
        for rank, rows, columns, kept, of in MATRIX.findall(line):
            assert int(rank) * (whole(rows) + whole(columns)) == whole(kept), line
            assert whole(rows) * whole(columns) == whole(of), line
            found |= {whole(rows), whole(columns), whole(kept), whole(of)}
    rates = [float(each) for line in lines for each in STATES.findall(line)]
    for line in lines:
        for count, product in COUNTED.findall(line):
            assert math.isclose(rates[0] * whole(count), whole(product), rel_tol=1e-3), line
            found.add(whole(product))
    return found


@pytest.mark.parametrize(("term", "name"), CASES)
def test_every_number_is_the_engines(term, name):
    said = explained(term, name)
    if said is None:
        return
    lines = [said.result, *said.lines]
    sizes = dict(staged_of(name).graph.sizes)
    for line in lines:
        sizes |= {letter: int(size) for letter, size in ASSUMED.findall(line)}
    known = figures(name) | own_figures(term, name) | stated(lines, sizes) | STATE
    rounded = {f"{figure / 1e9:,.4g}" for figure in known}
    for line in lines:
        for found in INTEGER.finditer(line):
            number = whole(found[0])
            if line[found.end() :].startswith(" GB"):
                assert found[0] in rounded, f"{number:,} GB in: {line}"
            else:
                assert number in known, f"{number:,} in: {line}"


# --- what single terms set beside the run: other layouts, recipes, policies, plans ----------------


def documents(*runs: Run) -> set[float]:
    found: set[float] = set()
    for run in runs:
        report = memory_run(run)
        found |= set(numbers_in(report.document()))
        parts = ("weights_bytes", "gradients_bytes", "optimizer_bytes")
        for stage in report.stages:
            found.add(sum(getattr(stage, part) for part in parts))
            found.add(stage.total_bytes)
    return found


def flash_figures(run: Run) -> set[float]:
    work = run.workload.model_copy(update={"attention": "flash"})
    staged = StagedRun(replace(run, workload=work))
    layer = staged.main.graph
    return set(layer_outcome(staged.graph, layer, NONE).sizes(staged.graph))


def ends_figures(run: Run) -> set[float]:
    staged, found = StagedRun(run), set[float]()
    graph = staged.graph
    for end in (graph.embedding, graph.head):
        size = sum(graph.tensor_bytes[end][n] for n in end.saved if n not in end.shared)
        found |= {size * count for count in range(1, 65)}
    found.add(staged.stored_bytes(0, NONE))
    paper = load_run("gpt-22b")
    return found | {paper.model.vocab, paper.model.hidden, paper.workload.seq}


def lora_figures(run: Run) -> set[float]:
    tuned = replace(run, training=run.training.model_copy(update={"lora_rank": 16}))
    staged = StagedRun(tuned)
    saved = staged.under(NONE).layer_bytes(staged.main.graph).saved
    group = StageMemory.of(tuned).parameters(0)
    plain = memory_run(run).stages[0].parameters
    return documents(tuned, run) | {saved, plain, group.trained}


def policy_figures(run: Run) -> set[float]:
    return documents(*(replace(run, policies=(name,)) for name in ("none", "full")))


def zero_figures(run: Run) -> set[float]:
    layout = run.layout
    if layout.dp * layout.cp == 1:
        layout = layout.model_copy(update={"dp": 8})
    return documents(
        *(replace(run, layout=layout.model_copy(update={"zero": zero})) for zero in range(4))
    )


def state_figures(run: Run) -> set[float]:
    return documents(replace(run, layout=run.layout.model_copy(update={"zero": 0})))


def norm_figures(run: Run) -> set[float]:
    staged = StagedRun(run)
    size = staged.graph.tensor_bytes[staged.main.graph]
    ops = layer_outcome(staged.graph, staged.main.graph, staged.policy("norm")).rerun
    return {sum(size[n] for op in ops for n in (*op.inputs, *op.outputs))}


def reserved_figures(run: Run) -> set[float]:
    found = {512.0}  # what a request is rounded to
    for policy in ("none", "full"):
        report = memory_run(replace(run, policies=(policy,)), reserved=True)
        found |= set(numbers_in(report.document()))
    return found


def lengths_figures(run: Run) -> set[float]:
    """Of 70 % of 512 tokens, 25 % of 2,048 and 5 % of 8,192, the term's own example."""
    sizes, below = (512, 2048, 8192), (0.7, 0.95, 1.0)

    def padded(batch: int) -> float:
        longest = [a**batch - b**batch for a, b in zip(below, (0.0, *below), strict=False)]
        return sum(size * share for size, share in zip(sizes, longest, strict=True))

    one = _plain(run)
    found = {*sizes, 1280, *(round(padded(batch)) for batch in (1, 4, 16))}
    for seq in (max(1, round(padded(run.workload.micro_batch))), 8192):
        work = run.workload.model_copy(update={"seq": seq, "completion": 0})
        found |= {seq, StageMemory.of(replace(one, workload=work)).figure(0).peak_bytes}
    return found


def stash_figures(run: Run) -> set[float]:
    staged = StagedRun(run)
    size = staged.graph.tensor_bytes[staged.main.graph]
    linear = [op for op in staged.main.graph.ops if op.kind == "linear"]
    inputs = {name for op in linear for name in op.saves}
    return {sum(size[n] for n in inputs) + sum(size[n] for op in linear for n in op.outputs)}


def optimum_figures(run: Run) -> set[float]:
    best = compare_run(run).checkpoint_optimum
    near = min(best.layers, max(1, round(best.continuous)))
    longest = -(-best.layers // near)
    first = best.input_bytes if "input" in StagedRun(run).main.graph.saved else 0
    inside = round(Fraction(best.in_flight).limit_denominator(10**6) * near * best.input_bytes)
    return {round(best.continuous_bytes), inside + longest * best.layer_bytes - first}


def nested_figures(run: Run) -> set[float]:
    staged, found = StagedRun(run), set[float]()
    for name in ("recursive", "sqrt"):
        figure = compare_run(replace(run, policies=(name,))).policies[0]
        found |= {figure.stored_bytes, figure.transient_bytes}
        found.add(staged.under(staged.policy(name)).layer_bytes(staged.main.graph).stored)
    return found


def expert_figures(run: Run) -> set[float]:
    moe, found = run.model.moe, set[float]()
    for degree in (1, 2, 4, 8) if moe else ():
        layer = max(
            StagedRun(run).kinds, key=lambda kind: sum(w.expert for w in kind.graph.weights)
        ).graph
        every = sum(
            int(w.parameters.value(StagedRun(run).whole_sizes)) for w in layer.weights if w.expert
        )
        found |= {every // degree, every // (degree * run.layout.tp)}
    return found


def gap_figures(run: Run) -> set[float]:
    staged = StagedRun(run)
    parts = gap(staged)
    tokens = run.workload.tokens
    idle = parts.get("experts that a token is not sent to", 0) // (6 * tokens)
    matrix = 6 * staged.parameters * tokens
    useful = model_flops(staged.graph)
    return {tokens, matrix, abs(matrix - useful), staged.parameters - idle}


def hardware_figures(run: Run) -> set[float]:
    staged = StagedRun(run)
    s, b, m = run.workload.seq, run.workload.micro_batch, run.model
    h, v, depth = m.hidden, m.vocab, m.layers
    again = rerun_flops(staged, staged.full)
    closed = b * s * (96 * depth * h * h + 16 * depth * s * h + 6 * h * v)
    return {model_flops(staged.graph) + again, closed}


def crossing_figures(run: Run) -> set[float]:
    """Where scores' FLOPs meet others', found by trying sequences."""
    run = replace(run, layout=Layout())
    work = run.workload

    def flops(seq: int) -> tuple[float, float, float]:
        layer = StagedRun(replace(run, workload=work.model_copy(update={"seq": seq}))).graph
        kind = max(reversed(layer.kinds), key=lambda kind: kind.count).graph
        size = layer.op_flops[kind]
        core = sum(size[op.name] for op in kind.ops if op.kind == "core")
        ffn = sum(size[op.name] for op in kind.ops if op.group == "ffn")
        return core, ffn, sum(size.values()) - core - ffn

    core, ffn, other = flops(1024)
    if not core:
        return set()
    return {round(1024 * rest / core) for rest in (ffn, ffn - other)} | byte_crossing(run)


def byte_crossing(run: Run) -> set[float]:
    staged = StagedRun(run)
    layer = staged.main.graph
    size = staged.graph.tensor_bytes[layer]
    own = [n for n in layer.saved if n not in layer.shared]
    square = [n for n in own if "s²" in layer.tensors[n].bytes.formula()]
    kept, rest = sum(size[n] for n in square), sum(size[n] for n in own if n not in square)
    at = run.workload.seq * rest / kept if kept else 0.0
    return {math.floor(at), math.ceil(at)}


def plan_figures(run: Run) -> set[float]:
    """What ``plan`` answers for the same budgets."""
    found: set[float] = set()
    for device, model, parts in ((None, "stored", 4), ("h100-80gb", "stored+working", 8)):
        one = replace(run, device=load_device(device) if device else None)
        for method in ("optimal", "greedy"):
            settings = PlanSettings(memory_model=model, activations_only=True, method=method)
            planner = RunPlanner(one, settings)
            budget = planner.smallest + (planner.free - planner.smallest) // parts
            result = plan_run(one, budget, points=0, planner=RunPlanner(one, settings))
            found |= set(numbers_in(result.document())) | {planner.smallest, planner.free, budget}
            for text in result.certificate:
                found |= {whole(each) for each in INTEGER.findall(text)}
    options = layer_options(planner.layer(planner.staged.main.graph))
    return found | set(options.stored)


def offload_figures(run: Run) -> set[float]:
    held = replace(run, device=load_device("h100-80gb"))
    planner = RunPlanner(held)
    layer = planner.staged.main.graph
    link = planner.transfer(layer)
    size = planner.layer(layer).total_saved_bytes
    return documents(held) | {size, link.forward * link.host_rate // 10**9}


def sent_figures(run: Run) -> set[float]:
    """What memory adds for outputs that stay, and the output itself."""
    piped, _ = _pipeline(StagedRun(run), "1f1b")
    layout = piped.run.layout
    totals = [
        memory_run(replace(piped.run, layout=layout.model_copy(update=update))).stages[0]
        for update in ({}, {"keep_sent_outputs": True})
    ]
    layer = piped.main.graph
    one = piped.graph.tensor_bytes[layer][layer.output]
    return {totals[1].total_bytes - totals[0].total_bytes, one}


def microbatch_figures(run: Run) -> set[float]:
    """Of each stage: its memory under full with more and more micro-batches kept whole."""
    piped, _ = _pipeline(StagedRun(run), "1f1b")
    reports = [memory_run(replace(piped.run, policies=(name,))).stages for name in ("full", "none")]
    ends = [max(stage.total_bytes for stage in stages) for stages in reports]
    found: set[float] = {max(ends[0], sum(ends) // 2)}
    for stage, (low, high) in enumerate(zip(*reports, strict=True)):
        kept = [
            piped.under(piped.policy(name)).stored_bytes(piped.places[stage][0])
            for name in ("none", "full")
        ]
        more = kept[0] - kept[1]
        found |= {low.total_bytes + k * more for k in range(low.in_flight)}
        found |= {high.total_bytes, more}
    return found


def freeze_figures(run: Run) -> set[float]:
    plain, found = _plain(run), set[float]()
    for freeze in (0, run.training.freeze or plain.model.depth // 2):
        one = replace(plain, training=plain.training.model_copy(update={"freeze": freeze}))
        stage = memory_run(one).stages[0]
        trained = StageMemory.of(one).parameters(0).trained
        found |= {stage.peak_bytes, trained}
        found |= {stage.activations_bytes, stage.gradients_full_bytes, stage.optimizer_bytes}
    return found


def objective_figures(run: Run) -> set[float]:
    """Next tokens and pairs; tiles of log-probabilities are TRL's own sizes."""
    plain, found = _plain(run), {4096.0, 32768.0}
    for update in (
        {"objective": "sft", "reference": "auto", "generation_share": 0.0, "loss": "tiled"},
        {"objective": "dpo"},
    ):
        one = replace(plain, training=plain.training.model_copy(update=update))
        stage = memory_run(one).stages[0]
        found |= {stage.peak_bytes, *(buffer.bytes for buffer in stage.buffers)}
    return found


OTHERS: dict[str, Callable[[Run], set[float]]] = {
    "18": state_figures, "8psi": gap_figures, "96": hardware_figures, "c*": optimum_figures,
    "ends": ends_figures, "ep": expert_figures, "flash": flash_figures, "greedy": plan_figures,
    "lora": lora_figures, "norm": norm_figures, "offload": offload_figures, "peak": policy_figures,
    "plan": plan_figures, "recursive": nested_figures, "s=4h": crossing_figures,
    "freeze": freeze_figures, "objective": objective_figures,
    "zero": zero_figures, "sent": sent_figures, "microbatch": microbatch_figures,
    "zero-bubble": stash_figures, "dualpipe": stash_figures, "reserved": reserved_figures,
    "lengths": lengths_figures,
}  # fmt: skip


def own_figures(term: str, name: str) -> set[float]:
    """Figures of what a term sets beside the run."""
    return OTHERS[term](run_of(name)) if term in OTHERS else set()


@pytest.mark.parametrize(("term", "name"), CASES)
def test_what_is_gpts_is_said_of_gpt(term, name):
    said = explained(term, name)
    if said is None or name.startswith("gpt") or name == "bert-large":
        return
    for line in [said.result, *said.lines]:
        if GPT_ALONE.search(line):
            assert "GPT" in line, line


@pytest.mark.parametrize("name", RUNS)
def test_the_gap_of_6psi_is_the_sum_of_its_parts(name):
    staged = staged_of(name)
    whole = 6 * staged.parameters * run_of(name).workload.tokens - model_flops(staged.graph)
    assert sum(gap(staged).values()) == whole
