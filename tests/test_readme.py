"""The README's commands, tables and example are what the program does.

``python -m tests.test_readme`` writes what the commands print now; read the difference.
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
CONSOLE = re.findall(r"```console\n\$ actcalc (.*?)\n(.*?)\n```", README, re.DOTALL)


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


def _rewritten() -> str:
    """The README with every command's output as it is now."""
    import os
    import subprocess
    import sys

    terminal = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}

    def shown(found: re.Match[str]) -> str:
        command = [sys.executable, "-m", "actcalc", *shlex.split(found[1])]
        done = subprocess.run(command, env=terminal, capture_output=True, text=True)
        text = "\n".join(lines(done.stdout + done.stderr))
        return f"```console\n$ actcalc {found[1]}\n{text}\n```"

    return re.sub(r"```console\n\$ actcalc (.*?)\n.*?\n```", shown, README, flags=re.DOTALL)


if __name__ == "__main__":
    (ROOT / "README.md").write_text(_rewritten(), encoding="utf-8")
