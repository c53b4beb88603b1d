"""A planning problem: layers as graphs of ops, a stack of layers, and a memory budget.

Every size is an exact integer of bytes per rank and micro-batch; every cost an exact integer in
one unit chosen by the caller (nanoseconds, FLOPs, ...). Nothing here solves anything: this module
says what a valid problem is.

Semantics of one layer (a set R of re-run ops, a set KEEP of tensors stored from forward to
backward). The choice is executable iff

1. every tensor in ``saved_for_backward`` is kept, or produced by an op in R;
2. every input of an op in R is the layer input, kept, or produced by an op in R;
3. R has no op of ``forbid_recompute``.

``K`` = bytes stored = layer input + kept tensors; ``W`` = working bytes = the saved tensors that
are not kept and so exist again while the layer runs backward. These are the rules of
``torch.utils.checkpoint`` read op by op (Chen et al. 2016, "Training Deep Nets with Sublinear
Memory Cost"; Korthikanti et al. 2022, section 5).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, get_args

from actcalc.errors import SpecError

PeakModel = Literal["stored", "stored+working", "timeline", "stored+working+segments"]
"""How the peak is counted; see :mod:`actcalc.solve.stack`."""

PEAK_MODELS: tuple[PeakModel, ...] = get_args(PeakModel)

LIMIT = 2**60
"""No sum of sizes or of costs may reach this: solvers hold them in 64-bit integers."""

MAX_LAYERS = 100_000
"""Longest stack accepted."""

_IGNORED = ("id", "description", "oracle")
_IGNORED_PREFIXES = ("optimal_cost", "one_optimal_")
_PROBLEM_KEYS = ("layer_types", "stack", "inflight", "const_bytes", "budget_bytes", "peak_model")
_LAYER_KEYS = ("input", "tensors", "saved_for_backward", "ops")


@dataclass(frozen=True, slots=True)
class PlanOp:
    """One op of a layer: the names of the tensors it reads and makes, and the cost of a re-run."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    cost: int


