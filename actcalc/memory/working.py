"""What lives while one layer runs forward, and while its backward runs.

Ops run one after another; a tensor lives from the op that makes it to its last reader, or, if it
is stored, until its backward. Backward walks the ops in reverse: an op needs what it saved and
the gradients of its outputs, and makes the gradients of its inputs. Gradients pass through views
and additions without a copy (autograd hands the same tensor on). A re-run module first makes its
tensors again. Summing what is alive at every op gives the highest moment, whatever its cause.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from actcalc.layers.adapters import low_rank
from actcalc.layers.core.algebra import most
from actcalc.layers.core.either import exact, greatest, single
from actcalc.layers.core.graph import Collective, DType, Graph, Op, Tensor, Weight
from actcalc.layers.model import ModelGraph
from actcalc.memory.gradients import NO_GRADIENTS, Gradients, OfTensors, OfWeights
from actcalc.memory.known import Alive, Beside, Known
from actcalc.policy.offload import Away
from actcalc.policy.outcome import LayerOutcome

_DQ_BYTES = 4  # flash attention sums the gradient of q in fp32 (flash_api.cpp mha_bwd, dq_accum)


class Working(NamedTuple):
    """The most bytes alive at once in one layer, on one rank for one micro-batch.

    Both include what the layer stores; ``backward`` also what its re-run makes again. The op names
    say where the highest moment is.
    """

    forward: int
    forward_at: str
    backward: int
    backward_at: str
    backward_rest: int
    """The same of backward without the loss."""


class Options(NamedTuple):
    """What the sizes of temporaries depend on beside the graph."""

    gradient_fusion: bool
    gathers_to_buffer: frozenset[str]
    """Names of ops whose gathered input goes to a buffer that stays (counted elsewhere)."""
    loss_compiled: bool
    """Megatron's fused cross-entropy runs as compiled functions."""
    loss_in_place: bool
    """The cross-entropy makes no fp32 tensor beside the one it keeps."""
    gradients: Gradients = NO_GRADIENTS
    """How weight gradients come to be, where autograd makes them."""
    dequantises: frozenset[str] = frozenset()
    """Names of ops whose 4- or 8-bit weight is made whole for its product, either way
    (bitsandbytes autograd/_functions.py MatMul4Bit)."""
    op_by_op: bool = False
    """Layers are plain PyTorch modules: autograd sums gradients and takes over those of weights."""


class Instant(NamedTuple):
    """One moment of a layer's pass: what is alive, of which the two collections are not copied."""

    at: str
    """The op at work."""
    total: int
    """Bytes of all of it."""
    alive: Collection[str]
    """Names of the layer's tensors."""
    gradients: Mapping[int, int]
    """Bytes of gradients by storage."""
    inside: int
    """Bytes of temporaries, gradients of weights among them."""
    kept: int = 0
    """Bytes of those gradients that stay, of ``inside``."""
    loss: bool = False
    """The loss is at work."""


def _whole(total: int, at: str) -> Instant:
    return Instant(at, total, (), {}, 0)


def _highest(moments: Iterable[Instant]) -> tuple[int, str]:
    """The most alive at any moment, and where: at the first of equals, of one run's numbers."""
    best, where = 0, ""
    for moment in moments:
        if not (single(moment.total) and single(best)):
            best = most(best, moment.total)
        elif moment.total > best:
            best, where = moment.total, moment.at
    return best, where


