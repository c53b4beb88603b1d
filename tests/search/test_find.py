"""The search as a whole: what it keeps, in which order, and when it is stopped."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest

from actcalc.io.runs import load_run
from actcalc.search.best import different, ordered, pareto
from actcalc.search.find import find
from actcalc.search.space import ANY, Choice, Space, choice_of
from tests.agreement.asking import ask

LINE = "search gpt-22b --framework megatron --gpus 16 --device a100-80gb --global-batch 32"


def searched(**space):
    run = load_run(
        "gpt-22b", workload={"global_batch": 32}, device="a100-80gb", framework="megatron"
    )
    return find(run, Space(gpus=16, **space))


@pytest.fixture(scope="module")
def found():
    return searched(tp=choice_of("..4", "--tp"))


def test_a_search_ends_with_its_time(cli):
    args = ("search", "llama-3-8b", "--gpus", 8, "--device", "h100-80gb", "--global-batch", 64,
            "--framework", "torchtitan", "--pp", 1, "--tp", 1, "--policy", "full")  # fmt: skip
    whole, cut = (cli(*args, *more, "--json").json for more in ((), ("--time-limit", 1e-6)))
    assert whole["complete"]
    assert not cut["complete"]
    assert cut["considered"] < whole["considered"]
    assert any("--time-limit" in note for note in cut["notes"])
    assert "Does not fit" not in cli(*args, "--time-limit", 1e-6).out
    assert cli(*args, "--time-limit", 0).code == 2


def test_what_is_kept_fits_and_uses_every_gpu(found):
    assert 0 < len(found.peak) < found.considered
    assert found.complete
    assert found.peak.max() <= found.run.budget_bytes
    for row in range(0, len(found.peak), 97):
        run = found.one(row)
        assert run.layout.devices == 16
        assert run.layout.tp <= 4
        assert run.workload.global_batch == 32
        assert 32 % (run.layout.dp * run.workload.micro_batch) == 0


def test_best_first_each_degrees_once_and_a_front_that_nothing_tops(found):
    order = ordered(found)
    assert (np.diff(found.seconds[order]) >= 0).all()
    chosen = different(found, order)
    assert chosen[0] == order[0]
    layouts = [found.layout(int(row)) for row in chosen]
    degrees = [(one.tp, one.cp, one.ep, one.pp) for one in layouts]
    assert len(set(degrees)) == len(degrees) > 3
    front = pareto(found, order)
    assert (np.diff(found.peak[front]) < 0).all()
    for row in front[:10]:
        better = (found.peak < found.peak[row]) & (found.seconds <= found.seconds[row])
        assert not better.any()


def test_stopped_by_the_user_it_keeps_what_it_has():
    def stop(done: int, whole: int) -> None:
        if done:
            raise KeyboardInterrupt

    run = load_run(
        "gpt-22b", workload={"global_batch": 64, "seq": 32768}, device="h100-80gb",
        framework="megatron",
    )  # fmt: skip
    space = Space(gpus=64)
    part = find(run, space, progress=stop)
    assert not part.complete
    assert 0 < part.considered < find(run, space).considered


def test_several_numbers_of_gpus_at_once_are_each_its_own():
    alone = searched(tp=choice_of("2", "--tp"), pp=choice_of("2", "--pp"))
    more = searched(tp=choice_of("2", "--tp"), pp=choice_of("2", "--pp"), more=((8, 32),))
    own = more.rows.dp == 4
    assert np.array_equal(np.sort(more.seconds[own]), np.sort(alone.seconds))
    assert set(more.rows.dp.tolist()) == {2, 4}


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [("1,2,4", (1, 2, 4), (3, 8)), ("..4", (1, 4), (5,)), ("4..", (4, 99), (3,)),
     ("2..4", (2, 3, 4), (1, 5))],
)  # fmt: skip
def test_choices(text, inside, outside):
    choice = choice_of(text, "--tp")
    assert isinstance(choice, Choice)
    assert all(value in choice for value in inside)
    assert not any(value in choice for value in outside)
    assert 7 in ANY


def test_a_file_holds_every_row_best_first(cli, tmp_path):
    path = tmp_path / "all.csv"
    assert cli(*LINE.split(), "-o", path).code == 0
    rows = list(csv.DictReader(path.open()))
    answer = ask(*LINE.split())
    assert len(rows) == answer["feasible"]
    seconds = [float(row["step_seconds"]) for row in rows]
    assert seconds == sorted(seconds)
    best = answer["results"][0]
    assert int(rows[0]["tp"]) == best["layout"]["tp"]
    assert float(rows[0]["step_seconds"]) == best["step_seconds"]
    assert int(rows[0]["peak_bytes"]) == best["peak_bytes"]
    whole = tmp_path / "all.json"
    assert cli(*LINE.split(), "-o", whole).code == 0
    assert len(json.loads(whole.read_text())["results"]) == answer["feasible"]


def test_a_result_is_what_memory_and_mfu_say_of_it():
    best = ask(*LINE.split())["results"][0]
    layout = best["layout"]
    flags = [f"--{key}={layout[key]}" for key in ("tp", "pp", "vpp", "cp", "dp", "zero")]
    flags += ["--sp"] * layout["sp"] + [f"--policy={best['policy']}"]
    flags += [f"--micro-batch={best['micro_batch']}", "--global-batch=32"]
    if layout["layers_per_stage"]:
        flags.append("--layers-per-stage=" + ",".join(map(str, layout["layers_per_stage"])))
    run = ["gpt-22b", "--framework=megatron", "--device=a100-80gb", *flags]
    memory, mfu = ask("memory", *run), ask("mfu", *run)
    assert best["peak_bytes"] == max(stage["total_bytes"] for stage in memory["stages"])
    assert best["step_seconds"] == pytest.approx(mfu["step_seconds"], rel=1e-9)
    assert best["mfu_ratio"] == pytest.approx(mfu["mfu_ratio"], rel=1e-9)
    assert best["tokens_per_second_per_gpu"] == pytest.approx(
        mfu["tokens_per_second_per_gpu"], rel=1e-9
    )
