"""docs/journeys.md: eight people get from ``--help`` to their answer in at most three commands.

``python -m tests.test_readme`` writes what the commands print now; read the difference.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import shutil

import pytest

from tests.conftest import ROOT
from tests.pages import CONSOLE, lines
from tests.pages import JOURNEYS as FILE

PAGE = FILE.read_text(encoding="utf-8")
HEAD, *PARTS = re.split(r"^## ", PAGE, flags=re.M)
JOURNEYS = {part.split("\n", 1)[0]: part for part in PARTS}
NEEDS_TORCH = ("measure",)


@pytest.fixture(autouse=True)
def _in_the_examples(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "docs" / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path / "examples")


def commands(text: str) -> list[tuple[str, str]]:
    return [(command, shown) for command, _, shown in CONSOLE.findall(text)]


def any_version(text: str) -> str:
    """Without the versions of what is installed here."""
    return re.sub(r"\b(torch|transformers) [\w.+]+", r"\1 of some version", text)


def test_there_are_eight():
    assert len(JOURNEYS) == 8
    assert [command for command, _ in commands(HEAD)] == ["--help"]


def test_help_is_as_it_is_printed(cli):
    ((command, shown),) = commands(HEAD)
    assert lines(cli(command).out) == lines(shown)


@pytest.mark.parametrize("name", JOURNEYS)
def test_a_journey_takes_three_commands_at_most(name, cli):
    """One is ``--help``, which lists every command that the others are."""
    part = JOURNEYS[name]
    run = commands(part)
    assert len(run) <= 2
    assert run or "```python" in part
    listed = cli("--help").out
    for command, _ in run:
        word = command.split()[0]
        assert f"\n  {word} " in listed or f"actcalc {word}" in listed


@pytest.mark.parametrize("name", JOURNEYS)
def test_a_journey_ends_with_its_answer(name, cli):
    part = JOURNEYS[name]
    found = ""
    for command, shown in commands(part):
        if command.split()[0] in NEEDS_TORCH:
            pytest.importorskip("torch", reason="needs actcalc[torch]")
            pytest.importorskip("transformers", reason="needs actcalc[torch]")
        outcome = cli(*shlex.split(command), columns=80)
        assert outcome.code in (0, 1)
        found = outcome.out + outcome.err
        assert lines(any_version(found)) == lines(any_version(shown))
    for code in re.findall(r"```python\n(.*?)```", part, re.DOTALL):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, name, "exec"), {})
        found = printed.getvalue()
    (answer,) = re.findall(r"^Answer: `(.*)`$", part, re.M)
    assert answer.strip() in " ".join(found.split())
