"""Options of fine-tuning: what is trained, and over which base."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from actcalc.specs.training import TRAINABLE

_PANEL = "Fine-tuning"


def _option(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=_PANEL, show_default=False)


@dataclass(frozen=True, eq=False, repr=False)
class TuningOptions:
    """Adapters, frozen parts and a quantised base; None means: as the run file says."""

    lora_rank: Annotated[
        int | None, _option("--lora-rank", help="Train adapters of this rank.")
    ] = None
    lora_targets: Annotated[
        str | None,
        _option(
            "--lora-targets",
            help="attention, mlp, all-linear, names (q,v) or a pattern of module paths.",
        ),
    ] = None
    dora: Annotated[
        bool | None, _option("--dora/--no-dora", help="Adapters with a magnitude (DoRA).")
    ] = None
    base_bits: Annotated[
        int | None,
        _option("--base-bits", help="Bits of the frozen base: 4 (nf4, double quantisation), 8."),
    ] = None
    qlora: Annotated[
        bool | None,
        _option("--qlora", help="--base-bits 4 --lora-rank 16 on all linear layers."),
    ] = None
    train: Annotated[
        str | None,
        _option("--train", help=f"Parts to train: {', '.join(TRAINABLE)}; nothing else, or too."),
    ] = None
    freeze: Annotated[
        int | None,
        _option("--freeze", help="First layers that stay frozen; -N: all but N."),
    ] = None
    galore_rank: Annotated[
        int | None, _option("--galore-rank", help="Project gradients to this rank (GaLore).")
    ] = None

    def changes_layers(self) -> tuple[str, ...]:
        """Names of the options that change what layers keep."""
        return ("lora_rank", "lora_targets", "dora", "qlora", "base_bits", "train", "freeze")

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
            "galore_rank": self.galore_rank,
        }
        return found | {name: value for name, value in given.items() if value is not None}
