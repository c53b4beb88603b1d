"""Pipeline schedules against published formulas, PyTorch's own orders and a plain simulator."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actcalc.cost import pipeline
from actcalc.cost.pipeline import makespan
from actcalc.errors import SpecError
from actcalc.run.schedule import (
    Action,
    actions,
    in_flight,
    in_flight_by_chunk,
    moments,
)
from actcalc.run.schedule.orders import order_of
from actcalc.run.schedule.shape import shape_of
from actcalc.specs.schedules import SCHEDULES

SPLIT = tuple(name for name, row in SCHEDULES.items() if row.splits_backward)


@st.composite
def runs(draw, most_stages=6, most_rounds=6):
    """(schedule, pp, microbatches, vpp, group) that the schedule can run."""
    name = draw(st.sampled_from(tuple(SCHEDULES)))
    pp = draw(st.integers(1, most_stages))
    vpp, group = 1, None
    count = draw(st.integers(1, most_rounds * pp))
    if not SCHEDULES[name].chunks:
        pp, vpp = max(pp, 2), draw(st.integers(2, 4))
        group = draw(st.integers(pp, 2 * pp))
        count = draw(st.integers(1, most_rounds)) * group
        count += draw(st.sampled_from([0, *range(pp, group)]))
    elif name == "dualpipe":
        pp += pp % 2
        count = 2 * draw(st.integers(pp, most_rounds * pp))
    elif name == "dualpipe-v":
        count += 2 * pp
    return name, pp, count, vpp, group


# --- a plain simulator over the public list of actions -------------------------------------------


def way(name, pp, microbatch, count):
    """The (stage, chunk) pairs a microbatch passes, in order."""
    if name in ("zb-v", "dualpipe-v"):
        return [(r, 0) for r in range(pp)] + [(r, 1) for r in reversed(range(pp))]
    if name == "dualpipe":
        if microbatch < count // 2:
            return [(r, 0) for r in range(pp)]
        return [(r, 1) for r in reversed(range(pp))]
    return None


def simulate(name, pp, count, vpp, group, duration, delay):
    """Finish time of every (kind, stage, chunk, microbatch); fails on an order that deadlocks."""
    orders = [list(stage) for stage in actions(name, pp, count, vpp, group=group)]
    routes = {}
    for microbatch in range(count):
        route = way(name, pp, microbatch, count)
        if route is None:
            chunks = SCHEDULES[name].chunks or vpp
            route = [(r, c) for c in range(chunks) for r in range(pp)]
        routes[microbatch] = route
    finish = {}
    clock = [0] * pp

    def arrival(stage, action):
        route = routes[action.microbatch]
        here = route.index((stage, action.chunk))
        if action.kind == "F":
            if here == 0:
                return 0
            source = ("F", *route[here - 1], action.microbatch)
        elif action.kind == "W":
            source = ("I", stage, action.chunk, action.microbatch)
        elif here == len(route) - 1:
            source = ("F", stage, action.chunk, action.microbatch)
        else:
            source = ("I", *route[here + 1], action.microbatch)
        if source not in finish:
            return None
        return finish[source] + (delay if source[1] != stage else 0)

    progress = True
    while progress:
        progress = False
        for stage, order in enumerate(orders):
            while order:
                together = order[:2] if order[0].joined else order[:1]
                times = [arrival(stage, action) for action in together]
                if None in times:
                    break
                clock[stage] = max(clock[stage], *times) + sum(
                    duration(action.kind, stage, action.chunk) for action in together
                )
                for action in together:
                    kind = "I" if action.kind == "B" else action.kind
                    finish[kind, stage, action.chunk, action.microbatch] = clock[stage]
                del order[: len(together)]
                progress = True
    assert not any(orders), "the order deadlocks"
    return finish


def held(order):
    """(activations, stashes) per chunk while each action of a stage runs."""
    activations, stashes = Counter(), Counter()
    for action in order:
        if action.kind == "F":
            activations[action.chunk] += 1
        yield action, activations.copy(), stashes.copy()
        if action.kind in "BI":
            activations[action.chunk] -= 1
        if action.kind == "I":
            stashes[action.chunk] += 1
        if action.kind == "W":
            stashes[action.chunk] -= 1
    assert not +activations
    assert not +stashes


# --- every order is complete, and can be executed ------------------------------------------------


@given(runs())
@settings(max_examples=150, deadline=None)
def test_every_chunk_of_every_microbatch_runs_once_in_order(run):
    name, pp, count, vpp, group = run
    orders = actions(name, pp, count, vpp, group=group)
    assert len(orders) == pp
    chunks = SCHEDULES[name].chunk_count(vpp)
    for stage, order in enumerate(orders):
        expected = {
            (microbatch, chunk)
            for microbatch in range(count)
            for chunk in range(chunks)
            if name != "dualpipe" or chunk == (microbatch >= count // 2)
        }
        kinds = {kind: [a[1:3] for a in order if a.kind == kind] for kind in "FBIW"}
        assert sorted(kinds["F"]) == sorted(expected)
        assert sorted(kinds["B"] + kinds["I"]) == sorted(expected)
        assert sorted(kinds["W"]) == sorted(kinds["I"])
        assert name in SPLIT or not kinds["I"]
        seen = set()
        for action in order:
            need = {"F": None, "B": "F", "I": "F", "W": "I"}[action.kind]
            assert need is None or (need, *action[1:3]) in seen, (stage, action)
            seen.add((action.kind, *action[1:3]))


@given(runs(most_stages=5, most_rounds=4), st.data())
@settings(max_examples=100, deadline=None)
def test_makespan_equals_a_plain_simulation(run, data):
    name, pp, count, vpp, group = run
    chunks = SCHEDULES[name].chunk_count(vpp)
    whole = st.integers(1, 20)
    table = {kind: [[data.draw(whole) for _ in range(chunks)] for _ in range(pp)] for kind in "FIW"}
    table["B"] = [
        [i + w for i, w in zip(*rows, strict=True)]
        for rows in zip(table["I"], table["W"], strict=True)
    ]
    delay = data.draw(st.integers(0, 3))
    finish = simulate(name, pp, count, vpp, group, lambda k, r, c: table[k][r][c], delay)
    result = makespan(
        name,
        pp,
        count,
        vpp,
        group=group,
        forward_seconds=table["F"],
        backward_seconds=table["B"],
        weight_seconds=table["W"],
        p2p_seconds=delay,
    )
    assert result.total_seconds == pytest.approx(max(finish.values()), rel=1e-10)
    each = count // 2 if name == "dualpipe" else count
    busy = [each * (sum(table["F"][r]) + sum(table["B"][r])) for r in range(pp)]
    assert result.busy_seconds == pytest.approx(busy)
    assert result.bubble_ratio == pytest.approx(1 - sum(busy) / (pp * max(finish.values())))


@given(runs())
@settings(max_examples=150, deadline=None)
def test_in_flight_and_moments_equal_a_plain_count_over_the_whole_step(run):
    name, pp, count, vpp, group = run
    chunks = range(SCHEDULES[name].chunk_count(vpp))
    counts = in_flight(name, pp, count, vpp, group=group)
    fullest = in_flight_by_chunk(name, pp, count, vpp, group=group)
    sizes = [[3 + 2 * r + 5 * c for c in chunks] for r in range(pp)]
    kept = [[1 + r + 7 * c for c in chunks] for r in range(pp)]
    heaviest = in_flight_by_chunk(
        name, pp, count, vpp, group=group, activation_bytes=sizes, stash_bytes=kept
    )
    for stage, order in enumerate(actions(name, pp, count, vpp, group=group)):
        states = list(held(order))
        most = max(a.total() + s.total() for _, a, s in states)
        assert counts[stage] == most == fullest[stage].total
        weigh = lambda a, s, r=stage: sum(  # noqa: E731
            a[c] * sizes[r][c] + s[c] * kept[r][c] for c in chunks
        )
        best = heaviest[stage]
        assert weigh(best.activations, best.stashes) == max(weigh(a, s) for _, a, s in states)
        distinct = dict.fromkeys(
            (x.kind, x.chunk, tuple(a[c] for c in chunks), tuple(s[c] for c in chunks))
            for x, a, s in states
        )
        found = moments(name, pp, count, vpp, stage=stage, group=group)
        assert {(m.kind, m.chunk, *m.held) for m in found} == set(distinct)


# --- long runs are shortened soundly -------------------------------------------------------------

LONG = [
    ("1f1b", 1, 1, None),
    ("1f1b", 5, 1, None),
    ("interleaved-zb", 4, 2, None),
    ("interleaved", 2, 2, None),
    ("interleaved", 4, 3, None),
    ("interleaved", 4, 2, 6),
    ("interleaved", 3, 5, 5),
    ("zb-h1", 5, 1, None),
    ("zb-v", 1, 1, None),
    ("zb-v", 5, 1, None),
    ("dualpipe", 2, 1, None),
    ("dualpipe", 6, 1, None),
    ("dualpipe-v", 1, 1, None),
    ("dualpipe-v", 4, 1, None),
]


@pytest.mark.parametrize(("name", "pp", "vpp", "group"), LONG)
def test_a_longer_step_is_the_shorter_one_with_a_piece_of_the_middle_repeated(name, pp, vpp, group):
    """What an action follows does not depend on how long the step is, in head or tail."""
    base = shape_of(name, pp, 40 * pp * (group or 1), vpp, group)
    span, unit = base.span, base.unit
    short = base.shortened(2 * (2 * span + 2 * unit))
    long = short.resized(short.microbatches + 3 * unit)
    moved = long.lane - short.lane
    for stage in range(pp):
        first, second = (
            list(
                zip(
                    order.kind,
                    order.chunk,
                    order.joined,
                    order.microbatch,
                    strict=True,
                )
            )
            for order in (order_of(short, stage), order_of(long, stage))
        )
        before = {b: a for a, b in zip([None, *first], first, strict=False)}
        for previous, action in zip([None, *second], second, strict=False):
            *what, microbatch = action
            if microbatch < short.lane - span:
                assert before[action] == previous
            if microbatch >= span + moved:
                earlier = (*previous[:3], previous[3] - moved)
                assert before[*what, microbatch - moved] == earlier


@pytest.mark.parametrize(("name", "pp", "vpp", "group"), LONG)
@pytest.mark.parametrize("extra", [0, 1])
def test_in_flight_of_a_long_step_is_that_of_the_whole_list(name, pp, vpp, group, extra):
    unit = shape_of(name, pp, 40 * pp * (group or 1), vpp, group).unit
    count = 40 * pp * (group or 1) + extra * unit
    counts = in_flight(name, pp, count, vpp, group=group)
    for stage, order in enumerate(actions(name, pp, count, vpp, group=group)):
        states = [
            (x.kind, x.chunk, tuple(sorted((+a).items())), tuple(sorted((+s).items())))
            for x, a, s in held(order)
        ]
        most = max(sum(n for _, n in a) + sum(n for _, n in s) for *_, a, s in states)
        assert counts[stage] == most
        assert len(moments(name, pp, count, vpp, stage=stage, group=group)) == len(set(states))


@pytest.mark.parametrize(("name", "pp", "vpp", "group"), [*LONG, ("gpipe", 5, 1, None)])
@pytest.mark.parametrize("heavy", [None, 0, -1])
@pytest.mark.parametrize("delay", [0.0, 0.25])
def test_extrapolated_time_equals_the_whole_run(name, pp, vpp, group, heavy, delay):
    chunks = SCHEDULES[name].chunk_count(vpp)
    forward = [[1.0 + 0.125 * (r % 3)] * chunks for r in range(pp)]
    if heavy is not None:
        forward[heavy] = [2.5] * chunks
    backward = [[2 * t + 0.0625 * r for t in row] for r, row in enumerate(forward)]
    weight = [[0.75 * t for t in row] for row in forward]
    for count in (60 * pp * (group or 1), 60 * pp * (group or 1) + 2 * (group or pp)):
        shape = shape_of(name, pp, count, vpp, group)
        durations = pipeline._durations(shape, forward, backward, weight, delay)
        whole = max(map(max, pipeline.finish_times(shape, durations, delay)))
        result = makespan(
            name,
            pp,
            count,
            vpp,
            group=group,
            forward_seconds=forward,
            backward_seconds=backward,
            weight_seconds=weight,
            p2p_seconds=delay,
        )
        assert result.total_seconds == pytest.approx(float(whole), rel=1e-10)


def test_a_long_step_is_not_simulated_whole(monkeypatch):
    lengths = []
    plain = pipeline.finish_times

    def counted(shape, durations, delay):
        lengths.append(shape.lane)
        return plain(shape, durations, delay)

    monkeypatch.setattr(pipeline, "finish_times", counted)
    for name in SCHEDULES:
        vpp = 1 if SCHEDULES[name].chunks else 2
        makespan(name, 8, 8000, vpp, forward_seconds=1, backward_seconds=2, weight_seconds=1)
    assert max(lengths) < 200


# --- published formulas --------------------------------------------------------------------------


@given(st.integers(1, 24), st.integers(1, 60))
@settings(deadline=None)
def test_1f1b_holds_what_megatron_holds(pp, count):
    """Megatron-Core: p - r - 1 warm-up forwards, then one forward before every backward."""
    assert in_flight("1f1b", pp, count) == tuple(min(pp - r, count) for r in range(pp))


@given(st.integers(2, 10), st.integers(2, 6), st.data())
@settings(deadline=None)
def test_interleaved_holds_what_megatron_holds(pp, vpp, data):
    group = data.draw(st.integers(pp, 2 * pp))
    count = group * data.draw(st.integers(1, 6))
    expected = []
    for r in range(pp):
        warm = min(2 * (pp - r - 1) + (vpp - 1) * group, count * vpp)
        expected.append(min(warm + 1, count * vpp))
    assert in_flight("interleaved", pp, count, vpp, group=group) == tuple(expected)


@pytest.mark.parametrize(("pp", "vpp"), [(4, 2), (8, 3), (8, 12), (35, 3), (64, 2)])
def test_first_stage_holds_korthikantis_share_of_the_layers(pp, vpp):
    """Korthikanti et al. 2022, section 4.2.3: L(1 + (p - 1)/(p·v)) layers on the first stage."""
    layers = pp * vpp * 2
    chunk_layers = layers // (pp * vpp)
    chunks = in_flight("interleaved", pp, 4 * pp, vpp)[0]
    assert chunks * chunk_layers == layers * (1 + Fraction(pp - 1, pp * vpp))
    assert in_flight("1f1b", pp, 4 * pp)[0] * (layers // pp) == layers


def test_gpipe_holds_every_microbatch():
    """Huang et al. 2019: all forwards come before the first backward."""
    assert in_flight("gpipe", 4, 1000) == (1000,) * 4


@pytest.mark.parametrize("pp", [1, 2, 5, 8])
def test_zero_bubble_needs_no_more_than_the_first_stage_of_1f1b(pp):
    """Qi et al. 2023, sections 2.1 and 6: every stage holds p (2p half-sized chunks in ZB-V)."""
    assert in_flight("zb-h1", pp, 10 * pp) == (pp,) * pp
    assert in_flight("zb-v", pp, 10 * pp) == (2 * pp,) * pp
    for r, state in enumerate(in_flight_by_chunk("zb-h1", pp, 10 * pp)):
        assert state.activations == (pp - r,)
        assert state.stashes == (r,)


@pytest.mark.parametrize("pp", [2, 4, 8, 16])
def test_dualpipe_holds_one_microbatch_more_than_there_are_stages(pp):
    """DeepSeek-V3 (arXiv:2412.19437), table 2: activations of PP + 1 microbatches."""
    assert in_flight("dualpipe", pp, 6 * pp) == (pp + 1,) * pp
    assert in_flight("dualpipe-v", pp, 6 * pp) == (2 * pp + 1,) * pp


@pytest.mark.parametrize("pp", [1, 2, 4, 7])
@pytest.mark.parametrize("count", [7, 28, 2800])
def test_bubble_of_1f1b_and_gpipe(pp, count):
    """Narayanan et al. 2021, sections 2.2.1 and 2.2: (p - 1)/m."""
    for name in ("1f1b", "gpipe"):
        result = makespan(name, pp, count, forward_seconds=1.0, backward_seconds=2.0)
        assert result.overhead_ratio == pytest.approx((pp - 1) / count)
        assert result.bubble_ratio == pytest.approx((pp - 1) / (count + pp - 1))


@pytest.mark.parametrize(("pp", "vpp"), [(2, 2), (4, 2), (4, 5), (8, 3)])
def test_bubble_of_interleaved_is_v_times_smaller(pp, vpp):
    """Narayanan et al. 2021, section 2.2.2: (p - 1)/(m·v)."""
    for count in (pp, 8 * pp, 500 * pp):
        result = makespan("interleaved", pp, count, vpp, forward_seconds=1, backward_seconds=2)
        assert result.overhead_ratio == pytest.approx((pp - 1) / (count * vpp))


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.0, 1.0, 0.5)])
def test_bubble_of_zb_h1(pp, times):
    """Qi et al. 2023, table 2: (p - 1)(TF + TB - TW), TB the input gradient's time."""
    forward, gradient, weight = times
    count = 4 * pp
    result = makespan(
        "zb-h1",
        pp,
        count,
        forward_seconds=forward,
        backward_seconds=gradient + weight,
        weight_seconds=weight,
    )
    bubble = result.total_seconds - result.busy_seconds[0]
    assert bubble == pytest.approx((pp - 1) * (forward + gradient - weight))
    plain = makespan("1f1b", pp, count, forward_seconds=forward, backward_seconds=gradient + weight)
    assert result.total_seconds < plain.total_seconds


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
def test_zb_v_leaves_no_bubble_inside_a_stage(pp):
    """Qi et al. 2023, section 6: no idle time between first and last action at equal times.

    Stages start and end at different moments, p - 1 steps apart in all.
    """
    count = 4 * pp
    finish = simulate("zb-v", pp, count, 1, None, lambda *_: 1, 0)
    for stage in range(pp):
        times = [time for (_, r, *_), time in finish.items() if r == stage]
        assert max(times) - (min(times) - 1) == 6 * count
    result = makespan("zb-v", pp, count, forward_seconds=1, backward_seconds=2, weight_seconds=1)
    assert result.total_seconds == 6 * count + pp - 1


