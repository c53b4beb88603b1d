"""What of the exchange between expert-parallel ranks is exposed where other work runs beside it.

Megatron-Core hides it in two ways: beside the shared experts of the same layer
(``moe_shared_expert_overlap``), or beside the work of another micro-batch whose forward is merged
with this one's backward (``overlap_moe_expert_parallel_comm``; models/common/
model_chunk_schedule_plan.py). A collective takes its channels' share of the multiprocessors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from actcalc.cost.optime import OpTime, beside
from actcalc.layers.core.algebra import added, least
from actcalc.layers.core.either import nothing
from actcalc.layers.core.graph import Graph

if TYPE_CHECKING:
    from actcalc.cost.kernels import Kernels


def exchanged(times: Sequence[OpTime]) -> tuple[float, float]:
    """Exposed seconds of the exchange, forward and backward."""
    moved = [time for time in times if time.kind == "dispatch"]
    return added(time.forward_comm for time in moved), added(time.backward_comm for time in moved)


def beside_exchange(times: tuple[OpTime, ...], graph: Graph, run: Kernels) -> tuple[OpTime, ...]:
    """The times of a layer's ops with only the exposed part of its exchange."""
    kernels = run.model.context.workload.kernels
    merged, shared = kernels.overlap_moe_expert_parallel_comm, kernels.moe_shared_expert_overlap
    forward, backward = exchanged(times)
    if not (merged or shared) or nothing(forward + backward):
        return times
    share = run.rates.shares.communication_multiprocessors
    if merged:
        work = added(time.forward + time.backward_compute for time in times)
        exposed = beside(work, forward + backward, share) - work
        # Of so many micro-batches the first forward and the last backward have none beside them.
        alone = 1 / run.microbatches
        left = alone + (1 - alone) * least(1.0, exposed / (forward + backward))
        shares = left, left
    else:
        inside = {op.name for op in graph.ops if "shared_experts" in op.modules}
        beside_them = [time for time in times if time.name in inside]
        works = (
            added(time.forward for time in beside_them),
            added(time.backward_compute for time in beside_them),
        )
        shares = (
            _left(works[0], forward, share),
            _left(works[1], backward, share),
        )
    return tuple(
        replace(
            time,
            forward_comm=time.forward_comm * shares[0],
            backward_comm=time.backward_comm * shares[1],
        )
        if time.kind == "dispatch"
        else time
        for time in times
    )


def _left(work: float, hidden: float, share: float) -> float:
    """Share of a collective that is exposed beside ``work`` seconds; it also slows that work."""
    if nothing(hidden) or nothing(work):
        return 1.0
    left: float = least(1.0, (beside(work, hidden, share) - work) / hidden)
    return left
