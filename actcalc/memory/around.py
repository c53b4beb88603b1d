"""What exists beside activations while a part of a chunk runs: gradients so far, gathered weights.

Gradients come to exist as backward goes through the parts. Where weights are sharded
(``torch.distributed.fsdp.fully_shard``), they are gathered unit by unit, and a unit's gradients are
whole until they are reduced. All of that belongs to moments, and none of it to every moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from actcalc.layers.core.algebra import most
from actcalc.layers.core.either import greatest, nothing, rounded
from actcalc.memory.parts import EMBEDDING, HEAD, Part
from actcalc.memory.states import Parameters, packed_bytes, packs
from actcalc.specs.recipes import Recipe
from actcalc.specs.training import Training


class Around(NamedTuple):
    """Bytes beside activations and working set at one moment."""

    gradients: int = 0
    """Summed gradients that exist, of those that the step ends with."""
    gathered: int = 0
    """Weights gathered from their shards, on the way or in use, and copies that autocast keeps."""
    unreduced: int = 0
    """Gradients beside those: whole ones of a unit before they are reduced, a tied table's first
    one that waits for the second, and copies in the type in which they are reduced."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.gradients + self.gathered + self.unreduced


class Both(NamedTuple):
    """What is around one occurrence of a part in forward and in backward."""

    forward: Around
    backward: Around


class Sharding(NamedTuple):
    """How weights are sharded in units (fully_shard), and in which types they move."""

    rules: Recipe
    training: Training
    ranks: int
    """Ranks over which a unit is sharded."""
    root: bool
    """Embedding and head are one unit, which stays gathered from beginning to end."""
    stays: bool
    """Units stay gathered from forward to backward (reshard_after_forward is false)."""
    whole: bool
    """Gradients of several micro-batches are summed whole, and reduced after the last."""
    experts: bool = False
    """A layer's routed experts are a unit of their own (torchtitan apply_fsdp under ep)."""

    @property
    def ahead(self) -> bool:
        """The next unit is gathered while one is in use."""
        return self.training.prefetch and not self.stays

    def gathered(self, parameters: Parameters) -> int:
        """Bytes of gathered weights: quantised ones travel as they are."""
        return sum(
            packed_bytes(group, self.training)
            + self.rules.gathered
            * (group.parameters - (group.packed if packs(self.training) else 0))
            for group in parameters
        )


def sharding_like(
    rules: Recipe, training: Training, ranks: int, *, root: bool, zero: int, piped: bool,
    experts: bool,
) -> Sharding:  # fmt: skip
    """How weights are sharded under a ZeRO stage, over so many ranks, in a pipeline or alone."""
    stays = zero == 2 or piped
    return Sharding(
        rules=rules,
        training=training,
        ranks=ranks,
        root=root,
        stays=stays if training.keeps_gathered is None else training.keeps_gathered,
        whole=piped,
        experts=experts,
    )


def chunks_around(
    chunks: Sequence[Sequence[Part]],
    made: Sequence[Sequence[tuple[int, int]]],
    gradient: float,
    full: int,
    sharding: Sharding | None,
    *,
    persistent: bool,
    waiting: int,
) -> list[list[Both]]:
    """For each chunk of a stage what is around every occurrence of its parts.

    ``full`` bytes are the stage's gradients, ``gradient`` one parameter's; ``made`` says of every
    chunk what :func:`actcalc.memory.peaks.first_gradients` says of its parts. ``waiting`` are the
    bytes per parameter of a tied table's gradient that waits.
    """
    if sharding is not None and sharding.rules.units and sharding.root:
        made = [_at_the_end(each) for each in made]
    found = [
        plain(parts, each, gradient, full, persistent=persistent,
              waiting=waiting * _in_both_ends(parts) if waiting else 0)
        for parts, each in zip(chunks, made, strict=True)
    ]  # fmt: skip
    if sharding is None:
        return found
    if not sharding.rules.units:
        pairs = zip(chunks, found, strict=True)
        return [live(parts, each, sharding) for parts, each in pairs]
    units = [Units(parts, sharding) for parts in chunks]
    every = [
        [one.around(at, both) for at, both in enumerate(each)]
        for one, each in zip(units, found, strict=True)
    ]
    return _all_chunks(every, units) if sharding.whole else every


