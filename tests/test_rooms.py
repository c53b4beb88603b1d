"""Imports only go down the list of rooms."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.conftest import ROOT

ROOMS = (
    "cli",
    "render",
    "answers",
    "plan",
    "cost",
    "memory",
    "run",
    "policy",
    "layers",
    "io",
    "measure",
    "specs",
    "solve",
)
FREE = {"errors"}  # importable from everywhere
ABOVE = {"__main__", "api", "__init__"}  # may import everything
FILES = sorted((ROOT / "actcalc").rglob("*.py"))


def room(path: Path) -> str:
    parts = path.relative_to(ROOT / "actcalc").parts
    return parts[0] if len(parts) > 1 else path.stem


def imported(path: Path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("actcalc."):
            yield node.module.split(".")[1], node.lineno
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.startswith("actcalc."):
                    yield name.name.split(".")[1], node.lineno


def test_every_room_is_known():
    assert {room(path) for path in FILES} <= {*ROOMS, *FREE, *ABOVE}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path):
    own = room(path)
    if own in ABOVE:
        return
    for other, line in imported(path):
        if other in FREE:
            continue
        assert own not in FREE, f"{path}:{line}: errors imports nothing"
        assert other in ROOMS, f"{path}:{line}: {other} is above every room"
        assert ROOMS.index(other) >= ROOMS.index(own), f"{path}:{line}: {own} imports {other}"


def test_light_rooms_load_nothing_heavy():
    """The main job's modules import neither Pydantic nor NumPy nor the planner's solvers."""
    import subprocess
    import sys

    code = (
        "import sys; from actcalc.cli.app import run; run(['gpt3-175b', '--tp', '8', '--sp']);"
        "print([m for m in ('pydantic', 'numpy', 'torch', 'scipy', 'transformers')"
        " if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
