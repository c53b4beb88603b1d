"""Peaks of whole training steps, traced with the frameworks' own code, beside ``actcalc memory``.

``tests/data/fake_step_peaks.json`` says how they were made (its ``about``): real steps of
transformers, PEFT, bitsandbytes, DDP, FSDP2 and torchtitan on fake CUDA tensors, bytes of all live
storages. Nothing in the package was fitted to them; each rule has its source in the frameworks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

DATA = json.loads(
    (Path(__file__).resolve().parents[1] / "data" / "fake_step_peaks.json").read_text(
        encoding="utf-8"
    )
)
CASES = {case["id"]: case for case in DATA["cases"]}

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


def group(name: str) -> str:
    return name.split("/")[0] if name.split("/")[0] in ("lora", "qlora", "ddp", "fsdp2", "titan") \
        else "one GPU"  # fmt: skip


def predicted(cli: Callable[..., Any], folder: Path, name: str) -> tuple[int, int]:
    """Peak and resident bytes, without cuBLAS workspaces, which the traces do not have."""
    case = CASES[name]
    config = folder / "config.json"
    config.write_text(json.dumps(DATA["configs"][case["model"]]), encoding="utf-8")
    words = [str(config) if word == "CONFIG" else word for word in case["command"]]
    (stage,) = json.loads(cli(*words, *STATED.get(name, [])).out)["stages"]
    beside = sum(b["bytes"] for b in stage["buffers"] if b["name"] == "cuBLAS workspace")
    return stage["peak_bytes"] - beside, stage["static_bytes"] - beside


def test_what_no_command_said_is_stated() -> None:
    assert {name for name, case in CASES.items() if "outside" in case} == set(STATED)
    assert len(CASES) == 59


@pytest.mark.parametrize("name", CASES)
def test_a_traced_step_s_peak(cli: Callable[..., Any], tmp_path: Path, name: str) -> None:
    peak, resident = predicted(cli, tmp_path, name)
    case = CASES[name]
    assert abs(peak / case["peak_bytes"] - 1) <= 0.01
    assert abs(resident / case["resident_bytes"] - 1) <= 0.003


def test_groups_of_traced_steps(
    cli: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    errors: dict[str, list[float]] = {}
    for name in CASES:
        peak, _ = predicted(cli, tmp_path, name)
        errors.setdefault(group(name), []).append(peak / CASES[name]["peak_bytes"] - 1)
    with capsys.disabled():
        for kind, found in errors.items():
            sizes = [abs(error) for error in found]
            print(
                f"\n{kind:8} {len(found):3} steps: median {median(sizes):.2%}, "
                f"largest {max(sizes):.2%}, bias {median(found):+.2%}",
                end="",
            )
        print()
    for found in errors.values():
        assert median(abs(error) for error in found) <= 0.002