class LayerWalk:
    """One layer under a policy, op by op, forward and backward."""

    def __init__(
        self,
        model: ModelGraph,
        outcome: LayerOutcome,
        options: Options,
        away: Away | None,
        ahead: bool,
        known: Known,
    ) -> None:
        self.graph: Graph = outcome.graph
        self.away = away
        self.ahead = ahead
        self.options = options
        self.sizes = model.sizes
        self.stored = set(outcome.stored)
        self.again = {op.name for op in outcome.rerun}
        self.at_once = outcome.at_once
        self.restored = set(outcome.restored)
        self.act = model.context.act.itemsize
        self.known = known

    def size(self, name: str) -> int:
        """Bytes of a tensor."""
        return self.known.sizes[name]

    def inside(self, op: Op, backward: bool) -> int:
        """Bytes of an op's temporaries."""
        key = (op.name, backward)
        if key not in self.known.inside:
            self.known.inside[key] = self._inside(op, backward)
        return self.known.inside[key]

    def _inside(self, op: Op, backward: bool) -> int:
        """Temporaries inside one op: gathered and unreduced buffers, a weight gradient."""
        extra: int = self._loss(op, backward) if op.kind == "loss" else 0
        own = exact((op.backward_scratch if backward else op.forward_scratch).value(self.sizes))
        if op.name in self.options.dequantises:
            each = (exact(one.at_once.value(self.sizes)) for one in op.own_weights)
            made = greatest(each) * self.act
            own = most(own, made + (self._after_adapter(op) if backward else 0))
        extra = extra + own
        for comm in op.backward_comm if backward else op.comm:
            if comm.collective in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER):
                if (
                    comm.collective is Collective.ALL_GATHER
                    and op.name in self.options.gathers_to_buffer
                ):
                    continue
                moves = op.kind in ("gather", "scatter") and self.options.op_by_op
                if moves or (
                    not backward
                    and comm.collective is Collective.ALL_GATHER
                    and op.kind == "gather"
                ):
                    continue  # either side is the op's input or output
                extra += exact(comm.bytes.value(self.sizes))
        if backward:
            if op.kernel.startswith("flash") or (op.kind == "core" and "lse" in op.outputs):
                q = op.inputs[0]
                extra += self.size(op.outputs[0]) * _DQ_BYTES // self.act if q else 0
            options = self.options
            trained = [weight for weight in op.weights if not weight.frozen]
            separate = not options.gradient_fusion and not options.op_by_op
            if separate and trained and op.kind != "embedding":
                extra += greatest(self._counts(trained)) * self.act
            if op.kind == "embedding" and not options.op_by_op:
                extra += sum(self._counts(trained)) * self.act
        return extra

    def _after_adapter(self, op: Op) -> int:
        """Bytes that an op's product has more in backward as its adapter ran before: the gradient
        of its input waits for the product's, and what the adapter kept is gone."""
        if not any(weight.added == "adapter" for weight in op.weights):
            return 0
        kept = low_rank(op.name)
        return self.size(op.inputs[0]) - sum(
            self.size(name) for name in op.saves if name.startswith(kept)
        )

    def _counts(self, weights: Iterable[Weight]) -> Iterator[int]:
        return (exact(weight.parameters.value(self.sizes)) for weight in weights)

    def _loss(self, op: Op, backward: bool) -> int:
        """Temporaries of a cross-entropy made of single torch ops.

        Where the model casts the logits to fp32, the cast stays while log_softmax makes its output.
        Backward holds the gradients of nll_loss and of log_softmax, in the type in which that ran
        (ATen LossNLL.cpp, SoftMax.cpp). Megatron's works in place on the tensor it keeps
        (cross_entropy.py), and so does Transformer Engine's (triton/cross_entropy.py).
        """
        logits = self.graph.tensors[op.inputs[0]]
        count: int = exact(logits.elements.value(self.sizes))
        if op.kernel == "te":
            # the gradient overwrites the logits that the op kept
            return -logits.dtype.itemsize * count if backward else 0
        if self.options.loss_in_place:
            if logits.dtype is DType.FP32:
                return -4 * count  # .float() is no copy: softmax and gradient live in the logits
            # fused_cross_entropy.py: compiled functions return new tensors, so that the fp32
            # logits and their exponentials are two
            return 4 * count if self.options.loss_compiled and not backward else 0
        wide = self._log_probs(op).dtype is DType.FP32
        if op.kernel == "parallel":
            # distributed/tensor/parallel/loss.py: forward makes the shifted logits and their
            # exponentials beside the cast; backward adds the exponential of what was kept to a
            # gradient of zeros, and multiplies: four tensors in fp32
            return (12 - logits.dtype.itemsize if backward else 4 + 4) * count
        if backward:
            # that of log_softmax is cast to the logits' type once what it was made of is gone
            return (8 - logits.dtype.itemsize if wide else logits.dtype.itemsize) * count
        return 4 * count if wide and logits.dtype is not DType.FP32 else 0

    def _log_probs(self, op: Op) -> Tensor:
        """What log_softmax makes: the largest that the cross-entropy keeps first."""
        return self.graph.tensors[op.outputs[0]]

    def forward(self, kept: set[str]) -> tuple[int, str]:
        """The highest moment of a forward pass that keeps ``kept``."""
        return _highest(self.forward_moments(kept))

    def forward_moments(self, kept: set[str], cached: Iterable[str] = ()) -> Iterator[Instant]:
        """The moments of a forward pass that keeps ``kept``; ``cached`` is there already."""
        graph = self.graph
        alive = Alive(self.known.own, (graph.input, *cached))
        yield Instant("", alive.total, alive.names, {}, 0)
        for op, ends in zip(graph.ops, self.known.ends, strict=True):
            alive.add(op.outputs)
            inside = self.inside(op, backward=False)
            yield Instant(op.name, alive.total + inside, alive.names, {}, inside)
            alive.drop(ends - kept)

    def backward(self, *, whole: bool) -> tuple[int, str, int]:
        """The highest moment of the backward pass, re-runs included, and that without the loss."""
        rest, loss = list[Instant](), list[Instant]()
        for moment in self.backward_moments(whole=whole):
            (loss if moment.loss else rest).append(moment)
        best, where = _highest(rest)
        if not loss:
            return best, where, best
        return *_highest([_whole(best, where), *loss]), best

    def backward_moments(self, *, whole: bool) -> Iterator[Instant]:
        """The moments of the backward pass, re-runs included, in order.

        A layer re-run ``whole``, or under one checkpoint, makes all it saved before its backward
        begins.
        """
        graph, known = self.graph, self.known
        trip = _Trip(self)
        alive = Alive(known.own, self.stored - trip.late)
        pending = set(self.restored)
        beside = self.beside()
        savers = dict(known.savers)
        if whole or self.at_once:
            cached = () if whole else self.stored
            gradient, sizes = beside[0].before, beside[0].before_sizes
            lacking = 0 if graph.input in self.stored else self.size(graph.input)
            for moment in self.forward_moments(set(graph.saved), cached):
                total = moment.total + gradient + lacking
                yield Instant("re-run", total, moment.alive, sizes, moment.inside + lacking)
            alive.add(pending)
            alive.drop(set(cached) - set(graph.saved))
            pending = set()
        groups = _Groups(graph, self.again)
        for op, own in zip(reversed(graph.ops), beside, strict=True):
            saves = known.saves[op.name]
            alive.add(trip.late & saves)
            members = groups.asked(op, known, saves & pending) if pending else ()
            if members:
                made = {name for o in members for name in (*o.outputs, *o.saves)} & pending
                alive.add(trip.late & {name for o in members for name in o.inputs})
                alive.add(made)
                pending -= made
                if made:
                    inside = (
                        trip.more + own.kept + greatest(self._passing(o, made) for o in members)
                    )
                    now = alive.total + own.before + inside
                    yield Instant(
                        members[0].name, now, alive.names, own.before_sizes, inside, own.kept
                    )
            inside = trip.more + own.inside
            now = alive.total + own.gradients + inside
            loss = op.kind == "loss"
            yield Instant(op.name, now, alive.names, own.sizes, inside, own.kept, loss)
            alive.drop(trip.passed(op))
            for name in saves:
                savers[name] -= 1
                if not savers[name]:
                    alive.drop((name,))
            inside = trip.more + own.summing
            now = alive.total + own.after + inside
            yield Instant(op.name, now, alive.names, own.after_sizes, inside, own.kept_after)

    def beside(self) -> Sequence[Beside]:
        """What each op's backward has alive beside tensors, from the last op on."""
        if not self.known.beside:
            options, known = self.options, self.known
            gradients = OfTensors(known, op_by_op=options.op_by_op)
            weights = OfWeights(known, options.gradients, self.act, op_by_op=options.op_by_op)
            gradients.add(self.graph.output)
            for op in reversed(self.graph.ops):
                before, kept = gradients.seen(), weights.kept
                added = gradients.pass_on(op)
                own, summing = weights.pass_on(op)
                inside = self.inside(op, backward=True) + added + own
                at = gradients.seen()
                gradients.drop(op.outputs)
                self.known.beside.append(
                    Beside(*before, kept, *at, inside, *gradients.seen(), summing, weights.kept)
                )
        return self.known.beside

    def _passing(self, op: Op, made: set[str]) -> int:
        """Bytes of what a re-run op makes that backward does not ask for."""
        own = self.known.own
        return sum(own[name] for name in self.known.outputs[op.name] if name not in made)


