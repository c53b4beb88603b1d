"""What the measuring tests share. All of them need the extra ``actcalc[torch]``."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conftest import DATA

AUTOCAST = "fp32 params + autocast bf16"


def records(name: str) -> list[dict[str, Any]]:
    return json.loads((DATA / name).read_text(encoding="utf-8"))["records"]


def measured(record: dict[str, Any], *, layers: int | None = None, **options: Any):
    """Measure a recorded case anew."""
    transformers = pytest.importorskip("transformers", reason="needs actcalc[torch]")
    from actcalc.measure import measure_transformers

    model_type = getattr(transformers, record["config_class"]).model_type
    return measure_transformers(
        {"model_type": model_type, **record["config"]},
        batch=record["batch"],
        seq=record["seq"],
        dtype="amp-bf16" if record["dtype"] == AUTOCAST else record["dtype"],
        attention=record["attn"],
        padding_mask=record["padding_mask"],
        checkpointing=record["checkpointing"],
        cls=record["model_class"],
        layers=layers,
        **options,
    )
