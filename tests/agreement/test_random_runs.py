"""Random legal runs: commands that answer the same question give the same answer.

``pytest --agreement-runs 3000`` asks about more of them, ``python -m tests.agreement`` sums up what
it finds.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.agreement.questions import disagreements
from tests.agreement.runs import KINDS, random_run

BATCH = 10
"""Runs asked about in one test."""


def pytest_generate_tests(metafunc):
    if "batch" in metafunc.fixturenames:
        count = metafunc.config.getoption("--agreement-runs")
        batches = [range(n, min(n + BATCH, count)) for n in range(0, count, BATCH)]
        metafunc.parametrize("batch", batches, ids=[f"{b.start}-{b.stop - 1}" for b in batches])


def test_commands_agree(batch):
    texts = [
        f"{one.kind}: {one.detail}\n  " + "\n  ".join(one.commands)
        for number in batch
        for one in disagreements(random_run(f"1:{number}")) or ()
    ]
    assert not texts, f"{len(texts)} disagreements\n" + "\n".join(texts)


def test_random_runs_are_of_every_kind():
    """What is drawn covers models, schedules, policies and training; few runs are refused."""
    runs = [random_run(f"1:{number}") for number in range(400)]
    assert {run.kind for run in runs} == set(KINDS)
    words = Counter(word for run in runs for word in {*run.timed, *run.policies})
    wanted = (
        "--pp", "--vpp", "--cp", "--ep", "--sp", "--zero", "--layers-per-stage", "--global-batch",
        "gpipe", "zb-h1", "zb-v", "dualpipe", "dualpipe-v", "sqrt", "op", "full-sharded",
        "lora_rank=16", "base_bits=4", "--device", "megatron", "torchtitan", "transformers",
    )  # fmt: skip
    assert {word for word in wanted if not words[word]} == set()
    for name in ("uniform:", "block:", "every:"):
        assert any(policy.startswith(name) for run in runs for policy in run.policies)


@pytest.mark.parametrize("seed", ["1:3", "1:7"])
def test_a_seed_is_a_run(seed):
    assert random_run(seed) == random_run(seed)