@pytest.mark.parametrize("pp", [2, 4, 8, 16])
@pytest.mark.parametrize("rounds", [2, 5, 100])
def test_bubble_of_dualpipe(pp, rounds):
    """DeepSeek-V3, table 2: (PP/2 - 1)(F&B + B - 3W), here with equal F, input and weight times.

    Without communication F&B is F + B. For the V shape PP counts its 2p chunks, as the published
    code's own table does.
    """
    expected = {"dualpipe": (pp // 2 - 1) * (3 + 2 - 3), "dualpipe-v": (pp - 1) * (3 + 2 - 3)}
    for name, bubble in expected.items():
        result = makespan(
            name, pp, rounds * 2 * pp, forward_seconds=1, backward_seconds=2, weight_seconds=1
        )
        assert result.total_seconds - result.busy_seconds[0] == pytest.approx(bubble)


def test_message_time_delays_the_ends_only_once_per_boundary_under_gpipe():
    quick = makespan("gpipe", 4, 10, forward_seconds=1, backward_seconds=2)
    slow = makespan("gpipe", 4, 10, forward_seconds=1, backward_seconds=2, p2p_seconds=0.5)
    assert slow.total_seconds - quick.total_seconds == pytest.approx(2 * 3 * 0.5)
    assert slow.busy_seconds == quick.busy_seconds


def test_the_slowest_stage_sets_the_pace():
    forward = [1.0, 1.0, 1.5, 1.0]
    backward = [2.0, 2.0, 3.0, 2.0]
    short = makespan("1f1b", 4, 1000, forward_seconds=forward, backward_seconds=backward)
    long = makespan("1f1b", 4, 2000, forward_seconds=forward, backward_seconds=backward)
    assert long.total_seconds - short.total_seconds == pytest.approx(1000 * 4.5)
    assert max(short.busy_seconds) == pytest.approx(4500)


# --- orders as the frameworks run them -----------------------------------------------------------


def test_megatrons_example_of_uneven_groups():
    """Megatron-Core ``schedules.py``, its table of PP2 N3M5 with VP2."""
    forwards = [
        (a.microbatch, a.chunk)
        for a in actions("interleaved", 2, 5, 2, group=3)[0]
        if a.kind == "F"
    ]
    assert [m for m, _ in forwards] == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
    assert [c for _, c in forwards] == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]


def test_1f1b_by_hand():
    order = "".join(f"{a.kind}{a.microbatch}" for a in actions("1f1b", 3, 4)[0])
    assert order == "F0F1F2B0F3B1B2B3"


def torch_order(name, pp, count, rank):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    kind = getattr(schedules, name)
    stub = SimpleNamespace(
        pp_group_size=pp,
        num_stages=2 * pp,
        n_local_stages=2,
        _n_microbatches=count,
        microbatches_per_round=pp,
    )
    short = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    for action in kind._calculate_single_rank_operations(stub, rank):
        if action is None:
            continue
        for part in action.sub_actions or (action,):
            chunk = part.stage_index // pp
            joined = action.sub_actions is not None and part is action.sub_actions[0]
            yield Action(short[part.computation_type.name], part.microbatch_index, chunk, joined)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("zb-v", "ScheduleZBVZeroBubble"),
        ("dualpipe-v", "ScheduleDualPipeV"),
        ("interleaved", "ScheduleInterleaved1F1B"),
    ],
)
@pytest.mark.parametrize(("pp", "rounds"), [(2, 2), (3, 4), (4, 2), (8, 5)])
def test_orders_are_those_of_pytorch(ours, theirs, pp, rounds):
    count = rounds * pp
    mine = actions(ours, pp, count, 2)
    for rank in range(pp):
        assert list(mine[rank]) == list(torch_order(theirs, pp, count, rank))


