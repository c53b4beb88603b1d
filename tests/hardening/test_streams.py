"""Streams, files and signals: an answer is whole or there is an error, and exit 1 means no."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT, posix

pytestmark = posix

MAIN = [sys.executable, "-m", "actcalc", "gpt2", "--policy", "none"]


def shell(line: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """One line of a shell, where ``actcalc`` is this checkout's."""
    return subprocess.run(
        ["bash", "-c", f"actcalc() {{ '{sys.executable}' -m actcalc \"$@\"; }}; {line}"],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("actcalc gpt2 > /dev/full", ["standard output", "No space left", "free some space"]),
        ("actcalc gpt2 --json > /dev/full", ["standard output", "No space left"]),
        ("actcalc gpt2 >&-", ["standard output", "closed"]),
        ("actcalc gpt2 -o /dev/full --json", ["/dev/full", "No space left"]),
        ("actcalc schema run > /dev/full", ["No space left"]),
    ],
)
def test_an_answer_that_cannot_be_written_is_an_error(line, words, tmp_path):
    done = shell(line, tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert all(word in done.stderr for word in words)


@pytest.mark.parametrize(
    "line",
    [
        "actcalc gpt2 2>&-",
        "actcalc gpt2 2>/dev/full",
        "actcalc gpt2 -o answer.json >&-",
        "actcalc gpt2 -o answer.json >&- 2>&-",
        "actcalc gpt2 --json -o /dev/stdout | tail -1",
        "actcalc gpt2 --json -o >(cat > copy.json); sleep 0.5; test -s copy.json",
        "actcalc gpt2 --json | head -1",
    ],
)
def test_a_good_answer_is_one_whatever_becomes_of_notes(line, tmp_path):
    done = shell(f"set -o pipefail; {line}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "line",
    ["presets list", "presets show gpt2", "schema", "explain", "explain 34", "help plan", "--help",
     "breakdown gpt2", "memory gpt2", "plan gpt2 --memory 9GB", "sweep gpt2 --vary tp=1,2",
     "advise gpt2 --device h100-80gb", "mfu gpt2 --device h100-80gb", "--version",
     "search gpt2 --gpus 2 --device h100-80gb --global-batch 8 --json"],
)  # fmt: skip
def test_a_reader_that_reads_nothing_is_no_error(line, tmp_path):
    """``| true`` of every command: the pipe may be gone before anything is written."""
    done = shell(f"actcalc {line} | true; exit ${{PIPESTATUS[0]}}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("columns", ["0", "1", "-5", "x", ""])
def test_a_table_is_printed_in_any_terminal(columns, tmp_path):
    done = shell("actcalc gpt2", tmp_path, COLUMNS=columns)
    assert done.returncode == 0
    assert "selective" in done.stdout


def test_an_alphabet_without_our_letters_shows_them_written_out(tmp_path):
    done = shell("actcalc explain plan gpt2", tmp_path, PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert done.stdout.isascii()
    assert "Traceback" not in done.stderr


def test_a_file_keeps_who_may_read_it(cli, tmp_path):
    path = tmp_path / "answer.json"
    path.write_text("old")
    path.chmod(0o600)
    assert cli("gpt2", "-o", path).code == 0
    assert json.loads(path.read_text())["schema"] == "actcalc/compare/1"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_is_written_through(cli, tmp_path):
    path, link = tmp_path / "answer.json", tmp_path / "link.json"
    link.symlink_to(path)
    assert cli("gpt2", "-o", link).code == 0
    assert link.is_symlink()
    assert json.loads(path.read_text())["schema"] == "actcalc/compare/1"


def test_a_name_as_long_as_a_name_can_be(cli, tmp_path):
    assert cli("gpt2", "-o", tmp_path / ("a" * 250 + ".json")).code == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("folder.json", ["Is a directory", "name a file"]),
        ("loop.json", ["symbolic links", "circle"]),
        ("a" * 300 + ".json", ["too long", "shorter name"]),
        ("file/x.json", ["Not a directory", "a part of it is a file"]),
        ("nowhere/x.json", ["No such file", "folder has to exist"]),
        ("a\nhint: run this/x.json", ["a\\nhint: run this"]),
    ],
)
def test_hints_say_why_a_file_cannot_be_written(name, words, cli, tmp_path):
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "loop.json").symlink_to("loop.json")
    found = cli("gpt2", "-o", tmp_path / name)
    assert (found.code, found.out) == (2, "")
    assert len(found.err.splitlines()) == 2
    assert all(word in found.err for word in words)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["measure", "a" * 500], ["too long", "shorter name"]),
        (["memory", "loop.yaml"], ["symbolic links"]),
        (["plan", "a" * 500 + ".json", "--memory", "1GB"], ["no such file"]),
        (["gpt2", "--device", "loop.yaml"], ["symbolic links"]),
        (["utf16.yaml"], ["UTF-16", "save it as UTF-8"]),
        (["memory", "self.yaml"], ["names itself"]),
    ],
)
def test_hints_say_why_a_file_cannot_be_read(args, words, cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    (tmp_path / "utf16.yaml").write_bytes("model: gpt2\n".encode("utf-16"))
    (tmp_path / "self.yaml").write_text("model: self.yaml\n")
    found = cli(*args)
    assert (found.code, found.out) == (2, "")
    assert "internal error" not in found.err
    assert all(word in found.err for word in words), found.err


@pytest.mark.skipif(os.name != "nt" and os.geteuid() == 0, reason="root may search every folder")
def test_a_folder_that_may_not_be_searched(cli, tmp_path):
    folder = tmp_path / "closed"
    folder.mkdir(mode=0)
    for args in (["memory", folder / "x.yaml"], ["gpt2", "-o", folder / "x.json"]):
        found = cli(*args)
        assert found.code == 2
        assert "Permission denied" in found.err
    folder.chmod(0o700)


def test_a_full_disk_leaves_the_old_file(monkeypatch, tmp_path):
    from actcalc.cli.output import write_whole
    from actcalc.errors import SpecError

    path = tmp_path / "layer.json"
    path.write_text("old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(SpecError, match="full"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


# A process in the background of a script is born deaf to the signal.
INTERRUPTED = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from actcalc.cli import entry
entry()
"""


@pytest.mark.parametrize("after", [0.06, 0.09, 0.15, 0.3])
def test_an_interrupt_prints_no_traceback(after, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, "compare", "gpt3-175b",
         "--device", "h100-80gb", "--layers", "1000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    time.sleep(after)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    # Python's own start-up, before the package is loaded, is not ours.
    assert "actcalc" not in err or "Traceback" not in err
    assert process.returncode != 1 or "Traceback" in err


def test_a_module_that_exits_is_an_error(cli, tmp_path):
    pytest.importorskip("torch")
    path = tmp_path / "block.py"
    path.write_text("raise SystemExit(3)\n")
    found = cli("measure", "--module", f"{path}:factory")
    assert found.code == 2
    assert "SystemExit" in found.err


def test_what_is_measured_is_saved_whole(cli, monkeypatch, tmp_path):
    """A disk that fills up leaves the old file."""
    pytest.importorskip("torch")
    path = tmp_path / "layer.json"
    path.write_text("old")
    block = tmp_path / "block.py"
    block.write_text(
        "import torch\n\ndef factory():\n    return torch.nn.Linear(8, 8), torch.ones(1, 8)\n"
    )
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    found = cli("measure", "--module", f"{block}:factory", "--save", path)
    assert found.code == 2
    assert "free some space" in found.err
    assert path.read_text() == "old"
    assert {each.name for each in tmp_path.iterdir()} <= {"layer.json", "block.py", "__pycache__"}
