"""The answer in every format: the same figures, exact where machines read them."""

from __future__ import annotations

import csv
import io
import json
import re

import pytest

from tests.conftest import posix

MAIN = ("gpt3-175b", "--tp", 8, "--sp")


def test_json_holds_the_contract(cli):
    document = cli(*MAIN, "--json").json
    assert document["schema"] == "actcalc/compare/1"
    for key in ("version", "model", "layout", "workload", "device", "framework"):
        assert key in document
    assert document["device"] is None
    first = document["policies"][0]
    assert first["policy"] == "none"
    assert first["formula"] == "sbh(34+5as/h)/t"
    assert first["saved_ratio"] == 0
    assert first["recompute_flops"] == 0
    assert first["hardware_flops_per_model_flops_ratio"] == 1
    assert {"continuous", "integer", "stored_bytes"} <= document["checkpoint_optimum"].keys()


def test_formats_agree(cli):
    document = cli(*MAIN, "--json").json
    rows = list(csv.DictReader(io.StringIO(cli(*MAIN, "--format", "csv").out)))
    assert [row["policy"] for row in rows] == [p["policy"] for p in document["policies"]]
    for row, policy in zip(rows, document["policies"], strict=True):
        assert int(row["stored_bytes"]) == policy["stored_bytes"]
        assert int(row["peak_bytes"]) == policy["peak_bytes"]
    table = cli(*MAIN, "--format", "markdown").out
    for policy in document["policies"]:
        assert f"| {policy['policy']} |" in table


def test_csv_of_a_comparison_is_one_table(cli):
    """With a device there are more columns of the same policies, not more tables."""
    plain = cli(*MAIN, "--format", "csv").out
    timed = cli(*MAIN, "--device", "a100-80gb", "--format", "csv").out
    assert "\n\n" not in timed
    assert timed.splitlines()[0].startswith(plain.splitlines()[0] + ",")
    document = cli(*MAIN, "--device", "a100-80gb", "--json").json
    rows = list(csv.DictReader(io.StringIO(timed)))
    for row, policy in zip(rows, document["policies"], strict=True):
        assert row["policy"] == policy["policy"]
        assert int(row["stored_bytes"]) == policy["stored_bytes"]
        assert float(row["step_seconds"]) == policy["step_seconds"]
        assert int(row["largest_micro_batch"]) == policy["largest_micro_batch"]


def test_lines_are_an_answer_too():
    from actcalc.render.sheet import Column, Row, Sheet
    from actcalc.render.text import csv as as_csv
    from actcalc.render.text import markdown

    bare = Sheet(title="no table", columns=(), rows=(), above=("nothing fits, really",))
    assert as_csv([bare]) == 'line\nno table\n"nothing fits, really"\n'
    hidden = Column("b", "b", shown=False)
    table = Sheet(title="", columns=(Column("a", "a"), hidden), rows=(Row((1, 2)),))
    assert as_csv([bare, table]) == "a,b\n1,2\n"
    assert markdown([table]) == "| a |\n| ---: |\n| 1 |\n"
    alone = Sheet(title="", columns=(hidden,), rows=(), records=((3,),))
    assert as_csv([alone]) == "b\n3\n"
    assert markdown([alone, table]) == markdown([table])


def test_adapters_change_a_comparison(cli):
    """Frozen matrices keep no input, adapters keep theirs: what memory says of all layers."""
    base = ("llama-3-8b", "--set", "lora_rank=16", "--set", "lora_targets=attention")
    compared = cli("compare", *base, "--json").json
    assert compared["training"]["lora_rank"] == 16
    for policy in ("none", "full"):
        memory = cli("memory", *base, "--policy", policy, "--json").json
        stored = {p["policy"]: p["stored_bytes"] for p in compared["policies"]}
        assert stored[policy] == memory["stages"][0]["layers_activations_bytes"]
    plain = cli("compare", "llama-3-8b", "--json").json
    assert compared["policies"][0]["stored_bytes"] < plain["policies"][0]["stored_bytes"]
    for more in ([], ["bert-base"], ["--framework", "transformers,paper"]):
        shown = " ".join(cli("compare", *base, *more).out.split())
        assert "LoRA r 16 on attention" in shown
    assert "LoRA" not in cli("compare", "llama-3-8b").out


