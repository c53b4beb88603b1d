"""No name, path or key can pass for something that was not said: every format shows it escaped."""

from __future__ import annotations

import csv
import io
import json
import re
from xml.etree import ElementTree

import pytest

EVIL = "a\x1b[31m\x9b2J\u202e\nerror: forged\r\x00\u2028</svg><script>|`*_=1+1"
ENDINGS = ("txt", "csv", "md", "svg", "html", "json", "vl.json")


def plain(text: str) -> bool:
    """Whether nothing but line ends moves a cursor."""
    return text.replace("\n", "").isprintable()


def run_file(tmp_path, name=EVIL):
    path = tmp_path / "run.yaml"
    title = json.dumps(name, ensure_ascii="\x00" in name)
    path.write_text(f"title: {title}\nmodel: {{preset: gpt2, name: {title}, layers: 2}}\n")
    return path


@pytest.mark.parametrize("command", ["compare", "memory", "breakdown"])
@pytest.mark.parametrize("form", ["table", "csv", "markdown", "json"])
def test_names_are_shown_on_one_line(command, form, cli, tmp_path):
    found = cli(command, run_file(tmp_path), "--format", form)
    assert found.code in (0, 1)
    assert plain(found.out)
    assert not any(line.startswith("error: forged") for line in found.out.splitlines())


@pytest.mark.parametrize("ending", ENDINGS)
def test_files_of_every_format(ending, cli, tmp_path):
    path = tmp_path / f"out.{ending}"
    found = cli("compare", run_file(tmp_path), "--device", "h100-80gb", "-o", path)
    if "not installed" in found.err or "actcalc[" in found.err:
        pytest.skip("drawn by an extra")
    assert found.code in (0, 1), found.err
    text = path.read_text()
    assert plain(text.replace("\t", ""))
    assert "<script>alert" not in text
    if ending == "svg":
        ElementTree.fromstring(text)
    if ending in ("svg", "html"):
        assert "</svg><script>|" not in text
        named = set(re.findall(r"https?://[^\s\"'<>)]+", text))
        assert named <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


def test_json_has_what_the_file_says(cli, tmp_path):
    found = json.loads(cli(run_file(tmp_path, "caf\u00e9 \U0001f984"), "--json").out)
    assert found["model"]["name"] == "caf\u00e9 \U0001f984"


@pytest.mark.parametrize("sign", ["=", "+", "-", "@"])
def test_no_cell_of_csv_is_a_formula(sign, cli, tmp_path):
    path = tmp_path / "layer.json"
    name = f"{sign}cmd"
    path.write_text(json.dumps({
        "schema": "actcalc/measured-layer/2", "name": name, "cls": name, "torch_version": "2",
        "dtype": "int8", "params": 1, "forward_flops": 10,
        "storages": [{"id": 0, "bytes": 10, "shape": [10], "dtype": "int8",
                      "saved_by": [{"module": "m", "op": name}]}],
        "modules": [{"path": "", "cls": name, "inputs": [0], "forward_flops": 10},
                    {"path": "m", "cls": name, "inputs": [0], "forward_flops": 5}],
    }))  # fmt: skip
    found = cli("compare", path, "--format", "csv")
    assert found.code == 0, found.err
    cells = [cell for row in csv.reader(io.StringIO(found.out)) for cell in row]
    assert not any(cell.startswith(sign) and "cmd" in cell for cell in cells)


def test_markdown_shows_names_as_they_are(cli, tmp_path):
    found = cli(run_file(tmp_path, "[x](http://evil) | <b> *b*"), "--format", "markdown")
    assert "[x](" not in found.out
    assert "<b>" not in found.out


@pytest.mark.parametrize(
    "args",
    [
        [EVIL.replace("\x00", "")],
        ["memory", "./" + EVIL.replace("\x00", "")],
        ["gpt2", "-o", "x/" + EVIL.replace("\x00", "") + ".json"],
        ["gpt2", "--device", EVIL],
        ["gpt2", "--policy", EVIL],
        ["gpt2", "--framework", EVIL],
        ["gpt2", "--set", f"{EVIL}=1"],
        ["gpt2", "--format", EVIL],
        ["gpt2", "--" + EVIL],
        ["explain", EVIL],
        ["schema", EVIL],
        ["presets", "show", EVIL],
        ["gpt2", "--policy", "a" * 100_000],
        ["explain", "b" * 100_000],
        ["presets", "show", "c" * 100_000],
    ],
)
def test_errors_are_two_short_lines(args, cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = cli(*args)
    assert (found.code, found.out) == (2, "")
    lines = found.err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("error: ")
    assert lines[1].startswith("hint: ")
    assert all(line.isprintable() and len(line) < 1000 for line in lines)


@pytest.mark.parametrize("key", [EVIL, "k" * 50_000])
@pytest.mark.parametrize("place", ["", "model", "layout"])
def test_errors_of_files_are_two_short_lines(key, place, cli, tmp_path):
    path = tmp_path / "run.yaml"
    inner = {key: 1}
    added = {place: inner} if place else inner
    path.write_text(json.dumps({"model": {"preset": "gpt2"}, **added}))
    found = cli(path)
    assert found.code == 2
    assert len(found.err.splitlines()) == 2
    assert all(line.isprintable() and len(line) < 1000 for line in found.err.splitlines())


SECRET = "root:$6$verysecret:19000:0:99999:7:::"


@pytest.mark.parametrize(
    "text",
    [
        "model: {preset: PATH}",
        "model: {file: PATH}",
        "model: PATH",
        "base_model: PATH\nsequence_len: 128\nmicro_batch_size: 1\nadapter: lora\n",
        "base_model: gpt2\ndeepspeed: PATH\nsequence_len: 128\nmicro_batch_size: 1\n",
        "model: {preset: gpt2}\ndevice: PATH",
    ],
)
@pytest.mark.parametrize("held", [SECRET, f"{SECRET}: 1\n{SECRET}: 2\n", f"password: {SECRET}\n"])
def test_a_file_that_another_names_is_not_shown(text, held, cli, tmp_path):
    secret, path = tmp_path / "secret", tmp_path / "run.yaml"
    secret.write_text(held)
    path.write_text(text.replace("PATH", str(secret)))
    found = cli("memory", path)
    assert "verysecret" not in found.err + found.out


def test_a_preset_is_a_name_and_a_file_has_its_own_key(cli, tmp_path):
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100,
              "num_attention_heads": 4, "intermediate_size": 128}  # fmt: skip
    model, path = tmp_path / "config.json", tmp_path / "run.yaml"
    model.write_text(json.dumps(config))
    path.write_text(f"model: {{file: {model}, layers: 3}}\n")
    assert json.loads(cli(path, "--json").out)["model"]["layers"] == 3
    path.write_text(f"model: {{preset: {model}}}\n")
    found = cli(path)
    assert found.code == 2
    assert "names no preset" in found.err
