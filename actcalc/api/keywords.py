"""Keyword arguments of the library's calls: the flags of the command line, by their names.

The types stand here, for editors and type checkers; what each one means is the flag's own help,
which :func:`documented` writes into the docstring of a call.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, TypedDict, TypeVar, get_type_hints

from actcalc.cli.bundles import help_of
from actcalc.errors import SpecError

Call = TypeVar("Call", bound=Callable[..., Any])
Names = str | Sequence[str]
"""One name, several joined with commas, or a sequence of names."""
Efficiency = Names | Mapping[str, float] | None
"""Shares of a device's peaks, or presets and files of them."""


class WorkKeywords(TypedDict, total=False):
    """What is trained, on what; None or absent: as the model or the run file says."""

    seq: int | None
    global_batch: int | None
    grad_accum: int | None
    lengths: str | None
    packed: bool | None
    completion: int | None
    decoder_seq: int | None
    image_tokens: int | None
    layers: int | None
    sp: bool | None
    schedule: str | None
    layers_per_stage: str | Sequence[int] | None
    precision: str | None
    attention: str | None
    dropout: bool | None
    framework: str | None
    device: str | None
    device_memory: str | None
    peak: str | None
    headroom: str | float | None
    policy: Names | None
    recompute_method: str | None
    recompute_num_layers: int | None
    cuda_graphs: str | None
    moe_imbalance: float | None
    set: Mapping[str, Any] | Sequence[str] | None
    from_: str | None


class RunKeywords(WorkKeywords, total=False):
    """The same, and how it is laid out."""

    micro_batch: int | None
    tp: int | None
    pp: int | None
    vpp: int | None
    cp: int | None
    ep: int | None
    etp: int | None
    dp: int | None
    zero: int | None


class TuningKeywords(TypedDict, total=False):
    """How weights are trained."""

    optimizer: str | None
    recipe: str | None
    shards: int | None
    loss: str | None
    lora_rank: int | None
    lora_targets: str | None
    dora: bool | None
    base_bits: int | None
    qlora: bool | None
    train: str | None
    freeze: int | None
    galore_rank: int | None
    tower: str | None
    objective: str | None
    reference: str | None
    generation_share: float | None


class MemoryKeywords(RunKeywords, TuningKeywords, total=False):
    """A run, how its weights are trained, and what is kept in host memory."""

    offload: Names | None


class PlanKeywords(RunKeywords, TuningKeywords, total=False):
    """The same for a plan, whose ``offload`` moves activations."""

    offload_states: str | None


class SearchKeywords(WorkKeywords, TuningKeywords, total=False):
    """The same where every degree is a choice: ``"1,2,4"``, ``"..8"``, or one number."""

    offload: Names | None
    micro_batch: int | str | None
    tp: int | str | None
    pp: int | str | None
    vpp: int | str | None
    cp: int | str | None
    ep: int | str | None
    etp: int | str | None
    dp: int | str | None
    zero: int | str | None


def _listed(value: Any) -> list[str] | None:
    if value is None:
        return None
    return [value] if isinstance(value, str) else [str(each) for each in value]


def _settings(value: Any) -> list[str] | None:
    """``key=value`` texts; a mapping's values as JSON, which is YAML."""
    if isinstance(value, Mapping):
        return [
            f"{key}={one if isinstance(one, str) else json.dumps(one)}"
            for key, one in value.items()
        ]
    return _listed(value)


_READ: Mapping[str, Callable[[Any], Any]] = {
    "policy": _listed,
    "offload": _listed,
    "efficiency": _settings,
    "set": _settings,
    "headroom": lambda value: None if value is None else str(value),
    "layers_per_stage": lambda value: (
        value if value is None or isinstance(value, str) else ",".join(map(str, value))
    ),
}
"""How a keyword is turned into what its flag would have been given."""


def bundle(kind: Any, keywords: Mapping[str, Any]) -> Any:
    """The options of one bundle of the command line, from keywords that may hold more."""
    names = [field.name for field in fields(kind) if field.name in keywords]
    return kind(**{name: _READ.get(name, lambda value: value)(keywords[name]) for name in names})


def bundles(keywords: Mapping[str, Any], *kinds: Any) -> list[Any]:
    """The bundles of the command line's options that the keywords make up.

    ``TypeError`` for a keyword that no bundle has, with the nearest that one has; ``SpecError`` for
    several framework profiles, since a call answers for one.
    """
    known = [field.name for kind in kinds for field in fields(kind)]
    for name in keywords:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"unexpected keyword argument {name!r}{hint}")
    framework = keywords.get("framework")
    if isinstance(framework, str) and "," in framework:
        raise SpecError(
            f"framework {framework!r} names several profiles", "call once for each of them"
        )
    return [bundle(kind, keywords) for kind in kinds]


def documented(typed: type, *kinds: Any) -> Callable[[Call], Call]:
    """Give a call the signature and the docstring of the options that it takes."""

    def decorate(call: Call) -> Call:
        own = [
            each
            for each in inspect.signature(call).parameters.values()
            if each.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        hints = get_type_hints(typed)
        taken = {each.name for each in own}
        lines, extra = [], []
        for kind in kinds:
            for name, text in help_of(kind).items():
                if name in taken:
                    continue
                shown = inspect.formatannotation(hints.get(name, Any)).replace("typing.", "")
                shown = shown.replace("collections.abc.", "")
                lines.append(f"    {name}: {text}")
                extra.append(
                    inspect.Parameter(
                        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=shown
                    )
                )
        call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [*own, *extra], return_annotation=inspect.signature(call).return_annotation
        )
        call.__doc__ = "\n".join([inspect.cleandoc(call.__doc__ or ""), "", "Flags:", *lines])
        return call

    return decorate
