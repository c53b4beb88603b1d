"""Terminals as they are: narrow, coloured, piped, not UTF-8; the answer first in all of them."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from actcalc.render.plain import ascii_text, takes_signs
from actcalc.render.sheet import Column, Row, Sheet, brief
from actcalc.render.table import print_sheets
from actcalc.render.units import digits, flops, percent, seconds

COMMANDS = {
    "compare": ("gpt3-175b", "--tp", 8, "--sp"),
    "compare on a device": ("llama-3-8b", "--device", "h100-80gb"),
    "compare of models": ("compare", "gpt2", "bert-base"),
    "compare of profiles": ("compare", "llama-3-8b", "--framework", "transformers,megatron"),
    "breakdown": ("breakdown", "mixtral-8x7b"),
    "memory": ("memory", "llama-3-8b", "--tp", 2, "--sp", "--pp", 4, "--device", "h100-80gb"),
    "memory in full": ("memory", "llama-3-8b", "--device", "h200", "-v", "--timeline"),
    "memory of two": ("memory", "gpt2", "gpt3-175b"),
    "memory of policies": ("memory", "gpt2", "--policy", "none,selective,full"),
    "plan": ("plan", "gpt2", "--memory", "4GB", "-v"),
    "no plan": ("plan", "llama-3-8b", "--memory", "40GB"),
    "mfu": ("mfu", "gpt2", "--device", "a100-80gb", "--policy", "full"),
    "explain": ("explain", "c*"),
    "devices": ("presets", "list", "devices"),
    "a preset": ("presets", "show", "gpt2"),
    "help": ("help", "plan"),
}


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_terminal_of_any_width_cuts_no_number_and_no_word(cli, name, columns):
    outcome = cli(*COMMANDS[name], columns=columns)
    assert outcome.code in (0, 1)
    assert "…" not in outcome.out
    lines = [line for line in outcome.out.splitlines() if not line.startswith("  actcalc ")]
    assert max(map(len, lines)) <= columns
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("help", "explain")])
def test_the_first_line_is_a_sentence(cli, name):
    first = cli(*COMMANDS[name], columns=400).out.splitlines()[0]
    assert re.match(r"[A-Z0-9a-z]", first)
    assert first.endswith(".")
    assert "  " not in first


def run(*args: object, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "actcalc", *map(str, args)],
        capture_output=True,
        env={**os.environ, "COLUMNS": "80", **environment},
        check=False,
    )


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
@pytest.mark.parametrize("name", ["compare", "explain", "breakdown", "help"])
def test_a_stream_that_is_not_utf_8_gets_ascii(name, encoding):
    done = run(*COMMANDS[name], PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()
    if name == "compare":
        assert b"c* = sqrt(l*A_int/A_in) = sqrt(96*57.0)" in done.stdout
        assert b" ------" in done.stdout


def test_what_machines_read_is_the_same_in_every_encoding():
    found = [run("gpt2", "--json", PYTHONIOENCODING=each) for each in ("utf-8", "ascii")]
    assert found[1].stdout.isascii()
    assert json.loads(found[0].stdout) == json.loads(found[1].stdout)
    page = run("gpt2", "--format", "html", PYTHONIOENCODING="ascii").stdout
    assert b"&#8730;" in page  # the square root, as HTML writes it


def test_errors_are_told_in_ascii_too():
    done = run("gpt2", "--set", "√=1", PYTHONIOENCODING="ascii")
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: --set sqrt: no such field\n")


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("c* = √(l·A)", "c* = sqrt(l*A)"),
        ("2as²b ≤ ⌈l/c⌉ × Ψ − 1", "2as^2b <= ceil(l/c) x Psi - 1"),
        ("Modèle", "Modele"),
        ("模型", r"\u6a21\u578b"),
    ],
)
def test_signs_have_names_in_ascii(text, plain):
    assert ascii_text(text) == plain


def test_encodings_that_take_signs():
    assert [takes_signs(each) for each in ("utf-8", "UTF8", "utf-16", None)] == [True] * 4
    assert not any(takes_signs(each) for each in ("ascii", "cp1252", "latin-1", "no-such"))


def drawn(sheet: Sheet, width: int = 80, **settings: object) -> str:
    out = io.StringIO()
    target = Console(file=out, width=width, highlight=False, markup=False, **settings)
    print_sheets([sheet], target)
    return out.getvalue()


def test_a_verdict_has_a_colour_where_colour_is_on():
    red = Sheet(answer="Does not fit.", fits=False, title="", columns=(), rows=())
    assert "\x1b[1;31mDoes not fit." in drawn(red, force_terminal=True, color_system="standard")
    assert drawn(red) == "Does not fit.\n"


def test_no_blanks_at_the_ends_of_lines_in_colour():
    column = Column("fits", "fits", style=lambda value: "red")
    sheet = Sheet(title="", columns=(Column("a", "a"), column), rows=(Row((1, "no")),))
    text = drawn(sheet, force_terminal=True, color_system="standard")
    assert "\x1b[31m" in text
    assert not re.search(r" +(\x1b\[[0-9;]*m)*$", text, re.MULTILINE)


def test_columns_go_by_rank_and_are_named():
    columns = (
        Column("a", "name", align="left"),
        Column("b", "second", rank=1),
        Column("c", "third\nGB", rank=2),
        Column("d", "spare", rank=9),
    )
    sheet = Sheet(title="", columns=columns, rows=(Row(("one", 12345, 67890, "x" * 30)),))
    wide, middle, narrow = drawn(sheet, 80), drawn(sheet, 30), drawn(sheet, 16)
    assert "spare" in wide
    assert "spare" not in middle
    assert "note" not in middle
    assert "12345" in narrow
    assert "67890" not in narrow
    assert "Left out" in narrow
    assert "third GB" in narrow


def test_a_table_that_cannot_lose_columns_is_told_row_by_row():
    columns = (Column("stage", "stage", align="left"), Column("b", "weights\nGB"), Column("c", "x"))
    rows = (Row(("0", 123456789012, 5)), Row(("last", 7, None)))
    lines = drawn(Sheet(title="", columns=columns, rows=rows), 20).splitlines()
    assert [line for line in lines if line] == [
        "stage 0", "  weights GB", "    123456789012", "  x           5",
        "last", "  weights GB  7",
    ]  # fmt: skip


def test_details_are_for_those_who_ask():
    sheets = [
        Sheet("t", (), (), below=("always",), details=("a proof",)),
        Sheet("buffers", (), (), detail=True),
    ]
    assert [sheet.lines for sheet in brief(sheets)] == [("t", "always")]
    assert sheets[0].lines == ("t", "always", "a proof")


def test_verbose_has_the_proof_and_the_buffers(cli, tmp_path):
    args = ("plan", "gpt2", "--memory", "6GB")
    assert "Proven" not in cli(*args).out
    assert "Proven" in cli(*args, "-v").out
    memory = ("memory", "gpt2", "--device", "t4")
    assert "device context" not in cli(*memory).out
    assert "device context" in cli(*memory, "--verbose").out
    assert "device context" in cli(*memory, "--format", "csv").out
    path = Path(tmp_path / "m.md")
    cli(*memory, "-o", path)
    assert "device context" not in path.read_text()


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (digits(4e-9), "<0.001"),
        (digits(-4e-9), ">-0.001"),
        (digits(0.0006), "0.001"),
        (digits(12288), "12,288"),
        (percent(0.0269), "2.7 %"),
        (percent(1e-7), "<0.001 %"),
        (flops(2.17e15), "2.17 PFLOP"),
        (seconds(0.0013), "1.30 ms"),
        (seconds(0), "0"),
    ],
)
def test_numbers_for_people(shown, text):
    assert shown == text


def test_one_unit_a_column_and_one_style_of_percent(cli):
    for args in (args for name, args in COMMANDS.items() if name != "help"):
        out = cli(*args, columns=120).out
        assert not re.search(r"\d%", out), args
        assert not re.search(r"\de[-+]\d", out), args


def test_sbh_t_shows_the_paper_s_numbers(cli):
    out = cli("gpt3-175b", "--tp", 8, "--sp", "--units", "sbh/t").out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.startswith(" ")}
    assert rows["none"][1] == "114"
    assert rows["selective"][1] == "34"
    assert rows["full"][1] == "16"
    tensors = cli("breakdown", "gpt3-175b", "--tp", 8, "--sp", "--units", "sbh/t").out
    assert re.search(r"^ = all +114$", tensors, re.MULTILINE)
    done = cli("memory", "gpt2", "--units", "sbh/t")
    assert done.code == 2
    assert "units sbh/t are those of compare and breakdown" in done.err


def test_the_formula_is_shown_where_there_is_room_and_always_in_csv(cli):
    assert "34sbh/t" not in cli("gpt3-175b", "--tp", 8, "--sp", columns=80).out
    wide = cli("gpt3-175b", "--tp", 8, "--sp", columns=120).out
    for formula in ("sbh(34+5as/h)/t", "34sbh/t", "2sbh"):
        assert formula in wide
    csv = cli("gpt3-175b", "--tp", 8, "--sp", "--format", "csv").out
    assert "formula" in csv.splitlines()[0]
    assert "sbh(34+5as/h)/t" in csv


def test_memory_shows_every_policy_that_is_named(cli):
    out = cli("memory", "gpt2", "--policy", "none,full").out
    assert out.startswith("The fullest GPU needs: none 13.3 GB, full ")
    assert re.search(r"^ +none +full +difference$", out, re.MULTILINE)
    runs = cli("memory", "gpt2", "--policy", "none", "--policy", "full", "--json").json["runs"]
    assert [each["policy"] for each in runs] == ["none", "full"]
    alone = cli("memory", "gpt2", "--policy", "full", "--json").json
    assert alone["peak_bytes"] == runs[1]["peak_bytes"]


@pytest.mark.parametrize(
    ("args", "start"),
    [
        (("bert-base",), "Try selective first: it frees 54 % for 2.7 % more FLOPs; full has"),
        (("gpt2",), "Try selective first: it frees 70 % for 4.4 % more FLOPs; full has"),
        (("llama-3-8b",), "No setting here is nearly free: full frees 96 % for 25 % more FLOPs."),
        (("llama-3-8b", "--policy", "none,norm"), "The transformers profile has no setting for"),
        (("llama-3-8b", "--framework", "torchtitan"), "No setting here is nearly free: full"),
    ],
)
def test_advice_is_what_the_framework_has_a_setting_for(cli, args, start):
    assert cli(*args, columns=200).out.startswith(start)
