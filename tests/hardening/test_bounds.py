"""Time and memory are bounded: 10 s of a processor and 500 MB for whatever is accepted."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.sweeps import sampled

SECONDS, BYTES = 10.0, 500_000_000
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="measured by Linux's /proc")

# A child's ru_maxrss has its parent's memory in it; what the program itself took is VmHWM.
MEASURED = """
import sys
from pathlib import Path
from actcalc.cli import main
code = 0
try:
    main()
except SystemExit as stop:
    code = stop.code
sys.stdout.flush()
lines = Path("/proc/self/status").read_text().splitlines()
most = next(line.split()[1] for line in lines if line.startswith("VmHWM"))
sys.stderr.write("\\nmost kB " + most)
sys.stderr.flush()
raise SystemExit(code)
"""


def bounded(args: list[str], cwd: Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command, which may not take more than it may."""
    with subprocess.Popen(
        [sys.executable, "-c", MEASURED, *args],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        out, err = process.stdout.read(), process.stderr.read()
        err, _, most = err.rpartition("\nmost kB ")
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    taken = used.ru_utime + used.ru_stime
    assert taken < SECONDS, f"{taken:.1f} s of a processor: {args}"
    assert int(most) * 1024 < BYTES, f"{int(most) // 1024} MB: {args}"
    assert process.returncode in (0, 1, 2), err
    assert "Traceback" not in err
    assert "internal error" not in err
    return process.returncode, out, err


LINES = (
    "gpt-oss-20b --layers 2147483648",
    "gpt-oss-20b --layers 1024",
    "compare gpt-oss-20b --layers 100000 --device h100-80gb",
    "memory gpt3-175b --layers 100000 --pp 1000 --vpp 100",
    "memory gpt3-175b --layers 256 --pp 256",
    "memory gpt3-175b --layers 1024 --pp 16 --vpp 16",
    "compare gpt3-175b --pp 8 --schedule dualpipe-v --device h100-80gb --global-batch 1048576",
    "compare gpt3-175b --pp 8 --schedule zb-v --device h100-80gb --global-batch 4294967296",
    "plan deepseek-v2 --offload --device a10 --memory 0.5GiB --layers 12",
    "plan llama-4-scout --offload --device h100-80gb --memory 60GB --activations-only",
    "plan deepseek-v3 --memory 3000GB",
    "plan gemma-3-27b --layers 1000 --memory 900GB --memory-model timeline",
    "plan gemma-3-27b --layers 10000 --memory 900GB --memory-model timeline",
    "plan gpt3-175b --layers 256 --pp 256 --memory 80GB",
    "plan deepseek-v4-flash --device h100-80gb",
    "explain plan deepseek-v4-flash --layers 256 --micro-batch 1 --seq 1024",
    "plan deepseek-v4-flash --device h100-80gb --memory 50GB --activations-only --offload",
)


@pytest.mark.parametrize("line", sampled(LINES, LINES[:3]))
def test_what_took_minutes(line, tmp_path):
    code, out, err = bounded(line.split(), tmp_path)
    assert out if code < 2 else "hint: " in err


def many_policies() -> str:
    return "model: gpt2\npolicies: [" + ", ".join(["full"] * 90_000) + "]\n"


FILES: dict[str, Callable[[], str]] = {
    "twice.json": lambda: "{" + ",".join(f'"k{i}":1' for i in range(160_000)) + ',"k159999":2}',
    "sixty.yaml": lambda: "model: gpt2\nx: " + "1:59:" * 350_000 + "59\n",
    "many.yaml": many_policies,
    "lists.yaml": lambda: "a: [" + "{}," * 190_000 + "1]\n",
    "long.yaml": lambda: "a: [" + "1," * 900_000 + "1]\n",
    "deep.yaml": lambda: "- " * 900_000,
    "problem.json": lambda: '{"layer_types": [' + "[]," * 600_000 + "[]]}",
    "huge.json": lambda: '{"layer_types": "' + "x" * 50_000_000 + '"}',
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("command", sampled(["compare", "plan"], ["compare"]))
def test_files(name, command, tmp_path):
    (tmp_path / name).write_text(FILES[name]())
    code, _, err = bounded([command, name], tmp_path)
    if name != "many.yaml" or command == "plan":
        assert code == 2
        assert len(err) < 2000


def powers(count: int, model: str, layers: int = 1) -> dict[str, Any]:
    """``count`` ops that need nothing of each other, of size and cost 2^i."""
    tensors = {"x": 1, **{f"t{i}": 1000 * 2**i for i in range(count)}}
    ops = [{"name": f"o{i}", "inputs": ["x"], "outputs": [f"t{i}"], "cost": 2**i}
           for i in range(count)]  # fmt: skip
    layer = {"input": "x", "tensors": tensors, "saved_for_backward": [t for t in tensors if t > "x"
             or t.startswith("t")], "ops": ops}  # fmt: skip
    return {"layer_types": {"k": layer}, "stack": [["k", layers]], "inflight": 1, "const_bytes": 0,
            "budget_bytes": layers * sum(tensors.values()) * 3 // 4 + max(tensors.values()),
            "peak_model": model, "max_segment": 4}  # fmt: skip


def tangled(count: int, model: str, layers: int) -> dict[str, Any]:
    """Ops that read each other's unsaved tensors at random."""
    rng = random.Random(3)
    tensors, ops = {"x": 1000}, []
    for i in range(count):
        inputs = rng.sample(list(tensors), min(3, len(tensors)))
        ops.append({"name": f"o{i}", "inputs": inputs, "outputs": [f"t{i}"],
                    "cost": rng.randrange(1, 10**9)})  # fmt: skip
        tensors[f"t{i}"] = rng.randrange(1, 10**9)
    saved = [name for name in tensors if rng.random() < 0.3]
    layer = {"input": "x", "tensors": tensors, "saved_for_backward": saved, "ops": ops}
    held = sum(tensors[name] for name in saved)
    budget = layers * held // 2 + held
    return {"layer_types": {"k": layer}, "stack": [["k", layers]], "inflight": 1, "const_bytes": 0,
            "budget_bytes": budget, "peak_model": model, "max_segment": 4}  # fmt: skip


MODELS = ("stored", "stored+working", "timeline", "stored+working+segments")


@pytest.mark.parametrize("model", sampled(MODELS, MODELS[2:3]))
@pytest.mark.parametrize(
    "problem",
    [lambda m: powers(20, m), lambda m: powers(40, m, 12), lambda m: tangled(60, m, 30)],
    ids=["20 powers", "40 powers", "tangled"],
)
def test_problems_are_planned_as_well_as_time_allows(problem, model, tmp_path):
    (tmp_path / "problem.json").write_text(json.dumps(problem(model)))
    code, out, _ = bounded(["plan", "problem.json", "--json"], tmp_path)
    found = json.loads(out)
    assert code == (0 if found["feasible"] else 1)
    if found["feasible"]:
        assert 0 <= found["lower_bound"] <= found["cost"]
        assert found["optimal"] == (found["lower_bound"] == found["cost"])
        gap = (found["cost"] - found["lower_bound"]) / max(1, found["cost"])
        assert found["gap_ratio"] == pytest.approx(gap)
        assert found["peak_bytes"] <= found["budget_bytes"]
    else:
        assert not found["optimal"]


def test_a_bound_in_time_is_none_that_a_longer_search_contradicts(tmp_path, cli):
    """What is proven when the time is over stays below the true optimum."""
    (tmp_path / "problem.json").write_text(json.dumps(powers(8, "stored", 2)))
    exact = json.loads(cli("plan", tmp_path / "problem.json", "--json").out)
    assert exact["optimal"]

    from actcalc.solve import parse_problem, solve

    hurried = solve(parse_problem(powers(8, "stored", 2)), seconds=0.0)
    assert hurried.feasible
    assert hurried.lower_bound is not None
    assert hurried.cost is not None
    assert hurried.lower_bound <= exact["cost"] <= hurried.cost


def test_the_time_limit_is_kept(tmp_path):
    (tmp_path / "problem.json").write_text(json.dumps(tangled(60, "timeline", 30)))
    started = time.monotonic()
    bounded(["plan", "problem.json", "--time-limit", "0.5"], tmp_path)
    short = time.monotonic() - started
    assert short < 30
