"""Mutated configurations give a valid model or an error with a hint: never a traceback."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actcalc.errors import SpecError
from actcalc.io.hf import read_config, read_config_file
from actcalc.io.hub.families import FAMILIES
from actcalc.specs import Model, Workload
from actcalc.specs.validate import build
from tests.sweeps import examples

DATA = Path(__file__).parent.parent / "data"
CONFIGS = [json.loads(path.read_text()) for path in sorted((DATA / "configs").glob("*.json"))]
CONFIGS += [case["config"] for case in json.loads((DATA / "hub_types.json").read_text())["cases"]]
KEYS = sorted({key for config in CONFIGS for key in config})

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["silu", "gelu_new", "full_attention", "sliding_attention", "sparse", "LLLG"]),
)
junk = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    config = json.loads(json.dumps(draw(st.sampled_from(CONFIGS))))
    if draw(st.booleans()):
        config["model_type"] = draw(st.sampled_from(sorted(FAMILIES)))
    for _ in range(draw(st.integers(1, 4))):
        target = config
        inner = [value for value in config.values() if isinstance(value, dict)]
        if inner and draw(st.booleans()):
            target = draw(st.sampled_from(inner))
        known = sorted(target) or KEYS
        key = draw(st.sampled_from(known) | st.sampled_from(KEYS))
        if draw(st.integers(0, 3)) == 0:
            target.pop(key, None)
        else:
            target[key] = draw(junk)
    return config


def check(spec: Model) -> None:
    sizes = [spec.layers, spec.hidden, spec.heads, spec.kv_heads, spec.ffn, spec.q_dim]
    sizes += [spec.vocab or spec.patches]
    sizes += [spec.moe.experts, spec.moe.topk, spec.moe.ffn] if spec.moe else []
    assert all(isinstance(size, int) and 0 < size < 2**70 for size in sizes)
    rates = [spec.hidden_dropout, spec.attention_dropout, spec.embedding_dropout]
    assert all(math.isfinite(rate) and 0 <= rate < 1 for rate in rates)
    assert sum(count for _, count in spec.runs()) == spec.depth


def outcome(path_or_config: Path | dict[str, Any]) -> Model | SpecError:
    """A validated model, or the error a user sees; anything else propagates."""
    try:
        if isinstance(path_or_config, Path):
            imported = read_config_file(path_or_config)
        else:
            imported = read_config(path_or_config)
        build(Workload, imported.workload, "workload")
        return build(Model, imported.fields, "model")
    except SpecError as error:
        return error


def check_outcome(result: Model | SpecError) -> None:
    if isinstance(result, Model):
        check(result)
    else:
        assert str(result)
        assert result.hint
        assert "\n" not in str(result)


@settings(max_examples=examples(600), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mutated())
def test_mutated_configurations(config):
    check_outcome(outcome(config))


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=300) | st.text(max_size=300).map(lambda text: text.encode()))
def test_bytes_that_are_no_configuration(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / "config.json"
    path.write_bytes(data)
    assert isinstance(outcome(path), SpecError)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(CONFIGS), st.data())
def test_cut_or_damaged_text(tmp_path_factory, config, data):
    text = json.dumps(config)
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(len(text), start + 12)))
    path = tmp_path_factory.mktemp("cut") / "config.json"
    path.write_text(
        text[:start] + data.draw(st.text('0123456789{}[],:"-e.nN', max_size=4)) + text[stop:]
    )
    check_outcome(outcome(path))
