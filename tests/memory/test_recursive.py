"""A checkpoint of checkpoints: what it keeps and how often it runs what again, as torch does it."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from actcalc.answers.compare import compare_run
from actcalc.answers.memory import memory_run
from actcalc.cost.flops import layers_forward_flops, rerun_flops
from actcalc.io.runs import load_run
from actcalc.policy.rules import parse_policy
from actcalc.run.staged import StagedRun

RECURSIVE = parse_policy("recursive")


def forwards(layers: int) -> dict[int, int]:
    """How often each layer runs again: half of every segment it lies in the first half of."""
    steps = RECURSIVE.backward(range(layers))
    return dict(Counter(step.layer for step in steps if step.kind == "re-run"))


@pytest.mark.parametrize("layers", range(1, 40))
def test_every_layer_runs_backward_once_and_in_order(layers):
    steps = list(RECURSIVE.backward(range(layers)))
    assert [s.layer for s in steps if s.kind == "backward"] == list(reversed(range(layers)))
    most = max(len({*step.beside, step.layer} - {0}) for step in steps if step.kind == "backward")
    assert most == math.floor(math.log2(layers))
    for step in steps:
        assert step.layer not in step.beside


@pytest.mark.parametrize("power", range(7))
def test_powers_of_two_have_a_closed_form(power):
    layers = 2**power
    assert sum(forwards(layers).values()) == layers + layers * power // 2


def test_a_layer_is_run_from_an_input_that_is_there():
    """Following the steps: every re-run starts from an input that is kept or was just made."""
    for layers in (5, 12, 32, 61):
        made = {0}
        for step in RECURSIVE.backward(range(layers)):
            made &= {0, step.layer, *step.beside}
            assert step.layer in made
            if step.kind == "re-run":
                made.add(step.layer + 1)


@pytest.mark.parametrize("layers", [1, 2, 3, 6, 8, 11])
def test_torch_runs_each_layer_as_often(layers):
    """Nested checkpoints of torch.utils.checkpoint, each around halves of its layers."""
    torch = pytest.importorskip("torch", reason="needs actcalc[torch]")
    from torch.utils.checkpoint import checkpoint

    calls: Counter[int] = Counter()
    weights = [torch.nn.Linear(3, 3) for _ in range(layers)]

    def one(x, at):
        calls[at] += 1
        return torch.tanh(weights[at](x))

    def nested(x, start, stop):
        if stop - start == 1:
            return checkpoint(one, x, start, use_reentrant=False)
        middle = (start + stop + 1) // 2

        def both(x):
            return nested(nested(x, start, middle), middle, stop)

        return checkpoint(both, x, use_reentrant=False)

    nested(torch.ones(2, 3, requires_grad=True), 0, layers).sum().backward()
    assert {at: count - 1 for at, count in calls.items()} == forwards(layers)


@pytest.mark.parametrize("layout", [{}, {"pp": 4}, {"pp": 2, "vpp": 3}])
def test_what_is_kept_and_what_runs_again(layout):
    run = load_run("gpt3-175b", layout={"tp": 8, "sp": True, **layout}, policies=["recursive"])
    staged = StagedRun(run)
    figure = compare_run(run).policies[0]
    held = sum(n for n, chunk in zip(staged.held(0), staged.places[0], strict=True) if chunk)
    entry = 2 * 2048 * 12288  # 2sbh of the paper, replicated
    assert figure.stored_bytes == held * entry
    chunk = staged.places[0][0]
    again = sum(forwards(len(chunk)).values()) / len(chunk)
    assert figure.recompute_forward_ratio == pytest.approx(again)
    layer = 358_612_992
    inputs = math.floor(math.log2(len(chunk))) * entry
    own = entry // 8  # of the layer at work, which saves its own slice of its input
    assert figure.transient_bytes == inputs + layer - own


def test_memory_counts_the_inputs_that_wait():
    base = {"model": {"layers": 8}, "layout": {"tp": 8, "sp": True}}
    peaks = {
        name: memory_run(load_run("gpt3-175b", policies=[name], **base)).stages[0]
        for name in ("full", "recursive")
    }
    entry = 2 * 2048 * 12288
    # Both are highest while the last layer re-runs: full holds eight inputs, recursive four.
    assert peaks["full"].total_bytes - peaks["recursive"].total_bytes == 4 * entry


def test_re_runs_that_stop_early_do_so_in_their_last_pass():
    run = load_run("llama-3-8b", policies=["recursive"])
    staged = StagedRun(run)
    policy = staged.policy("recursive")
    passes = sum(forwards(32).values())
    whole = layers_forward_flops(staged.graph) / 32
    last = rerun_flops(staged, staged.policy("full")) / 32
    assert rerun_flops(staged, policy) == pytest.approx(32 * last + (passes - 32) * whole)


def test_time_and_flops_grow_alike(cli):
    line = ["gpt3-175b", "--tp", 8, "--sp", "--device", "a100-80gb", "--policy"]
    plain, full, nested = (
        cli(*line, name, "--json").json["policies"][0] for name in ("none", "full", "recursive")
    )
    one = full["layer_backward_seconds"] - plain["layer_backward_seconds"]
    many = nested["layer_backward_seconds"] - plain["layer_backward_seconds"]
    assert many / one == pytest.approx(nested["recompute_forward_ratio"], rel=0.05)
