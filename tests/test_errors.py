"""Bad input: one error line with the values, one hint, exit 2, no traceback, nothing written."""

from __future__ import annotations

import json

import pytest

from tests.conftest import posix

CASES = {
    "tp does not divide heads": (["gpt3-175b", "--tp", 7], ["tp 7", "heads 96", "--tp 8"]),
    "sp without tp": (["gpt3-175b", "--sp"], ["tp is 1", "--tp 2"]),
    "unknown preset": (["gpt3-175"], ["gpt3-175", "did you mean gpt3-175b"]),
    "unknown command": (["comapre", "gpt3-175b"], ["comapre", "did you mean compare"]),
    "unknown option": (["gpt3-175b", "--sequence", 5], ["--sequence"]),
    "zero seq": (["gpt3-175b", "--seq", 0], ["seq is 0", "at least 1"]),
    "negative batch": (["gpt3-175b", "--micro-batch", -3], ["micro_batch is -3", "at least 1"]),
    "absurd seq": (["gpt3-175b", "--seq", 10**15], ["seq is 1000000000000000", "at most"]),
    "not a number": (["gpt3-175b", "--seq", "many"], ["'many'"]),
    "sp and seq": (["gpt3-175b", "--tp", 8, "--sp", "--seq", 2049], ["seq 2049", "--seq 2048"]),
    "cp and seq": (["gpt3-175b", "--cp", 3], ["cp 3", "seq 2048", "--cp"]),
    "pp and layers": (["gpt3-175b", "--pp", 7], ["pp 7", "96 layers", "--layers-per-stage"]),
    "vpp without pp": (["gpt3-175b", "--vpp", 2], ["pp is 1", "--pp 2"]),
    "bad split": (["gpt3-175b", "--pp", 2, "--layers-per-stage", "a,b"], ["'a'", "7,8x14,7"]),
    "split adds up wrong": (
        ["gpt3-175b", "--pp", 2, "--layers-per-stage", "40,40"],
        ["80", "96 layers"],
    ),
    "experts of a dense model": (["gpt3-175b", "--ep", 2], ["ep 2", "gpt3-175b"]),
    "unknown policy": (["gpt3-175b", "--policy", "half"], ["'half'", "selective"]),
    "policy with full": (["gpt3-175b", "--policy", "full+ffn"], ["full+ffn", "combine"]),
    "unknown field": (["gpt3-175b", "--set", "hiden=5"], ["hiden", "did you mean hidden"]),
    "set without value": (["gpt3-175b", "--set", "hidden"], ["hidden", "key=value"]),
    "set nonsense": (["gpt3-175b", "--set", "hidden=[1,2]"], ["hidden", "[1, 2]"]),
    "hidden and heads": (["gpt3-175b", "--set", "hidden=1000"], ["hidden 1000", "heads 96"]),
    "unknown attention": (["gpt3-175b", "--attention", "falsh"], ["falsh", "flash"]),
    "unknown framework": (["gpt3-175b", "--framework", "papre"], ["papre", "did you mean paper"]),
    "unknown device": (["gpt3-175b", "--device", "h100-8gb"], ["h100-8gb", "did you mean"]),
    "unknown format": (["gpt3-175b", "--format", "yaml"], ["yaml", "json"]),
    "contradicting formats": (["gpt3-175b", "--json", "--format", "csv"], ["csv"]),
    "unknown units": (["gpt3-175b", "--units", "MB"], ["MB", "GiB"]),
    "unknown ending": (["gpt3-175b", "-o", "x.docx"], [".docx", ".csv"]),
    "folder missing": (["gpt3-175b", "-o", "no/such/folder/x.json"], ["no/such/folder"]),
    "missing file": (["no/such/run.yaml"], ["no/such/run.yaml"]),
    "unknown term": (["explain", "selectiv"], ["selectiv", "did you mean selective"]),
    "unknown schema": (["schema", "compar"], ["compar", "did you mean compare"]),
    "unknown shown preset": (["presets", "show", "gtp2"], ["gtp2", "did you mean gpt2"]),
    "global batch": (
        ["gpt3-175b", "--global-batch", 10, "--dp", 4],
        ["global_batch 10", "--global-batch"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_flags(name, cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args, words = CASES[name]
    check_refusal(cli(*args), words)
    assert list(tmp_path.iterdir()) == []


FILES = {
    "unknown key": (b"model: gpt3-175b\nlayuot: {tp: 8}\n", ["layuot", "did you mean layout"]),
    "unknown field": (b"model: {layers: 2, hidden: 8, heads: 2, vocab: 9, hiden: 1}\n", ["hiden"]),
    "missing field": (b"model: {layers: 2, hidden: 8, vocab: 9}\n", ["heads"]),
    "wrong type": (b"model: {layers: two, hidden: 8, heads: 2, vocab: 9}\n", ["layers", "two"]),
    "not a mapping": (b"- 1\n- 2\n", ["list"]),
    "empty": (b"", ["nothing"]),
    "syntax": (b"model: [gpt3\n", ["line"]),
    "duplicate": (b"model: gpt2\nmodel: gpt3-175b\n", ["model", "twice"]),
    "alias bomb": (
        b"a: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]\nmodel: gpt2\n",
        ["alias"],
    ),
    "python tag": (b"model: !!python/object/apply:os.system ['true']\n", ["python"]),
    "binary": (bytes(range(256)) * 40, ["text"]),
    "nul": (b"model: gpt2\x00\n", []),
    "infinite": (b"model: gpt2\nworkload: {seq: .inf}\n", ["seq"]),
    "boolean size": (b"model: gpt2\nworkload: {seq: true}\n", ["seq"]),
    "deep": (b"model: " + b"[" * 5000 + b"]" * 5000, []),
}


@pytest.mark.parametrize("name", FILES)
def test_files(name, cli, tmp_path):
    path = tmp_path / "run.yaml"
    text, words = FILES[name]
    path.write_bytes(text)
    check_refusal(cli(path), words)


def test_huge_file(cli, tmp_path):
    path = tmp_path / "run.yaml"
    with path.open("wb") as stream:
        stream.truncate(100_000_000)
    check_refusal(cli(path), ["larger than"])


def test_directory(cli, tmp_path):
    check_refusal(cli(tmp_path), ["config.json"])


def check_refusal(outcome, words):
    assert outcome.code == 2
    assert outcome.out == ""
    lines = outcome.err.splitlines()
    assert lines[0].startswith("error: ")
    assert "internal error" not in lines[0]
    assert any(line.startswith("hint: ") for line in lines[1:])
    assert "Traceback" not in outcome.err
    for word in words:
        assert word in outcome.err, f"{word!r} missing in {outcome.err!r}"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([""], ["empty"]),
        (["x" * 5000], ["no preset"]),
        (["gpt2", "--framework", ""], ["--framework"]),
        (["gpt2", "--policy", ""], ["--policy"]),
        (
            ["gpt2", "--framework", "megatron", "--set", "kernels.masked_softmax_fuson=false"],
            ["did you mean masked_softmax_fusion"],
        ),
        (["gpt2", "--set", "hidden=1e3"], ["whole number"]),
        (["gpt2", "--precision", "amp-bf16"], ["amp-bf16", "transformers"]),
        (["gpt2", "--schedule", "gpipe"], ["gpipe", "--pp"]),
        (["llama-3-8b", "--framework", "transformers", "--tp", 2], ["tp 2", "megatron"]),
        pytest.param(["/dev/zero"], ["regular file"], marks=posix),
    ],
)
def test_more_flags(args, words, cli):
    outcome = cli(*args)
    check_refusal(outcome, words)
    assert max(len(line) for line in outcome.err.splitlines()) < 400


def test_a_beginning_is_completed(cli):
    assert "did you mean gpt3-175b?" in cli("gpt3").err
    hint = cli("memory", "gpt3-175b", "--device", "h100").err
    assert "h100-80gb" in hint
    assert "h100-pcie" in hint


@pytest.mark.parametrize(
    "args",
    [
        ["explain", "34", "--device", "h100-80gb"],
        ["explain", "c*", "--policy", "full"],
        ["breakdown", "gpt2", "--device", "h100-80gb"],
    ],
)
def test_an_option_without_effect_is_refused(args, cli):
    check_refusal(cli(*args), [args[0], f" does not depend on {args[2]}"])


HERE = {"url": "file:///a%20b/actcalc", "dir_info": {"editable": True}}
GIT = {"url": "https://host/actcalc", "vcs_info": {"vcs": "git", "commit_id": "1"}}


@pytest.mark.parametrize(
    ("origin", "prefix", "command"),
    [
        (None, "/venv", "pip install 'actcalc[torch]'"),
        (HERE, "/venv", "pip install -e '/a b/actcalc[torch]'"),
        (GIT, "/venv", "pip install 'actcalc[torch] @ git+https://host/actcalc'"),
        (None, "/home/u/.local/pipx/venvs/actcalc", "pipx install --force 'actcalc[torch]'"),
        (
            HERE,
            "/home/u/.local/share/uv/tools/actcalc",
            "uv tool install --force --editable '/a b/actcalc[torch]'",
        ),
    ],
)
def test_an_extra_is_added_as_the_rest_was_installed(monkeypatch, origin, prefix, command):
    from actcalc.errors import install

    class Found:
        @staticmethod
        def read_text(name):
            assert name == "direct_url.json"
            return None if origin is None else json.dumps(origin)

    monkeypatch.setattr("importlib.metadata.distribution", lambda name: Found)
    monkeypatch.setattr("sys.prefix", prefix)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert install("torch") == command


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (("memory", "mistral-7b-v0.3"), "did you mean mistral-7b-v0."),
        (("gpt2", "--policy", "fulll"), "did you mean full?"),
        (("gpt2", "--polcy", "full"), "did you mean --policy?"),
        (("falcon-7b", "--tp", 71), "use --framework paper for an estimate, or drop --tp"),
        (("falcon-7b", "--tp", 71, "--framework", "transformers"), "drop --tp"),
        (("gpt2", "--device", "t5"), "`actcalc presets list devices`"),
    ],
)
def test_a_hint_leads_on(cli, args, hint):
    outcome = cli(*args)
    assert outcome.code == 2
    assert outcome.err.splitlines()[-1].startswith(f"hint: {hint}")