def test_short_zb_v_steps_are_those_of_pytorch():
    for count in range(1, 8):
        mine = actions("zb-v", 4, count)
        for rank in range(4):
            assert list(mine[rank]) == list(torch_order("ScheduleZBVZeroBubble", 4, count, rank))


# --- placement and refusals ----------------------------------------------------------------------


def test_slices_follow_the_way_of_a_microbatch():
    def held(name, pp, chunks):
        row = SCHEDULES[name]
        return [[row.place(pp, stage, chunk) for chunk in range(chunks)] for stage in range(pp)]

    assert held("1f1b", 4, 1) == [[0], [1], [2], [3]]
    assert held("interleaved", 2, 3) == [[0, 2, 4], [1, 3, 5]]
    assert held("zb-v", 3, 2) == [[0, 5], [1, 4], [2, 3]]
    assert held("dualpipe", 4, 2) == [[0, 3], [1, 2], [2, 1], [3, 0]]
    assert SCHEDULES["dualpipe"].slices(4, 1) == 4
    assert SCHEDULES["dualpipe-v"].slices(4, 1) == SCHEDULES["zb-v"].slices(4, 1) == 8
    assert SCHEDULES["interleaved"].slices(4, 3) == 12


@pytest.mark.parametrize(
    ("call", "what", "hint"),
    [
        (("zbh1", 2, 2), "zbh1", "zb-h1"),
        (("nonsense-word", 2, 2), "nonsense-word", "gpipe"),
        (("interleaved", 4, 8, 1), "vpp is 1", "--vpp 2"),
        (("interleaved", 1, 8, 2), "pp is 1", "--pp 2"),
        (("interleaved", 4, 3, 2), "4 microbatches", "1f1b"),
        (("interleaved", 4, 10, 2), "last group of 2", "8 or 12 microbatches"),
        (("1f1b", 4, 8, 2), "vpp is 2", "interleaved"),
        (("zb-v", 4, 8, 3), "vpp is 3", "interleaved"),
        (("dualpipe", 3, 8), "pp is 3", "even"),
        (("dualpipe", 4, 9), "9", "zb-h1"),
        (("dualpipe", 4, 6), "2·pp = 8", "zb-h1"),
        (("dualpipe-v", 4, 7), "2·pp = 8", "zb-v"),
        (("1f1b", 0, 8), "pp 0", "pp 1"),
        (("1f1b", 2, 0), "0 microbatches", "one microbatch"),
        (("1f1b", 2, 4, 0), "vpp 0", "vpp 1"),
        (("gpipe", 2, 10**9), "1000000000", "microbatch"),
    ],
)
def test_what_a_schedule_cannot_run_is_refused(call, what, hint):
    with pytest.raises(SpecError) as caught:
        in_flight(*call)
    assert what in str(caught.value)
    assert hint in caught.value.hint


