"""Patterns of trained parameters: what is written reads back, what is not known is not guessed."""

from __future__ import annotations

import pytest

from actcalc.io.readers.unfrozen import patterns_of, unfrozen

ALL = ["^model.norm.weight$", "^lm_head.weight$"]


@pytest.mark.parametrize(
    ("parts", "train"),
    [
        (("norm", "head"), ()),
        ((), ("layers",)),
        (("embeddings",), ("embeddings", "layers")),
    ],
)
def test_what_is_written_reads_back(parts, train):
    assert unfrozen(patterns_of(20, 32, parts)) == {
        "training.freeze": 20,
        "training.train": train,
    }


@pytest.mark.parametrize(
    "patterns",
    [
        ["model.layers.2[0-9]+.block_sparse_moe.gate"],
        [*ALL],
        ["^model.embed_tokens.weight$[:32000]", *ALL],
        ["model.layers.(1|3).", *ALL],
        ["model.layers.(.", *ALL],
        ["model.layers.[0-9]+.", "^lm_head.weight$"],
        ["(a+)+$"],
    ],
)
def test_others_are_not_guessed(patterns):
    assert unfrozen(patterns) is None


def test_every_layer_alone():
    assert unfrozen(["model.layers.[0-9]+."]) == {"training.train": ("layers",)}
