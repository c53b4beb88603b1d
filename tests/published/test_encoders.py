"""Encoders, encoder-decoders, vision and audio: what the real classes keep, to the byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actcalc.io.runs import load_framework
from tests.published.test_transformers import graph_of, predicted

DATA = Path(__file__).parent.parent / "data"
TRACED: list[dict[str, Any]] = json.loads((DATA / "encoders_traced.json").read_text())["models"]
CASES = [(model, case) for model in TRACED for case in model["cases"]]
RUN = ("seq", "decoder_seq", "precision", "attention", "padding_mask")


def name(value: dict[str, Any]) -> str:
    return value.get("name") or "-".join(str(value[key]) for key in ("batch", *RUN) if key in value)


@pytest.mark.parametrize(("model", "case"), CASES, ids=name)
def test_bytes_of_the_real_class(model: dict[str, Any], case: dict[str, Any]) -> None:
    run = {key: case[key] for key in RUN if key in case}
    found = predicted(graph_of(model["config"], micro_batch=case["batch"], **run))
    assert found.layers == case["layers_bytes"]
    assert found.head == case["head_bytes"]
    assert found.embedding == case["embedding_bytes"]
    assert found.parameters == model["params"]


def test_every_kind_of_run_is_there() -> None:
    """Two sizes, and two kernels of attention where the library has two, for each model."""
    profile = load_framework("transformers")
    for model in TRACED:
        family = model["config"]["model_type"]
        kernels = 1 if profile.kernel("core_sdpa", family) == "none" else 2
        assert len({(case["batch"], case["seq"]) for case in model["cases"]}) > 1, model["name"]
        assert len({case["attention"] for case in model["cases"]}) == kernels, model["name"]
