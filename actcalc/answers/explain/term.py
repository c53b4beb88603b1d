"""What an explanation is made of: an explainer of a run, and the papers that it cites."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from actcalc.run.staged import StagedRun

Body = tuple[str, tuple[str, ...], str]
"""Title, lines, source."""
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
ZERO = "Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054"
ZERO_OFFLOAD = "Ren et al. 2021, ZeRO-Offload, arXiv:2101.06840"
HU = "Hu et al. 2021, LoRA, arXiv:2106.09685"
QI = "Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv:2401.10241"
DEEPSEEK = "DeepSeek-AI 2024, DeepSeek-V3, arXiv:2412.19437"
MCKP = "Sinha and Zoltners 1979, The Multiple-Choice Knapsack Problem, Operations Research 27(3)"


def gb(size: float) -> str:
    """Bytes in GB."""
    return f"{size / 1e9:,.4g} GB"
