"""Every size in the answer is a whole number of bytes, whatever the run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from actcalc.answers.memory import memory_run
from actcalc.errors import SpecError
from actcalc.io import presets
from actcalc.io.runs import load_run
from tests.sweeps import examples

MODELS = ("gpt2", "bert-base", "llama-3-8b", "mixtral-8x7b", "deepseek-v3", "t5-small",
          "mamba2-130m", "nemotron-3-nano-30b-a3b", "vit-b-16")  # fmt: skip


def sizes(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value whose key ends in ``bytes``, with its path."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "bytes" or key.endswith("_bytes"):
                yield f"{path}.{key}", inner
            yield from sizes(inner, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from sizes(inner, f"{path}[{index}]")


def wrong(document: Any) -> list[tuple[str, Any]]:
    """Sizes that are neither whole numbers nor absent."""
    whole = json.loads(json.dumps(document))
    return [(path, v) for path, v in sizes(whole) if v is not None and type(v) is not int]


@pytest.mark.parametrize("device", presets.names("devices"))
def test_devices(device: str) -> None:
    document = memory_run(load_run("gpt2", device=device), limits=("micro-batch",)).document()
    assert wrong(document) == []


@given(
    model=st.sampled_from(MODELS),
    device=st.sampled_from([None, *presets.names("devices")]),
    framework=st.sampled_from(["megatron", "megatron-local", "transformers", "paper"]),
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 3]),
    schedule=st.sampled_from([None, "1f1b", "gpipe", "zb-h1", "zb-v", "dualpipe"]),
    zero=st.sampled_from([0, 1, 2, 3]),
    dp=st.sampled_from([1, 3, 8]),
    policy=st.sampled_from(["none", "full", "selective", "mlp", "sqrt", "op"]),
    precision=st.sampled_from(["bf16", "fp32", "fp8", "amp-bf16"]),
    training=st.sampled_from(
        [
            {},
            {"optimizer": "adam8bit"},
            {"optimizer": "adafactor", "fused_optimizer": False},
            {"optimizer": "muon"},
            {"lora_rank": 7, "base_bits": 4},
            {"offload": "activations", "loss": "chunked", "loss_chunks": 7},
            {"step_in_backward": True, "compiled_loss": True},
            {"gradients_in_16_bit": True, "shards": 2, "moments_bytes": 3},
        ]
    ),
    imbalance=st.sampled_from([1.0, 1.37]),
)
@settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much],
)
def test_runs(
    model: str,
    device: str | None,
    framework: str,
    tp: int,
    pp: int,
    schedule: str | None,
    zero: int,
    dp: int,
    policy: str,
    precision: str,
    training: dict[str, Any],
    imbalance: float,
) -> None:
    layout: dict[str, Any] = {"tp": tp, "sp": tp > 1, "pp": pp, "dp": dp, "zero": zero}
    if schedule and pp > 1:
        layout["schedule"] = schedule
    workload: dict[str, Any] = {"seq": 256, "precision": precision}
    try:
        if load_run(model).model.moe:
            workload["moe_imbalance"] = imbalance
        if load_run(model).model.patches:
            del workload["seq"]
        run = load_run(
            model, layout=layout, workload=workload, training=training, framework=framework,
            device=device, policies=(policy,),
        )  # fmt: skip
        document = memory_run(run).document()
    except SpecError:
        assume(False)
    assert wrong(document) == []
