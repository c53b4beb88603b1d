"""Seconds of what ranks do together once in a step, when the last gradients are there.

Replicas reduce gradients and gather what sharded states updated; a tied embedding's gradients of
first and last stage are summed; a trainer's metrics are gathered from all ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from actcalc.cost.collective import collective_seconds, send_seconds
from actcalc.cost.optime import beside
from actcalc.cost.rates import Rates
from actcalc.cost.roofline import LayerTime
from actcalc.layers.core.either import nothing, real
from actcalc.layers.core.graph import Collective
from actcalc.layers.core.ops import EMBEDDING_SCOPE
from actcalc.layers.model import ModelGraph
from actcalc.memory.states import alike, in_units, recipe, replicas
from actcalc.specs.framework import Framework
from actcalc.specs.recipes import Recipe
from actcalc.specs.training import Training

# Tensors that a metric keeps (a sum and a count: Composer metrics/nlp.py LanguageCrossEntropy).
_METRIC_STATES = 2


def reduced_bytes(training: Training, rules: Recipe) -> int:
    """Bytes of one gradient as replicas reduce it, unless the run says 16 bits.

    Megatron's accumulate_allreduce_grads_in_fp32, FSDP's reduce_dtype.
    """
    return 2 if training.gradients_in_16_bit else rules.reduced


class Reduction(NamedTuple):
    """Seconds of the collectives of replicas once in a step, each alone on its links."""

    reduced: float
    """Of reducing gradients."""
    gathered: float
    """Of gathering what sharded states updated."""

    def exposed(
        self, training: Training, busiest: LayerTime, rates: Rates, each: float, *, overlaps: bool
    ) -> float:
        """Seconds that nothing hides; the work beside them is the ``busiest`` stage's.

        PyTorch's DDP reduces beside the last backward (``overlaps``); Megatron reduces after it
        unless told to overlap (overlap_grad_reduce is off by default), and gathers what its
        distributed optimizer updated before the next step unless told to do it beside that step's
        first forward (overlap_param_gather). Where ``each`` of so many micro-batches reduces (0:
        once in a step), it does so beside its own backward (Megatron-FSDP sets overlap_grad_reduce
        then, distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py).
        """
        share = rates.shares.communication_multiprocessors
        reduced, gathered = self
        beyond = beside(busiest.backward, reduced, share) - busiest.backward
        once = beyond if overlaps or training.overlapped_reduction else reduced
        reduced = each * beyond + (each == 0) * once
        if training.overlapped_gather:
            gathered = beside(busiest.forward, gathered, share) - busiest.forward
        return reduced + gathered


def reduction(
    model: ModelGraph, training: Training, parameters: tuple[int, int], rates: Rates
) -> Reduction:
    """The collectives of a rank with so many trained parameters: of all replicas, and experts'."""
    layout = model.context.layout
    rules = recipe(model, training)
    whole = layout.zero == 0 or (layout.zero == 1 and rules.reduced_whole)
    reduced = gathered = 0.0
    for count, expert in zip(parameters, (False, True), strict=True):
        if expert and nothing(count):
            continue
        ranks = alike(layout, expert=expert)
        stride = layout.ep * layout.expert_tp if expert else layout.tp
        gradients = count * reduced_bytes(training, rules)
        if whole:
            reduced += collective_seconds(Collective.ALL_REDUCE, gradients, ranks, stride, rates)
        else:
            parts = replicas(layout, training, expert=expert)
            reduced += scattered_seconds(gradients, ranks, parts, stride, rates)
        if layout.zero:
            weights = count * model.context.act.itemsize
            parts = replicas(layout, training, expert=expert, states=True)
            gathered += collective_seconds(Collective.ALL_GATHER, weights, parts, stride, rates)
    return Reduction(reduced, gathered)


def reduces_each(model: ModelGraph, training: Training) -> bool:
    """Whether every micro-batch's gradients are reduced, not only those of a step's last.

    A rank that keeps a part of the gradients has nowhere to sum whole ones: each backward reduces
    (DeepSpeed runtime/zero/stage_1_and_2.py reduce_ready_partitions under partition_gradients;
    Megatron-FSDP's grad_reduce_every_bprop; torch fully_shard). fully_shard in a pipeline sums them
    whole and reduces once (memory/around.py). ZeRO-3's are reduced layer by layer (cost/step.py).
    """
    layout = model.context.layout
    whole = layout.pp > 1 and in_units(model, recipe(model, training))
    return layout.zero == 2 and not whole


def scattered_seconds(gradients: float, ranks: int, parts: int, stride: int, rates: Rates) -> float:
    """Seconds of summing so many bytes over ``ranks``, of which each keeps one of the ``parts``.

    Where that is fewer than all (hybrid sharding), a part is then summed over the ranks that keep
    the same one (torch FSDP HYBRID_SHARD; Megatron-Core distributed/param_and_grad_buffer.py,
    several instances of the distributed optimizer).
    """
    inside = collective_seconds(Collective.REDUCE_SCATTER, gradients, parts, stride, rates)
    return inside + collective_seconds(
        Collective.ALL_REDUCE, gradients / parts, ranks // parts, stride * parts, rates
    )


def tied_seconds(model: ModelGraph, training: Training, rates: Rates, stride: Any) -> Any:
    """Seconds of summing a tied embedding's gradient of first and last stage.

    These are ``stride`` devices apart (a number, or an array by lane as the sizes are). Each of two
    ranks sends the other its part of the table once, after gradients were reduced over replicas
    (Narayanan et al. 2021, section 4; Megatron-Core distributed/finalize_model_grads.py
    _allreduce_word_embedding_grads).
    """
    tables = [one for one in model.head.weights if one.scope == EMBEDDING_SCOPE]
    if not tables or tables[0].frozen:
        return 0.0
    rows, columns = (real(dim.value(model.sizes)) for dim in tables[0].shape)
    size = rows * columns * reduced_bytes(training, recipe(model, training))
    return send_seconds(size, stride, rates)


def logged_seconds(training: Training, framework: Framework, rates: Rates, devices: Any) -> Any:
    """Seconds of gathering logged metrics from all ``devices`` (a number or an array).

    Each state of a metric is gathered into a list of one tensor a rank, which the host makes one by
    one and torch.distributed fills with a copy each; nothing else runs meanwhile, since the result
    is printed (torchmetrics utilities/distributed.py gather_all_tensors; torch
    ProcessGroupNCCL.cpp allgather; Composer trainer.py _compute_and_log_metrics).
    """
    if not training.loss_metrics:
        return 0.0
    shares = rates.shares
    each = (framework.kernel_host_seconds + shares.launch_seconds) * shares.host_pace
    return training.loss_metrics * _METRIC_STATES * each * devices