@pytest.mark.parametrize("ending", ["json", "csv", "md", "txt", "svg", "html"])
def test_file_is_whole(cli, tmp_path, ending):
    path = tmp_path / f"answer.{ending}"
    outcome = cli(*MAIN, "-o", path)
    assert (outcome.code, outcome.out) == (0, "")
    assert "selective" in path.read_text(encoding="utf-8")
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_file_is_replaced_only_by_a_whole_one(cli, tmp_path):
    path = tmp_path / "answer.json"
    path.write_text("old")
    assert cli("gpt3-175b", "--tp", 7, "-o", path).code == 2
    assert path.read_text() == "old"
    assert cli(*MAIN, "-o", path).code == 0
    assert json.loads(path.read_text())["policies"]


def test_units_are_named(cli):
    decimal, binary = cli(*MAIN).out, cli(*MAIN, "--units", "GiB").out
    assert "GB" in decimal
    assert "GiB" not in decimal
    assert "GiB" in binary
    assert "GB" not in binary.replace("GiB", "")
    assert "32.1" in binary  # 34,426,847,232 / 2^30


def test_breakdown_sums_to_compare(cli):
    for args in (MAIN, ("bert-base",), ("gpt2-xl", "--attention", "flash")):
        for policy in ("none", "selective", "ffn+norm", "full"):
            document = cli("breakdown", *args, "--policy", policy, "--json").json
            compared = cli(*args, "--policy", policy, "--json").json
            total = sum(tensor["bytes"] for tensor in document["tensors"])
            assert total == compared["policies"][0]["stored_bytes_per_layer"]


def test_every_line_fits_80_columns(cli):
    for args in (
        MAIN,
        ("breakdown", *MAIN),
        ("breakdown", "bert-base"),
        ("explain", "34"),
        ("explain", "selective"),
        ("explain", "c*"),
        ("presets", "list"),
        ("presets", "show", "gpt3-175b"),
    ):
        outcome = cli(*args, columns=80)
        assert outcome.code == 0
        assert max(len(line) for line in outcome.out.splitlines()) <= 80


def test_default_command_is_compare(cli):
    assert cli(*MAIN).out == cli("compare", *MAIN).out
    assert cli("--tp", 8, "--sp", "gpt3-175b").out == cli(*MAIN).out


