"""Weights, gradients and optimizer states of one rank, for precision recipes and ZeRO stages.

Parameters fall into two groups that are sharded over different ranks: routed experts, whose
replicas are dp·cp·tp / (ep·etp) ranks, and everything else, whose replicas are dp·cp ranks
(Megatron-Core parallel_state.py, expert_data_parallel group). ZeRO stage 1 divides optimizer
states by that number, 2 gradients too, 3 weights too (Rajbhandari et al. 2020, section 5;
Megatron's distributed optimizer is stage 1: 6 + 12/dp bytes, docs/source/api-guide/dist_optimizer).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from actcalc.errors import SpecError
from actcalc.layers.adapters import in_module
from actcalc.layers.core.algebra import least, most
from actcalc.layers.core.either import exact, greatest, smallest
from actcalc.layers.core.graph import Graph, Op, Weight
from actcalc.layers.model import ModelGraph
from actcalc.specs import Layout
from actcalc.specs.optimizers import OPTIMIZERS
from actcalc.specs.recipes import RECIPES, Recipe
from actcalc.specs.training import Training

_BLOCK = 256  # elements that share one fp32 scale in 8-bit Adam (bitsandbytes, torchao)
_TOWER = ("tower", "projector")  # layers like any other, though they run before the first
_SMALLEST_8BIT = 4096  # smaller tensors keep fp32 moments (bitsandbytes min_8bit_size)


def recipe(model: ModelGraph, training: Training) -> Recipe:
    """The recipe of a run; raises ``SpecError`` for one its precision cannot have."""
    context = model.context
    precision = context.workload.precision
    name: str = training.recipe
    if name == "auto":
        name = context.framework.recipe
        if precision.startswith("amp"):
            name = "amp" if context.layout.zero < 3 else "fsdp"
        elif precision == "fp32":
            name = "fp32"
    if precision == "fp32" and name not in ("fp32",):
        if training.recipe not in ("auto", "pure"):
            raise SpecError(
                f"recipe {training.recipe} keeps 16-bit weights, but precision is fp32",
                "drop --recipe, or use --precision bf16",
            )
        name = "fp32"
    rules = RECIPES[name]
    if training.gradients_in_16_bit:
        rules = rules.changed(gradient=rules.gradient_in_16_bit)
    if name == "fp32" and context.framework.persistent_gradients:
        rules = rules.changed(persistent=True)
    if training.bucket_view and context.framework.reduction_buckets and context.layout.dp > 1:
        rules = rules.changed(persistent=True)
    return rules


def in_units(model: ModelGraph, rules: Recipe) -> bool:
    """Whether weights are sharded in units that are gathered for use (fully_shard).

    Under ZeRO 3, and with fp32 shards under ZeRO 2, whose units stay gathered from forward to
    backward.
    """
    framework, zero = model.context.framework, model.context.layout.zero
    units = framework.op_by_op and not framework.main_gradients and rules.units
    return units and (zero == 3 or (zero == 2 and rules.name == "fsdp"))


class Group(NamedTuple):
    """Parameters of one kind on one rank before ZeRO."""

    trained: int
    """Parameters with gradients and optimizer states."""
    frozen: int
    """Parameters of a frozen base model."""
    matrices: int
    """Those of ``trained`` that are hidden matrices (Muon updates them)."""
    factored: int
    """Elements of Adafactor's row and column statistics."""
    small: int
    """Elements of ``trained`` in tensors too small for 8-bit moments."""
    packed: int
    """Those of ``frozen`` in hidden matrices, which quantisation packs (embeddings and norms keep
    their type)."""
    projected: int
    """Elements of one moment where gradients of hidden matrices are projected to a low rank."""
    projectors: int
    """Elements of the matrices that project them."""

    def __add__(self, other: object) -> Group:
        if not isinstance(other, Group):
            return NotImplemented
        return Group(*(a + b for a, b in zip(self, other, strict=True)))

    def __mul__(self, count: object) -> Group:
        if not isinstance(count, int):
            return NotImplemented
        return Group(*(a * count for a in self))

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.trained + self.frozen


