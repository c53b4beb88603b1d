"""The utilisation command: both directions, both countings, its refusals, a calibration."""

from __future__ import annotations

import csv
import io
import math

import pytest

from tests.conftest import load_data
from tests.sweeps import sampled

TABLE = load_data("korthikanti2022_table5.yaml")
STEP = ("--gpus", 8, "--global-batch", 4, "--device", "a100-80gb", "--policy", "selective")


@pytest.mark.parametrize("row", TABLE["rows"], ids=lambda row: row["model"])
def test_table5(cli, row):
    done = cli(
        "mfu", row["model"], "--step-time", row["seconds"], "--gpus", row["gpus"],
        "--global-batch", row["batch"], "--device", "a100-80gb", "--policy", "selective", "--json",
    ).json  # fmt: skip
    assert done["mfu_ratio"] == pytest.approx(row["mfu"], abs=0.0025)
    assert done["hfu_ratio"] == pytest.approx(row["hfu"], abs=0.0025)
    assert done["hardware_flops_convention"] == "paper"
    assert done["hardware_flops_by_ops"] < done["hardware_flops"]


def test_there_and_back(cli):
    there = cli("mfu", "gpt-22b", "--step-time", 1.1, *STEP, "--json").json
    back = cli("mfu", "gpt-22b", "--mfu", there["mfu_ratio"], *STEP, "--json").json
    assert back["basis"] == "mfu"
    assert back["step_seconds"] == pytest.approx(1.1)
    assert back["hfu_ratio"] == pytest.approx(there["hfu_ratio"])


def test_units_of_time_agree(cli):
    plain = cli("mfu", "gpt-22b", "--step-time", "1.1", *STEP, "--json").json
    small = cli("mfu", "gpt-22b", "--step-time", "1100ms", *STEP, "--json").json
    assert plain == small


def test_training_run(cli):
    done = cli(
        "mfu", "gpt3-175b", "--mfu", 0.5, "--gpus", 1024, "--global-batch", 1536, "--device",
        "a100-80gb", "--tokens", "300B", "--price-per-gpu-hour", 2, "--json",
    ).json  # fmt: skip
    training = done["training"]
    assert training["tokens"] == 300 * 10**9
    assert training["steps"] == -(-300 * 10**9 // (1536 * 2048))
    assert training["gpu_hours"] == pytest.approx(training["days"] * 24 * 1024)
    assert training["price"] == pytest.approx(2 * training["gpu_hours"])
    # Narayanan et al. 2021, section 5.1: 34 days at 140 TFLOP/s with recomputation (factor 4/3).
    assert training["days"] == pytest.approx(34 * 140 * 3 / 4 / 156, rel=0.03)


def test_countings(cli):
    done = cli("mfu", "gpt-22b", "--step-time", 1.1, *STEP, "--flops", "causal", "--json").json
    both = {figure["counting"]: figure for figure in done["countings"]}
    assert done["mfu_ratio"] == both["causal"]["mfu_ratio"] < both["full"]["mfu_ratio"]


def test_prediction_beside_measurement(cli):
    layout = ("--tp", 8, "--sp")
    done = cli("mfu", "gpt-22b", "--step-time", 1.1, *STEP, *layout, "--json").json
    guess = done["prediction"]
    assert guess["step_seconds"] == pytest.approx(1.1, rel=0.1)
    assert guess["error_ratio"] == pytest.approx(guess["step_seconds"] / 1.1 - 1)
    alone = cli("mfu", "gpt-22b", *STEP, *layout, "--json").json
    assert alone["basis"] == "predicted"
    assert alone["step_seconds"] == guess["step_seconds"]
    slower = cli("mfu", "gpt-22b", *STEP, *layout, "--efficiency", "gemm=0.4", "--json").json
    assert slower["step_seconds"] > 1.4 * alone["step_seconds"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--step-time", "0"),
        ("--step-time", "soon"),
        ("--step-time", "1.1", "--mfu", "0.4"),
        ("--mfu", "40"),
        ("--mfu", "-1"),
        ("--step-time", "1.1", "--flops", "half"),
        ("--step-time", "1.1", "--tokens", "many"),
        ("--step-time", "1.1", "--price-per-gpu-hour", "2"),
        ("--step-time", "1.1", "--policy", "full"),
        ("--step-time", "1.1", "--efficiency", "gem=0.5"),
        (),
    ],
)
def test_refusals(cli, arguments):
    done = cli("mfu", "gpt-22b", *STEP, *arguments)
    assert done.code == 2
    assert done.err.startswith("error: ")
    assert "\nhint: " in done.err


