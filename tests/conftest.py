"""What tests share: running the command line in this process, with a fixed terminal."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests import sweeps

# A worker a core: threads of torch's that wait for one another would take two thirds of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(__file__).resolve().parent / "data"
posix = pytest.mark.skipif(os.name == "nt", reason="Windows has no such shell, file or signal")
"""Of a test that needs what POSIX says of shells, files or signals."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--agreement-runs",
        type=int,
        default=6,
        help="random runs on which commands must agree (default 6)",
    )


def pytest_configure(config: pytest.Config) -> None:
    sweeps.ALL = "not sweep" not in config.option.markexpr


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A sample of each test's cases, before what is marked as a sweep is deselected."""
    sweeps.leave_out(items)


LEFT_OUT = pytest.StashKey[int]()
"""Long sweeps that this run deselects."""


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    if items:
        stash = items[0].config.stash
        sweeps = sum(1 for item in items if item.get_closest_marker("sweep"))
        stash[LEFT_OUT] = stash.get(LEFT_OUT, 0) + sweeps


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of xdist tells the process that prints the summary."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Every worker collects, and deselects, the same tests."""
    count = getattr(node, "workeroutput", {}).get("left_out", 0)
    node.config.stash[LEFT_OUT] = max(count, node.config.stash.get(LEFT_OUT, 0))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if count := config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(
            f"{count} tests of long sweeps left out; `pytest -m ''` runs them too, as CI does"
        )


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def cli(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """Run ``actcalc`` with arguments; a terminal of ``columns`` columns, without colour."""

    def run(*args: object, columns: int = 80) -> Outcome:
        from actcalc import cli as command_line

        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setattr(sys, "argv", ["actcalc", *map(str, args)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            command_line.main()
        gc.enable()
        captured = capsys.readouterr()
        code = stop.value.code
        return Outcome(code if isinstance(code, int) else 1, captured.out, captured.err)

    return run


def load_data(name: str) -> Any:
    """A YAML or JSON file under tests/data."""
    text = (DATA / name).read_text(encoding="utf-8")
    return json.loads(text) if name.endswith(".json") else yaml.safe_load(text)
