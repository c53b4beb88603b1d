"""Reading back what was written, and in what it differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from actcalc.io.readers import read_text
from actcalc.io.runs import resolve
from actcalc.io.sources import Source
from actcalc.specs.recompute import ALIASES
from actcalc.specs.run import Run
from actcalc.specs.targets import module_names

_NAMES = {"model.name"}
"""What a file calls the model is no part of the run."""


def read_back(run: Run, file: str, text: str, *, vetted: bool = False) -> Run:
    """The run that a text describes, whose model is ``run``'s where it only names one.

    ``vetted``: its readers' types are taken as they are, and Pydantic is not loaded.
    """
    model = Source(run.model.name, run.model.model_dump(), vetted=True)
    found = read_text(file, text, model)
    return resolve(replace(found, vetted=True) if vetted else found)


def differences(
    run: Run,
    file: str,
    text: str,
    same: Mapping[str, Mapping[str, str]],
    *,
    vetted: bool = False,
) -> tuple[str, ...]:
    """Fields in which the run read back differs, each with both values."""
    back = read_back(run, file, text, vetted=vetted)
    first, second = _fields(run), _fields(back)
    found: list[str] = []
    for name, value in first.items():
        other = second.get(name)
        if name in _NAMES or value == other:
            continue
        meaning = same.get(name, {})
        if meaning.get(str(value), str(value)) != meaning.get(str(other), str(other)):
            found.append(f"{name} {_short(value)} (it reads {_short(other)})")
    return tuple(found)


def grouped(run: Run) -> str:
    """Whether local experts run as one product, which auto leaves to Transformer Engine."""
    asked = run.workload.kernels.moe_grouped_gemm
    return asked if asked != "auto" else "on" if run.framework.transformer_engine else "off"


def balanced(run: Run) -> str:
    """The load-balancing loss that auto means: per sequence for sigmoid routers."""
    asked = run.workload.kernels.moe_router_load_balancing_type
    moe = run.model.moe
    if moe is None or not moe.aux_loss:
        return "none"
    return asked if asked != "auto" else "seq_aux_loss" if moe.router == "sigmoid" else "aux_loss"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 24 else text[:21] + "..."


def _fields(run: Run) -> dict[str, Any]:
    """Everything that a run's figures depend on, flat, with what follows from it filled in."""
    model = run.model.model_dump()
    if not run.workload.dropout:
        model |= {name: 0.0 for name in model if name.endswith("_dropout")}
    work = run.workload.model_dump()
    kernels = work.pop("kernels")
    rates = [name for name in model if name.endswith("_dropout") and model[name]]
    work["dropout"] = bool(rates)
    if run.layout.pp == 1:  # one micro-batch, where nothing is said
        work["global_batch"] = work["global_batch"] or work["micro_batch"] * run.layout.dp
    if kernels["make_vocab_size_divisible_by"] == 0 and run.model.vocab % run.layout.tp == 0:
        kernels["make_vocab_size_divisible_by"] = 1  # nothing is padded either way
    layout = run.layout.model_dump()
    layout["schedule"] = run.layout.pipeline
    if run.model.moe:
        kernels |= {"moe_grouped_gemm": grouped(run),
                    "moe_router_load_balancing_type": balanced(run)}  # fmt: skip
    else:
        kernels = {key: value for key, value in kernels.items() if not key.startswith("moe_")}
    fields = {
        **{f"model.{key}": value for key, value in _flat(model)},
        **{f"layout.{key}": value for key, value in layout.items()},
        **{f"workload.{key}": value for key, value in work.items()},
        **{f"kernels.{key}": value for key, value in kernels.items()},
        **{f"training.{key}": value for key, value in run.training.model_dump().items()},
    }
    if run.training.recipe == "auto" and run.workload.precision in ("bf16", "fp16"):
        fields["training.recipe"] = run.framework.recipe
    if run.training.freeze < 0:
        fields["training.freeze"] = run.model.depth + run.training.freeze
    if run.training.loss == "chunked":
        fields["training.loss_chunks"] = run.training.loss_chunks or 8
    fields["framework"] = str(run.framework)
    words = (run.policies or ("none",))[0].split("+")
    fields["policy"] = "+".join(ALIASES.get(word, word) for word in words)
    if not run.training.lora_rank:
        fields.pop("training.lora_targets")
    else:
        fields["training.lora_targets"] = module_names(run.model, run.training.lora_targets)
    return fields


def _flat(model: Mapping[str, Any]) -> list[tuple[str, Any]]:
    result: list[tuple[str, Any]] = []
    for key, value in model.items():
        if isinstance(value, Mapping):
            result += [(f"{key}.{name}", inner) for name, inner in value.items()]
        else:
            result.append((key, value))
    return result
