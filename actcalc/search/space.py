"""What is searched: legal ways to split a model over GPUs, and to cut it into pipeline stages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from actcalc.errors import SpecError
from actcalc.specs.check import check, check_profile, divisors, uneven_split
from actcalc.specs.layout import Layout
from actcalc.specs.run import Run
from actcalc.specs.schedules import SCHEDULES

_FEWEST_TOKENS = 2048
"""Tokens of a sequence that a context-parallel rank keeps, where --cp is not given."""
_LAYERS_OF_UNEVEN = 2
"""Layers of a slice from which on an uneven cut is tried, where --pp is not given: of fewer, the
longest slices have half as much again, or more."""
_LARGEST_MICRO_BATCH = 32
"""Sequences of a micro-batch that are tried, where --micro-batch is not given."""


class Choice(NamedTuple):
    """What one degree may be: single values, or all from ``low`` to ``high``."""

    values: frozenset[int] = frozenset()
    low: int = 0
    high: int = 2**31

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, int):
            return False
        return value in self.values if self.values else self.low <= value <= self.high


ANY = Choice()


def choice_of(text: str | None, flag: str) -> Choice | None:
    """``1,2,4,8``, ``..16``, ``4..`` or ``2..8`` as a choice; None where nothing is given.

    Raises ``SpecError`` for anything else.
    """
    if text is None:
        return None
    words = text.replace(" ", "")
    span = re.fullmatch(r"(\d*)\.\.(\d*)", words)
    if span and (span[1] or span[2]):
        return Choice(low=int(span[1] or 0), high=int(span[2] or ANY.high))
    if re.fullmatch(r"\d+(,\d+)*", words):
        return Choice(frozenset(int(word) for word in words.split(",")))
    hint = f"write {flag} 1,2,4 or {flag} ..16"
    raise SpecError(f"{flag} {text!r} is no choice of numbers", hint)


@dataclass(frozen=True, kw_only=True)
class Space:
    """Which layouts of ``gpus`` devices are looked at; None leaves a degree to its defaults."""

    gpus: int
    tp: Choice | None = None
    pp: Choice | None = None
    vpp: Choice | None = None
    cp: Choice | None = None
    ep: Choice | None = None
    etp: Choice | None = None
    dp: Choice | None = None
    zero: Choice | None = None
    micro_batch: Choice | None = None
    sp: bool | None = None
    schedules: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()
    more: tuple[tuple[int, int], ...] = ()
    """Further (devices, sequences in a step) that are looked at beside ``gpus`` and the run's."""
    tp_within_node: bool = True
    """Tensor parallelism stays inside a node, where --tp does not say otherwise."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Every number of devices."""
        return tuple(sorted({self.gpus, *(gpus for gpus, _ in self.more)}))

    def divides(self, degree: int) -> bool:
        """Whether some number of devices is a multiple of ``degree``."""
        return any(gpus % degree == 0 for gpus in self.counts)


class Split(NamedTuple):
    """How one stage is split over ranks."""

    tp: int
    sp: bool
    cp: int
    ep: int
    etp: int | None

    def layout(self, **more: object) -> Layout:
        """The layout with these degrees and ``more`` fields."""
        return Layout(**self._asdict(), **more)  # type: ignore[arg-type]


class Cut(NamedTuple):
    """How a model is cut into pipeline stages."""

    pp: int
    vpp: int
    schedule: str
    layers_per_stage: tuple[int, ...]

    def fields(self) -> dict[str, object]:
        """Its fields of a layout."""
        usual = "interleaved" if self.vpp > 1 else "1f1b"
        return {
            "pp": self.pp,
            "vpp": self.vpp,
            "layers_per_stage": self.layers_per_stage,
            "schedule": None if self.schedule == usual else self.schedule,
        }


def _powers(most: int) -> Iterator[int]:
    value = 1
    while value <= most:
        yield value
        value *= 2


def _degrees(space: Space) -> list[int]:
    """Degrees that divide some number of devices, ascending."""
    return sorted({degree for gpus in space.counts for degree in divisors(gpus)})


def splits(run: Run, space: Space) -> list[Split]:
    """Every legal split of the model over ranks."""
    node = (run.device.devices_per_node if run.device else None) or 1
    found = []
    for tp in _degrees(space):
        inside = not space.tp_within_node or tp <= node
        if not (tp in space.tp if space.tp is not None else inside):
            continue
        for cp in _degrees(space):
            if not space.divides(tp * cp):
                continue
            enough = cp == 1 or run.workload.seq // cp >= _FEWEST_TOKENS
            if not (cp in space.cp if space.cp is not None else enough):
                continue
            for ep, etp in _expert_degrees(run, space, tp):
                for sp in _sequence_parallel(space, tp):
                    split = Split(tp, sp, cp, ep, etp)
                    if _legal(run, split):
                        found.append(split)
    return found