@dataclass(frozen=True)
class PlanLayer:
    """One kind of layer: a DAG of ops over named tensors.

    ``tensors`` maps names to bytes. Each tensor is the layer ``input`` or the output of exactly
    one op. The input is always stored, and counted once. Tensors outside ``saved_for_backward``
    may be kept all the same when that makes a re-run cheaper. Costs are minimised in whole
    ``grain``s; what is left over only chooses between plans found on the way (FLOPs with bytes
    moved as a tie-break, for one); over a whole stack that must stay below one grain.

    Raises:
        SpecError: the graph is not a DAG of known tensors with one producer each, or a number is
            not a whole number in range.
    """

    input: str
    tensors: Mapping[str, int]
    saved_for_backward: frozenset[str]
    ops: tuple[PlanOp, ...]
    forbid_recompute: frozenset[str] = frozenset()
    name: str = field(default="layer", compare=False)
    grain: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", MappingProxyType(dict(self.tensors)))
        object.__setattr__(self, "ops", tuple(self.ops))
        object.__setattr__(self, "saved_for_backward", frozenset(self.saved_for_backward))
        object.__setattr__(self, "forbid_recompute", frozenset(self.forbid_recompute))
        check_int(self.grain, f"grain of layer type {self.name!r}", low=1)
        _check_layer(self)

    @cached_property
    def _hash(self) -> int:
        tensors = tuple(sorted(self.tensors.items()))
        saved, forbidden = self.saved_for_backward, self.forbid_recompute
        return hash((self.input, tensors, saved, self.ops, forbidden))

    def __hash__(self) -> int:
        return self._hash

    @property
    def input_bytes(self) -> int:
        """Bytes of the layer input."""
        return self.tensors[self.input]

    @cached_property
    def total_saved_bytes(self) -> int:
        """Bytes stored without any re-run: every saved tensor and the layer input, once each."""
        return sum(self.tensors[t] for t in self.saved_for_backward | {self.input})

    @cached_property
    def producer(self) -> Mapping[str, int]:
        """Index in ``ops`` of the op that makes each tensor (the layer input has none)."""
        return MappingProxyType({t: i for i, op in enumerate(self.ops) for t in op.outputs})

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Indices of ``ops`` in a topological order, the given order where that is one."""
        return _topological_order(self)


@dataclass(frozen=True)
class Problem:
    """Layer kinds, the stack in forward order as runs of one kind, and the memory to fit in.

    ``inflight`` is how many micro-batches are stored at once; ``const_bytes`` is everything else
    in memory, or ``beside`` (a :class:`actcalc.solve.beside.Beside`) tells moments apart.
    ``max_segment`` is the longest chain of layers that may be re-run as one, used by the peak model
    ``stored+working+segments``.

    Raises:
        SpecError: a number is not a whole number in range, the stack is empty or names an unknown
            layer kind, or the peak model is unknown.
    """

    layer_types: Mapping[str, PlanLayer]
    stack: tuple[tuple[str, int], ...]
    inflight: int
    const_bytes: int
    budget_bytes: int
    peak_model: PeakModel
    max_segment: int = 1
    beside: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_types", MappingProxyType(dict(self.layer_types)))
        object.__setattr__(self, "stack", tuple((k, n) for k, n in self.stack))
        check_int(self.inflight, "inflight", low=1, high=1_000_000)
        check_int(self.const_bytes, "const_bytes")
        check_int(self.budget_bytes, "budget_bytes", low=1)
        check_int(self.max_segment, "max_segment", low=1, high=MAX_LAYERS)
        check_peak_model(self.peak_model)
        if not self.stack:
            raise SpecError("stack is empty", hint="list at least one [layer_type, count]")
        for kind, count in self.stack:
            if kind not in self.layer_types:
                raise SpecError(
                    f"stack names an unknown layer type {kind!r}",
                    hint=f"known layer types: {_listing(self.layer_types)}",
                )
            check_int(count, f"count of {kind!r} in stack", low=1, high=MAX_LAYERS)
        layers = sum(n for _, n in self.stack)
        if layers > MAX_LAYERS:
            raise SpecError(
                f"stack has {layers} layers, more than {MAX_LAYERS}", hint="plan fewer layers"
            )
        kinds = self.layer_types
        held = sum(n * sum(kinds[k].tensors.values()) for k, n in self.stack)
        cost = sum(n * sum(op.cost for op in kinds[k].ops) for k, n in self.stack)
        for value, what in ((held * self.inflight, "bytes in flight"), (cost, "re-run cost")):
            if value >= LIMIT:
                raise SpecError(
                    f"the stack's {what} add up to {value}, not below 2**60",
                    hint="check the sizes, or state costs in a coarser unit",
                )


def parse_problem(data: Mapping[str, Any]) -> Problem:
    """Read one planning problem from plain data (the JSON object of an instance).

    Keys: ``layer_types`` {name: {``input``, ``tensors`` {name: bytes}, ``saved_for_backward``
    [names], ``ops`` [{``name``, ``inputs``, ``outputs``, ``cost``}], optional
    ``forbid_recompute`` [op names]}}, ``stack`` [[layer_type, count], ...] in forward order,
    ``inflight``, ``const_bytes``, ``budget_bytes``, ``peak_model``, and ``max_segment`` for the
    model with segments. ``id``, ``description``, ``oracle``, ``optimal_cost*`` and
    ``one_optimal_*`` are ignored. Nothing is executed.

    Raises:
        SpecError: anything missing, unknown, of the wrong type, out of range or inconsistent.
    """
    top = _mapping(data, "a planning problem")
    known = (*_PROBLEM_KEYS, "max_segment", *_IGNORED)
    unknown = [k for k in top if k not in known and not k.startswith(_IGNORED_PREFIXES)]
    _check_keys(top, _PROBLEM_KEYS, unknown, "planning problem")
    kinds = _mapping(top["layer_types"], "layer_types")
    if not kinds:
        raise SpecError("layer_types is empty", hint="describe at least one layer type")
    model = check_peak_model(top["peak_model"])
    if model == "stored+working+segments" and "max_segment" not in top:
        raise SpecError(
            "peak_model 'stored+working+segments' without max_segment",
            hint="give max_segment: the longest chain of layers to re-run as one",
        )
    return Problem(
        layer_types={k: _parse_layer(k, v) for k, v in kinds.items()},
        stack=tuple(_parse_run(run) for run in _sequence(top["stack"], "stack")),
        inflight=check_int(top["inflight"], "inflight", low=1, high=1_000_000),
        const_bytes=check_int(top["const_bytes"], "const_bytes"),
        budget_bytes=check_int(top["budget_bytes"], "budget_bytes", low=1),
        peak_model=model,
        max_segment=check_int(top.get("max_segment", 1), "max_segment", low=1, high=MAX_LAYERS),
    )


def check_int(value: object, what: str, *, low: int = 0, high: int = LIMIT - 1) -> int:
    """``value`` if it is a whole number in [low, high].

    Raises:
        SpecError: it is a bool, a float, a string or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise SpecError(
            f"{what} is {_shown(value)}, not an integer", hint="give a whole number, no unit"
        )
    if not low <= value <= high:
        raise SpecError(f"{what} is {value}", hint=f"give a whole number from {low} to {high}")
    return value


