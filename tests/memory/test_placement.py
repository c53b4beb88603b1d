"""Every layer has its place: schedules with two chunks per stage, uneven splits, refusals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actcalc.answers.memory import memory_run
from actcalc.errors import SpecError
from actcalc.io.runs import load_run
from actcalc.run.placement import ends, placement
from actcalc.specs import Layout

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


@given(
    st.sampled_from(["1f1b", "gpipe", "zb-h1", "zb-v", "dualpipe", "dualpipe-v"]),
    st.sampled_from([2, 4]),
)
def test_each_end_of_the_model_lives_on_one_slice(schedule: str, pp: int) -> None:
    layout = Layout(pp=pp, schedule=schedule)  # type: ignore[arg-type]
    chunks = placement(layout.slices, layout)
    for side in (0, 1):
        holding = [
            chunk
            for stage, held in zip(chunks, ends(layout), strict=True)
            for chunk, sides in zip(stage, held, strict=True)
            if sides[side]
        ]
        assert len(holding) == TWICE.get(schedule, 1)
        assert set(holding) == {range(1) if side == 0 else range(layout.slices)[-1:]}


def test_ends_without_a_layer_of_their_own() -> None:
    """E|t|...|t|L: embedding and head live on the first and the last stage all the same."""
    every = {"global_batch": 8, "seq": 1024, "micro_batch": 1}
    own = {"pp": 4, "vpp": 2, "layers_per_stage": (0, 2, 2, 2, 2, 2, 2, 0)}
    run = load_run("gpt2", layout=own, workload=every)
    stages = memory_run(run).stages
    assert [(stage.embedding, stage.head) for stage in stages] == [
        (True, False), (False, False), (False, False), (False, True)
    ]  # fmt: skip
    assert sum(stage.layers for stage in stages) == 12
    table = run.model.vocab * run.model.hidden
    assert stages[3].parameters > stages[3].layers * 7e6 + 0.9 * table
    assert "logits" in stages[3].peak_at
    even = memory_run(load_run("gpt2", layout={"pp": 4}, workload=every)).stages
    assert even[0].parameters + table > stages[0].parameters > table