def _sequence_parallel(space: Space, tp: int) -> tuple[bool, ...]:
    if tp == 1:
        return (False,)
    return (False, True) if space.sp is None else (space.sp,)


def _expert_degrees(run: Run, space: Space, tp: int) -> Iterator[tuple[int, int | None]]:
    moe = run.model.moe
    if moe is None:
        if 1 in (space.ep or ANY):
            yield 1, None
        return
    for ep in divisors(moe.experts):
        if ep > max(space.counts) or ep not in (space.ep or ANY):
            continue
        for etp in dict.fromkeys((tp, 1)) if space.etp is None else _degrees(space):
            if etp in (space.etp or ANY):
                yield ep, etp


def _legal(run: Run, split: Split) -> bool:
    try:
        layout = split.layout()
        check(run.model, layout, replace(run.workload, global_batch=None))
        check_profile(run.framework, layout, run.workload)
    except SpecError:
        return False
    return True


def cuts(run: Run, space: Space) -> list[Cut]:
    """Every way to cut the model into stages that some schedule of the framework runs."""
    depth = run.model.depth
    given = run.layout.layers_per_stage
    found = []
    for pp in (pp for pp in _degrees(space) if pp in (space.pp or ANY)):
        if pp == 1:
            if 1 in (space.vpp or ANY) and not given:
                found.append(Cut(1, 1, "1f1b", ()))
            continue
        if not run.framework.model_parallel:
            continue
        for name in space.schedules or run.framework.schedules:
            row = SCHEDULES[name]
            if row.directions == 2 and pp % 2:
                continue
            for vpp in _interleaving(depth, pp, row.chunks):
                if vpp not in (space.vpp or ANY):
                    continue
                slices = row.slices(pp, vpp)
                short = depth < _LAYERS_OF_UNEVEN * slices
                if depth % slices and short and vpp == 1 and space.pp is None:
                    continue
                counts = given or _counts(depth, slices, vpp)
                if counts is not None and len(counts or ()) in (0, slices):
                    found.append(Cut(pp, vpp, name, counts))
    return found


def _interleaving(depth: int, pp: int, chunks: int) -> Iterable[int]:
    if chunks:
        return (1,)
    return range(2, (depth + _ENDS) // pp + 1)


_ENDS = 2
"""Slices that may have a layer less in an interleaved pipeline: those with embedding and head,
which then count for a layer (Grattafiori et al. 2024, section 3.3.2; Megatron's
account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split)."""


def _counts(depth: int, slices: int, vpp: int) -> tuple[int, ...] | None:
    """Layers of each slice: empty for an even split, None where there is none.

    Slices of different lengths are as even as can be, with less at the ends; of interleaved ones
    only the last, or the first and the last, have one layer less.
    """
    if depth % slices == 0:
        return ()
    if vpp == 1:
        if slices > depth:
            return None
        runs = (part.partition("x") for part in uneven_split(depth, slices).split(","))
        return tuple(int(count) for count, _, times in runs for _ in range(int(times or 1)))
    missing = -depth % slices
    if missing > _ENDS:
        return None
    full = (depth + missing) // slices
    first = full - 1 if missing == _ENDS else full
    return (first, *[full] * (slices - 2), full - 1)


def micro_batches(space: Space, per_replica: int) -> list[int]:
    """Sizes of a micro-batch that divide the sequences of one replica."""
    if space.micro_batch is None:
        tried: Iterable[int] = _powers(min(per_replica, _LARGEST_MICRO_BATCH))
    else:
        tried = divisors(per_replica, per_replica)
    return [
        size for size in tried if per_replica % size == 0 and size in (space.micro_batch or ANY)
    ]


def zero_stages(run: Run, space: Space) -> list[int]:
    """ZeRO stages that are tried: as asked for, else those of the framework.

    Where gradients are summed in buffers of their own (Megatron's ``main_grad``), no more than the
    states beside them are sharded, unless asked for: stages 2 and 3 are another data parallelism.
    """
    if space.zero is not None:
        return [stage for stage in range(4) if stage in space.zero]
    most = 1 if run.framework.main_gradients else 3
    return [0, *(stage for stage in run.framework.zero_stages if stage <= most)]