def check_peak_model(value: object) -> PeakModel:
    """``value`` if it names a peak model.

    Raises:
        SpecError: it does not.
    """
    for model in PEAK_MODELS:
        if value == model:
            return model
    raise SpecError(f"unknown peak_model {_shown(value)}", hint=f"one of {_listing(PEAK_MODELS)}")


def _parse_run(run: object) -> tuple[str, int]:
    pair = _sequence(run, "an entry of stack")
    if len(pair) != 2:
        raise SpecError(f"an entry of stack is {_shown(run)}", hint="write [layer_type, count]")
    return _name(pair[0], "layer type in stack"), check_int(
        pair[1], f"count of {pair[0]!r} in stack", low=1, high=MAX_LAYERS
    )


def _parse_layer(kind: object, value: object) -> PlanLayer:
    name = _name(kind, "layer type")
    where = f"layer type {name!r}"
    data = _mapping(value, where)
    _check_keys(
        data, _LAYER_KEYS, [k for k in data if k not in (*_LAYER_KEYS, "forbid_recompute")], where
    )
    forbidden = data.get("forbid_recompute", ())
    return PlanLayer(
        input=_name(data["input"], f"input of {where}"),
        tensors=_mapping(data["tensors"], f"tensors of {where}"),
        saved_for_backward=frozenset(
            _names(data["saved_for_backward"], f"saved_for_backward of {where}")
        ),
        ops=tuple(_parse_op(op, where) for op in _sequence(data["ops"], f"ops of {where}")),
        forbid_recompute=frozenset(_names(forbidden, f"forbid_recompute of {where}")),
        name=name,
    )


def _parse_op(value: object, where: str) -> PlanOp:
    data = _mapping(value, f"an op of {where}")
    keys = ("name", "inputs", "outputs", "cost")
    _check_keys(data, keys, [k for k in data if k not in keys], f"op of {where}")
    name = _name(data["name"], f"name of an op of {where}")
    return PlanOp(
        name=name,
        inputs=_names(data["inputs"], f"inputs of op {name!r} of {where}", unique=False),
        outputs=_names(data["outputs"], f"outputs of op {name!r} of {where}"),
        cost=check_int(data["cost"], f"cost of op {name!r} of {where}"),
    )


def _check_ops(layer: PlanLayer, where: str) -> tuple[Mapping[str, str], frozenset[str]]:
    """Which op makes each tensor, and the names of all ops."""
    made: dict[str, str] = {}
    names: set[str] = set()
    for op in layer.ops:
        check_int(op.cost, f"cost of op {op.name!r} of {where}")
        if op.name in names:
            raise SpecError(f"two ops of {where} are called {op.name!r}", hint="rename one of them")
        names.add(op.name)
        for tensor in (*op.inputs, *op.outputs):
            if tensor not in layer.tensors:
                raise SpecError(
                    f"op {op.name!r} of {where} uses an unknown tensor {tensor!r}",
                    hint="give its size in tensors",
                )
        for tensor in op.outputs:
            if tensor == layer.input:
                raise SpecError(
                    f"op {op.name!r} of {where} produces the layer input {tensor!r}",
                    hint="the layer input comes from outside; rename the output",
                )
            if tensor in made:
                raise SpecError(
                    f"tensor {tensor!r} of {where} has two producers: "
                    f"{made[tensor]!r} and {op.name!r}",
                    hint="each tensor needs exactly one producer",
                )
            made[tensor] = op.name
    return made, frozenset(names)


