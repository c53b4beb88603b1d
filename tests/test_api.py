"""The library's calls, with objects of the library's own."""

from __future__ import annotations

import pytest

from actcalc import Layout, Model, SpecError, Workload, breakdown, compare, load_model


@pytest.mark.parametrize("name", ["gpt3-175b", "llama-3-8b", "mixtral-8x7b", "deepseek-v2-lite"])
def test_a_workload_of_ones_own(name):
    workload = Workload(seq=512, micro_batch=2, attention="flash", dropout=False)
    result = compare(load_model(name), workload=workload)
    assert result.workload["seq"] == 512
    assert result.policies[0].stored_bytes_per_layer > 0
    leaves = breakdown(name, workload=workload)
    assert leaves.stored_bytes_per_layer == result.policies[0].stored_bytes_per_layer


def test_a_model_of_ones_own():
    model = Model(layers=2, hidden=64, heads=4, vocab=100)
    result = compare(
        model, Layout(tp=2, sp=True), Workload(seq=32, attention="eager"), framework="paper"
    )
    assert result.policies[0].formula == "sbh(32+2as/h)/t"


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: Layout(tp=0), "tp is 0"),
        (lambda: Layout(zero=7), "zero is 7"),
        (lambda: Workload(seq=True), "seq is True"),
        (lambda: Workload(attention="falsh"), "falsh"),
        (lambda: Model(layers=2, hidden=63, heads=4, vocab=9), "hidden 63"),
        (lambda: compare("gpt3-175b", Layout(tp=7)), "tp 7"),
        (lambda: load_model("gtp2"), "gtp2"),
    ],
)
def test_contradictions_are_refused(make, word):
    with pytest.raises(SpecError, match=word):
        make()
