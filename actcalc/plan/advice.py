"""Which remedies a run has, what each does alone, and the cheapest of them together that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import inf
from typing import Any

from actcalc.cost.rounding import growth
from actcalc.plan.changes import Change
from actcalc.plan.cheapest import Axes, Cheapest, merged
from actcalc.plan.remedies import NODE, REMEDIES, Keeps, Remedy
from actcalc.plan.trials import Need, Trials

TIERS: tuple[Keeps, ...] = ("training", "adapters", "moved", "host", "data")
"""Combinations are looked for with remedies of the first, then with those of another beside."""
ALIKE = 0.02
"""Step times that differ by less are not told apart: fewer changes decide."""
NOTHING = 0.002
"""Of what a run needs: a remedy that frees less is not worth a line."""
_NEAR = 2  # times the budget: what needs more is not saved by other remedies
_MOST_GPUS = 16384


@dataclass(frozen=True)
class Single:
    """One remedy alone on a run."""

    remedy: Remedy
    change: Change
    """Of its options the mildest that is enough, else the leanest."""
    need: Need
    seconds: float | None


@dataclass(frozen=True)
class Combination:
    """Remedies together; one change for each."""

    keeps: Keeps
    parts: tuple[Change, ...]
    need: Need
    seconds: float | None

    @property
    def change(self) -> dict[str, Any]:
        """All of it."""
        return merged(self.parts)


class Advice:
    """The remedies of one run within a budget of bytes; build once, read what is asked for."""

    def __init__(self, trials: Trials, budget: int) -> None:
        own = trials.need({})
        assert own is not None
        self.trials = trials
        self.budget = budget
        self.need: Need = own
        self.seconds = trials.seconds({})
        self.axes = Axes(trials, budget)

    @property
    def fits(self) -> bool:
        """Whether the run fits as it is."""
        return self.need.total_bytes <= self.budget

    @cached_property
    def remedies(self) -> tuple[Remedy, ...]:
        """Those that the run's framework offers."""
        return tuple(r for r in REMEDIES if r.offered(self.trials.run.framework))

    @cached_property
    def singles(self) -> tuple[Single, ...]:
        """Every remedy that frees bytes of this run alone.

        Those that cost no time come first, in the order of the table; then others by what they
        cost; then states in host memory, whose own work no figure has; then other data.
        """
        found = [one for one in map(self._single, self.remedies) if one is not None]
        late = {"host": 1, "data": 2}
        found.sort(key=lambda one: (late.get(one.remedy.keeps, 0), self._bucket(one.seconds)))
        return tuple(found)

    def _single(self, remedy: Remedy) -> Single | None:
        change = self.axes.mildest(remedy)
        need = self.trials.need(change) if change else None
        if change is None or need is None:
            return None
        freed = self.need.total_bytes - need.total_bytes
        enough = not self.fits and need.total_bytes <= self.budget
        if freed <= (0 if enough else NOTHING * self.need.total_bytes):
            return None
        return Single(remedy, change, need, self.trials.seconds(change))

    def _bucket(self, seconds: float | None) -> float:
        """What a step is slower, nothing where it is not told apart: free remedies keep their
        order. What has no time comes last."""
        if self.seconds is None:
            return 0.0
        if seconds is None:
            return inf
        slower = growth(seconds, self.seconds)
        return slower if slower > ALIKE else 0.0

    @cached_property
    def combination(self) -> Combination | None:
        """The cheapest that fits and keeps most as it is; None where none fits, or all does."""
        return next(iter(self.combinations), None)

    @cached_property
    def combinations(self) -> tuple[Combination, ...]:
        """The cheapest of those that train as the run does, where one fits, and one that is faster
        with activations in host memory; else the cheapest with adapters, with host memory, with
        shorter sequences."""
        if self.fits:
            return ()
        own = self._cheapest("training")
        if own is not None:
            costs = self._bucket(own.seconds) > 0
            moved = self._cheapest("moved") if costs else None
            return (own, moved) if moved and self._faster(moved, own) else (own,)
        found: list[Combination] = []
        for keeps in TIERS[1:]:
            if found and keeps == "data":
                break
            one = self._cheapest(keeps)
            if one is not None:
                found.append(one)
        return tuple(found)

    def _faster(self, one: Combination, other: Combination) -> bool:
        """Whether one is faster than another by what is told apart."""
        if one.seconds is None or other.seconds is None:
            return False
        return growth(other.seconds, one.seconds) > ALIKE

    def _cheapest(self, keeps: Keeps) -> Combination | None:
        allowed = self._allowed(keeps, {})
        new = [one for one in allowed if one.keeps == keeps and self.axes.options(one)]
        if keeps != "training" and not new:
            return None
        for single in self.singles:
            enough = single.need.total_bytes <= self.budget and single.remedy in allowed
            if enough and not self._bucket(single.seconds):
                return Combination(keeps, (single.change,), single.need, single.seconds)
        return self._searched(keeps, {})

    def _allowed(self, keeps: Keeps, base: Change) -> list[Remedy]:
        """Remedies that may stand beside ``base``: where it says the number of replicas, no degree
        takes more GPUs."""
        fixed = ("tp", "pp", "cp") if "layout.dp" in base else ()
        known = [one for one in self.remedies if one.axis not in fixed]
        return [one for one in known if one.keeps in ("training", keeps)]

    def _searched(self, keeps: Keeps, base: Change) -> Combination | None:
        """The cheapest combination beside ``base``, without what it can do without."""
        parts = Cheapest(self.axes, self._allowed(keeps, base), base).parts()
        if parts is None:
            return None
        chosen = self._fewest(parts, base)
        change = merged((base, *chosen))
        need = self.trials.need(change)
        assert need is not None
        parts = (base, *chosen) if base else chosen
        return Combination(keeps, parts, need, self.trials.seconds(change))

    def _fewest(self, parts: Sequence[Change], base: Change) -> tuple[Change, ...]:
        """The fewest of ``parts`` that fit beside ``base`` in about the same time, or in no more
        than the run takes as it is; mildest first of as many."""

        def cost(chosen: Sequence[Change]) -> float:
            seconds = self.trials.seconds(merged((base, *chosen)))
            return 0.0 if self.seconds is None else inf if seconds is None else seconds

        most = max(cost(parts), self.seconds or 0.0) * (1 + ALIKE)

        def does(chosen: Sequence[Change]) -> bool:
            fits = self.axes.size(merged((base, *chosen))) <= self.budget
            return fits and cost(chosen) <= most

        spare = [one for one in parts if does([each for each in parts if each is not one])]
        for count in range(len(spare)):
            for kept in combinations(spare, count):
                fewer = tuple(one for one in parts if one not in spare or one in kept)
                if does(fewer):
                    return fewer
        return tuple(parts)

    @cached_property
    def more_gpus(self) -> Combination | None:
        """As few GPUs as hold the run trained as it is, and what it takes there.

        The fewest times its replicas, over which the framework shards, or, if those are fewer,
        tensor parallelism within a node and then pipeline stages, in powers of two. None where the
        run fits, or nothing does.
        """
        if self.fits:
            return None
        for times in (1 << n for n in range(1, _MOST_GPUS.bit_length())):
            if self._holds(self._replicas(times)):
                return self._searched("training", self._replicas(self._fewest_times(times)))
            split = self._split(times)
            if split and self._holds(split):
                return self._searched("training", split)
        return None

    def _fewest_times(self, times: int) -> int:
        """The least times as many replicas that hold the run; ``times`` do, half of them do not."""
        low, high = times // 2 + 1, times
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._holds(self._replicas(middle)) else (middle + 1, high)
        return low

    @cached_property
    def _lean(self) -> tuple[Change, ...]:
        """The leanest remedies beside other replicas."""
        base = {"layout.dp": self.trials.run.layout.dp}
        return Cheapest(self.axes, self._allowed("training", base), {}).leanest

    def _holds(self, base: Change) -> bool:
        """Whether the run changed by ``base`` fits with the leanest remedies beside it.

        Those that are leanest on the run as it is say so first, where that is not far off.
        """
        size = self.axes.size(merged((*self._lean, base)))
        if size <= self.budget or size > _NEAR * self.budget:
            return size <= self.budget
        return Cheapest(self.axes, self._allowed("training", base), base).possible

    def _replicas(self, times: int) -> Change:
        """So many times the replicas, weights or states sharded over them as far as can be, with as
        many micro-batches in a step."""
        run, layout = self.trials.run, self.trials.run.layout
        dp = layout.dp * times
        stage = max((n for n in run.framework.zero_stages if n >= layout.zero), default=layout.zero)
        change: dict[str, Any] = {"layout.dp": dp}
        if stage > layout.zero:
            change["layout.zero"] = stage
        if run.workload.global_batch:
            batch = run.workload.micro_batch * self.trials.staged.microbatches * dp
            change["workload.global_batch"] = batch
        return change

    def _split(self, times: int) -> Change:
        """So many times the GPUs by tensor parallelism within a node, and pipeline stages."""
        run, layout = self.trials.run, self.trials.run.layout
        if not run.framework.model_parallel:
            return {}
        node = (run.device.devices_per_node if run.device else None) or NODE
        tp = min(times, max(1, node // layout.tp))
        change: dict[str, Any] = {"layout.dp": layout.dp}
        if tp > 1:
            change |= {"layout.tp": layout.tp * tp, "layout.sp": True}
        return change if times == tp else {**change, "layout.pp": layout.pp * (times // tp)}