def _at_the_end(made: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    """The same where embedding and head are one unit: the head's are reduced with the embedding's,
    the last of all."""
    if len(made) < 2:
        return made
    (first, both), *rest, (own, shared) = made
    return [(first + own, both + shared), *rest, (0, 0)]


def _in_both_ends(parts: Sequence[Part]) -> int:
    """Parameters of a table that embedding and head of one chunk share.

    Its gradient of the head waits for the look-up's, in one micro-batch: the engine adds up what
    arrives for a parameter before it is accumulated (torch/csrc/autograd/input_buffer.cpp).
    """
    ends = [
        dict(part.trained.shared)
        for part in parts
        if part.first < 0 and not nothing(part.parameters.total)
    ]
    if len(ends) < 2:
        return 0
    return sum(count for scope, count in ends[0].items() if scope in ends[-1])


def _all_chunks(around: list[list[Both]], units: Sequence[Units]) -> list[list[Both]]:
    """What lies around every part with the gathered weights and gradients of the other chunks."""
    gathered = sum(one.all_gathered for one in units)
    summed = sum(one.all_summed for one in units)

    def more(one: Around, of: Units) -> Around:
        return one._replace(
            gathered=one.gathered + gathered - of.all_gathered,
            unreduced=one.unreduced + summed - of.all_summed,
        )

    return [
        [Both(more(both.forward, of), more(both.backward, of)) for both in each]
        for each, of in zip(around, units, strict=True)
    ]


def plain(
    parts: Sequence[Part],
    made: Sequence[tuple[int, int]],
    gradient: float,
    full: int,
    *,
    persistent: bool,
    waiting: int = 0,
) -> list[Both]:
    """Around every occurrence of the parts where weights are whole.

    ``full`` bytes of gradients exist at all times where they persist; ``gradient`` is the bytes of
    one parameter's, ``made`` what :func:`actcalc.memory.peaks.first_gradients` says of the parts.
    ``waiting`` bytes are a tied table's gradient of this micro-batch, from the head's backward on.
    """
    found: list[Both] = []
    lacking = cast = 0
    for part, (own, shared) in zip(parts, made, strict=True):
        for index in range(part.count):
            cast = cast + part.casts
            lacking = lacking + own + (shared if index == part.count - 1 else 0)
            absent = 0 if persistent else rounded(lacking * gradient)
            more = waiting if persistent and part.name != HEAD else 0
            forward = Around(full if persistent else 0, gathered=cast)
            found.append(Both(forward, Around(full - absent, unreduced=more)))
    return found


class _Unit(NamedTuple):
    """One occurrence of a part: its weights, gathered, and its trained parameters."""

    part: Part
    weights: int
    trained: int
    last: int
    """Parameters of the largest weight, taken to be the last whose gradient is dropped."""
    experts: int
    """Those of ``trained`` that are reduced as a unit inside this one, before it."""

    @classmethod
    def of(cls, part: Part, rule: Sharding) -> _Unit:
        layers = max(1, part.layers)
        own = part.parameters
        experts = own.reduced[1] // layers * rule.experts
        weights = rule.gathered(own) // layers
        return cls(part, weights, own.trained // layers, part.largest, experts)


class Units:
    """The units of one chunk of parts, in order; equal layers one by one."""

    def __init__(self, parts: Sequence[Part], rule: Sharding) -> None:
        self.parts = tuple(parts)
        self.rule = rule
        units = ([_Unit.of(part, rule)] * part.count for part in parts)
        self.each = [unit for same in units for unit in same]
        ends = [unit for unit in self.each if unit.part.first < 0] if rule.root else []
        # a table that embedding and head share is gathered, and has its gradient, once
        self.root, self.root_trained = _once(ends)
        self.head_trained = sum(u.trained for u in ends if u.part.name == HEAD)

    def _own(self, at: int) -> bool:
        """Whether an occurrence is a unit of its own."""
        return not (self.rule.root and self.each[at].part.first < 0)

    def _next(self, at: int, step: int) -> _Unit | None:
        at += step
        while 0 <= at < len(self.each):
            if self._own(at):
                return self.each[at]
            at += step
        return None

    def _flat(self, at: int) -> int:
        """The message with the weights that backward needs next."""
        before = self._next(at, -1)
        return before.weights if before is not None and self.rule.ahead else 0

    def _message(self, at: int) -> int:
        """The gradients that the unit before, in backward's order, is reducing.

        One message is kept at a time (``_fsdp_param_group.py`` reduce_scatter_state). Once experts
        inside the unit reduce theirs, the message stands where their gradients and weights were;
        while they do, it is there beside the gradients.
        """
        after, rules = self._next(at, +1), self.rule.rules
        before = rules.reduced * (after.trained - after.experts) if after is not None else 0
        found: int = most(before, rules.gathered * self.each[at].experts)
        return found

    def around(self, at: int, plainly: Both) -> Both:
        """What is around one occurrence, beside the gradients that ``plainly`` says."""
        unit, rule, own = self.each[at], self.rule, self._own(at)
        cast = plainly.forward.gathered
        if rule.whole:
            # FSDP's hooks neither reshard nor reduce before the last micro-batch's backward
            # (pipelining/stage.py backward_maybe_with_nosync): shards have no gradients until then
            found = Around(0, self.all_gathered, self.all_summed)
            return Both(found._replace(gathered=found.gathered + cast), found)
        here = unit.weights if own else 0
        if rule.stays:
            here = sum(u.weights for i, u in enumerate(self.each[: at + 1]) if self._own(i))
        head = unit.part.name == HEAD
        forward = self.root + here + (unit.weights if own and not head else 0)
        backward = self.root + here
        unreduced = 0
        if not head:
            backward += self._flat(at)
            unreduced = self._message(at) + rule.rules.gathered * self.head_trained
        elif rule.root:
            backward += self._flat(at)
        return Both(
            plainly.forward._replace(gathered=cast + forward),
            plainly.backward._replace(gathered=backward, unreduced=unreduced),
        )

    @cached_property
    def all_gathered(self) -> int:
        """Bytes of all units, gathered."""
        return self.root + sum(u.weights for i, u in enumerate(self.each) if self._own(i))

    @cached_property
    def all_summed(self) -> int:
        """Bytes of all gradients in the type in which they are summed, whole."""
        own = sum(u.trained for i, u in enumerate(self.each) if self._own(i))
        return self.rule.rules.reduced * (own + self.root_trained)

    def reducing(self) -> tuple[Part, ...]:
        """The parts, with the moments at which embedding's and head's units reduce gradients.

        Whole gradients and their copy in the type that is reduced; then, of the gradients, the last
        one alone, and the reduced shard (``_fsdp_collectives.py foreach_reduce``). Activations of
        the part are gone by then, and so is what was gathered for it. The head is gathered alone
        while the loss runs.
        """
        if self.rule.whole:
            return self.parts
        found, at = [], 0
        for part in self.parts:
            found.append(self._reducing(part, at) if part.first < 0 else part)
            at += part.count
        return tuple(found)

    def _reducing(self, part: Part, at: int) -> Part:
        rules, rule = self.rule.rules, self.rule
        trained = self.root_trained if rule.root else self.each[at].trained
        ends = (unit.last for unit in self.each if unit.part.first < 0)
        last = greatest(ends) if rule.root else part.largest
        shard = rules.reduced * -(-trained // rule.ranks)
        copied = (rules.gathered + rules.reduced) * trained
        reduced = rules.reduced * trained + rules.gathered * last + shard
        gone = self.around(at, Both(Around(), Around())).backward
        ahead = self._flat(at)
        if part.name == HEAD and not rule.root:
            later = most(copied, reduced) + ahead - gone.gathered
            rest = part.backward_rest + ahead
            return replace(part, backward=greatest((part.backward, rest, later)))
        if part.name == EMBEDDING:
            later = most(copied, reduced) - gone.gathered - gone.unreduced
            return replace(part, backward=most(part.backward, later))
        return part


def live(parts: Sequence[Part], plainly: Sequence[Both], rule: Sharding) -> list[Both]:
    """Around every occurrence where DeepSpeed gathers weights by module (ZeRO 3).

    Beside the module at work, so many elements of what comes next are fetched, and what is used
    again within a distance, counted in elements, is not released: the last modules of forward wait
    for their backward (runtime/zero/partitioned_param_coordinator.py fetch_sub_module,
    release_sub_module; __params_to_release). Together no more than the live parameters allowed.
    """
    training, width = rule.training, rule.rules.gathered
    sizes = [
        part.parameters.total // max(1, part.layers) for part in parts for _ in range(part.count)
    ]
    after = [sum(sizes[at + 1 :]) for at in range(len(sizes))]
    waits = [2 * rest <= training.reuse_elements for rest in after]
    found = []
    for at, both in enumerate(plainly):
        kept = sum(size for size, stays in zip(sizes[:at], waits, strict=False) if stays)
        ahead = training.prefetch_elements if training.prefetch else 0
        ways = []
        for around, rest in ((both.forward, after[at]), (both.backward, sum(sizes[:at]) - kept)):
            most = max(training.live_elements, sizes[at])
            count = min(sizes[at] + kept + min(ahead, max(0, rest)), most)
            ways.append(around._replace(gathered=around.gathered + width * count))
        found.append(Both(*ways))
    return found


def _once(ends: Sequence[_Unit]) -> tuple[int, int]:
    """Gathered bytes and trained parameters of embedding and head, a tied table once."""
    known: set[str] = set()
    weights = trained = 0
    for unit in ends:
        shared = sum(count for scope, count in unit.part.trained.shared if scope in known)
        known |= {scope for scope, _ in unit.part.trained.shared}
        each = unit.weights // most(1, unit.part.parameters.total)
        weights += unit.weights - each * shared
        trained += unit.trained - shared
    return weights, trained
