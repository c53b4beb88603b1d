"""What is said of Megatron-LM's options that are not modelled: refused, or noted once."""

from __future__ import annotations

import re

from actcalc.errors import SpecError
from actcalc.io.megatron.names import IDLE, LEFT_OUT, OF_A_SWITCH, REFUSED
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
