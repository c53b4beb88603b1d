"""Whole weights given to ranks by Megatron's layer-wise optimizer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actcalc.answers.memory import memory_run
from actcalc.errors import SpecError
from actcalc.io.megatron import read_arguments
from actcalc.io.runs import load_run
from actcalc.memory.layerwise import dealt, packed
from actcalc.memory.stage import StageFigure


def test_weights_are_dealt_back_and_forth() -> None:
    """The example of layer_wise_optimizer.py: 4 ranks, 10 weights in ascending order."""
    owners = dealt(list(range(10, 20)), 4)
    ranks = [[i for i, owner in enumerate(owners) if owner == rank] for rank in range(4)]
    assert ranks == [[0, 7, 8], [1, 6, 9], [2, 5], [3, 4]]


@given(st.lists(st.integers(1, 10**7), min_size=1, max_size=60), st.integers(1, 16))
def test_every_weight_has_one_owner(sizes: list[int], ranks: int) -> None:
    for bucket in (None, 10**6):
        owners, padding = packed(sizes, ranks, bucket)
        assert len(owners) == len(sizes)
        assert all(0 <= owner < ranks for owner in owners)
        loads = [
            sum(s for s, o in zip(sizes, owners, strict=True) if o == rank) for rank in range(ranks)
        ]
        assert padding >= 0
        if bucket is None:
            assert ranks * max(loads) <= sum(sizes) + padding
    assert all(0 <= owner < ranks for owner in dealt(sizes, ranks))


def test_equal_weights_that_divide_pad_nothing() -> None:
    owners, padding = packed([1024] * 24, 8, None)
    assert sorted(owners) == sorted(list(range(8)) * 3)
    assert padding == 0


def stage(whole: str, dp: int) -> StageFigure:
    training: dict[str, Any] = {"optimizer": "muon", "whole_weights": whole}
    return memory_run(
        load_run("gpt2", framework="megatron", layout={"dp": dp, "zero": 1}, training=training)
    ).stages[0]


def test_the_fullest_rank_has_the_embedding_when_dealt() -> None:
    """The largest weight goes whole to one rank; an even split gives each an eighth."""
    even, own, packed_own = (stage(kind, 8) for kind in ("none", "dealt", "packed"))
    table = 50257 * 768 * 12
    assert own.optimizer_bytes > table > even.optimizer_bytes
    assert packed_own.optimizer_bytes < own.optimizer_bytes
    assert own.static_bytes - own.last_rank_spare_bytes >= own.weights_bytes + own.gradients_bytes


def test_one_rank_keeps_everything() -> None:
    assert stage("dealt", 1).optimizer_bytes == stage("none", 1).optimizer_bytes


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"optimizer": "dist_muon"}, "dealt"),
        ({"optimizer": "muon", "use-distributed-optimizer": True}, "packed"),
        (
            {"optimizer": "muon", "use-distributed-optimizer": True,
             "no-use-layer-wise-param-layout": True},
            "dealt",
        ),
        ({"optimizer": "muon"}, None),
        ({"optimizer": "adam", "use-distributed-optimizer": True}, None),
    ],
)  # fmt: skip
def test_arguments(options: dict[str, Any], kind: str | None) -> None:
    base = {"num-layers": 2, "hidden-size": 64, "num-attention-heads": 4, "vocab-size": 100}
    assert read_arguments({**base, **options}).training.get("whole_weights") == kind


def test_whole_weights_are_muon_s() -> None:
    with pytest.raises(SpecError, match="muon"):
        load_run("gpt2", training={"whole_weights": "dealt"})
