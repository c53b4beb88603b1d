"""Several files are one run or several; flags win; -, hub ids and the local cache."""

from __future__ import annotations

import http.server
import io
import json
import threading

import pytest

from actcalc.io import hub_ids, presets
from actcalc.io.runs import resolve
from actcalc.io.sources import source, sources

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 512, "tie_word_embeddings": False,
}  # fmt: skip
SCRIPT = (
    "torchrun --nproc_per_node 8 --nnodes 2 p.py --num-layers 4 --hidden-size 64 "
    "--num-attention-heads 4 --micro-batch-size 1 --global-batch-size 32 --bf16 --vocab-size 128"
)


def test_two_runs_are_two(tmp_path):
    for name in ("a.sh", "b.sh"):
        (tmp_path / name).write_text(SCRIPT)
    found = sources([str(tmp_path / "a.sh"), str(tmp_path / "b.sh")])
    assert [each.name for each in found] == ["a", "b"]
    assert len(sources(["gpt2", "gpt2-xl"])) == 2


def test_parts_and_a_model_are_one(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}, "steps_per_print": 1}')
    args = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4, "bf16": True}
    (tmp_path / "args.json").write_text(json.dumps(args))
    names = [str(tmp_path / name) for name in ("ds.json", "args.json", "config.json")]
    for order in (names, names[::-1]):
        (found,) = sources(order)
        run = resolve(found, layout={"dp": 4})
        assert run.model.hidden == 64
        assert (run.layout.zero, run.layout.dp) == (2, 4)
        assert run.workload.global_batch == 3 * 4 * 4
    assert resolve(found, layout={"dp": 4}, workload={"micro_batch": 1}).workload.global_batch == 16


def test_a_config_beside_a_recipe_replaces_its_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "a.yml").write_text("base_model: nobody/nothing\nsequence_len: 256\n")
    (found,) = sources([str(tmp_path / "a.yml"), str(tmp_path / "config.json")])
    assert found.model["hidden"] == 64
    assert found.workload["seq"] == 256


def test_flags_win_over_a_file(tmp_path, cli):
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT)
    read = cli("memory", path, "--json").json
    assert read["layout"]["dp"] == 16
    changed = cli("memory", path, "--json", "--dp", 4, "--seq", 512, "--policy", "full").json
    assert changed["layout"]["dp"] == 4
    assert changed["workload"]["seq"] == 512
    assert changed["policy"] == "full"
    assert changed["microbatches"] == 8


def test_a_note_on_what_was_taken_goes_when_it_is_given(tmp_path):
    path = tmp_path / "args.yaml"
    path.write_text("num-layers: 2\nhidden-size: 64\nnum-attention-heads: 4\nvocab-size: 128\n"
                    "micro-batch-size: 1\n")  # fmt: skip
    found = source(str(path))
    assert any("one replica" in note for note in resolve(found).warnings)
    assert not any("one replica" in note for note in resolve(found, layout={"dp": 2}).warnings)


def test_standard_input(monkeypatch, cli):
    class Stream:
        buffer = io.BytesIO(SCRIPT.encode())

    monkeypatch.setattr("sys.stdin", Stream())
    assert cli("memory", "-", "--json").json["layout"]["dp"] == 16


def test_from_forces_a_kind(tmp_path):
    path = tmp_path / "odd.json"
    path.write_text(json.dumps({"per_device_train_batch_size": 2, "model_name_or_path": "gpt2"}))
    assert resolve(source(str(path))).policies == ("none",)
    assert resolve(source(str(path), "trl")).policies == ("full",)


def test_from_is_never_ignored(tmp_path, cli):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "a.json").write_text('{"per_device_train_batch_size": 2}')
    both = [tmp_path / "a.json", tmp_path / "config.json"]
    assert cli("memory", *both, "--from", "trl", "--json").json["policy"] == "full"
    assert "--from" in cli("memory", "gpt2", "--from", "trl").err
    assert "--from" in cli("explain", "34", "gpt2", "--from", "trl").err