NO_GROUP = Group(0, 0, 0, 0, 0, 0, 0, 0)


class Parameters(NamedTuple):
    """Parameters on one rank: routed experts apart from the rest, adapters apart from the base.

    Adapters may have a type of their own.
    """

    dense: Group
    expert: Group
    adapters: Group
    expert_adapters: Group

    def __add__(self, other: object) -> Parameters:
        if not isinstance(other, Parameters):
            return NotImplemented
        return Parameters(*(a + b for a, b in zip(self, other, strict=True)))

    def __mul__(self, count: object) -> Parameters:
        if not isinstance(count, int):
            return NotImplemented
        return Parameters(*(group * count for group in self))

    @property
    def total(self) -> int:
        """All of them."""
        return sum(group.parameters for group in self)

    @property
    def reduced(self) -> tuple[int, int]:
        """Those with gradients: what all replicas have, and what experts' replicas have."""
        expert = self.expert.trained + self.expert_adapters.trained
        return self.trained - expert, expert

    @property
    def trained(self) -> int:
        """Those with a gradient."""
        return sum(group.trained for group in self)

    def groups(self) -> Iterator[tuple[Group, bool, bool]]:
        """Each group, whether it is of routed experts, and whether of adapters."""
        yield self.dense, False, False
        yield self.expert, True, False
        yield self.adapters, False, True
        yield self.expert_adapters, True, True


NO_PARAMETERS = Parameters(NO_GROUP, NO_GROUP, NO_GROUP, NO_GROUP)


def parameters_of(
    model: ModelGraph, graph: Graph, training: Training, seen: set[str] | None = None
) -> Parameters:
    """Parameters of one graph on one rank, adapters included; a scope in ``seen`` only once."""
    known = set() if seen is None else seen
    found = _weighed(model, graph, training)
    result = found.own
    for scope, parameters in found.scoped.items():
        if scope not in known:
            known.add(scope)
            result = result + parameters
    return result


def rank_parameters(
    model: ModelGraph, graphs: Mapping[Graph, int], training: Training
) -> Parameters:
    """Parameters of one rank that holds so many of each graph; what they share counts once."""
    seen: set[str] = set()
    result = NO_PARAMETERS
    for graph, count in graphs.items():
        result = result + parameters_of(model, graph, training, seen)
        if count > 1:
            result = result + parameters_of(model, graph, training, seen) * (count - 1)
    return result


class _Weighed(NamedTuple):
    """Parameters of one graph on one rank."""

    own: Parameters
    """Those of weights that no other graph has."""
    scoped: Mapping[str, Parameters]
    """Those that other graphs may have too (a tied table), by the name of the scope."""
    training: Training
    """What they were counted for: it stays, so that its identity does."""


def _weighed(model: ModelGraph, graph: Graph, training: Training) -> _Weighed:
    """The parameters of a graph, counted once for each model's graph and training."""
    kept: dict[tuple[Graph, int], _Weighed] = model.kept.setdefault("parameters", {})
    key = (graph, id(training))
    if key not in kept:
        own, scoped = NO_PARAMETERS, dict[str, Parameters]()
        for op in graph.ops:
            for weight in op.weights:
                if weight.scope in scoped:
                    continue
                ends = graph.name in ("embedding", "head") and op.group not in _TOWER
                hidden = op.kind not in ("embedding", "norm") and not ends
                each = [NO_GROUP] * 4
                at = weight.expert + 2 * (weight.added == "adapter")
                each[at] = _group(model, weight, training, op, hidden=hidden)
                if weight.scope:
                    scoped[weight.scope] = Parameters(*each)
                else:
                    own = own + Parameters(*each)
        kept[key] = _Weighed(own, scoped, training)
    return kept[key]


