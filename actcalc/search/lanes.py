"""What a layer, the embedding and the head need under each split, micro-batch and policy.

A *lane* is one split with one micro-batch. Lanes with the same graphs are worked out together, by
the same objects that answer for a single run (:mod:`actcalc.search.family`), and kept as tables:
rows of a search are sums and maxima of these figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from actcalc.cost.rates import Rates
from actcalc.errors import SpecError
from actcalc.layers.alike import signature, structure
from actcalc.layers.core.either import MixedError
from actcalc.search.family import Family, Floats, Ints, Lane, Weights, laid
from actcalc.specs.run import Run


class Lanes:
    """Tables with a row for each lane; lanes that the framework cannot run have none."""

    def __init__(
        self,
        run: Run,
        rates: Rates,
        policies: Sequence[str],
        wanted: Iterable[Lane],
        *,
        together: bool = True,
    ) -> None:
        """``together``: lanes with the same graphs are worked out at once, else one by one."""
        self.run, self.rates, self.policies = run, rates, tuple(policies)
        self.families: list[Family] = []
        self._tables: dict[Any, Any] = {}
        for lanes in self._alike(wanted) if together else ([lane] for lane in wanted):
            self.families += self._measured(lanes)
        self.lanes = [lane for family in self.families for lane in family.lanes]
        self.places = {lane: place for place, lane in enumerate(self.lanes)}

    def _alike(self, wanted: Iterable[Lane]) -> Iterable[list[Lane]]:
        """Lanes in groups with the same graphs; those that the framework cannot run left out."""
        groups: dict[Any, list[Lane]] = {}
        for lane in wanted:
            groups.setdefault(_key(self.run, lane), []).append(lane)
        found: dict[Any, list[Lane]] = {}
        for lanes in groups.values():
            try:
                graph = laid(self.run, lanes[0]).graph
            except SpecError:
                continue
            key = signature(graph), lanes[0].rounds, lanes[0].zero
            found.setdefault(key, []).extend(lanes)
        return found.values()

    def _measured(self, lanes: Sequence[Lane]) -> list[Family]:
        """Lanes as one family, as one each where they differ in more than sizes, or none."""
        try:
            found = Family(laid(self.run, lanes[0]), lanes, self.rates, self.policies)
            parts = [(found.parts(kind), found.seconds(kind)) for kind in range(len(found.layers))]
        except SpecError:
            return []
        except MixedError:
            return [family for lane in lanes for family in self._measured([lane])]
        found.measured = parts
        return [found]

    def _table(self, key: Any, make: Callable[[Family], Any]) -> Any:
        """A table by lane, made once."""
        if key not in self._tables:
            self._tables[key] = np.concatenate([make(family) for family in self.families])
        return self._tables[key]

    def part(self, kind: int) -> Ints:
        """Bytes by [lane, policy, (stored, forward, backward, casts)]."""
        found: Ints = self._table(("part", kind), lambda family: family.measured[kind][0])
        return found

    def seconds(self, kind: int) -> Floats:
        """Seconds of a layer by [lane, policy, field of ``SECONDS``]."""
        found: Floats = self._table(("seconds", kind), lambda family: family.measured[kind][1])
        return found

    def end(self, name: str) -> Ints:
        """Bytes of an end, which no policy changes: by [lane, ...]."""
        found: Ints = self._table(("end", name), lambda family: family.end(name))
        return found

    def rest(self, name: str) -> Ints:
        """The most alive in an end's backward without the loss, by lane."""
        found: Ints = self._table(("rest", name), lambda family: family.rest(name))
        return found

    def weights(self, of: int | str) -> Weights:
        """What a kind of layer, or an end, has of weights, by lane."""
        key = "weights", of
        if key not in self._tables:
            self._tables[key] = Weights.joined([family.weights(of) for family in self.families])
        found: Weights = self._tables[key]
        return found

    def end_seconds(self, name: str) -> Floats:
        """Seconds of an end by [lane, field]."""
        found: Floats = self._table(("end seconds", name), lambda family: family.end_seconds(name))
        return found

    def shared(self, kinds: tuple[int, ...], *, mixed: bool) -> Ints:
        """Bytes by [lane, policy] of what a stage with these kinds holds once for all layers."""
        found: Ints = self._table(
            ("shared", kinds, mixed), lambda family: family.shared(kinds, mixed=mixed)
        )
        return found

    def waiting(self) -> Ints:
        """Bytes by lane of a tied table's gradient that waits for the look-up's."""
        found: Ints = self._table("waiting", lambda family: family.waiting())
        return found

    def passing(self, *, head: bool, interleaved: bool) -> Ints:
        """Bytes by lane of buffers of what passes through a stage."""
        found: Ints = self._table(
            ("passing", head, interleaved),
            lambda family: family.passing(head=head, interleaved=interleaved),
        )
        return found

    def handover(self, *, far: bool) -> Floats:
        """Seconds by lane of handing a micro-batch on, inside a node or out of it."""
        found: Floats = self._table(("handover", far), lambda family: family.handover(far=far))
        return found

    def tied(self, *, far: bool) -> Floats:
        """Seconds by lane of summing a tied table's gradients, inside a node or out of it."""
        found: Floats = self._table(("tied", far), lambda family: family.tied(far=far))
        return found

    def flops(self) -> Floats:
        """Model FLOPs of one sequence by lane."""
        found: Floats = self._table("flops", lambda family: family.flops())
        return found

    @property
    def predictions(self) -> int:
        """Prediction layers beside the head."""
        mtp = self.families[0].model.mtp
        return mtp.count if mtp else 0


def _key(run: Run, lane: Lane) -> Any:
    """What lanes of one family agree in."""
    workload = run.workload.model_copy(update={"micro_batch": lane.micro_batch})
    layout = lane.split.layout()
    alike = structure(run.model, layout, workload, run.framework)
    return alike, lane.rounds, lane.alone, lane.zero
