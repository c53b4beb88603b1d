"""Objectives of training, one row each: sequences of an example, and what runs beside the model.

Rows are as TRL 1.16 runs them (``trl/trainer/*_trainer.py``); verl's actor update is GRPO's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from actcalc.specs.row import Row


class Objective(Row):
    """What one objective computes of every example."""

    name: str
    """As given to --objective."""
    title: str
    """In a few words, for help and schema."""
    sequences: int
    """Sequences of one example, which go through the model together."""
    head: Literal["logits", "log-probabilities", "score"]
    """What the head makes: logits and their cross-entropy; log-probabilities of the labels alone,
    in tiles; one number a sequence."""
    reference: Literal["", "always", "asked"]
    """Whether log-probabilities of a reference model are needed: always, or where asked for."""
    beside: bool
    """The reference runs while the activations of the trained model are kept."""
    plain_forwards: int
    """Forward passes without gradients of the trained model."""
    reference_forwards: int
    """The same of the reference, in a step."""
    source: str
    """Where it is from."""


_ROWS = (
    Objective(
        name="sft", title="next tokens", sequences=1, head="logits", reference="", beside=False,
        plain_forwards=0, reference_forwards=0,
        source="transformers loss/loss_utils.py ForCausalLMLoss",
    ),
    Objective(
        name="dpo", title="chosen against rejected, together", sequences=2,
        head="log-probabilities", reference="always", beside=True,
        plain_forwards=0, reference_forwards=1,
        source="Rafailov et al. 2023; trl/trainer/dpo_trainer.py _compute_loss",
    ),
    Objective(
        name="kto", title="desirable or not, with a mismatched batch", sequences=1,
        head="log-probabilities", reference="always", beside=True,
        plain_forwards=1, reference_forwards=2,
        source="Ethayarajh et al. 2024; trl/trainer/kto_trainer.py _compute_loss",
    ),
    Objective(
        name="reward", title="a score of chosen and rejected", sequences=2, head="score",
        reference="", beside=False, plain_forwards=0, reference_forwards=0,
        source="trl/trainer/reward_trainer.py compute_loss",
    ),
    Objective(
        name="grpo", title="one update on generated completions", sequences=1,
        head="log-probabilities", reference="asked", beside=False,
        plain_forwards=0, reference_forwards=0,
        source="Shao et al. 2024; trl/trainer/grpo_trainer.py _compute_loss",
    ),
)  # fmt: skip

OBJECTIVES: Mapping[str, Objective] = {row.name: row for row in _ROWS}
"""Every objective by its name."""
