"""Peaks of whole training steps, traced with the frameworks' own code, beside ``actcalc memory``.

``tests/data/fake_step_peaks.json`` says how they were made (its ``about``): real steps of
transformers, PEFT, bitsandbytes, DDP, FSDP2 and torchtitan on fake CUDA tensors, bytes of all live
storages. Nothing in the package was fitted to them; each rule has its source in the frameworks.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from tests.agreement.asking import answer

DATA = json.loads(
    (Path(__file__).resolve().parents[1] / "data" / "fake_step_peaks.json").read_text(
        encoding="utf-8"
    )
)
CASES = {case["id"]: case for case in DATA["cases"]}
MORE = {
    case["id"]: case
    for case in json.loads(
        (Path(__file__).resolve().parents[1] / "data" / "fake_step_peaks_more.json").read_text(
            encoding="utf-8"
        )
    )["cases"]
}
"""Steps of the same models with few layers, and mostly small vocabularies."""

STATED = {
    "llama-3.2-1b/s512-loop": [
        "--set",
        "fused_optimizer=false",
        "--set",
        "foreach_optimizer=false",
    ],
    "lora/llama-3-8b-all16-fp32": ["--set", "lora_dtype=fp32"],
    "lora/llama-3-8b-all16-fp32-checkpoint": ["--set", "lora_dtype=fp32"],
    "lora/mistral-7b-qv8": ["--lora-targets", "q_proj+v_proj"],
    "ddp/llama-3.2-1b-bucket-view": ["--set", "bucket_view=true"],
    "titan/8b-8-none-0.2.2": ["--framework", "torchtitan-0.2.2"],
    "titan/8b-8-full-never": ["--set", "keeps_gathered=true"],
}
"""Options that state what ``command`` could not say when the steps were traced."""

_KINDS = ("lora", "qlora", "ddp", "fsdp2", "titan")


class Traced(NamedTuple):
    """One traced step beside its prediction, in bytes."""

    name: str
    kind: str
    peak: int
    predicted: int
    resident: int
    resident_predicted: int

    @property
    def error(self) -> float:
        """Predicted peak over the traced one, less one."""
        return self.predicted / self.peak - 1


def traced(name: str) -> Traced:
    """One case, without cuBLAS workspaces, which the traces do not have."""
    return _beside(name, CASES[name])


def traced_more(name: str) -> Traced:
    """One of ``MORE``."""
    return _beside(name, MORE[name])


def _beside(name: str, case: dict[str, Any]) -> Traced:
    with TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        stated = {**DATA["configs"][case["model"]], **case.get("config", {})}
        config.write_text(json.dumps(stated), encoding="utf-8")
        words = [str(config) if word == "CONFIG" else word for word in case["command"]]
        (stage,) = json.loads(answer([*words, *STATED.get(name, [])]))["stages"]
    beside = sum(b["bytes"] for b in stage["buffers"] if b["name"] == "cuBLAS workspace")
    first = name.split("/")[0]
    return Traced(
        name,
        first if first in _KINDS else "one GPU",
        case["peak_bytes"],
        stage["peak_bytes"] - beside,
        case["resident_bytes"],
        stage["static_bytes"] - beside,
    )