def test_no_device(cli):
    done = cli("mfu", "gpt-22b", "--step-time", "1.1", "--gpus", 8)
    assert done.code == 2
    assert "--device" in done.err


RUNS = """
runs:
  - {name: one, model: gpt-22b, layout: {tp: 8, sp: true}, workload: {global_batch: 4},
     device: a100-80gb, policy: selective, step_seconds: 1.10}
  - {name: two, model: gpt3-175b, layout: {tp: 8, pp: 8, vpp: 3}, workload: {global_batch: 64},
     device: a100-80gb, policy: full, step_seconds: 18.13}
"""


def test_calibration(cli, tmp_path):
    path = tmp_path / "runs.yaml"
    path.write_text(RUNS)
    done = cli(
        "mfu", "gpt-22b", "--tp", 8, "--sp", *STEP, "--calibrate", path, "--json"
    ).json  # fmt: skip
    fit = done["calibration"]
    assert set(fit["efficiency"]) == {"gemm", "memory"}
    assert fit["after_ratio"] < fit["before_ratio"] / 2
    assert fit["left_out_ratio"] < 0.1
    assert done["prediction"]["efficiency"]["gemm"] == fit["efficiency"]["gemm"]
    table = cli("mfu", "gpt-22b", "--tp", 8, "--sp", *STEP, "--calibrate", path)
    assert "--efficiency gemm=" in table.out


@pytest.mark.parametrize(
    "text", ["runs: []", "runs: [3]", "{}", "runs: [{model: gpt-22b, device: a100-80gb}]",
             "runs: [{model: gpt-22b, when: now, step_seconds: 1}]",
             "runs: [{model: gpt-22b, step_seconds: 1}]"],
)  # fmt: skip
def test_bad_calibration_files(cli, tmp_path, text):
    path = tmp_path / "runs.yaml"
    path.write_text(text)
    done = cli("mfu", "gpt-22b", *STEP, "--step-time", 1, "--calibrate", path)
    assert done.code == 2
    assert done.err.startswith("error: ")


def test_calibration_recovers_what_made_the_times():
    """Times made with known shares give those shares back."""
    from actcalc.answers.calibrate import calibrate, predictor
    from actcalc.io.runs import load_run

    truth = {"gemm": 0.6, "memory": 0.7}
    runs = []
    for batch in (1, 4):
        run = load_run("gpt2", device="a100-80gb", workload={"micro_batch": batch, "seq": 1024})
        predict = predictor(run)
        runs.append((f"b{batch}", predict, predict(truth)))
    fit = calibrate(runs, {})
    assert fit.after_ratio < 0.01
    assert fit.efficiency["gemm"] == pytest.approx(0.6, abs=0.05)
    assert fit.efficiency["memory"] == pytest.approx(0.7, abs=0.05)


CONTRADICTING = """
runs:
  - {name: slow, model: llama-3-8b, layout: {dp: 8, zero: 3}, workload: {global_batch: 64},
     framework: torchtitan, device: h100-80gb, policy: full, step_seconds: 11.0}
  - {name: fast, model: llama-3-8b, layout: {dp: 8, zero: 3}, workload: {global_batch: 64},
     framework: torchtitan, device: h100-80gb, policy: none, step_seconds: 8.5}
"""


def test_calibration_goes_on_at_a_bound(tmp_path):
    """Where memory stops at 1, matrix products alone still fit both runs to a per cent."""
    from actcalc.answers.calibrate import calibrate_file

    path = tmp_path / "runs.yaml"
    path.write_text(CONTRADICTING)
    fit = calibrate_file(str(path))
    assert fit.after_ratio < 0.01
    assert all(abs(run.after_seconds / run.measured_seconds - 1) < 0.01 for run in fit.runs)


def _made(*factors):
    """Predictors of small runs with different mixes of work, and their times times a factor."""
    from actcalc.answers.calibrate import predictor
    from actcalc.io.runs import load_run

    cases = [
        ("gpt2", {"dp": 8}, {"micro_batch": 1, "global_batch": 8}),
        ("gpt2", {}, {"micro_batch": 16}),
        ("gpt-22b", {"tp": 8}, {"micro_batch": 4}),
        ("bert-base", {}, {"micro_batch": 32}),
    ]
    runs = []
    for index, (name, layout, work) in enumerate(cases[: len(factors)]):
        run = load_run(name, device="a100-80gb", layout=layout, workload=work)
        runs.append((f"{index}", predictor(run)))
    return [
        (name, predict, predict({}) * factor)
        for (name, predict), factor in zip(runs, factors, strict=True)
    ]


