"""Files that cannot be read as a run: one clear error each, with a way out, and nothing runs."""

from __future__ import annotations

import pickle
import struct
import time

import pytest

from tests.test_errors import check_refusal

MALFORMED: dict[str, tuple[str, str | bytes, list[str]]] = {
    "unclosed quote": (
        "run.sh",
        'torchrun x.py --num-layers "12\n',
        ['" of line 1', "never closed"],
    ),
    "unclosed array": ("run.sh", "A=(--num-layers 12\n", ["( of line 1", "never closed"]),
    "unclosed substitution": ("run.sh", "A=$(date\ntorchrun x.py --num-layers 2", ["never closed"]),
    "script of nothing": ("run.sh", "#!/bin/bash\necho hello\n", ["launches no training"]),
    "no sizes": ("run.sh", "torchrun p.py --num-layers 2 --micro-batch-size 1\n", ["hidden-size"]),
    "unknown size": (
        "run.sh",
        "torchrun p.py --num-layers 2 --hidden-size $H --micro-batch-size 1\n",
        ["hidden-size is missing", "$H (line 1)"],
    ),
    "toml syntax": ("job.toml", "[training\nseq_len = 1\n", ["job.toml", "TOML"]),
    "unknown flavour": (
        "job.toml",
        '[model]\nname = "llama3"\nflavor = "9B"\n[training]\nseq_len = 8\n[parallelism]\n',
        ["llama3 9B"],
    ),
    "unknown mode": (
        "job.toml",
        '[model]\nflavor = "8B"\n[training]\nseq_len = 8\n[activation_checkpoint]\nmode = "half"\n',
        ["mode is 'half'", "selective"],
    ),
    "json syntax": ("ds.json", '{"zero_optimization": {"stage": 3}', ["line 1"]),
    "json twice": ("ds.json", '{"bf16": {}, "bf16": {}}', ["twice"]),
    "stage 4": (
        "ds.json",
        '{"zero_optimization": {"stage": 4}, "train_batch_size": 1}',
        ["stage is 4"],
    ),
    "no number": (
        "ds.json",
        '{"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": "four"}',
        ["'four'", "whole number"],
    ),
    "a part alone": (
        "ds.json",
        '{"zero_optimization": {"stage": 1}, "train_batch_size": 8}',
        ["DeepSpeed", "not which", "config.json"],
    ),
    "both precisions": (
        "args.json",
        '{"per_device_train_batch_size": 1, "bf16": true, "fp16": true, '
        '"model_name_or_path": "gpt2"}',
        ["bf16 and fp16"],
    ),
    "no switch": (
        "args.yaml",
        "per_device_train_batch_size: 1\ngradient_checkpointing: perhaps\n"
        "model_name_or_path: gpt2\n",
        ["gradient_checkpointing", "'perhaps'"],
    ),
    "qlora of 16 bits": (
        "a.yml",
        "base_model: Qwen/Qwen2.5-7B\nadapter: qlora\nsequence_len: 8\n",
        ["load_in_4bit"],
    ),
    "unknown component": (
        "t.yaml",
        "model: {_component_: torchtune.models.nobody.nobody_7b}\n",
        ["nobody_7b"],
    ),
    "alias bomb": (
        "a.yml",
        "base_model: &a [x]\nsequence_len: *a\n",
        ["alias"],
    ),
    "python tag": ("a.yml", "base_model: !!python/object/apply:os.system ['true']\n", ["python"]),
    "deep": ("args.json", '{"a":' * 4000 + "1" + "}" * 4000, ["nested too deeply"]),
    "pickle": ("ckpt.pickle", pickle.dumps({"a": 1}), ["pickle", "config.json"]),
    "safetensors": (
        "model.safetensors",
        struct.pack("<Q", 20) + b'{"__metadata__": {}}',
        ["safetensors"],
    ),
    "zip": ("model.pt", b"PK\x03\x04" + b"\0" * 40, ["zip"]),
    "python": ("train.py", "import torch\n\nprint(torch)\n", ["Python code"]),
    "tokenizer": ("t.json", '{"added_tokens": [], "model": {}}', ["tokenizer"]),
    "trainer state": ("s.json", '{"log_history": [], "global_step": 3}', ["check RUN --log"]),
    "weights": ("i.json", '{"weight_map": {}, "metadata": {}}', ["index of weights"]),
    "kubernetes": ("k.yaml", "apiVersion: v1\nkind: Job\nspec: {}\n", ["Kubernetes"]),
    "two recompute": (
        "m.yaml",
        "num-layers: 2\nhidden-size: 64\nnum-attention-heads: 2\nmicro-batch-size: 1\n"
        "recompute-granularity: selective\nrecompute-method: block\n",
        ["Megatron refuses"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_file_is_one_error(name, cli, tmp_path):
    file, text, words = MALFORMED[name]
    path = tmp_path / file
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    check_refusal(cli("memory", path), words)


def test_nothing_of_a_script_is_run(cli, tmp_path):
    """Neither substitutions nor commands: the file that they would make is not there."""
    mark = tmp_path / "ran"
    script = tmp_path / "run.sh"
    script.write_text(
        f"X=$(touch {mark})\nY=`touch {mark}`\ntouch {mark}\neval 'touch {mark}'\n"
        f'[ -z "$(touch {mark})" ] && touch {mark}\nL=$((1+a[$(touch {mark})]))\n'
        "torchrun p.py --num-layers 2 --hidden-size 64 --num-attention-heads 2 "
        "--micro-batch-size 1 --bf16 --vocab-size 128 --lr $X\n"
    )
    outcome = cli("memory", script, "--json")
    assert outcome.code == 0
    assert not mark.exists()
    assert "$(touch" in " ".join(outcome.json["notes"])


def test_a_huge_script_is_refused(cli, tmp_path):
    path = tmp_path / "run.sh"
    path.write_text("A=1\n" * 400_000)
    check_refusal(cli("memory", path), ["words"])


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            {
                "ds.json": '{"zero_optimization": {"stage": 2}, '
                '"train_micro_batch_size_per_gpu": 4}',
                "args.json": '{"per_device_train_batch_size": 2, "model_name_or_path": "gpt2"}',
            },
            ["micro_batch is 4", "args.json 2"],
        ),
        (
            {
                "a.yaml": "model: gpt2\nlayout: {dp: 2}\n",
                "b.yaml": "model: gpt2-xl\nlayout: {dp: 4}\n",
                "ds.json": '{"zero_optimization": {"stage": 2}, "steps_per_print": 1}',
            },
            ["both describe a run"],
        ),
    ],
)  # fmt: skip
def test_parts_that_contradict_are_refused(files, words, cli, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    check_refusal(cli("memory", *(tmp_path / name for name in files)), words)


def test_an_unknown_kind_is_refused(cli):
    check_refusal(cli("memory", "gpt2", "--from", "axolotle"), ["axolotle", "axolotl"])


BOMBS = {
    "text": "A=aaaaaaaaaa\n" + "A=$A$A\n" * 60,
    "appended": "A=aaaaaaaaaa\n" + "A+=$A\n" * 10_000,
    "array": 'A=("" "")\n' + 'A=("${A[@]}" "${A[@]}")\n' * 60,
    "appended array": "A=(a b)\n" + 'A+=("${A[@]}")\n' * 200,
    "nested defaults": "A=" + "${X:-" * 3000 + "}" * 3000 + "\n",
    "nested quotes": "A=" + '"$(' * 3000 + ')"' * 3000 + "\n",
    "nested conditions": "if true; then\n" * 3000 + "fi\n" * 3000,
    "arithmetic": "A=$((9" + "**9" * 90 + "))\n",
    "long line": "a" * 300_000 + ":" * 300_000 + " .. \n",
    "many dots": ("x" * 50 + " .... ") * 20_000 + "\n",
    "many brackets": "A=" + "$(" * 100_000 + "\n",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_harmless(name, cli, tmp_path):
    """Within seconds: an error, or a run of what is left."""
    launch = "torchrun p.py --num-layers 2 --hidden-size 64 --num-attention-heads 2 --bf16 $A\n"
    path = tmp_path / "run.sh"
    path.write_text(BOMBS[name] + launch)
    start = time.monotonic()
    outcome = cli("memory", path)
    assert time.monotonic() - start < 20
    assert outcome.code in (0, 2)
    assert "internal error" not in outcome.err
