"""What an explanation is made of: an explainer of a run, and the papers that it cites."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from actcalc.io.runs import load_framework, load_run
from actcalc.layers.core.algebra import Expr
from actcalc.layers.core.graph import Graph
from actcalc.layers.model import ModelGraph
from actcalc.run.staged import StagedRun
from actcalc.specs.layout import Layout
from actcalc.specs.run import Run


@dataclass(frozen=True, kw_only=True)
class Body:
    """What is said of a term for one run."""

    title: str
    """What it is, in one line."""
    result: str
    """The answer, in a sentence."""
    lines: tuple[str, ...]
    """How it is derived."""
    source: str
    """Paper and section, or framework file."""


Explainer = Callable[[StagedRun], Body]


@dataclass(frozen=True)
class Term:
    """Something that can be explained: a row of which all that is known of a term is read."""

    name: str
    """What it is called."""
    about: str
    """What it is, in a few words."""
    explain: Explainer
    """Its derivation for a run."""
    words: tuple[str, ...] = ()
    """Other words for it."""
    flags: tuple[str, ...] = ()
    """Flags of the command line that it explains."""
    heeds: tuple[str, ...] = ()
    """Options of the command line that change its numbers and no other term's."""
    model: str = "gpt3-175b"
    """Whose numbers it takes where no model is named."""
    layout: Mapping[str, Any] = field(default_factory=lambda: {"tp": 8, "sp": True})
    """In which layout."""


KORTHIKANTI = "Korthikanti et al. 2022, Reducing Activation Recomputation, arXiv:2205.05198"
NARAYANAN = (
    "Narayanan et al. 2021, Efficient Large-Scale Training on GPU Clusters, arXiv:2104.04473"
)
CHEN = "Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174"
DAO = "Dao et al. 2022, FlashAttention, arXiv:2205.14135"
DAO_2 = "Dao 2023, FlashAttention-2, arXiv:2307.08691"
ZERO = "Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054"
ZERO_OFFLOAD = "Ren et al. 2021, ZeRO-Offload, arXiv:2101.06840"
HU = "Hu et al. 2021, LoRA, arXiv:2106.09685"
QI = "Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv:2401.10241"
DEEPSEEK = "DeepSeek-AI 2024, DeepSeek-V3, arXiv:2412.19437"
MCKP = "Sinha and Zoltners 1979, The Multiple-Choice Knapsack Problem, Operations Research 27(3)"
CHECKPOINT = "torch/utils/checkpoint.py"


def gb(size: float) -> str:
    """Bytes in GB."""
    return f"{size / 1e9:,.4g} GB"


def named(name: str) -> str:
    """The name of an op or tensor, as words."""
    return name.replace("_", " ")


def size_text(expr: Expr, graph: ModelGraph) -> str:
    """A size as formula and bytes."""
    return f"{expr.formula()} = {int(expr.value(graph.sizes)):,} B"


def own_saved(graph: Graph) -> tuple[str, ...]:
    """What a layer saves itself: what all layers share is left out."""
    return tuple(name for name in graph.saved if name not in graph.shared)


def alone(staged: StagedRun) -> StagedRun:
    """The same model on one device: nothing is split."""
    return staged.changed(layout=Layout())


def layer_words(staged: StagedRun) -> str:
    """Which layer figures are of, where there are several kinds."""
    if len(staged.kinds) == 1:
        return f"one of the {staged.main.count} layers"
    return f"one of the {staged.main.count} {staged.main.label} layers"


@cache
def gpt() -> StagedRun:
    """The paper's own layer, on one device: what sentences about GPT are derived from."""
    return StagedRun(load_run("gpt3-175b"))


def is_gpt(staged: StagedRun) -> bool:
    """Whether the layers are the paper's GPT layers, with eager attention and dropout."""
    here, there = alone(staged).main.graph, gpt().main.graph
    formula = there.bytes_of(own_saved(there)).formula()
    return len(staged.kinds) == 1 and here.bytes_of(own_saved(here)).formula() == formula


def splitting(run: Run) -> tuple[Run, tuple[str, ...]]:
    """The run under a profile that knows model parallelism, and a note where it is another's."""
    if run.framework.model_parallel:
        return run, ()
    from dataclasses import replace

    note = f"The {run.framework} profile splits no layer: Megatron-Core's layers are taken."
    return replace(run, framework=load_framework("megatron")), (note,)