def _squares(runs, shares):
    return sum(math.log(predict(shares) / seconds) ** 2 for _, predict, seconds in runs)


@pytest.mark.parametrize(
    "factors",
    sampled(
        [
            (3, 0.3, 1, 1),
            (1, 1, 1, 1),
            (0.2, 0.2, 0.2, 0.2),
            (2, 0.5),
            (40, 40, 40, 40),
            (1, 2, 0.5, 4),
            (1.3,),
            (0.5,),
        ],
        [(3, 0.3, 1, 1), (2, 0.5)],
    ),
)
def test_calibration_is_never_worse_than_before_or_a_single_share(factors):
    from actcalc.answers.calibrate import BOUNDS, FITTED, calibrate

    runs = _made(*factors)
    fit = calibrate(runs, {}).efficiency
    reached = _squares(runs, fit)
    alike = len(runs) * 0.01**2
    assert reached <= _squares(runs, {}) + alike
    assert all(BOUNDS[0] <= share <= BOUNDS[1] for share in fit.values())
    grid = [BOUNDS[0] * (BOUNDS[1] / BOUNDS[0]) ** (i / 40) for i in range(41)]
    for name in FITTED:
        assert reached <= 1.005 * min(_squares(runs, {name: share}) for share in grid) + alike


@pytest.mark.parametrize(
    "truth",
    [
        {"gemm": 0.4, "memory": 0.5, "communication": 0.3},
        {"gemm": 0.9, "memory": 0.35, "communication": 0.8},
    ],
)
def test_calibration_finds_planted_shares(truth):
    from actcalc.answers.calibrate import calibrate

    runs = [(name, predict, predict(truth)) for name, predict, _ in _made(1, 1, 1, 1)]
    fit = calibrate(runs, {})
    assert fit.after_ratio < 1e-3
    assert fit.efficiency == pytest.approx(truth, rel=0.02)


def test_calibration_leaves_out_what_no_run_depends_on():
    from actcalc.answers.calibrate import calibrate

    runs = [run for run in _made(1.2, 1.2, 1.2, 1.2) if run[0] in ("1", "3")]
    assert "communication" not in calibrate([*runs, runs[0]], {}).efficiency


def test_calibration_errors_name_the_run(cli, tmp_path):
    path = tmp_path / "runs.yaml"
    path.write_text(CONTRADICTING.replace("policy: none", "policy: nothing"))
    done = cli("mfu", "gpt-22b", *STEP, "--calibrate", path)
    assert done.code == 2
    assert "run 2 (fast): " in done.err
    path.write_text(CONTRADICTING.replace("{dp: 8, zero: 3}", "8", 1))
    done = cli("mfu", "gpt-22b", *STEP, "--calibrate", path)
    assert "run 1 (slow): layout is 8" in done.err


def test_calibration_format_is_in_help(cli):
    text = " ".join(cli("mfu", "--help").out.split())
    assert "step_seconds: 1.4" in text


LORA = ("mfu", "llama-3-8b", "--device", "h100-80gb", "--framework", "torchtitan")


def test_hfu_counts_no_gradients_of_frozen_weights(cli):
    plain = cli(*LORA, "--step-time", 1, "--json").json
    lora = cli(*LORA, "--step-time", 1, "--lora-rank", 16, "--json").json
    assert lora["model_flops"] == plain["model_flops"]
    assert lora["mfu_ratio"] == plain["mfu_ratio"]
    # Scores have two gradients whatever is frozen; each product with a weight loses one of three.
    core = 32 * 3 * 4 * 8192**2 * 4096
    assert lora["hardware_flops"] == plain["model_flops"] - (plain["model_flops"] - core) // 3
    assert "by convention" in " ".join(lora["notes"])


def test_impossible_is_judged_by_what_runs(cli):
    fast = (*LORA, "--step-time", 0.35)
    assert cli(*fast).code == 1
    lora = cli(*fast, "--lora-rank", 16, "--json")
    assert (lora.code, lora.json["possible"]) == (0, True)
    assert lora.json["mfu_ratio"] > 1
    assert "frozen weights" in lora.json["notes"][0]


def test_offloaded_activations_are_not_timed_for_free(cli):
    assert cli(*LORA, "--offload", "activations").code == 2
    done = cli(*LORA, "--offload", "activations", "--step-time", 2, "--json").json
    assert done["prediction"] is None
    assert "offloaded activations" in " ".join(done["notes"])
    compared = cli(*LORA[1:], "--set", "offload=activations", "--json").json
    assert "leave out the transfers" in " ".join(compared["notes"])


