"""Every layer has its place: schedules with two chunks per stage, uneven splits, refusals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actcalc.errors import SpecError
from actcalc.memory.placement import placement
from actcalc.memory.report import memory_run
from actcalc.specs import Layout
from actcalc.specs.run import load_run

Cli = Callable[..., Any]
TWICE = {"dualpipe": 2}


@given(
    st.sampled_from(["1f1b", "gpipe", "zb-h1", "zb-v", "dualpipe", "dualpipe-v"]),
    st.sampled_from([2, 4, 6]),
    st.data(),
)
def test_every_layer_is_placed_or_the_split_is_refused(
    schedule: str, pp: int, data: st.DataObject
) -> None:
    plain = Layout(pp=pp, schedule=schedule)  # type: ignore[arg-type]
    split = data.draw(
        st.none() | st.lists(st.integers(0, 4), min_size=plain.slices, max_size=plain.slices)
    )
    layers = sum(split) if split else data.draw(st.integers(1, 40))
    layout = plain.model_copy(update={"layers_per_stage": tuple(split or ())})
    if not (split and sum(split)) and layers % layout.slices:
        with pytest.raises(SpecError, match=f"does not divide {layers} layers"):
            placement(layers, layout)
        return
    found = Counter(layer for stage in placement(layers, layout) for c in stage for layer in c)
    assert found == dict.fromkeys(range(layers), TWICE.get(schedule, 1))


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipe-v"])
def test_a_v_wants_two_slices_per_stage(cli: Cli, schedule: str) -> None:
    base = ("memory", "llama-3-8b", "--pp", 4, "--schedule", schedule)
    uneven = cli(*base, "--layers", 36)
    assert uneven.code == 2
    assert f"pp 4 x 2 chunks of {schedule} does not divide 36 layers" in uneven.err
    assert "--layers-per-stage 4x2,5x4,4x2, or --pp 3" in uneven.err
    split = cli(*base, "--layers", 36, "--layers-per-stage", "4x2,5x4,4x2", "--json").json
    assert [stage["layers"] for stage in split["stages"]] == [8, 8, 10, 10]
    short = cli(*base, "--layers-per-stage", "9,8,8,7")
    assert short.code == 2
    assert "give 8 entries" in short.err


def test_dualpipe_keeps_each_of_its_slices_twice() -> None:
    layout = {"pp": 4, "schedule": "dualpipe", "layers_per_stage": (9, 8, 8, 7)}
    result = memory_run(load_run("llama-3-8b", layout=layout))
    assert [stage.layers for stage in result.stages] == [16, 16, 16, 16]
    with pytest.raises(SpecError, match="8 entries for pp 4"):
        load_run("llama-3-8b", layout={**layout, "layers_per_stage": (4,) * 8})


def test_an_encoder_s_layers_are_counted_too() -> None:
    """T5 runs 24 + 24 layers: five stages divide neither, and nothing may get lost."""
    run = {"layout": {"pp": 5}, "framework": "megatron"}
    with pytest.raises(SpecError, match="does not divide 48 layers"):
        load_run("t5-large", **run)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [("1f1b", "held: micro-batches in flight."), ("zb-v", "2 chunks"), ("dualpipe", "2 chunks")],
)
def test_what_is_held_is_said(cli: Cli, schedule: str, words: str) -> None:
    out = cli("memory", "llama-3-8b", "--pp", 4, "--schedule", schedule).out
    assert words in " ".join(out.split())
