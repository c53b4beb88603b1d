"""Rows that are evaluated one by one, as the run that each stands for: what arrays do not know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from actcalc.cost.rates import Rates
from actcalc.cost.roofline import Roofline
from actcalc.cost.step import step_time
from actcalc.memory.stage import total_bytes
from actcalc.memory.states import in_units, recipe
from actcalc.policy.rules import Policy
from actcalc.run.staged import StagedRun
from actcalc.search.choices import Choices
from actcalc.search.family import Floats, Ints, Lane
from actcalc.search.listed import Rows
from actcalc.search.space import Cut
from actcalc.specs.layout import Layout
from actcalc.specs.optimizers import OPTIMIZERS
from actcalc.specs.run import Run

_KEPT_RUNS = 256


def alike(run: Run) -> bool:
    """Whether rules that differ from lane to lane are made of sums, products and maxima alone.

    Cross-entropies in parts count tokens by the power of two, Muon's products are of each matrix,
    and offloaded weights are fetched in windows.
    """
    training = run.training
    return (
        training.loss in ("auto", "full")
        and not training.compiled_loss
        and not training.bucket_view
        and training.offload != "weights"
        and not OPTIMIZERS[training.optimizer].newton_schulz
    )


class Singles:
    """Evaluates rows one by one; their runs are laid out once for all policies."""

    def __init__(self, run: Run, rates: Rates, choices: Choices) -> None:
        self.run, self.rates, self.choices = run, rates, choices
        self.plain = StagedRun(run)
        self.persistent: bool = recipe(self.plain.graph, run.training).persistent
        """Gradients stay from one step to the next."""
        self._runs: dict[tuple[Layout, int], StagedRun] = {}

    def arrays_know(self, zero: int) -> bool:
        """Whether arrays know a ZeRO stage: not what FSDP gathers or ranks hold whole."""
        training = self.run.training
        special = (
            training.step_in_backward
            or training.zero_redundancy
            or training.whole_weights != "none"
            or training.objective != "sft"
            or self.run.layout.keep_sent_outputs
        )
        return zero < 3 and not special and not self._in_units(zero)

    def _in_units(self, zero: int) -> bool:
        model = self.plain.graph
        layout = self.run.layout.model_copy(update={"zero": zero})
        sharded = replace(model, context=replace(model.context, layout=layout))
        return in_units(sharded, recipe(sharded, self.run.training))

    def _single(
        self, cut: Cut, rows: Rows, lanes: Sequence[Lane], row: int
    ) -> tuple[StagedRun, Policy]:
        """One row as a run of its own."""
        lane = lanes[int(rows.lane[row])]
        more = {"dp": int(rows.dp[row]), "zero": int(rows.zero[row]), **cut.fields()}
        layout = lane.split.layout(**more)
        key = layout, lane.micro_batch
        if key not in self._runs:
            if len(self._runs) > _KEPT_RUNS:
                self._runs.clear()
            workload = self.run.workload.model_copy(update={"micro_batch": lane.micro_batch})
            self._runs[key] = StagedRun(replace(self.run, layout=layout, workload=workload))
        staged = self._runs[key]
        return staged, staged.policy(self.choices.name(rows, row))

    def peaks(self, cut: Cut, rows: Rows, lanes: Sequence[Lane]) -> Ints:
        """Bytes that the fullest stage of every row needs."""
        every = (self._single(cut, rows, lanes, row) for row in range(len(rows.lane)))
        return np.array([total_bytes(*one) for one in every], np.int64)

    def seconds(self, cut: Cut, rows: Rows, lanes: Sequence[Lane]) -> Floats:
        """Seconds of one step of every row."""
        every = (self._single(cut, rows, lanes, row) for row in range(len(rows.lane)))
        return np.array(
            [step_time(policy, Roofline(staged, self.rates)).total for staged, policy in every]
        )