def test_hinted_group_sizes_work():
    with pytest.raises(SpecError) as caught:
        actions("interleaved", 4, 10, 2)
    group = int(caught.value.hint.rsplit(" ", 1)[1])
    assert actions("interleaved", 4, 10, 2, group=group)
    with pytest.raises(SpecError, match="outside"):
        actions("interleaved", 4, 8, 2, group=3)
    with pytest.raises(SpecError, match="no microbatch groups"):
        actions("1f1b", 4, 8, group=4)


@pytest.mark.parametrize(
    ("times", "what"),
    [
        ({"forward_seconds": [1.0] * 3, "backward_seconds": 2.0}, "3 stages"),
        ({"forward_seconds": -1.0, "backward_seconds": 2.0}, "negative"),
        ({"forward_seconds": float("nan"), "backward_seconds": 2.0}, "not finite"),
        ({"forward_seconds": 1.0, "backward_seconds": 2.0, "p2p_seconds": -1.0}, "negative"),
        ({"forward_seconds": 1.0, "backward_seconds": 2.0, "weight_seconds": 3.0}, "weight"),
        ({"forward_seconds": 0.0, "backward_seconds": 0.0}, "nothing takes time"),
    ],
)
def test_durations_that_make_no_sense_are_refused(times, what):
    with pytest.raises(SpecError, match=what):
        makespan("1f1b", 4, 8, **times)


def test_stages_and_tables_out_of_range_are_refused():
    with pytest.raises(SpecError, match="stage 4"):
        moments("1f1b", 4, 8, stage=4)
    with pytest.raises(SpecError, match="bytes for 4 stages"):
        in_flight_by_chunk("zb-v", 4, 8, activation_bytes=[[1]] * 4)
