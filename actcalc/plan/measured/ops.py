"""A measured layer's ops as a planning problem: which to run again, which tensors to keep.

What the trace recorded are storages: a view is its base, and an op in place gives a storage a new
content. Backward can only read a storage's last content, and only that can be kept. So ops that
touch an earlier content (the one that made it, those that read it, those that change it) are one
choice: they run again together or not at all, with whatever lies between them.

An op may be planned to run again unless it routes by order (top-k, sort) or changes a buffer of
the model. Ops that draw random numbers may: what runs them again restores the generator's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

from actcalc.errors import SpecError
from actcalc.plan.options import ARRIVAL, Costs
from actcalc.solve.problem import LIMIT, PlanLayer, PlanOp

if TYPE_CHECKING:
    from actcalc.measure.layer import MeasuredLayer

_HANDED = "(handed over)"
_INPUT = "input"
_SHARE = 100


@dataclass(frozen=True)
class MeasuredOps:
    """A measured layer with its ops: names, sizes and costs, ready for planning.

    ``costs`` are whole numbers of one op each, in order: FLOPs, and where those tie, bytes moved.
    """

    layer: MeasuredLayer
    names: tuple[str, ...]
    costs: tuple[int, ...]
    rates: Costs

    @property
    def sizes(self) -> Mapping[int, int]:
        """Bytes of each storage."""
        return {storage.id: storage.bytes for storage in self.layer.storages}

    @property
    def saved(self) -> frozenset[int]:
        """Storages that autograd keeps."""
        return frozenset(s.id for s in self.layer.storages if s.saved_by)

    @property
    def arriving(self) -> frozenset[int]:
        """Storages from outside the layer: no op of it makes them."""
        made = {i for op in self.layer.ops for i in op.outputs if i not in op.writes}
        used = {i for op in self.layer.ops for i in (*op.inputs, *op.writes)}
        return frozenset((used | self.saved | set(self.given)) - made)

    @property
    def given(self) -> tuple[int, ...]:
        """Storages that the layer is called with."""
        return next((run.inputs for run in self.layer.modules if run.path == ""), ())

    @property
    def changes_input(self) -> bool:
        """Whether an op changes in place what the layer was given."""
        return any(i in self.arriving for op in self.layer.ops for i in op.writes)

    def bytes_of(self, storages: Iterable[int]) -> int:
        """Summed bytes of storages, each once."""
        sizes = self.sizes
        return sum(sizes[i] for i in set(storages))


def measured_ops(layer: MeasuredLayer, count: int = 1) -> MeasuredOps:
    """Name and price the recorded ops; ``count`` layers must fit the planner's integers.

    Raises:
        SpecError: the file is of a version that recorded no ops, or the numbers are too large.
    """
    if not layer.has_ops:
        raise SpecError(
            f"the measured layer {layer.name!r} was saved without its ops, so nothing can be "
            "planned on it",
            hint="measure it again: actcalc measure ... --save FILE",
        )
    flops = [op.forward_flops for op in layer.ops]
    sizes = {storage.id: storage.bytes for storage in layer.storages}
    moved = [sum(sizes[i] for i in {*op.inputs, *op.outputs}) for op in layer.ops]
    most = max(moved, default=0) or 1
    shares = [-(-_SHARE * m // most) for m in moved]
    unit = gcd(*flops) or 1
    scale = 1 + count * sum(shares)
    if count * sum(flops) // unit * scale >= LIMIT // 4:
        # The tie-break is dropped where it has no room: FLOPs alone stay exact.
        scale, shares = 1, [0] * len(flops)
    costs = tuple(f // unit * scale + share for f, share in zip(flops, shares, strict=True))
    names = _names(layer)
    return MeasuredOps(layer, names, costs, Costs("flops", {}, unit, scale))


def _names(layer: MeasuredLayer) -> tuple[str, ...]:
    """``mlp.up.addmm``: the module's path and the op's name, numbered where several are equal."""
    plain = [f"{op.module}.{short(op.op)}".lstrip(".") for op in layer.ops]
    seen: dict[str, int] = {}
    found = []
    for name in plain:
        seen[name] = seen.get(name, 0) + 1
        several = plain.count(name) > 1
        found.append(f"{name}#{seen[name]}" if several else name)
    return tuple(found)


def short(op: str) -> str:
    """``addmm`` of ``aten.addmm.default``."""
    parts = op.split(".")
    return parts[1] if len(parts) > 1 else op


def plan_layer_of(ops: MeasuredOps, *, input_stored: bool = False) -> PlanLayer:
    """The layer as a planning problem, op by op.

    What arrives from outside is stored if an op saves it or one that runs again reads it;
    ``input_stored`` stores it always, as one tensor (chains of layers begin with it). Ops whose
    results backward never needs are left out: nothing makes them run again.

    Raises:
        SpecError: ``input_stored``, and the layer changes its input in place.
    """
    arriving = sorted(ops.arriving)
    groups = _together(ops, arriving)
    needed = _needed(ops, groups)
    sizes, saved = ops.sizes, ops.saved
    names = _tensor_names(ops, arriving)
    tensors: dict[str, int] = {}
    found: list[PlanOp] = []
    forbidden: set[str] = set()
    stored_saved: set[str] = set()
    for group in groups:
        if not needed & set(group.makes):
            continue
        made = [i for i in group.makes if i in needed]
        if group.arrives and input_stored:
            _refuse_changed_input(ops, group)
            continue
        tensors |= {names[i]: sizes[i] for i in made}
        stored_saved |= {names[i] for i in made if i in saved}
        label = " + ".join(ops.names[m] for m in group.members) or f"{ARRIVAL} {names[made[0]]}"
        reads = dict.fromkeys(
            _INPUT if input_stored and i in ops.arriving else names[i] for i in group.reads
        )
        found.append(
            PlanOp(
                label,
                tuple(reads) or (_HANDED,) * group.arrives,
                tuple(names[i] for i in made),
                sum(ops.costs[m] for m in group.members),
            )
        )
        if group.arrives or not all(ops.layer.ops[m].rerunnable for m in group.members):
            forbidden.add(label)
    start = _INPUT if input_stored else _HANDED
    tensors[start] = ops.bytes_of(arriving) if input_stored else 0
    if input_stored and ops.arriving & saved:
        stored_saved.add(start)
    return PlanLayer(
        input=start,
        tensors=tensors,
        saved_for_backward=frozenset(stored_saved),
        ops=tuple(found),
        forbid_recompute=frozenset(forbidden),
        name=ops.layer.name,
        grain=ops.rates.scale,
    )


def _refuse_changed_input(ops: MeasuredOps, group: _Group) -> None:
    """Raise ``SpecError`` where ops of the layer change what arrives."""
    if group.members:
        raise SpecError(
            f"the measured layer {ops.layer.name!r} changes its input in place: layers cannot be "
            "re-run from it",
            hint="use --method optimal",
        )


@dataclass
class _Group:
    # Ops that run again together; ``reads`` and ``makes`` are storages' last contents.
    members: tuple[int, ...]
    arrives: bool
    reads: tuple[int, ...]
    makes: tuple[int, ...]


def _together(ops: MeasuredOps, arriving: Sequence[int]) -> list[_Group]:
    """The ops, those that touch a storage's earlier content merged, in an order that runs."""
    runs = ops.layer.ops
    last: dict[int, int] = dict.fromkeys(arriving, 0)
    for op in runs:
        for i in op.outputs:
            last[i] = last.get(i, -1) + 1
    now: dict[int, int] = dict.fromkeys(arriving, 0)
    # Nodes: 0 .. n-1 are ops, n + k is the arrival of the k-th storage from outside.
    n = len(runs)
    maker = {i: n + k for k, i in enumerate(arriving)}
    root = list(range(n + len(arriving)))

    def find(node: int) -> int:
        while root[node] != node:
            node = root[node]
        return node

    feeds: list[set[int]] = [set() for _ in root]
    for index, op in enumerate(runs):
        for i in op.inputs:
            if i not in maker:
                continue
            feeds[index].add(maker[i])
            if now[i] < last[i]:
                root[find(index)] = find(maker[i])
        for i in op.outputs:
            if i in maker and i in now and now[i] < last[i]:
                # A new content of a storage that is there: read or not, one choice with its maker.
                root[find(index)] = find(maker[i])
            now[i] = now.get(i, -1) + 1
            maker[i] = index
    _close(root, find, feeds)
    by_root: dict[int, list[int]] = {}
    for node in (*range(n, len(root)), *range(n)):
        by_root.setdefault(find(node), []).append(node)
    homes = {i: find(node) for i, node in maker.items()}
    groups = {
        key: _Group(
            members=tuple(node for node in nodes if node < n),
            arrives=any(node >= n for node in nodes),
            reads=tuple(
                dict.fromkeys(
                    i for node in nodes if node < n for i in runs[node].inputs if homes[i] != key
                )
            ),
            makes=tuple(i for i, home in homes.items() if home == key),
        )
        for key, nodes in by_root.items()
    }
    return list(groups.values())


