"""The recompute policies of a search: which are measured, and how a row names its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from actcalc.policy.rules import Policy, rerun_ops
from actcalc.run.staged import StagedRun

Ints = NDArray[np.int64]
NO_POLICY = 0
"""Number of the policy that re-runs nothing, in every table."""
_EVERY = (2, 3, 4, 6, 8)


class Tried(NamedTuple):
    """The policies of a cut's rows."""

    named: Ints
    """Numbers of their names."""
    policy: Ints
    """Number of the policy that holds for layers."""
    block: Ints
    """It does for so many first layers of a chunk (0: for all)."""
    nth: Ints
    """It does for every so-manieth layer of a chunk."""

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, int, int]]) -> Tried:
        """Policies one by one as columns."""
        return cls(*np.array(rows, np.int64).reshape(-1, 4).T)

    @property
    def partial(self) -> NDArray[np.bool_]:
        """Which leave some layers of a chunk alone."""
        found: NDArray[np.bool_] = (self.block > 0) | (self.nth > 1)
        return found


@dataclass(frozen=True)
class Choices:
    """Policies by number: those that treat every layer of a chunk alike come first."""

    measured: tuple[str, ...]
    """Whose layers are measured one by one; the first re-runs nothing."""
    nth: tuple[str, ...]
    """That re-run every so-manieth layer of a chunk whole."""
    others: tuple[str, ...]
    """Whose rows are evaluated each as a run of its own."""
    wanted: tuple[str, ...]
    """Names that are tried."""
    blocks: tuple[int, ...]
    """Numbers of first layers that alone re-run whole, where asked for by number."""
    every_block: bool
    """Every such number is tried."""

    @classmethod
    def of(cls, staged: StagedRun, names: Iterable[str]) -> Choices:
        """The choices that some names make; ``block`` and ``every`` are without a number."""
        wanted, nth, others, blocks, every_block = [], [], [], [], False
        for name in names:
            if name == "block":
                every_block = True
                continue
            if name == "every":
                nth += [f"every:{count}" for count in _EVERY if count <= staged.longest]
                continue
            policy = staged.policy(name)
            if policy.block is not None:
                blocks.append(policy.block)
            elif policy.every > 1 and not policy.segmented:
                nth.append(name)
            elif policy.segmented:
                others.append(name)
            else:
                wanted.append(name)
        full = ["full"] * bool(blocks or every_block or nth)
        return cls(
            measured=tuple(dict.fromkeys(["none", *wanted, *full])),
            nth=tuple(nth),
            others=tuple(others),
            wanted=(*wanted, *nth, *others),
            blocks=tuple(blocks),
            every_block=every_block,
        )

    @classmethod
    def usual(cls, staged: StagedRun) -> tuple[str, ...]:
        """Names that are tried where none are asked for: what the framework's options can say.

        Layers that re-run in segments are left out: they keep less and hold more than ``full``.
        """
        framework = staged.run.framework
        singles = [name for name in staged.usual_policies if name != "sqrt"]
        own = [*singles, *(["op"] * framework.per_op_policy)]
        pairs = _pairs(staged, singles) if framework.recomputes == "modules" else ()
        return (*own, *pairs, *_SOME_LAYERS[framework.recomputes])

    @property
    def names(self) -> tuple[str, ...]:
        """Every policy by its number."""
        return (*self.measured, *self.nth, *self.others)

    def for_chunks(self, deepest: int) -> tuple[Tried, Tried]:
        """The policies that are tried of chunks of so many layers, at most.

        Those that treat layers one by one, and the others.
        """
        names = [name for name in self.wanted if int(name.partition(":")[2] or 1) <= deepest]
        counts: Iterator[int] | tuple[int, ...] = self.blocks
        if self.every_block:
            counts = iter(range(1, deepest))
        full = self.measured.index("full") if "full" in self.measured else NO_POLICY
        found = [self._tried(name, full) for name in names if name not in self.others]
        found += [(full, full, count, 1) for count in counts if count <= deepest]
        alone = [self._tried(name, NO_POLICY) for name in names if name in self.others]
        return Tried.of(found), Tried.of(alone)

    def _tried(self, name: str, full: int) -> tuple[int, int, int, int]:
        number = self.names.index(name)
        if name in self.measured:
            return number, number, 0, 1
        return number, full, 0, int(name.partition(":")[2]) if name in self.nth else 1

    def name(self, rows: Any, row: int) -> str:
        """The policy's name of one row."""
        block = int(rows.block[row])
        return f"block:{block}" if block else self.names[int(rows.policy[row])]


_SOME_LAYERS = {"layers": (), "ops": ("every",), "modules": ("block",)}
"""Policies that re-run some layers whole, by what a framework's options can say."""


def _pairs(staged: StagedRun, names: Iterable[str]) -> Iterator[str]:
    """Two modules together, wherever that re-runs other ops than any before it."""
    policies = [staged.policy(name) for name in names]

    def again(policy: Policy) -> tuple[frozenset[str], ...]:
        return tuple(
            frozenset(op.name for op in rerun_ops(policy, kind.graph)) for kind in staged.kinds
        )

    known = {again(policy) for policy in policies}
    for one, other in combinations([policy for policy in policies if policy.modules], 2):
        name = f"{one.name}+{other.name}"
        ops = again(staged.policy(name))
        if ops not in known:
            known.add(ops)
            yield name
