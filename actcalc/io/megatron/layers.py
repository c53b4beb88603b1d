"""Which layers Megatron-LM's options describe: depth, hybrids' patterns, where experts are."""

from __future__ import annotations

import re
from typing import Any

from actcalc.errors import SpecError, shorten
from actcalc.io.megatron.options import Options
from actcalc.specs.base import MAX_LAYERS

_LONGEST = 2 * MAX_LAYERS + 100
"""Characters of a list of layers."""


def depth(o: Options) -> tuple[int, int]:
    """Layers, and those of an encoder before them (0: there is none).

    arguments.py sets num-layers to encoder-num-layers; a decoder of its own makes it T5.
    """
    encoder, decoder = o.number("encoder-num-layers", 0), o.number("decoder-num-layers", 0)
    layers = o.number("num-layers", 0) or encoder
    if not layers:
        raise SpecError("num-layers is missing", "give num-layers")
    if decoder or o.number("decoder-seq-length", 0) or o.text("model-family") == "t5":
        return decoder or layers, layers
    return layers, 0


def pattern(o: Options) -> str:
    """The layers of a hybrid as written, stages and prediction layers included; "" for others.

    Older runs give shares of attention and feed-forward layers, and what is inside prediction
    layers apart (arguments.py; hybrid_layer_allocation.py pattern_from_ratios).
    """
    written = o.text("hybrid-layer-pattern") or o.text("hybrid-override-pattern")
    stack = any(word in " ".join(o.words("spec")) for word in ("mamba_stack", "hybrid_stack"))
    if not written and (o.flag("is-hybrid-model") or stack):
        written = _spread(
            o.number("num-layers", 0),
            o.real("hybrid-attention-ratio", 0.0),
            o.real("hybrid-mlp-ratio", 0.0),
        )
    inside = o.text("mtp-hybrid-override-pattern")
    if written and inside and "/" not in written and len(inside) <= _LONGEST:
        written += f"/{inside}" * o.number("mtp-num-layers", 1)
    return written


def _spread(layers: int, attention: float, mlp: float) -> str:
    """``layers`` state-space layers, a share of them replaced by others at even distances."""
    if not 0 <= attention + mlp <= 1 or min(attention, mlp) < 0:
        raise SpecError(
            f"hybrid-attention-ratio {attention} and hybrid-mlp-ratio {mlp} of {layers} layers "
            "are no shares",
            "give shares of at most 1 together, or hybrid-layer-pattern",
        )
    letters = ["M"] * layers
    for letter, share in (("*", attention), ("-", mlp)):
        places = [index for index, each in enumerate(letters) if each == "M"]
        count = round(layers * share)
        for number in range(count):
            letters[places[(2 * number + 1) * len(places) // (2 * count)]] = letter
    return "".join(letters)


def hybrid(o: Options) -> dict[str, Any]:
    """Fields of a hybrid of state-space, attention and feed-forward layers.

    A slash introduces what is inside each prediction layer; a bar divides pipeline stages
    (models/hybrid/hybrid_layer_allocation.py).
    """
    written = pattern(o)
    if not written:
        return {}
    if len(written) > 2 * _LONGEST:
        raise SpecError(
            f"hybrid-layer-pattern has {len(written)} letters", f"use at most {MAX_LAYERS} layers"
        )
    main, *inside = written.split("/")
    inside = [part for part in inside if part]
    if len(set(inside)) > 1:
        raise SpecError(
            f"hybrid-layer-pattern {shorten(written)} has different prediction layers",
            "write the same pattern after each slash",
        )
    plain = main.replace("|", "")
    for letter in sorted(set(plain + "".join(inside)) - set("M*-E")):
        raise SpecError(
            f"hybrid-layer-pattern has {letter!r} layers, which are not modelled",
            "M (Mamba), * (attention), - (feed-forward) and E (experts) are",
        )
    fields: dict[str, Any] = {
        "pattern": plain,
        "mamba": {
            "state": o.number("mamba-state-dim", 128),
            "head_dim": o.number("mamba-head-dim", 64),
            "groups": o.number("mamba-num-groups", 8),
            "heads": o.number("mamba-num-heads", 0),
        },
    }
    if inside:
        fields |= {"mtp_layers": len(inside), "mtp_pattern": inside[0]}
    return fields


def frequency(text: str, layers: int) -> list[int]:
    """``moe-layer-freq``: every n-th layer, or a list written like ``([0]*3+[1]*11)``."""
    word = re.sub(r"[ '\"]", "", text[:_LONGEST])  # quotes stay where YAML quotes a shell's word
    if re.fullmatch(r"\d{1,6}", word):
        every = max(1, int(word))
        return [1 if index % every == 0 else 0 for index in range(layers)]
    result: list[int] = []
    for part in word[:_LONGEST].strip("()").split("+"):
        found = re.fullmatch(r"\(?\[([01](?:,[01])*)\]\)?(?:\*(\d{1,4}))?", part)
        if not found:
            raise SpecError(
                f"moe-layer-freq {shorten(text)} is neither a number nor a list",
                "write 1, or ([0]*3+[1]*11)",
            )
        result += [int(bit) for bit in found[1].split(",")] * int(found[2] or 1)
        if len(result) > layers:
            break
    if len(result) != layers:
        raise SpecError(
            f"moe-layer-freq lists {len(result)} layers, num-layers is {layers}",
            "list as many as there are layers",
        )
    return result