def _check_layer(layer: PlanLayer) -> None:
    where = f"layer type {layer.name!r}"
    for tensor, size in layer.tensors.items():
        check_int(size, f"size of tensor {tensor!r} of {where}")
    if sum(layer.tensors.values()) >= LIMIT:
        raise SpecError(f"tensors of {where} add up to 2**60 bytes or more", hint="check the sizes")
    if layer.input not in layer.tensors:
        raise SpecError(
            f"input {layer.input!r} of {where} is not among its tensors",
            hint=f"tensors: {_listing(layer.tensors)}",
        )
    made, names = _check_ops(layer, where)
    orphans = [t for t in layer.tensors if t != layer.input and t not in made]
    if orphans:
        raise SpecError(
            f"no op of {where} produces {_listing(orphans)}",
            hint="add the producer, or remove the tensor",
        )
    for tensor in sorted(layer.saved_for_backward):
        if tensor not in layer.tensors:
            raise SpecError(
                f"saved_for_backward of {where} names an unknown tensor {tensor!r}",
                hint="give its size in tensors",
            )
    for name in sorted(layer.forbid_recompute):
        if name not in names:
            raise SpecError(
                f"forbid_recompute of {where} names an unknown op {name!r}",
                hint=f"ops: {_listing(names)}",
            )
    if sum(op.cost for op in layer.ops) >= LIMIT:
        raise SpecError(
            f"costs of {where} add up to 2**60 or more", hint="state costs in a coarser unit"
        )
    if len(layer.order) < len(layer.ops):
        stuck = sorted({op.name for op in layer.ops} - {layer.ops[i].name for i in layer.order})
        raise SpecError(
            f"the ops of {where} form a cycle among {_listing(stuck)}",
            hint="a layer must be a directed acyclic graph",
        )


def _topological_order(layer: PlanLayer) -> tuple[int, ...]:
    ready = {layer.input}
    waiting = list(range(len(layer.ops)))
    order: list[int] = []
    while waiting:
        later: list[int] = []
        for i in waiting:
            if all(t in ready for t in layer.ops[i].inputs):
                order.append(i)
                ready.update(layer.ops[i].outputs)
            else:
                later.append(i)
        if len(later) == len(waiting):
            break
        waiting = later
    return tuple(order)


def _check_keys(
    data: Mapping[str, Any], needed: Sequence[str], extra: list[str], what: str
) -> None:
    missing = [k for k in needed if k not in data]
    if missing:
        raise SpecError(f"{what} lacks {_listing(missing)}", hint=f"it needs {_listing(needed)}")
    if extra:
        raise SpecError(f"{what} has unknown keys {_listing(extra)}", hint="remove or rename them")


def _mapping(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise SpecError(f"{what} is {_shown(value)}, not a mapping", hint="write {name: value}")
    bad = [k for k in value if not isinstance(k, str)]
    if bad:
        raise SpecError(f"{what} has the key {_shown(bad[0])}, not a string", hint="quote it")
    return value


def _sequence(value: object, what: str) -> Sequence[Any]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise SpecError(f"{what} is {_shown(value)}, not a list", hint="write [item, ...]")
    return value


def _name(value: object, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise SpecError(f"{what} is {_shown(value)}, not a name", hint="give a non-empty string")
    return value


def _names(value: object, what: str, *, unique: bool = True) -> tuple[str, ...]:
    names = tuple(_name(v, f"an entry of {what}") for v in _sequence(value, what))
    if unique and len(set(names)) < len(names):
        seen: set[str] = set()
        twice = next(n for n in names if n in seen or seen.add(n))  # type: ignore[func-returns-value]
        raise SpecError(f"{what} lists {twice!r} twice", hint="list it once")
    return names


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _listing(names: Iterable[str]) -> str:
    some = sorted(names)
    return ", ".join(repr(n) for n in some[:12]) + (", ..." if len(some) > 12 else "")