class _Trip:
    """Offloaded tensors on their way back, in bytes beside those that the layer itself counts.

    Brought back ahead, all a layer needs is there when its backward begins: every op has a copy
    of its own of what it saved, and each module that has ended lets a group of the layer before
    come. Otherwise a tensor comes when an op asks for it, and goes with that op.
    """

    def __init__(self, layer: LayerWalk) -> None:
        self.layer = layer
        away = layer.away
        self.late = set(away.leaving) if away and not layer.ahead else set[str]()
        self.more = 0
        self.copies: dict[str, int] = {}
        self.first = frozenset[str]()
        self.coming: list[int] = []
        if away is None or not layer.ahead:
            return
        seen: set[str] = set()
        order = {op.name: number for number, op in enumerate(layer.graph.ops)}
        pairs = sorted(
            (pair for group in away.groups for pair in group.copies),
            key=lambda pair: order[pair[0]],
        )
        for op, name in pairs:
            # The earliest op's copy stands for the tensor itself, which is counted until then.
            if op not in layer.again and (name in seen or name not in away.leaving):
                self.copies[op] = self.copies.get(op, 0) + layer.size(name)
            seen.add(name)
        self.more = sum(self.copies.values())
        self.first = frozenset(group.first for group in away.groups)
        self.coming = [sum(layer.size(name) for _, name in group.copies) for group in away.groups]

    def passed(self, op: Op) -> set[str]:
        """What goes with ``op``, whose backward has ended."""
        self.more -= self.copies.get(op.name, 0)
        if op.name in self.first:
            self.more += self.coming.pop()
        return set() if op.name in self.layer.again else self.late.intersection(op.saves)


