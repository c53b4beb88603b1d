"""Commands, tables and examples of README and docs are what the program does.

``python -m tests.test_readme`` writes what the commands print now; read the difference.
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import pytest
import yaml

from actcalc.cli.app import build, command_names
from actcalc.io import presets
from actcalc.policy.rules import ALIASES, MODULES
from tests.conftest import ROOT, load_data
from tests.pages import CONSOLE, JOURNEYS, PAGES, READMES, anchors, consoles, lines, links

README = READMES[0].read_text(encoding="utf-8")
CHINESE = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")
SHOWN = {(command, most): shown for _, command, most, shown in consoles()}


@pytest.mark.parametrize(("command", "most"), SHOWN, ids=[c for c, _ in SHOWN])
def test_shown_output_is_real(command, most, cli):
    """The same command prints the same on every page."""
    outcome = cli(*shlex.split(command), columns=80)
    real = lines(outcome.out + ("" if most else outcome.err), most)
    for page, other, limit, shown in consoles():
        if (other, limit) == (command, most):
            assert real == lines(shown), page


def test_readmes_are_short_and_alike():
    english, chinese = (page.read_text(encoding="utf-8") for page in READMES)
    for text in (english, chinese):
        assert len(text.splitlines()) <= 200
    assert CONSOLE.findall(english) == CONSOLE.findall(chinese)
    assert re.findall(r"^```.*?^```", english, re.M | re.S) == re.findall(
        r"^```.*?^```", chinese, re.M | re.S
    )
    level = re.compile(r"^#+|^- |^\|", re.MULTILINE)
    assert level.findall(english) == level.findall(chinese)
    assert set(links(READMES[0])) - {READMES[1].name} == set(links(READMES[1])) - {READMES[0].name}


def test_python_example_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    assert "none 358612992 sbh(34+5as/h)/t" in capsys.readouterr().out


def test_run_file_example_is_read(cli, tmp_path):
    page = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n(# run.yaml.*?)```", page, re.DOTALL)
    path = tmp_path / "run.yaml"
    path.write_text(text)
    document = cli(path, "--json").json
    assert [p["policy"] for p in document["policies"]] == ["none", "full", "ffn+norm"]
    assert document["model"]["layers"] == 48


def test_every_command_is_listed():
    for page in READMES:
        text = page.read_text(encoding="utf-8")
        for name in command_names():
            assert f"actcalc {name}" in text or name == "compare"


def test_every_policy_and_profile_is_named():
    page = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    for name in (*ALIASES, *MODULES):
        assert f"`{name}`" in page
    for name in presets.names("frameworks"):
        assert f"`{name}`" in page


_NO_COMMAND = r"[A-Z]{3}|\.\.\.|\[|FILE|block\.json|args|launch\.sh|--help|--calibrate"
"""Marks of a pattern, a file of the reader's own, or half a command."""


def test_commands_in_sentences_parse():
    """What stands as code with a preset's name is a command line that is understood."""
    group = build()
    found = {
        text
        for page in PAGES
        for text in re.findall(r"`actcalc ([^`|]+)`", page.read_text(encoding="utf-8"))
        if not re.search(_NO_COMMAND, text)
    }
    assert len(found) > 15
    for text in found:
        words = shlex.split(" ".join(text.split()))
        if words[0].startswith("-") or words[0] == "help":
            continue
        command = group.get_command(None, words[0])
        rest = words[1:] if command else words
        command = command or group.get_command(None, "compare")
        if getattr(command, "commands", None) is None and rest:
            command.make_context(words[0], list(rest))


def test_install_commands_are_the_two_of_ci():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "pip install ." in README
    assert "pip install -q ." in script
    assert "pytest" in script


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_every_page_can_be_reached():
    """From README, over links, to every page of the documentation."""
    seen, todo = set(), [READMES[0]]
    while todo:
        page = todo.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        found = (link.partition("#")[0] for link in links(page) if "://" not in link)
        todo += [(page.parent / link).resolve() for link in found if link]
    assert {page for page in PAGES if page not in seen} <= {ROOT / "docs" / "index.md"}


def test_the_site_builds(tmp_path):
    """mkdocs, strictly: a page or an anchor that is missing is an error."""
    pytest.importorskip("mkdocs", reason="needs actcalc[docs]")
    import subprocess
    import sys

    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", tmp_path / "x"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "x" / "policies" / "index.html").is_file()


# --- the table of accuracy -----------------------------------------------------------------------


PEERS = {
    "llm-analysis": "llm-analysis 0.2.2",
    "calc_transformer_mem": "calc_transformer_mem",
    "calculon": "calculon",
}
"""Other estimators' names in ``peers_memory.json``, and in the table."""


