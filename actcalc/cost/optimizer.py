"""Seconds of one optimizer step: bytes per parameter of what is really kept, FLOPs of Muon.

What a parameter keeps (weight, gradient, master copy, moments) is defined once, in
:mod:`actcalc.memory.states`; here is how often each is read and written. A fused kernel (apex,
Transformer Engine, ``torch.optim`` with ``fused=True``) touches each state once; an unfused one is
a chain of element-wise kernels, each of which reads and writes its operands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from actcalc.cost.gemm import Product, gemm_seconds
from actcalc.cost.rates import Rates
from actcalc.layers.core.algebra import added
from actcalc.layers.core.either import nothing
from actcalc.layers.core.graph import Graph
from actcalc.layers.model import ModelGraph
from actcalc.memory.states import (
    Parameters,
    rank_parameters,
    recipe,
    replicas,
    states,
)
from actcalc.specs.optimizers import OPTIMIZERS
from actcalc.specs.training import Training

# Norm of all gradients (one read) and their clipping (read, write), then zeroing (one write):
# Megatron-Core optimizer/clip_grads.py, torch.nn.utils.clip_grad_norm_.
_GRADIENT_PASSES = 4
# fp16 unscales gradients and looks for infinities: read and written once more.
_UNSCALE_PASSES = 2


@dataclass(frozen=True, kw_only=True)
class OptimizerTime:
    """One rank's optimizer step, in seconds."""

    memory: float
    """Kernels that move states and gradients."""
    products: float
    """Matrix products (Muon's Newton-Schulz iteration)."""
    host: float
    """Transfers of gradients and weights over the host's link, where states are offloaded."""

    @property
    def total(self) -> float:
        """All of them, one after another."""
        return self.memory + self.products + self.host


def optimizer_time(
    model: ModelGraph,
    graphs: Iterable[Graph],
    training: Training,
    rates: Rates,
    parameters: Parameters | None = None,
) -> OptimizerTime:
    """Time of the step over the parameters of ``graphs`` (one rank's), sharded as the layout says.

    Offloaded states are updated by the host: gradients go down its link and weights come up (Ren
    et al. 2021, ZeRO-Offload, section 4.1). Only these transfers are timed, not the host's own
    arithmetic, which no device preset describes. ``parameters`` are the graphs', where known.
    """
    held = list(graphs)
    parameters = parameters or rank_parameters(model, Counter(held), training)
    products = 0.0
    optimizer = OPTIMIZERS[training.optimizer]
    if optimizer.newton_schulz:
        products = added(_orthogonalise(model, graph, training, rates) for graph in held)
    if not optimizer.updates:
        return OptimizerTime(memory=0.0, products=0.0, host=0.0)
    trained = _trained(model, training, parameters)
    rules = recipe(model, training)
    offloaded = training.offload in ("optimizer", "weights")
    gradient = rules.updates_from or rules.gradient
    half = model.context.workload.precision in ("fp16", "amp-fp16")
    moved = (_GRADIENT_PASSES + _UNSCALE_PASSES * half) * gradient * trained
    if not offloaded:
        moved += _update_bytes(model, training, parameters, trained, gradient)
    host = (min(rules.gradient, 4) + rules.weight) * trained if offloaded else 0.0
    return OptimizerTime(memory=moved / rates.memory, products=products, host=host / rates.host)


def _trained(model: ModelGraph, training: Training, parameters: Parameters) -> float:
    """Parameters that this rank updates."""
    layout = model.context.layout
    seconds: float = added(
        group.trained
        / (replicas(layout, training, expert=expert, states=True) if layout.zero else 1)
        for group, expert, _ in parameters.groups()
    )
    return seconds


def _update_bytes(
    model: ModelGraph,
    training: Training,
    parameters: Parameters,
    trained: float,
    gradient: int,
) -> float:
    """Bytes of the update itself: states as they are kept, each read and written."""
    rules = recipe(model, training)
    kept = states(model, training, parameters)
    moments = kept.optimizer - kept.master
    moved = gradient * trained + 2.0 * moments
    if not nothing(kept.master):
        moved += 3 * kept.master + rules.weight * trained  # copied back into the weight
        element = 4
    else:
        moved += 2 * rules.weight * trained
        element = rules.weight
    optimizer = OPTIMIZERS[training.optimizer]
    if optimizer.fused and training.fused_optimizer:
        return moved
    if optimizer.kept == "factored":
        element = 4  # the type of its sums, in which it computes
    return moved + optimizer.passes * element * trained


def _orthogonalise(model: ModelGraph, graph: Graph, training: Training, rates: Rates) -> float:
    """Newton-Schulz on each hidden matrix as it lies on the rank, spread over the replicas.

    One iteration on an m x n matrix, m at most n, is A = XXᵀ, A², and (bA + cA²)X.
    """
    layout = model.context.layout
    iterations = OPTIMIZERS[training.optimizer].newton_schulz
    seconds = 0.0
    if graph.name in ("embedding", "head"):
        return seconds
    for op in graph.ops:
        if op.kind in ("embedding", "norm"):
            continue
        for weight in op.weights:
            shape = [int(dim.value(model.sizes)) for dim in weight.shape]
            if len(shape) < 2 or weight.frozen:
                continue
            batch = prod(shape[:-2])
            m, n = sorted(shape[-2:])
            once = (
                gemm_seconds(Product(m, m, n, batch), rates, core=True)
                + gemm_seconds(Product(m, m, m, batch), rates, core=True)
                + gemm_seconds(Product(m, n, m, batch), rates, core=True)
            )
            expert = weight.expert
            ranks = replicas(layout, training, expert=expert, states=True) if layout.zero else 1
            seconds += iterations * once / ranks
    return seconds
