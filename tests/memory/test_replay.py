"""The caching allocator's rules, and a step's requests replayed through them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actcalc.answers.memory import memory_run
from actcalc.io.runs import load_run
from actcalc.memory.caching import Block, CachingAllocator
from actcalc.memory.replay import replay
from actcalc.memory.stage import StageMemory

MIB = 2**20


def test_segments_by_size() -> None:
    for size, reserved in ((1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10)):
        pool = CachingAllocator()
        pool.take(size)
        assert pool.reserved == reserved * MIB
    pool = CachingAllocator()
    pool.take(11 * MIB)
    assert pool.reserved == 12 * MIB


def test_what_is_left_is_used_where_it_is_large_enough() -> None:
    pool = CachingAllocator()
    first = pool.take(40 * MIB)
    pool.give(first)
    half = pool.take(20 * MIB)
    pool.take(20 * MIB)
    assert pool.reserved == 40 * MIB
    pool.give(half)
    # a MiB or less is no block of its own
    whole = pool.take(20 * MIB - 512 * 1024)
    assert whole.size == 20 * MIB
    assert pool.allocated == 40 * MIB


def test_neighbours_join_in_a_segment_alone() -> None:
    pool = CachingAllocator()
    blocks = [pool.take(10 * MIB) for _ in range(4)]
    assert pool.reserved == 40 * MIB
    for block in blocks:
        pool.give(block)
    pool.take(40 * MIB)
    assert pool.reserved == 80 * MIB
    grown = CachingAllocator(expandable=True)
    blocks = [grown.take(10 * MIB) for _ in range(4)]
    for block in blocks:
        grown.give(block)
    grown.take(40 * MIB)
    assert grown.reserved == 40 * MIB


def test_streams_share_nothing() -> None:
    pool = CachingAllocator()
    pool.give(pool.take(40 * MIB))
    pool.take(40 * MIB, stream=1)
    assert pool.reserved == 80 * MIB


def test_free_segments_go_back_before_the_device_is_full() -> None:
    pool = CachingAllocator(limit=64 * MIB)
    pool.give(pool.take(40 * MIB))
    pool.take(48 * MIB)
    assert pool.reserved == 48 * MIB


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.integers(1, 64 * MIB), st.integers(0, 1)), min_size=1, max_size=60),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_blocks_never_overlap(
    requests: list[tuple[int, int]], random: Any, expandable: bool
) -> None:
    pool = CachingAllocator(expandable=expandable)
    held: list[Block] = []
    for size, stream in requests:
        block = pool.take(size, stream)
        assert block.size >= size
        for other in held:
            apart = (
                other.start + other.size <= block.start or block.start + block.size <= other.start
            )
            assert apart
        held.append(block)
        assert pool.allocated == sum(block.size for block in held) <= pool.reserved
        if random.random() < 0.5:
            pool.give(held.pop(random.randrange(len(held))))
    for block in held:
        pool.give(block)
    assert pool.allocated == 0


RUNS: tuple[dict[str, Any], ...] = (
    {"framework": "transformers", "policies": ("none",)},
    {"framework": "transformers", "policies": ("full",)},
    {"framework": "transformers", "workload": {"seq": 1024, "precision": "amp-bf16"}},
    {"framework": "torchtitan", "layout": {"dp": 8, "zero": 3}, "policies": ("op",)},
    {"framework": "torchtitan", "layout": {"dp": 8, "zero": 3}, "policies": ("full",)},
    {"framework": "megatron", "layout": {"tp": 2, "sp": True, "pp": 4}, "policies": ("selective",)},
    {"framework": "megatron", "layout": {"pp": 4, "vpp": 2}, "policies": ("full",)},
    {"framework": "megatron", "layout": {"pp": 4, "schedule": "zb-h1"}},
    {"framework": "megatron", "policies": ("uniform:4",)},
    {"framework": "megatron", "policies": ("sqrt",), "layout": {"dp": 2, "zero": 1}},
    {"framework": "transformers", "training": {"lora_rank": 16}, "policies": ("full",)},
    {"framework": "transformers", "training": {"loss": "chunked"}},
)


SIZES = st.sampled_from((1, 512, 5000, MIB, MIB + 1, 3 * MIB, 9 * MIB, 20 * MIB, 57 * MIB))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from((None, 10**9)), st.booleans(),
    st.lists(st.tuples(SIZES, st.integers(-1, 20)), max_size=40),
    SIZES, st.integers(1, 9), st.integers(0, 57 * MIB),
)  # fmt: skip
def test_touching_is_taking_and_giving_back(
    limit: int | None, expandable: bool, before: list[tuple[int, int]],
    size: int, count: int, last: int,
) -> None:  # fmt: skip
    """The same in use and reserved, and the same free blocks, however the pool was used before."""
    touched, taken = (CachingAllocator(limit=limit, expandable=expandable) for _ in range(2))
    for pool in (touched, taken):
        blocks: list[Block] = []
        for each, given_back in before:
            blocks.append(pool.take(each))
            if 0 <= given_back < len(blocks):
                pool.give(blocks.pop(given_back))
    sizes = [size] * count + [min(last, size)] * (last > 0)
    touched.touch(sizes)
    for block in [taken.take(each) for each in sizes]:
        taken.give(block)
    one, other = ({**vars(pool)} for pool in (touched, taken))
    for found in (one, other):
        found["_pools"] = {key: pool for key, pool in found["_pools"].items() if pool.free}
    assert one == other


@pytest.mark.parametrize("options", RUNS, ids=lambda options: str(options)[15:80])
def test_the_replay_has_the_peak_of_the_table(options: dict[str, Any]) -> None:
    """It is another way through the same moments: what it has in use at most is the peak."""
    run = load_run("llama-3-8b", **options)
    memory = StageMemory.of(run)
    report = memory_run(run, reserved=True)
    stage = report.stages[report.peak_stage]
    found, _ = replay(memory, stage.stage)
    assert found.allocated == pytest.approx(stage.peak_bytes, rel=0.02)
    assert stage.reserved_bytes == found.reserved >= found.allocated
    assert found.allocated <= (stage.reserved_expandable_bytes or 0)


def test_stages_that_are_not_the_fullest_are_not_replayed() -> None:
    report = memory_run(load_run("llama-3-8b", layout={"pp": 4}), reserved=True)
    known = [s.stage for s in report.stages if s.reserved_bytes is not None]
    assert known == [report.peak_stage]
    plain = memory_run(load_run("llama-3-8b", layout={"pp": 4}))
    assert {s.reserved_bytes for s in plain.stages} == {None}
