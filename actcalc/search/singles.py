"""Rows that are evaluated one by one, as the run that each stands for: what arrays do not know."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from actcalc.cost.rates import Rates
from actcalc.cost.roofline import Roofline
from actcalc.cost.step import step_time
from actcalc.layers.model import ModelGraph
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

    Cross-entropies in parts count tokens by the power of two, Muon's products are of each matrix.
    """
    training = run.training
    return (
        training.loss in ("auto", "full")
        and not training.compiled_loss
        and not training.bucket_view
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
        """Whether arrays know a ZeRO stage: not what ranks hold whole or gather by module."""
        training = self.run.training
        special = (
            training.step_in_backward
            or training.zero_redundancy
            or training.whole_weights != "none"
            or training.objective != "sft"
            or self.run.layout.keep_sent_outputs
        )
        replicated = training.instances > 1 or training.shards == 1
        if self.in_units(zero):
            listed = self.run.framework.sharded_units == "listed"
            return not (special or replicated or listed)
        # DeepSpeed gathers by module, and by how many parameters come next, or weight by weight
        framework = self.run.framework
        by_module = framework.op_by_op or framework.sharded_units == "listed" or replicated
        return not special and (zero < 3 or not by_module)

    def in_units(self, zero: int) -> bool:
        """Whether a ZeRO stage gathers its weights in units."""
        sharded = self._sharded(zero)
        return in_units(sharded, recipe(sharded, self.run.training))

    def like(self, zero: int, others: Iterable[int]) -> int:
        """The first of some ZeRO stages that gather in units whose layers are the same."""
        rules = recipe(self._sharded(zero), self.run.training)
        return next(one for one in others if recipe(self._sharded(one), self.run.training) == rules)

    def _sharded(self, zero: int) -> ModelGraph:
        model = self.plain.graph
        layout = self.run.layout.model_copy(update={"zero": zero})
        return replace(model, context=replace(model.context, layout=layout))

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