@pytest.mark.parametrize(
    "text", ["device: {name: t4}", "framework: [megatron]", "policies: 3", "layout: 3"]
)
def test_a_run_file_of_another_shape_is_one_error(cli, tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(f"model: gpt2\n{text}\n")
    outcome = cli("memory", path)
    assert outcome.code == 2
    assert outcome.err.startswith(f"error: {path}: {text.partition(':')[0]} is ")
    assert len(outcome.err.splitlines()) == 2


def test_counts_are_written_alike_everywhere(cli, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: llama-3-8b\nworkload: {seq: 4k}\n")
    file = cli(path, "--json").json
    flag = cli("llama-3-8b", "--seq", "4k", "--json").json
    field = cli("llama-3-8b", "--set", "seq=4k", "--json").json
    assert file["workload"] == flag["workload"] == field["workload"]
    assert file["workload"]["seq"] == 4096
    one, two = (
        cli("plan", "gpt2", "--memory", size, "--json").json["memory_bytes"]
        for size in ("24G", "24GB")
    )
    assert one == two == 24 * 10**9


def test_attention_that_nobody_names_is_the_one_a_config_gets(cli, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: {layers: 2, hidden: 512, heads: 8, vocab: 1000}\n")
    assert cli(path, "--json").json["workload"]["attention"] == "sdpa"
