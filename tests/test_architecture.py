"""docs/architecture.md is what the imports are: rooms in order, and every arrow between them.

``python -m tests.test_architecture`` writes the arrows of the code into the page.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import sweeps
from tests.conftest import ROOT

pytestmark = pytest.mark.each

PAGE = ROOT / "docs" / "architecture.md"
ABOVE = {"__main__", "api", "__init__"}  # the package's own front: may import everything
MOVED = {("specs", "io")}  # names of specs.run that moved to io.runs, until 1.0
FILES = sorted((ROOT / "actcalc").rglob("*.py"))
_BLOCK = re.compile(r"```imports\n(.*?)```", re.DOTALL)


def room(path: Path) -> str:
    parts = path.relative_to(ROOT / "actcalc").parts
    return parts[0] if len(parts) > 1 else path.stem


def rooms() -> list[str]:
    """The rooms that the page names, from the top."""
    return re.findall(r"^\| `([a-z]+)(?:/|\.py)` \|", PAGE.read_text(encoding="utf-8"), re.M)


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """Rooms that a module imports, also inside functions and by name, with the line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module.startswith("actcalc."):
                yield node.module.split(".")[1], node.lineno
        elif isinstance(node, ast.Import):
            for name in node.names:
                if name.name.startswith("actcalc."):
                    yield name.name.split(".")[1], node.lineno
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_module":
            text = ast.unparse(node.args[0])
            if found := re.search(r"actcalc\.([a-z_]+)", text):
                yield found[1], node.lineno


def arrows() -> dict[str, list[str]]:
    """For each room the rooms that it imports, in the page's order."""
    order = rooms()
    found: dict[str, set[str]] = {name: set() for name in order}
    for path in FILES:
        if room(path) in found:
            others = {other for other, _ in imported(path)}
            found[room(path)] |= {other for other in others if (room(path), other) not in MOVED}
    return {
        name: [other for other in order if other in others and other != name]
        for name, others in found.items()
    }


def drawn() -> str:
    return "".join(f"{name:<8} -> {', '.join(others)}\n" for name, others in arrows().items())


def test_every_room_is_drawn():
    assert {room(path) for path in FILES} - ABOVE == set(rooms())


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path):
    own, order = room(path), rooms()
    if own in ABOVE:
        return
    for other, line in imported(path):
        if (own, other) not in MOVED or path.name != "run.py":
            assert order.index(other) >= order.index(own), f"{path}:{line}: {own} imports {other}"


def test_the_arrows_drawn_are_the_imports():
    """Mend the page with ``python -m tests.test_architecture``."""
    found = _BLOCK.search(PAGE.read_text(encoding="utf-8"))
    assert found is not None
    assert found[1] == drawn()


@pytest.mark.parametrize("name", ["plan", "run", "policy", "layers", "specs", "solve"])
def test_pure_rooms_open_no_file(name):
    for path in FILES:
        if room(path) != name:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = node.func if isinstance(node, ast.Call) else None
            word = getattr(called, "id", getattr(called, "attr", ""))
            line = getattr(node, "lineno", 0)
            assert word not in ("open", "Path", "read_text", "read_bytes"), f"{path}:{line}: {word}"


def test_files_that_the_page_names_exist():
    text = PAGE.read_text(encoding="utf-8") + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:[a-z_]+/)+[a-z_*]*(?:\.(?:py|yaml|md))?)`", text))
    missing = [
        name
        for name in named
        if not list((ROOT / "actcalc").rglob(name.rstrip("/"))) and not list(ROOT.glob(name))
    ]
    assert not missing


def test_the_main_job_loads_nothing_heavy():
    """Neither Pydantic nor NumPy nor the planner's solver."""
    code = (
        "import sys; from actcalc.cli.app import run; run(['gpt3-175b', '--tp', '8', '--sp']);"
        "heavy = ('pydantic', 'numpy', 'torch', 'scipy', 'transformers', 'actcalc.solve');"
        "print([m for m in heavy if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_BLOCK.sub(lambda _: f"```imports\n{drawn()}```", page), encoding="utf-8")


def test_long_tests_are_tests():
    for path, names in sweeps.LONG.items():
        text = (ROOT / "tests" / f"{path}.py").read_text(encoding="utf-8")
        missing = [name for name in names if f"def {name}(" not in text]
        assert not missing, f"{path}: {missing}"