def _close(root: list[int], find: Callable[[int], int], feeds: list[set[int]]) -> None:
    """Merge what lies between two ops of one group, until no group waits for itself."""
    while True:
        nodes = {find(node) for node in range(len(root))}
        before: dict[int, set[int]] = {node: set() for node in nodes}
        for node, sources in enumerate(feeds):
            before[find(node)] |= {find(source) for source in sources} - {find(node)}
        cycle = _cycle(before)
        if cycle is None:
            return
        for node in cycle[1:]:
            root[find(node)] = find(cycle[0])


def _cycle(before: Mapping[int, set[int]]) -> list[int] | None:
    """Groups that wait for each other, or None."""
    left = {node: set(sources) for node, sources in before.items()}
    while True:
        ready = [node for node, sources in left.items() if not sources & left.keys()]
        if not ready:
            break
        for node in ready:
            del left[node]
    if not left:
        return None
    path = [next(iter(left))]
    while True:
        following = next(iter(left[path[-1]] & left.keys()))
        if following in path:
            return path[path.index(following) :]
        path.append(following)


def _needed(ops: MeasuredOps, groups: Sequence[_Group]) -> set[int]:
    """Storages that are saved, or that making a saved one again reads."""
    needed = set(ops.saved)
    maker = {i: group for group in groups for i in group.makes}
    waiting = list(needed)
    while waiting:
        for i in maker[waiting.pop()].reads:
            if i not in needed:
                needed.add(i)
                waiting.append(i)
    return needed


def _tensor_names(ops: MeasuredOps, arriving: Sequence[int]) -> dict[int, str]:
    """A name for each storage: ``input``, or the op that made it and which of its outputs it is."""
    names: dict[int, str] = {}
    for number, i in enumerate(arriving, 1):
        names[i] = _INPUT if len(arriving) == 1 else f"{_INPUT} {number}"
    for name, op in zip(ops.names, ops.layer.ops, strict=True):
        fresh = [i for i in op.outputs if i not in names]
        for number, i in enumerate(fresh):
            names[i] = name if number == 0 else f"{name}:{number}"
    return names
