"""The README's commands, tables and example are what the program does.

``python -m tests.test_readme`` writes what the commands print now, and ``docs/journeys.md`` and
``docs/api.md`` with it; read the difference.
"""

from __future__ import annotations

import re
import shlex

import pytest

from actcalc.cli.app import command_names
from actcalc.io import presets
from actcalc.policy.rules import ALIASES, MODULES
from tests.conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"```console\n\$ actcalc (.*?)\n(.*?)\n```", re.DOTALL)
CONSOLE = BLOCK.findall(README)


def lines(text: str) -> list[str]:
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n").splitlines()


@pytest.mark.parametrize(("command", "shown"), CONSOLE, ids=[c for c, _ in CONSOLE])
def test_shown_output_is_real(command, shown, cli):
    outcome = cli(*shlex.split(command), columns=80)
    assert lines(outcome.out + outcome.err) == lines(shown)


def test_python_example_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    assert "none 358612992 sbh(34+5as/h)/t" in capsys.readouterr().out


def test_run_file_example_is_read(cli, tmp_path):
    (text,) = re.findall(r"```yaml\n(# run.yaml.*?)```", README, re.DOTALL)
    path = tmp_path / "run.yaml"
    path.write_text(text)
    document = cli(path, "--json").json
    assert [p["policy"] for p in document["policies"]] == ["none", "full", "ffn+norm"]
    assert document["model"]["layers"] == 48


def test_every_command_is_listed():
    for name in command_names():
        assert f"actcalc {name}" in README or name == "compare"


def test_every_policy_and_profile_is_named():
    for name in (*ALIASES, *MODULES):
        assert f"`{name}`" in README
    for name in presets.names("frameworks"):
        assert f"`{name}`" in README


def test_install_commands_are_the_two_of_ci():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "pip install ." in README
    assert "pip install -q ." in script
    assert "pytest" in script


def _rewritten(text: str, folder: str = ".") -> str:
    """A page with every command's output as it is now, run in ``folder``."""
    import os
    import subprocess
    import sys

    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    terminal = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "PYTHONPATH": paths}

    def shown(found: re.Match[str]) -> str:
        command = [sys.executable, "-m", "actcalc", *shlex.split(found[1])]
        done = subprocess.run(command, env=terminal, cwd=folder, capture_output=True, text=True)
        text = "\n".join(lines(done.stdout + done.stderr))
        return f"```console\n$ actcalc {found[1]}\n{text}\n```"

    return BLOCK.sub(shown, text)


def _write() -> None:
    """Every page that shows what commands print, or what docstrings say."""
    import shutil
    import tempfile

    from tests import test_api_reference

    (ROOT / "README.md").write_text(_rewritten(README), encoding="utf-8")
    journeys = ROOT / "docs" / "journeys.md"
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "docs" / "examples", folder, dirs_exist_ok=True)
        text = _rewritten(journeys.read_text(encoding="utf-8"), folder)
    journeys.write_text(text, encoding="utf-8")
    test_api_reference.PAGE.write_text(test_api_reference.page(), encoding="utf-8")


if __name__ == "__main__":
    _write()
