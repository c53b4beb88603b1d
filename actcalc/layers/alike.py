"""Which runs of one model have the same graphs but for the sizes of their symbols.

A builder reads a run's degrees and micro-batch as symbols, and a few of them as conditions: whether
there is tensor parallelism, whether a rank has more query heads than key heads, whether there is
more than one sequence. Runs that agree in all of these share their graphs.
"""

from __future__ import annotations

from collections.abc import Hashable

from actcalc.specs import Framework, Layout, Model, Workload

_BLOCK = 8  # rows, or batches times heads, that a fused softmax wants to be a multiple of


def structure(
    model: Model, layout: Layout, workload: Workload, framework: Framework
) -> tuple[Hashable, ...]:
    """What the graphs of a run depend on beside their symbols: equal for runs that share them.

    Model, framework and the workload but for its micro-batch are the same in all of them.
    """
    tp, kv, size = layout.tp, model.kv_heads, workload.micro_batch
    if _reads_more(model):
        return tp, layout.sp, layout.cp, layout.ep, layout.etp, size
    heads, groups = model.heads // tp, kv // min(kv, tp)
    conditions: tuple[Hashable, ...] = (
        layout.sp, tp > 1, layout.cp > 1, layout.ep > 1, layout.expert_tp > 1,
        layout.expert_tp == tp, layout.pp > 1, size > 1,
        kv < tp, groups > 1, heads > max(1, kv // tp), heads == 1, kv // tp <= 1,
        workload.seq % (2 * layout.cp) == 0,
        (tp, layout.cp) if framework.layers == "pytorch" else 0,  # rings are written out in steps
    )  # fmt: skip
    if workload.attention == "flash" and workload.kernels.attention_backend != "unfused":
        return conditions
    return (*conditions, size * heads % _BLOCK, workload.seq // layout.cp % _BLOCK)


def _reads_more(model: Model) -> bool:
    """Whether builders read more of the degrees: of mixers, towers and layers of other sizes."""
    return bool(
        model.mamba or model.linear or model.patches or model.tower or model.encoder_layers
        or model.layer_sizes
    )  # fmt: skip