class Trained(NamedTuple):
    """Parameters of one graph that get a gradient, on one rank."""

    own: int
    """Those of weights that no other graph has."""
    shared: tuple[tuple[str, int], ...]
    """Those of weights that other graphs may have too (a tied table), by the name of the scope."""


def trained_of(model: ModelGraph, graph: Graph, training: Training) -> Trained:
    """Parameters of one graph that get a gradient: its own, and those under a shared scope."""

    def count(without: set[str]) -> int:
        return parameters_of(model, graph, training, set(without)).trained

    scopes = {weight.scope for weight in graph.weights if weight.scope}
    own = count(scopes)
    return Trained(own, tuple((scope, count(scopes - {scope}) - own) for scope in sorted(scopes)))


def together(every: Sequence[Trained]) -> Trained:
    """What several graphs have of them: what they share once."""
    shared = {scope: count for each in every for scope, count in each.shared}
    return Trained(sum(each.own for each in every), tuple(sorted(shared.items())))


def _group(model: ModelGraph, weight: Weight, training: Training, op: Op, *, hidden: bool) -> Group:
    shape = [exact(dim.value(model.sizes)) for dim in weight.shape]
    count = exact(weight.parameters.value(model.sizes))
    if weight.frozen:
        packed = count if hidden and training.lora_rank and in_module(model, op, weight) else 0
        return NO_GROUP._replace(frozen=count, packed=packed)
    matrix = len(shape) >= 2
    factored = count
    if matrix:
        rows, columns = prod(shape[:-1]), shape[-1]
        factored = rows + prod(shape[:-2]) * columns
    # transformers trainer.py: GlobalOptimManager registers every torch.nn.Embedding with 32 bits
    whole = training.embedding_moments == "fp32" and op.kind == "embedding"
    projected, projectors = count, 0
    if training.galore_rank and matrix and hidden and not weight.added:
        many, sides = prod(shape[:-2]), shape[-2:]
        rank = smallest((training.galore_rank, *sides))
        projected, projectors = many * rank * greatest(sides), many * rank * smallest(sides)
    return NO_GROUP._replace(
        trained=count,
        matrices=count if matrix and hidden else 0,
        factored=factored,
        small=count * ((count < _SMALLEST_8BIT) | whole),
        projected=projected,
        projectors=projectors,
    )


