"""What is said of Megatron-LM's options that are not modelled: refused, or noted once."""

from __future__ import annotations

import re

from actcalc.errors import SpecError
from actcalc.io.megatron.names import (
    IDLE,
    KNOWN_SPECIFICATIONS,
    LEFT_OUT,
    OF_A_SWITCH,
    REFUSED,
)
from actcalc.io.megatron.options import Options

_MOST_TOLD = 24


def refuse(o: Options, name: str) -> None:
    """Raise ``SpecError`` for options that describe another architecture, or no training."""
    for option, what in REFUSED:
        if o.text(option) not in ("", "False"):
            raise SpecError(
                f"{name}: {option} describes {what}, which the megatron profile does not model",
                f"drop {option} for the figures of the plain decoder or encoder",
            )
    _refuse_specification(o, name)
    _refuse_half_sandwich(o, name)


def _refuse_specification(o: Options, name: str) -> None:
    """Raise ``SpecError`` for a ``--spec`` whose layers are not known here.

    It names a module and a function that builds layers of any kind, whatever the other options
    say; those of Megatron-LM itself and of sandwich norms are known.
    """
    words = o.words("spec")
    if not words or any(part in " ".join(words) for part in KNOWN_SPECIFICATIONS):
        return
    raise SpecError(
        f"{name}: spec {' '.join(words)} names layers of its own, which other options do not tell",
        "give the model's config.json with --framework transformers; without spec the figures are "
        "those of the plain decoder",
    )


def _refuse_half_sandwich(o: Options, name: str) -> None:
    """Raise ``SpecError`` for a norm after one of attention and feed-forward alone."""
    both = ("post-self-attn-layernorm", "post-mlp-layernorm")
    given = [option for option in both if o.flag(option)]
    if len(given) == 1:
        missing = next(option for option in both if option not in given)
        raise SpecError(
            f"{name}: {given[0]} without {missing} is a layer that is not modelled",
            f"give {missing} too, or neither",
        )


def graphs(o: Options, warnings: list[str]) -> None:
    """Say what CUDA graphs do to memory, which is not modelled.

    Captured modules read static copies of their inputs, one for each layer and micro-batch in
    flight, and what they save lives in private pools: reserved all the time, but no longer counted
    as allocated (transformer/cuda_graphs.py; torch.cuda.graph pools).
    """
    implementation = o.text("cuda-graph-impl", "none")
    on = implementation if implementation != "none" else ""
    for name in ("enable-cuda-graph", "external-cuda-graph"):
        on = on or (name if o.flag(name) else "")
    if on:
        warnings.append(
            f"CUDA graphs ({on}) are not modelled in memory: static inputs and private pools of "
            "captured modules add to these figures, and what captured modules save is reserved "
            "rather than allocated."
        )


def unread(o: Options, warnings: list[str], idle: str = "") -> None:
    """Say which options were not read, once and all together; those that move nothing aside.

    ``idle`` matches further names that do.
    """
    others = re.compile(idle or "(?!)")
    for name, what, still in LEFT_OUT:
        o.read.add(name)
        if o.data.get(name) not in (None, False, *still):
            warnings.append(f"{name} is not modelled; it {what}.")
    off = tuple(group for switch, group in OF_A_SWITCH if o.data.get(switch) in (None, False))
    names = [
        name
        for name, value in o.data.items()
        if name not in o.read
        and value not in (None, False)
        and not IDLE.fullmatch(name)
        and not others.fullmatch(name)
        and not name.startswith(off)
    ]
    if not names:
        return
    import difflib

    close = {name: difflib.get_close_matches(name, o.read, n=1, cutoff=0.85) for name in names}
    told = [f"{name} (is it {close[name][0]}?)" if close[name] else name for name in sorted(names)]
    more = f" and {len(told) - _MOST_TOLD} more" if len(told) > _MOST_TOLD else ""
    warnings.append(
        f"Options not understood, and so not counted: {', '.join(told[:_MOST_TOLD])}{more}."
    )