def test_flags_beat_the_run_file(cli, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: gpt3-175b\nlayout: {tp: 8, sp: true}\nworkload: {seq: 4096}\n")
    from_file = cli(path, "--json").json
    assert (from_file["layout"]["tp"], from_file["workload"]["seq"]) == (8, 4096)
    flagged = cli(path, "--seq", 1024, "--tp", 4, "--json").json
    assert (flagged["layout"]["tp"], flagged["workload"]["seq"]) == (4, 1024)
    assert flagged["workload"]["micro_batch"] == 1  # the preset's


def test_run_file_may_change_a_preset(cli, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: {preset: gpt3-175b, layers: 12}\npolicies: [none, full]\n")
    document = cli(path, "--json").json
    assert [p["policy"] for p in document["policies"]] == ["none", "full"]
    assert document["policies"][1]["stored_bytes"] == 12 * 50331648


@pytest.mark.parametrize(
    "term", ["34", "c*", "selective", "8psi", "5as/h", "full", "mfu", "tp", "72", "symbols"]
)
def test_explain_cites_its_source(cli, term):
    outcome = cli("explain", term)
    assert outcome.code == 0
    assert "source: " in outcome.out


def test_schema_describes_what_is_printed(cli):
    from typing import Any

    schema: dict[str, Any] = cli("schema", "compare").json
    document = cli(*MAIN, "--json").json
    assert set(document) == set(schema["required"])
    assert set(schema["properties"]) == {*document, "frameworks", "models"}  # of several answers
    policy = schema["$defs"]["PolicyFigure"]
    assert set(policy["properties"]) == set(document["policies"][0])
    assert all("description" in field for field in policy["properties"].values())


@posix
def test_output_never_replaces_a_device(cli, tmp_path):
    import os
    import threading

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    assert cli(*MAIN, "-o", pipe, "--json").code == 0
    reader.join(timeout=10)
    assert json.loads(read[0])["policies"]
    assert not pipe.is_file()


@posix
def test_output_follows_a_link(cli, tmp_path):
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    assert cli(*MAIN, "-o", link).code == 0
    assert link.is_symlink()
    assert json.loads(target.read_text())["policies"]


def test_megatrons_recompute_options_are_policies(cli):
    flags = ("--recompute-method", "block", "--recompute-num-layers", 5)
    document = cli(*MAIN, "--policy", "none", *flags, "--json").json
    assert [p["policy"] for p in document["policies"]] == ["none", "block:5"]
    none, block = (p["stored_bytes"] for p in document["policies"])
    assert block == none // 96 * 91 + 5 * 50331648


def test_imbalance_grows_what_experts_keep(cli):
    moe = ("mixtral-8x7b", "--tp", 2, "--sp", "--ep", 4, "--policy", "none")
    even, uneven = (
        cli(*moe, *flags, "--json").json["policies"][0]["stored_bytes"]
        for flags in ((), ("--moe-imbalance", 1.5))
    )
    assert uneven > even


@posix
def test_a_reader_that_leaves_early_is_no_error():
    import subprocess
    import sys

    command = f"{sys.executable} -m actcalc presets list --json | head -c 10; "
    command += f"{sys.executable} -m actcalc gpt3-175b --tp 8 --sp | head -c 10"
    done = subprocess.run(
        ["bash", "-c", f"set -eo pipefail; {command}"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


LONG = "layernorm+core_attn+mlp"


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("policy", ["full", "layernorm+core_attn", LONG])
def test_names_wrap_and_numbers_are_never_cut(cli, monkeypatch, width, policy):
    args = ("gpt3-175b", "--tp", 8, "--sp", "--device", "a100-80gb", "--policy", "none")
    monkeypatch.setenv("COLUMNS", "240")
    wide = cli(*args, "--policy", policy).out
    monkeypatch.setenv("COLUMNS", str(width))
    narrow = cli(*args, "--policy", policy).out
    assert "…" not in narrow
    numbers = re.compile(r"\d[\d,.]*")
    assert sorted(numbers.findall(narrow)) == sorted(numbers.findall(wide))
    for name in policy.split("+"):
        assert name in narrow
    if width >= 80:
        assert max(map(len, narrow.splitlines())) <= width


def test_widths_are_what_is_drawn():
    """The width that names are broken for is that of the table that comes out."""
    from rich.console import Console

    from actcalc.render.narrow import fitting
    from actcalc.render.sheet import Column, Row, Sheet
    from actcalc.render.table import _table

    columns = (Column("a", "name", align="left"), Column("b", "x\ny"), Column("c", "long title"))
    rows = (Row(("one-two", 3, 44444)), Row(("three", 5, 6)))
    sheet = Sheet(title="", columns=columns, rows=rows)
    texts = [[column.title for column in columns], *(sheet.shown(row) for row in rows)]
    console = Console(width=200)
    drawn = console.measure(_table(sheet, 200, str)).maximum
    assert fitting(texts, [True, False, False], 200)[1] == drawn


@pytest.mark.parametrize(
    ("options", "chunks"),
    [(("--vpp", 3), 3), (("--schedule", "zb-v"), 2), (("--schedule", "dualpipe"), 2), ((), 1)],
)
def test_comparison_counts_chunks_as_memory_does(cli, options, chunks):
    args = ("gpt3-175b", "--tp", 8, "--sp", "--pp", 8, "--global-batch", 32, *options)
    compared = cli(*args, "--policy", "none", "--json").json
    held = cli("memory", *args, "--policy", "none", "--json").json["stages"][0]
    assert (compared["chunks"], compared["in_flight"]) == (chunks, held["in_flight"])
    # Of one stage every chunk has as many layers here, so bytes follow from the count.
    (none,) = compared["policies"]
    layers = compared["stage_layers"] // chunks * compared["in_flight"]
    assert none["stored_bytes"] == pytest.approx(layers * none["stored_bytes_per_layer"], rel=2e-3)
    best = compared["checkpoint_optimum"]
    assert best["in_flight"] == pytest.approx(layers / compared["stage_layers"])
    ratio = best["layer_bytes_per_input_bytes_ratio"]
    continuous = (compared["stage_layers"] * ratio / best["in_flight"]) ** 0.5
    assert best["continuous"] == pytest.approx(continuous)
    text = cli(*args, "--policy", "none").out
    assert (f"in {chunks} chunks" in text) == (chunks > 1)


def test_one_policy_from_a_file_names_no_option_to_drop(cli, tmp_path):
    path = tmp_path / "meg.json"
    path.write_text(
        '{"num-layers": 12, "hidden-size": 768, "num-attention-heads": 12, "seq-length": 1024,'
        ' "max-position-embeddings": 1024, "micro-batch-size": 4, "vocab-size": 50257}'
    )
    found = [policy["policy"] for policy in cli(path, "--json").json["policies"]]
    assert found[0] == "none"
    assert {"selective", "full"} < set(found)
    path.write_text(path.read_text().replace("{", '{"recompute-granularity": "selective", '))
    found = [policy["policy"] for policy in cli(path, "--json").json["policies"]]
    assert found[:2] == ["core_attn", "none"]
    assert "selective" not in found  # it is core_attn under another name
    alone = cli(path, "--policy", "none").out
    assert "repeat --policy" in " ".join(alone.split())
    assert "drop --policy" not in alone


def test_two_runs_of_far_sizes_have_units_of_their_own(cli):
    far = cli("memory", "gpt3-175b", "bert-base").out
    head = next(line for line in far.splitlines() if line.startswith(" part"))
    assert head.split() == ["part", "TB", "GB", "TB"]
    assert "0.219" in far


@pytest.mark.parametrize("option", ["--loss", "--lora-rank", "--optimizer"])
@pytest.mark.parametrize("command", ["compare", "breakdown"])
def test_training_options_elsewhere_say_how_to_set_them(cli, command, option):
    done = cli(command, "llama-3-8b", option, "1")
    assert done.code == 2
    assert f"--set {option[2:].replace('-', '_')}=VALUE" in done.err
    assert "did you mean" not in done.err


def test_on_and_off_are_words_of_a_setting(cli):
    """YAML would read both as booleans, which no kernel option of three words takes."""

    def kept(word: str) -> int:
        args = ("memory", "mixtral-8x7b", "--framework", "megatron", "--json", "--set")
        document = cli(*args, f"kernels.moe_grouped_gemm={word}").json
        value: int = document["stages"][0]["peak_bytes"]
        return value

    assert kept("on") == kept("auto") != kept("off")


@pytest.mark.parametrize("command", ["memory", "compare", "plan", "mfu"])
def test_the_header_says_what_images_and_completions_there_are(cli, command):
    without = cli(command, "llava-1.5-7b", "--device", "h200", columns=120)
    assert "No image is counted" in without.out + without.err
    done = cli(command, "llava-1.5-7b", "--device", "h200", "--image-tokens", 576, columns=120)
    assert "No image is counted" not in done.out + done.err
    assert "image tokens 576" in " ".join(done.out.split())