def test_no_causal_count_where_nothing_is_masked(cli):
    args = ("mfu", "bert-base", "--device", "a100-80gb")
    assert "causal" not in cli(*args).out
    done = cli(*args, "--flops", "causal")
    assert done.code == 2
    assert "both directions" in done.err


def test_csv_is_one_row_under_json_names(cli):
    done = cli("mfu", "gpt-22b", "--step-time", 1.1, *STEP, "--tokens", "1B", "--format", "csv").out
    (row,) = csv.DictReader(io.StringIO(done))
    data = cli("mfu", "gpt-22b", "--step-time", 1.1, *STEP, "--tokens", "1B", "--json").json
    for key, text in row.items():
        if not key.startswith("countings."):
            value = data
            for part in key.split("."):
                value = (value or {}).get(part)
            assert text == ("" if value is None else str(value)), key
    assert float(row["countings.causal.mfu_ratio"]) < float(row["mfu_ratio"]) < 1
    predicted = cli("mfu", "gpt-22b", *STEP, "--tp", 8, "--format", "csv").out
    assert predicted.splitlines()[0] == done.splitlines()[0]


def test_gpus_hold_whole_replicas(cli):
    done = cli("mfu", "gpt-22b", *STEP, "--gpus", 7, "--tp", 8, "--step-time", 1)
    assert done.code == 2
    assert "7 GPUs" in done.err
    assert "--gpus 8" in done.err
    assert cli("mfu", "gpt-22b", *STEP, "--gpus", 7, "--step-time", 1.5).code == 0


def test_more_than_the_peak_is_impossible(cli):
    done = cli("mfu", "gpt-22b", *STEP, "--step-time", "0.3", "--json")
    assert done.code == 1
    assert done.json["mfu_ratio"] > 1
    assert done.json["possible"] is False
    assert done.json["notes"][0].startswith("Impossible: ")
    # A possible MFU whose re-runs are not: full recomputation does a third more.
    again = [*STEP[:-1], "full", "--mfu", "0.9"]
    done = cli("mfu", "gpt-22b", *again, "--json")
    assert (done.code, done.json["possible"]) == (1, False)
    assert done.json["mfu_ratio"] == pytest.approx(0.9)
    assert done.json["hfu_ratio"] > 1


def test_masked_scores_may_exceed_the_peak(cli):
    """Flash attention skips what a full count has: above 1 by that count is no contradiction."""
    args = ("mfu", "llama-3-8b", "--tp", 8, "--sp", "--seq", 2**20, "--gpus", 8, "--global-batch",
            1, "--device", "h100-80gb", "--step-time", 200)  # fmt: skip
    done = cli(*args, "--json")
    assert done.json["mfu_ratio"] > 1
    assert done.json["possible"] is True
    assert done.code == 0
    eager = cli(*args, "--attention", "eager", "--json")
    assert (eager.code, eager.json["possible"]) == (1, False)


def test_what_cannot_fit_is_said_first(cli):
    run = (
        "mfu", "llama-3.1-70b", "--gpus", 1024, "--dp", 1024, "--framework", "megatron",
        "--device", "h100-80gb", "--global-batch", 1024,
    )  # fmt: skip
    done = cli(*run)
    assert done.code == 1
    first = "Does not fit: needs 1.46 TB of 80.8 GB (85.0 GB less 5 % headroom)"
    assert done.out.startswith(first)
    document = cli(*run, "--json").json
    assert document["fits"] is False
    memory = cli("memory", *run[1:2], *run[4:], "--json").json
    assert document["device_bytes"] == max(one["total_bytes"] for one in memory["stages"])
    spread = cli(*run, "--set", "layout.zero=3", "--policy", "full")
    assert spread.code == 0
    assert "Does not fit" not in spread.out


def test_a_measured_step_is_no_prediction(cli):
    """It ran, so what was run fits; the layout here is another."""
    step = ("--gpus", 64, "--global-batch", 64, "--device", "a100-80gb", "--policy", "selective")
    run = ("mfu", "gpt3-175b", "--step-time", 13.75, *step)
    bare = cli(*run)
    assert bare.code == 0
    assert "needs" not in bare.out + bare.err
    laid = cli(*run, "--tp", 8, "--sp")
    assert laid.code == 0
    assert "what was measured had others" in laid.out + laid.err