class _Groups:
    """Consecutive re-run ops: each run of them is one checkpointed module."""

    def __init__(self, graph: Graph, again: set[str]) -> None:
        self.members: list[list[Op]] = []
        self.number: dict[str, int] = {}
        inside = False
        for op in graph.ops:
            if op.name in again:
                if not inside:
                    self.members.append([])
                self.members[-1].append(op)
                self.number[op.name] = len(self.members) - 1
            inside = op.name in again

    def asked(self, op: Op, known: Known, need: set[str] | frozenset[str]) -> list[Op]:
        """What runs again before the backward of ``op``: its own module, and makers of ``need``."""
        makers = [maker for name in need for maker in known.makers.get(name, ())]
        numbers = {self.number[name] for name in (op.name, *makers) if name in self.number}
        return [member for number in sorted(numbers) for member in self.members[number]]


def working(
    model: ModelGraph,
    outcome: LayerOutcome,
    options: Options,
    *,
    whole: bool = False,
    away: Away | None = None,
    ahead: bool = True,
    known: Known | None = None,
) -> Working:
    """The highest moments of one layer, forward and backward; ``whole`` if all of it re-runs.

    ``away`` is what leaves for the host in forward; it comes back a layer ``ahead``, or when
    backward asks for it. ``known`` is of the graph and the options, for many outcomes.
    """
    known = known or Known(model, outcome.graph)
    layer = LayerWalk(model, outcome, options, away, ahead, known)
    if outcome.detached:
        return Working(*layer.forward(set()), 0, "", 0)
    forward, forward_at = layer.forward(set(outcome.stored) - (away.leaving if away else set()))
    backward, backward_at, rest = layer.backward(whole=whole)
    return Working(forward, forward_at, backward, "re-run" if whole else backward_at, rest)