def test_an_unknown_vocabulary_can_be_given(tmp_path, cli):
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT.replace("--vocab-size 128", "--tokenizer-type HuggingFaceTokenizer "
                                   "--tokenizer-model nobody/knows"))  # fmt: skip
    refused = cli("memory", path)
    assert "nobody/knows" in refused.err
    assert cli("memory", path, "--json", "--set", "vocab=32000").json["model"]["vocab"] == 32000


# --- the hub --------------------------------------------------------------------------------------


def test_every_preset_of_the_hub_is_found_by_its_id():
    for name in presets.names("models"):
        stated = presets.stated_source("models", name)
        if stated.endswith(" config.json") and "/" in stated.split()[0]:
            found = source(stated.split()[0])
            assert found.model["name"] in (name, hub_ids.preset_ids()[stated.split()[0].lower()])


@pytest.mark.parametrize(
    ("text", "preset"),
    [
        ("Qwen/Qwen2.5-7B", "qwen2.5-7b"),
        ("qwen/qwen2.5-7b-instruct", "qwen2.5-7b"),
        ("NousResearch/Meta-Llama-3-8B", "llama-3-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("unsloth/Llama-3.2-1B", "llama-3.2-1b"),
        ("someone/Qwen2.5-7B", ""),
        ("Qwen/Qwen2.5-7B-Math", ""),
    ],
)
def test_ids_of_presets(text, preset):
    assert hub_ids.preset_of(text)[0] == preset


def test_the_local_cache_is_read_without_network(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", "")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "hub" / "models--nobody--tiny"
    snapshot = folder / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(LLAMA))
    assert source("nobody/tiny").model["hidden"] == 64
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("../../..")
    assert source("nobody/tiny").model["hidden"] == 64


def test_offline_is_respected(tmp_path, monkeypatch, cli):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    outcome = cli("memory", "nobody/nothing")
    assert outcome.code == 2
    assert "HF_HUB_OFFLINE" in outcome.err


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub with one model; it writes down what it is asked for."""

    asked: list[tuple[str, str]] = []  # noqa: RUF012

    def answer(self, *, body: bool) -> None:
        type(self).asked.append((self.path, self.headers.get("authorization", "")))
        data = json.dumps(LLAMA).encode()
        there = self.path == "/nobody/tiny/resolve/main/config.json"
        self.send_response(200 if there else 404)
        self.send_header("Content-Length", str(len(data) if there else 0))
        if there:
            self.send_header("ETag", '"abc"')
            self.send_header("X-Repo-Commit", "0" * 40)
        self.end_headers()
        if there and body:
            self.wfile.write(data)

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


FETCH = """
import json, sys
from actcalc.io.sources import source
found = source(sys.argv[1])
print(found.model["hidden"])
"""


def test_a_config_is_fetched_from_a_server(tmp_path):
    """In a process of its own: huggingface_hub reads HF_ENDPOINT when it is imported."""
    pytest.importorskip("huggingface_hub")
    import os
    import subprocess
    import sys

    Hub.asked = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        env |= {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HOME": str(tmp_path),
            "HF_TOKEN": "hf_secret",
            "no_proxy": "127.0.0.1",
        }
        done = subprocess.run(
            [sys.executable, "-c", FETCH, "nobody/tiny"], env=env, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip
    finally:
        server.shutdown()
    assert done.stdout.strip() == "64", done.stderr
    assert "fetching config.json of nobody/tiny" in done.stderr
    # Once a day the library also asks its endpoint for a registry of its own.
    models = {path for path, _ in Hub.asked if not path.startswith("/api/agent")}
    assert models == {"/nobody/tiny/resolve/main/config.json"}
    assert any("hf_secret" in token for _, token in Hub.asked)


def test_a_preset_loads_no_reader():
    import subprocess
    import sys

    code = (
        "import sys; from actcalc.cli.app import run; run(['memory', 'gpt2']);"
        "print([m for m in sys.modules if m.startswith('actcalc.io.readers')], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
