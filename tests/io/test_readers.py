"""Public files of every kind, written anew and short, are read to the run that they describe."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from actcalc.io.readers import trainer
from actcalc.io.readers.kinds import KINDS
from actcalc.io.runs import resolve
from actcalc.io.sources import one_source
from actcalc.specs.optimizers import OPTIMIZERS
from actcalc.specs.run import Run
from tests.conftest import DATA

CASES = [
    (path.stem, case)
    for path in sorted((DATA / "runs").glob("*.yaml"))
    for case in yaml.safe_load(path.read_text(encoding="utf-8"))
]


def written(case: dict[str, Any], folder: Path) -> list[str]:
    """Write a case's files; what the command line would name."""
    files = case["file"] if isinstance(case["file"], list) else [case["file"]]
    texts = case["text"] if isinstance(case["text"], list) else [case["text"]]
    names = []
    for name, text in zip(files, texts, strict=True):
        (folder / name).write_text(text, encoding="utf-8")
        names.append(str(folder / name))
    return [*names, *case.get("beside", [])]


def field_of(run: Run, name: str) -> Any:
    if name == "framework":
        return run.framework.name
    if name == "policy":
        return run.policies[0]
    found: Any = run
    for step in name.split("."):
        found = getattr(found, step)
    return list(found) if isinstance(found, tuple) else found


@pytest.mark.parametrize(("kind", "case"), CASES, ids=[f"{k}-{c['file']}" for k, c in CASES])
def test_a_public_file_is_read(kind, case, tmp_path):
    run = resolve(one_source(written(case, tmp_path)))
    read = {name: field_of(run, name) for name in case["reads"]}
    assert read == case["reads"]
    told = "\n".join(run.warnings)
    for note in case.get("notes", ()):
        assert note in told
    if not case.get("notes"):
        assert "not understood" not in told


def test_every_kind_has_three_public_files():
    count: dict[str, int] = {}
    for kind, _ in CASES:
        count[kind] = count.get(kind, 0) + 1
    missing = {row.name for row in KINDS if count.get(row.name, 0) < 3} - {"fsdp"}
    assert not missing
    assert all(case["source"] for _, case in CASES)


def test_the_trainer_s_own_parser_reads_the_same(tmp_path):
    """What transformers makes of the arguments, defaults among them, is what is read."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    samples: list[dict[str, Any]] = [
        {},
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "bf16": True},
        {"gradient_checkpointing": True, "optim": "adafactor"},
        {"gradient_checkpointing": False, "optim": "sgd", "per_device_train_batch_size": 1},
    ]
    for number, sample in enumerate(samples):
        path = tmp_path / f"args{number}.json"
        shown = {"num_train_epochs": 1, "save_strategy": "no", **sample}
        path.write_text(json.dumps(shown))
        run = resolve(one_source([str(path), "llama-3-8b"]))
        parsed = transformers.TrainingArguments(str(tmp_path), use_cpu=True, **shown)
        assert run.workload.micro_batch == parsed.per_device_train_batch_size
        steps = parsed.gradient_accumulation_steps
        assert run.workload.global_batch == run.workload.micro_batch * steps
        assert run.policies == ("full" if parsed.gradient_checkpointing else "none",)
        word = str(parsed.optim).rsplit(".", 1)[-1].lower()
        names = OPTIMIZERS[run.training.optimizer].transformers
        assert word in names or str(parsed.optim) in names or parsed.optim.value in names


def test_argument_names_are_the_trainer_s():
    """Every name that marks its arguments is one of its dataclass's, of 5.x or of 4.x."""
    transformers = pytest.importorskip("transformers")
    fields = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    older = {"per_gpu_train_batch_size"}
    assert set(trainer.OWN) <= fields | older
