"""Options of fine-tuning: what is trained, and over which base."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from actcalc.cli.choices import TUNING, option
from actcalc.specs.objectives import OBJECTIVES
from actcalc.specs.targets import TARGET_GROUPS
from actcalc.specs.training import TRAINABLE


@dataclass(frozen=True, eq=False, repr=False)
class TuningOptions:
    """Adapters, frozen parts and a quantised base; None means: as the run file says."""

    lora_rank: Annotated[
        int | None, option("--lora-rank", help="Train adapters of this rank.", panel=TUNING)
    ] = None
    lora_targets: Annotated[
        str | None,
        option(
            "--lora-targets",
            help="attention, mlp, all-linear, names (q,v) or a pattern of module paths.",
            panel=TUNING,
            metavar="WHERE",
            words=lambda: TARGET_GROUPS,
        ),
    ] = None
    dora: Annotated[
        bool | None,
        option("--dora/--no-dora", help="Adapters with a magnitude (DoRA).", panel=TUNING),
    ] = None
    base_bits: Annotated[
        int | None,
        option(
            "--base-bits",
            help="Bits of the frozen base: 4 (nf4, double quantisation) or 8.",
            panel=TUNING,
        ),
    ] = None
    qlora: Annotated[
        bool | None,
        option("--qlora", help="--base-bits 4 --lora-rank 16, on all linear layers.", panel=TUNING),
    ] = None
    train: Annotated[
        str | None,
        option(
            "--train",
            help="Parts trained, alone or beside adapters: {words}.",
            panel=TUNING,
            metavar="PARTS",
            words=lambda: TRAINABLE,
        ),
    ] = None
    freeze: Annotated[
        int | None,
        option(
            "--freeze", help="First layers that stay frozen; -N: all but the last N.", panel=TUNING
        ),
    ] = None
    tower: Annotated[
        str | None,
        option(
            "--tower",
            help="A vision tower: {words}.",
            panel=TUNING,
            words=lambda: ("trained", "frozen"),
        ),
    ] = None
    galore_rank: Annotated[
        int | None,
        option("--galore-rank", help="Project gradients to this rank (GaLore).", panel=TUNING),
    ] = None

    objective: Annotated[
        str | None,
        option(
            "--objective",
            help="What is trained for: {words}.",
            panel=TUNING,
            metavar="WHAT",
            words=lambda: OBJECTIVES,
        ),
    ] = None
    reference: Annotated[
        str | None,
        option(
            "--reference",
            help="Of dpo, kto: none, log-probabilities precomputed; of grpo: model, for its beta.",
            panel=TUNING,
            metavar="WHICH",
            words=lambda: ("auto", "none", "model"),
        ),
    ] = None
    generation_share: Annotated[
        float | None,
        option(
            "--generation-share",
            help="Share of the device that generation holds beside grpo (vLLM's).",
            panel=TUNING,
            metavar="SHARE",
        ),
    ] = None

    def changes_layers(self) -> tuple[str, ...]:
        """Names of the options that change what layers keep."""
        tuned = ("lora_rank", "lora_targets", "dora", "qlora", "base_bits", "train", "freeze")
        return (*tuned, "objective")

    def tuning(self) -> dict[str, Any]:
        """The fields of ``specs.Training`` that were given."""
        parts = None
        if self.train is not None:
            parts = tuple(word.strip() for word in self.train.replace("+", ",").split(","))
        found: dict[str, Any] = {"lora_rank": 16, "base_bits": 4} if self.qlora else {}
        given = {
            "lora_rank": self.lora_rank,
            "lora_targets": self.lora_targets,
            "dora": self.dora,
            "base_bits": self.base_bits,
            "train": parts,
            "freeze": self.freeze,
            "tower": self.tower,
            "galore_rank": self.galore_rank,
            "objective": self.objective,
            "reference": self.reference,
            "generation_share": self.generation_share,
        }
        return found | {name: value for name, value in given.items() if value is not None}
