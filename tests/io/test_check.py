"""Logs of real frameworks are read, and set beside what is predicted for the run."""

from __future__ import annotations

import json
import pickle

import pytest
import yaml

from actcalc.errors import SpecError
from actcalc.io.logs import read_log
from tests.conftest import DATA
from tests.test_errors import check_refusal

MIB, GIB = 2**20, 2**30
MEGATRON = DATA / "logs" / "megatron.log"

# Lines as the frameworks print them: torchtitan components/metrics.py, DeepSpeed utils/timer.py and
# runtime/utils.py, transformers trainer.py, c10 CUDACachingAllocator.cpp, nvidia-smi.
LOGS = {
    "torchtitan": (
        "[rank0]:[titan] 2026-07-01 - root - INFO - Model llama3 8B size: 8,030,261,248 total "
        "parameters\n"
        "[rank0]:[titan] - root - INFO - \x1b[31mstep:  1  \x1b[32mloss: 12.2  \x1b[38;2;180;60;0m"
        "grad_norm:  4.1  \x1b[36mmemory: 41.20GiB(52.00%)  \x1b[34mtps: 1,200  \x1b[36mtflops: "
        "69.1  \x1b[35mmfu: 7.0%\x1b[39m\n"
        "[rank0]:[titan] - root - INFO - step: 10  loss:  9.9  grad_norm:  2.1  memory: 47.10GiB"
        "(59.49%)  tps: 5,762  tflops: 333.60  mfu: 33.73%\n",
        {
            "parameters": 8030261248,
            "peak_reserved": 47.10 * GIB,
            "tokens_per_second_per_gpu": (1200 + 5762) / 2,
            "flops_per_second_per_gpu": (69.1 + 333.6) / 2 * 1e12,
        },
    ),
    "deepspeed": (
        "[2026-07-01 10:00:00] [INFO] [timer.py:264:stop] epoch=0/micro_step=10/global_step=10, "
        "RunningAvgSamplesPerSec=30.1, CurrSamplesPerSec=31.5, MemAllocated=5.2GB, "
        "MaxMemAllocated=17.35GB\n"
        "MA 5.2 GB         Max_MA 17.4 GB         CA 18.0 GB         Max_CA 19 GB \n",
        {
            "samples_per_second": 31.5,
            "peak_allocated": 17.4 * GIB,
            "resident": 5.2 * GIB,
            "peak_reserved": 19 * GIB,
        },
    ),
    "trainer": (
        "{'loss': 1.2, 'learning_rate': 1e-05, 'epoch': 0.5}\n"
        "{'train_runtime': 100.5, 'train_samples_per_second': 15.92, 'train_steps_per_second': "
        "0.498, 'train_loss': 1.1, 'epoch': 1.0}\n",
        {"samples_per_second": 15.92, "steps_per_second": 0.498},
    ),
    "oom": (
        "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 "
        "has a total capacity of 79.15 GiB of which 1.50 GiB is free. Process 1 has 77.60 GiB "
        "memory in use. Of the allocated memory 74.20 GiB is allocated by PyTorch, and 1.90 GiB "
        "is reserved by PyTorch but unallocated. If reserved but unallocated memory is large\n",
        {
            "needed": 76.2 * GIB,
            "peak_reserved": 76.1 * GIB,
            "device_used": 77.6 * GIB,
        },
    ),
    "old oom": (
        "RuntimeError: CUDA out of memory. Tried to allocate 512.00 MiB (GPU 0; 39.59 GiB total "
        "capacity; 37.00 GiB already allocated; 300.19 MiB free; 38.00 GiB reserved in total by "
        "PyTorch)\n",
        {"needed": 37.5 * GIB, "peak_reserved": 38 * GIB},
    ),
    "nvidia-smi": (
        "| N/A   32C    P0    61W / 400W |  20001MiB / 81920MiB |      0%      Default |\n",
        {"device_used": 20001 * MIB},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOGS)
def test_a_log_is_read(name, tmp_path):
    text, expected = LOGS[name]
    path = tmp_path / "run.log"
    path.write_text(text)
    found = {figure.quantity: figure.value for figure in read_log(str(path)).figures}
    assert found == pytest.approx(expected)


def test_megatron_s_log_is_read():
    """The first iterations are no part of the time; parameters are a stage's."""
    log = read_log(str(MEGATRON))
    found = {figure.quantity: figure for figure in log.figures}
    assert found["step_seconds"].value == pytest.approx(0.151)
    assert found["peak_allocated"].value == pytest.approx(3110.02 * MIB)
    assert found["resident"].rank == 0
    assert found["parameters"].value == 124439808
    assert log.global_batch == 64


def test_the_trainer_s_state_is_read(tmp_path):
    path = tmp_path / "trainer_state.json"
    last = {"epoch": 1.0, "train_samples_per_second": 15.9, "train_runtime": 9.0, "step": 50}
    path.write_text(
        json.dumps({"log_history": [{"loss": 2.0, "step": 1}, last], "global_step": 50})
    )
    assert [figure.value for figure in read_log(str(path)).figures] == [15.9]


RUN = ["gpt2", "--framework", "megatron", "--dp", 8, "--micro-batch", 2, "--seq", 1024]


def test_predicted_beside_measured(cli):
    outcome = cli("check", *RUN, "--log", MEGATRON, "--json", "--device", "a100-80gb")
    figures = {figure["name"]: figure for figure in outcome.json["figures"]}
    assert set(figures) == {
        "parameters", "resident", "peak_allocated", "peak_reserved", "step_seconds",
        "flops_per_second_per_gpu",
    }  # fmt: skip
    for figure in figures.values():
        assert figure["difference_ratio"] == pytest.approx(
            figure["predicted"] / figure["measured"] - 1
        )
        low, high = figure["low_ratio"], figure["high_ratio"]
        inside = low <= figure["difference_ratio"] <= high
        near = figure["unit"] == "bytes" and abs(figure["predicted"] - figure["measured"]) < 0.3e9
        assert figure["within"] == (inside or near)
        assert bool(figure["cause"]) == (not figure["within"])
    assert figures["parameters"]["within"]
    assert figures["parameters"]["predicted"] == 124439808
    memory = cli("memory", *RUN, "--json", "--device", "a100-80gb", "--global-batch", 64).json
    assert figures["peak_allocated"]["predicted"] == memory["stages"][0]["peak_bytes"]
    assert outcome.code == (0 if all(f["within"] for f in figures.values()) else 1)


def test_times_need_a_device(cli):
    outcome = cli("check", *RUN, "--log", MEGATRON, "--json")
    names = [figure["name"] for figure in outcome.json["figures"]]
    assert "step_seconds" not in names
    assert any("--device" in note for note in outcome.json["notes"])
    assert outcome.json["calibration"] == ""


def test_what_is_to_be_calibrated_with_is_a_file_of_mfu(cli, tmp_path):
    """The entry is read by --calibrate, and its run is the same."""
    outcome = cli("check", *RUN, "--log", MEGATRON, "--json", "--device", "a100-80gb")
    path = tmp_path / "runs.yaml"
    path.write_text(outcome.json["calibration"])
    (entry,) = yaml.safe_load(path.read_text())["runs"]
    assert entry["step_seconds"] == pytest.approx(0.151)
    assert entry["layout"] == {"dp": 8}
    fitted = cli("mfu", *RUN, "--device", "a100-80gb", "--global-batch", 64, "--calibrate", path,
                 "--json")  # fmt: skip
    (run,) = fitted.json["calibration"]["runs"]
    figures = {f["name"]: f for f in outcome.json["figures"]}
    assert run["before_seconds"] == pytest.approx(figures["step_seconds"]["predicted"])


@pytest.mark.parametrize(("rank", "stage"), [(0, 0), (3, 0), (4, 1), (7, 1)])
def test_ranks_are_of_stages(rank, stage, cli, tmp_path):
    """Megatron's ranks pass tensor and data parallelism before the pipeline."""
    path = tmp_path / "run.log"
    path.write_text(f"[Rank {rank}] (after 2 iterations) memory (MB) | allocated: 1.0 | max "
                    "allocated: 2.0 | reserved: 3.0 | max reserved: 4.0\n")  # fmt: skip
    outcome = cli("check", "gpt2", "--framework", "megatron", "--tp", 2, "--pp", 2, "--dp", 2,
                  "--log", path, "--json")  # fmt: skip
    assert {figure["stage"] for figure in outcome.json["figures"]} == {stage}
    assert outcome.code == 1


def test_a_failed_run_asked_for_a_least(cli, tmp_path):
    """More than it had when it failed is no contradiction; less is, and its cause is named."""
    path = tmp_path / "oom.log"
    path.write_text(LOGS["oom"][0])
    large = cli("check", "llama-3-8b", "--log", path, "--json").json["figures"]
    needed = next(figure for figure in large if figure["name"] == "needed")
    assert needed["within"] == (needed["predicted"] >= 0.9 * needed["measured"])
    small = cli("check", "gpt2", "--log", path, "--json").json["figures"]
    needed = next(figure for figure in small if figure["name"] == "needed")
    assert not needed["within"]
    assert "--policy none" in needed["cause"]


def test_snapshots_are_refused(cli, tmp_path):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({}))
    for flag in ("--snapshot", "--log"):
        check_refusal(cli("check", "gpt2", flag, path), ["pickle", "JSON"])


@pytest.mark.parametrize(
    ("text", "words"), [("hello\n", ["nothing of memory"]), ("", ["nothing of memory"])]
)
def test_other_texts_are_refused(text, words, cli, tmp_path):
    path = tmp_path / "run.log"
    path.write_text(text)
    check_refusal(cli("check", "gpt2", "--log", path), words)
    check_refusal(cli("check", "gpt2"), ["--log"])


def test_json_without_figures_is_refused(tmp_path):
    path = tmp_path / "s.json"
    path.write_text('{"log_history": [{"loss": 1.0}]}')
    with pytest.raises(SpecError):
        read_log(str(path))


def test_the_table(cli):
    out = cli("check", *RUN, "--log", MEGATRON, "--device", "a100-80gb", columns=100).out
    assert "peak, allocated" in out
    assert "step_seconds: 0.151" in out