def test_accuracy_beside_other_estimators():
    from tests.published.memory_cases import ci_cases

    theirs = load_data("megatron_estimator.json")["total_bytes"]
    cases = [case for case in ci_cases() if not case.left_out and case.name in theirs]
    ours = [100 * case.error for case in cases]
    others = [100 * (theirs[case.name] / case.measured - 1) for case in cases]
    shown = (
        f"| {len(cases)} | median {median(map(abs, ours)):.1f} % off, largest "
        f"{max(map(abs, ours)):.1f} % | Megatron-LM's own estimator: median "
        f"{-median(others):.1f} % too low, largest {max(map(abs, others)):.0f} %; "
    )
    assert shown in README
    measured = {case.name: case.measured for case in cases}
    for name, words in PEERS.items():
        peer = load_data("peers_memory.json")[name]
        assert {*peer["total_bytes"], *peer["refused"]} == set(measured)
        errors = [100 * abs(v / measured[key] - 1) for key, v in peer["total_bytes"].items()]
        said = f"{words}: median {median(errors):.1f} % off, largest {max(errors):.0f} %"
        assert said in README
        assert f"中位数 {median(errors):.1f} %,最大 {max(errors):.0f} %" in CHINESE
        assert peer["source"].startswith(words) or "cookbook at" in peer["source"]


def test_accuracy_is_that_of_the_pages():
    page = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    (big,) = re.findall(r"\| peak above 10 GB \| (\d+) \| median absolute error ([\d.]+) %, "
                        r"largest ([\d.]+) %", page)  # fmt: skip
    assert "| {} | median {} % off, largest {} % |".format(*big) in README
    (small,) = re.findall(r"\| peak up to 10 GB \| (\d+) \|.*?error ([\d.]+) %", page)
    assert "| {} | median {} % off |".format(*small) in README
    traced = re.findall(r"\| traced step \| .*? \| (\d+) \| ([\d.]+) % \| .*? \| ([+-][\d.]+) %",
                        page)  # fmt: skip
    assert f"| {sum(int(n) for n, _, _ in traced)} | median 0.0 % off, largest " in README
    assert f"largest {max(abs(float(e)) for _, _, e in traced):.1f} % |" in README
    shares = re.findall(r"\*\*(reserved|device)\*\* \| all \| (\d+) \| ([\d.]+) %", page)
    assert len(shares) == 2
    for what, count, share in shares:
        words = {"reserved": "reserved by the allocator", "device": "of the whole device"}[what]
        assert f"| memory {words}, published | {count} | median {share} % off |" in README
    (most,) = re.findall(r"\*\*device\*\* .* ([+-][\d.]+) % \| \|", page)
    off = f"figure is {float(shares[1][2]):.0f} % off the predicted one in the median, "
    assert off + f"{abs(float(most)):.0f} % at most" in " ".join(README.split())


def test_accuracy_of_times_is_that_of_the_benchmark():
    from tests.published.step_times import outcomes

    errors = [abs(one.error) for one in outcomes()]
    assert f"| published step times | {len(errors)} | median {100 * median(errors):.0f} % off" in (
        README
    )
    known = yaml.safe_load((ROOT / "presets/accuracy/step-times.yaml").read_text(encoding="utf-8"))
    assert known


def _rewritten(text: str, outputs: dict[tuple[str, str], str], folder: Path = ROOT) -> str:
    """A page with every command's output as it is now, run in ``folder``."""
    import os
    import subprocess
    import sys

    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    terminal = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "PYTHONPATH": paths}

    def shown(found: re.Match[str]) -> str:
        key = (found[1], found[2] or "")
        if key not in outputs:
            command = [sys.executable, "-m", "actcalc", *shlex.split(found[1])]
            done = subprocess.run(
                command, env=terminal, cwd=folder, capture_output=True, text=True, check=False
            )
            said = done.stdout + ("" if found[2] else done.stderr)
            outputs[key] = "\n".join(lines(said, found[2]))
        head = f" | head -{found[2]}" if found[2] else ""
        return f"```console\n$ actcalc {found[1]}{head}\n{outputs[key]}\n```"

    return CONSOLE.sub(shown, text)


def _write() -> None:
    """Every page that shows what commands print, or what docstrings say."""
    from tests import test_api_reference

    known: dict[tuple[str, str], str] = {}
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        if page == JOURNEYS:
            with TemporaryDirectory() as folder:
                shutil.copytree(ROOT / "docs" / "examples", folder, dirs_exist_ok=True)
                page.write_text(_rewritten(before, {}, Path(folder)), encoding="utf-8")
        else:
            page.write_text(_rewritten(before, known), encoding="utf-8")
    test_api_reference.PAGE.write_text(test_api_reference.page(), encoding="utf-8")


if __name__ == "__main__":
    _write()