@dataclass(frozen=True)
class States:
    """Bytes on one rank that stay through a step."""

    weights: int
    gradients: int
    optimizer: int
    master: int
    """Part of ``optimizer`` that is the fp32 copy of the weights."""
    largest_state: int
    """Bytes of one optimizer moment (what an unfused optimizer step makes again)."""
    step_gradients: int
    """fp32 copies of 16-bit gradients, from the optimizer step to the next step's beginning."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.gradients + self.optimizer


def alike(layout: Layout, *, expert: bool) -> int:
    """Ranks whose gradients of parameters of that kind are summed."""
    ranks: int = layout.dp * layout.cp
    return most(1, ranks * layout.tp // (layout.ep * layout.expert_tp)) if expert else ranks


def replicas(layout: Layout, training: Training, *, expert: bool, states: bool = False) -> int:
    """Ranks over which ZeRO shards parameters of that kind, or their optimizer states."""
    ranks = alike(layout, expert=expert)
    if training.shards is not None:
        ranks = least(ranks, training.shards)
    if not (states and training.instances_share_states):
        ranks = ranks // training.instances
    found: int = most(1, ranks)
    return found


def states(model: ModelGraph, training: Training, parameters: Parameters) -> States:
    """Weights, gradients and optimizer states of one rank, sharded as the layout says."""
    layout = model.context.layout
    rules = recipe(model, training)
    own = RECIPES["fp32"] if training.lora_dtype == "fp32" else rules
    sums = [0, 0, 0, 0, 0, 0]
    for group, expert, adapters in parameters.groups():
        ranks = replicas(layout, training, expert=expert)
        fp8 = model.context.workload.fp8_products and not model.context.framework.op_by_op
        kind = own if adapters else rules
        weight = _weights(group, kind, training, fp8=fp8)
        gradient = group.trained * kind.gradient
        master = group.trained * (training.master_bytes or kind.master)
        moments, one = moments_of(group, kind, training)
        if not OPTIMIZERS[training.optimizer].updates:
            gradient = master = 0
        zero = layout.zero
        owners = replicas(layout, training, expert=expert, states=True)
        master = _shard(master, owners, zero >= 1)
        parts = (
            _shard(weight, ranks, zero >= 3 or in_units(model, rules)),
            _shard(gradient, ranks, zero >= 2),
            master + _shard(moments, owners, zero >= 1),
            master,
            _shard(one, owners, zero >= 1),
            # optimizer.py _copy_model_grads_to_main_grads; zero_grad drops them
            _shard(4 * group.trained, owners, zero >= 1) if kind.gradient < kind.master else 0,
        )
        sums = [a + b for a, b in zip(sums, parts, strict=True)]
    weights, gradients, optimizer, master, largest, copies = sums
    if training.offload in ("optimizer", "weights"):
        optimizer = master = largest = 0
    if training.offload == "weights":
        weights = 0
    copies = copies * (optimizer > 0)
    return States(weights, gradients, optimizer, master, largest, copies)


def _weights(group: Group, rules: Recipe, training: Training, *, fp8: bool) -> int:
    """Weights in their own type; fp8 products read fp8 copies, one for either direction.

    Transformer Engine keeps the cast weight and its transpose for all micro-batches of a step
    (module/base.py get_weight_workspace); with fp8 weights these two are all there is.
    """
    frozen = group.frozen * rules.weight
    if packs(training):
        frozen += packed_bytes(group, training) - group.packed * rules.weight
    trained = group.trained * rules.weight
    if fp8:
        trained = trained - (2 * group.matrices if training.fp8_weights else 0)
        trained += 2 * group.matrices
    return trained + frozen


def packs(training: Training) -> bool:
    """Whether matrices of a frozen base are quantised."""
    return bool(training.lora_rank) and training.base_bits != 16


def packed_bytes(group: Group, training: Training) -> int:
    """Quantised weights with their scales; 0 where none are."""
    if not packs(training):
        return 0
    bits = training.base_bits
    return group.packed * bits // 8 + _scales(group.packed, bits)


def _scales(count: int, bits: int) -> int:
    """Scales of 4-bit weights: one byte for each 64, and fp32 for each 256 of those.

    NF4 with double quantisation (Dettmers et al. 2023, section 3): 0.127 bits per weight.
    """
    if bits >= 8:
        return 4 * -(-count // _BLOCK)
    blocks = -(-count // 64)
    return blocks + 4 * -(-blocks // 256)


def moments_of(group: Group, rules: Recipe, training: Training) -> tuple[int, int]:
    """Bytes of all optimizer moments, and of one."""
    count, size = group.trained, rules.moment
    kind = OPTIMIZERS[training.optimizer]
    if training.galore_rank:
        one = group.projected * (1 if kind.kept == "8-bit" else size)
        scales = 4 * -(-group.projected // _BLOCK) if kind.kept == "8-bit" else 0
        return kind.moments * (one + scales) + size * group.projectors, one
    if training.moments_bytes:
        return training.moments_bytes * count, training.moments_bytes * count // 2
    if kind.kept == "factored":
        return kind.moments * 4 * group.factored, 4 * group.factored
    if kind.kept == "8-bit":
        large = count - group.small
        one = large + 4 * -(-large // _BLOCK) + 4 * group.small
        return kind.moments * one, large
    matrices = group.matrices
    alike = kind.matrix_moments == kind.moments
    every = kind.moments * (count - matrices) + kind.matrix_moments * matrices
    one = (count if alike else matrices) if kind.moments else 0
    return size * every, size * one


def _shard(size: int, ranks: int, sharded: bool) -> int:
    return -(-size // ranks) if sharded else size
