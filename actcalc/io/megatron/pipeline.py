"""How Megatron-LM's options divide the layers over pipeline stages."""

from __future__ import annotations

import re
from typing import Any

from actcalc.errors import SpecError, shorten
from actcalc.io.megatron.layers import pattern
from actcalc.io.megatron.options import Options
from actcalc.specs.base import MAX_LAYERS


def stages(o: Options, layers: int, pp: int) -> dict[str, Any]:
    """Fields of the layout that say what each stage and chunk holds; ``SpecError`` if uneven."""
    if pp == 1:
        for name in ("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"):
            if o.has(name):
                raise SpecError(
                    f"{name} is {o.text(name)}, but there is one pipeline stage: Megatron refuses "
                    "it",
                    f"drop {name}, or give pipeline-model-parallel-size",
                )
        return {}
    written = pattern(o).split("/")[0].split("|")
    if len(written) > 1:
        if len(written) % pp:
            raise SpecError(
                f"hybrid-layer-pattern has {len(written)} stages for pp {pp}", "check the pattern"
            )
        split_up: dict[str, Any] = {"layers_per_stage": tuple(len(stage) for stage in written)}
        return split_up | ({"vpp": len(written) // pp} if len(written) > pp else {})
    described = o.text("pipeline-model-parallel-layout")
    if described:
        return _described(described, pp, layers)
    vpp = max(1, o.number("num-virtual-stages-per-pipeline-rank", 1))
    per = o.number("num-layers-per-virtual-pipeline-stage", 0)
    # Megatron-DeepSpeed: the embedding and the head, which it ties, count as layers
    counted_ends = "transformer|embedding" in o.text("pp-partition-method")
    ends = (
        o.flag("account-for-embedding-in-pipeline-split") or counted_ends,
        o.flag("account-for-loss-in-pipeline-split") or counted_ends,
    )
    counted = layers + sum(ends)
    if per:
        vpp = max(1, counted // pp // per)
    first = o.number("decoder-first-pipeline-num-layers", 0)
    last = o.number("decoder-last-pipeline-num-layers", 0)
    result: dict[str, Any] = {"vpp": vpp} if vpp > 1 else {}
    if any(ends):
        chunk = counted // (pp * vpp)
        split = [chunk] * (pp * vpp)
        split[0] -= ends[0]
        split[-1] -= ends[1]
        result["layers_per_stage"] = tuple(split)
    elif first or last:
        middle = layers - first - last
        rest = pp - (1 if first else 0) - (1 if last else 0)
        if vpp > 1 or rest < 1 or middle % rest:
            raise SpecError(
                f"{middle} layers do not divide over the {rest} stages in the middle",
                "give layers_per_stage through --layers-per-stage",
            )
        split = ([first] if first else []) + [middle // rest] * rest + ([last] if last else [])
        result["layers_per_stage"] = tuple(split)
    return result


def _described(text: str, pp: int, layers: int) -> dict[str, Any]:
    """``pipeline-model-parallel-layout``: E embedding, t layer, m prediction layer, L loss.

    Stages are divided by ``|``; ``x*n`` repeats a character, ``(...)*n`` a group
    (``pipeline_parallel_layer_layout.py``).
    """
    # A shell's escapes of bars and brackets stay where the arguments come from a file.
    plain = re.sub(r"[\s,\\'\"]", "", text[: 4 * MAX_LAYERS])
    for repeated in (r"\(([^()]{0,400})\)\*(\d{1,4})", r"([EtmL|])\*(\d{1,4})"):
        times = re.findall(repeated, plain)
        if sum(len(each) * int(number) for each, number in times) > 8 * MAX_LAYERS:
            raise SpecError(
                f"pipeline-model-parallel-layout {shorten(text)} is longer than any model",
                f"use at most {MAX_LAYERS} layers",
            )
        plain = re.sub(repeated, lambda m: m[1] * int(m[2]), plain)
    if not re.fullmatch(r"[EtmL|]*", plain):
        raise SpecError(
            f"pipeline-model-parallel-layout {shorten(text)} does not read", "use E t m L |"
        )
    counts = [stage.count("t") for stage in plain.split("|")]
    if len(counts) % pp or sum(counts) != layers:
        raise SpecError(
            f"pipeline-model-parallel-layout has {len(counts)} stages and {sum(counts)} layers, "
            f"for pp {pp} and {layers} layers",
            "check the layout",
        )
    vpp = len(counts) // pp
    return {"layers_per_stage": tuple(counts), **({"vpp": vpp} if vpp > 1 else {})}
