"""Ways of sharding: ZeRO stages whose rows are put together alike, with the tables of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from actcalc.cost.rates import Rates
from actcalc.search.batches import Batches, Sized, columns, runnable
from actcalc.search.beside import PartRows
from actcalc.search.choices import Choices, Tried
from actcalc.search.family import Lane
from actcalc.search.lanes import Lanes
from actcalc.search.layouts import Layouts
from actcalc.search.rows import CutRows
from actcalc.search.singles import Singles
from actcalc.search.space import Cut
from actcalc.search.stages import Stage
from actcalc.specs.run import Run


class Way(NamedTuple):
    """ZeRO stages whose rows are put together alike."""

    zeros: tuple[int, ...]
    gathers: int
    """The stage under which layers are measured, where weights are gathered in units; else 0."""
    by_parts: bool
    """What is beside a layer belongs to moments."""
    rounds: str
    """Which batches it is for: of ``one`` micro-batch, of ``more``, or ``all``."""

    def here(self, cut: Cut, batches: Batches) -> NDArray[np.bool_]:
        """Which batches of a cut it is for.

        A pipeline's gathered weights and gradients are whole through the step, however many
        micro-batches there are.
        """
        here = np.ones(len(batches), bool)
        if self.gathers and cut.pp > 1:
            here &= self.rounds == "more"
        elif self.rounds != "all":
            here &= (batches.rounds == 1) == (self.rounds == "one")
        if 0 not in self.zeros:
            here &= batches.sharded > 0
        return here


def ways_of(singles: Singles, zeros: Sequence[int]) -> list[Way]:
    """How the ZeRO stages of a search are put together; what no way covers is evaluated alone."""
    known = [zero for zero in zeros if singles.arrays_know(zero)]
    units = [zero for zero in known if singles.in_units(zero)]
    whole = tuple(zero for zero in known if zero not in units)
    lasting = singles.persistent
    # each layer waits for its weights, which depends on the replicas
    fetched = [zero for zero in whole if zero == 3 or singles.run.training.offload == "weights"]
    plain = tuple(zero for zero in whole if zero not in fetched)
    more = "all" if lasting else "more"
    found = [Way(plain, 0, by_parts=False, rounds=more)] if plain else []
    found += [Way((zero,), 0, by_parts=True, rounds=more) for zero in fetched]
    if not lasting:
        found += [Way((zero,), 0, by_parts=True, rounds="one") for zero in whole if zero < 2]
    for zero in units:
        like = singles.like(zero, units)
        found += [Way((zero,), like, by_parts=True, rounds=rounds) for rounds in ("one", "more")]
    return found


class Tables:
    """What is tabulated of some splits, for every way."""

    def __init__(
        self,
        run: Run,
        rates: Rates,
        choices: Choices,
        ways: Sequence[Way],
        batches: Mapping[int, Sequence[Sized]],
        *,
        together: bool,
    ) -> None:
        """``batches`` are those on pipelines of so many stages."""
        self.ways = tuple(ways)
        self.lanes: dict[int, Lanes] = {}
        self.batches: dict[tuple[int, int], Batches] = {}
        self.layouts: dict[Way, Layouts] = {}
        for gathers in dict.fromkeys((0, *(way.gathers for way in ways))):
            own = {
                pp: [one.gathered(gathers) for one in some if one.sharded] if gathers else some
                for pp, some in batches.items()
            }
            flat = [one for some in own.values() for one in some]
            wanted = dict.fromkeys(one.lane for one in flat)
            lanes = Lanes(run, rates, choices.measured, wanted, together=together)
            known = dict.fromkeys(one.layout for one in flat if one.lane in lanes.places)
            places = {layout: at for at, layout in enumerate(known)}
            if not places:
                continue
            self.lanes[gathers] = lanes
            for pp, some in own.items():
                self.batches[gathers, pp] = columns(some, lanes, places)
            for way in self.ways:
                if way.gathers == gathers:
                    zeros = list(way.zeros)
                    self.layouts[way] = Layouts(lanes, tuple(places), zeros, together=together)

    @property
    def every_lane(self) -> list[Lane]:
        """The lanes of all ways, one after another."""
        return [lane for lanes in self.lanes.values() for lane in lanes.lanes]

    @property
    def flops(self) -> list[float]:
        """Model FLOPs of a sequence in each of them."""
        return [one for lanes in self.lanes.values() for one in lanes.flops().tolist()]

    def offset(self, gathers: int) -> int:
        """The number of the first lane of a way among all."""
        before = [key for key in self.lanes if key < gathers]
        return sum(len(self.lanes[key].lanes) for key in before)

    def rows(
        self, cut: Cut, stages: Sequence[Stage], tried: Tried
    ) -> Iterator[tuple[Way, CutRows]]:
        """The rows of a cut that some way puts together."""
        for way, layouts in self.layouts.items():
            batches = runnable(cut, self.batches[way.gathers, cut.pp])
            batches = batches.take(np.flatnonzero(way.here(cut, batches)))
            if len(batches) and len(tried.policy):
                kind = PartRows if way.by_parts else CutRows
                yield way, kind(self.lanes[way.gathers], layouts, cut, stages, batches, tried)
