"""Inputs that are nearly right, each from a seed and a number."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from actcalc.io import presets
from actcalc.io.hub.write import write_config
from actcalc.io.runs import load_run
from actcalc.specs import Layout, Model, Workload
from actcalc.specs.training import Training

NUMBERS: tuple[Any, ...] = (
    0, 1, 2, 3, 8, 1000, -1, -(2**63), 2**20, 2**31, 2**32 + 1, 10**18, 10**30, 0.0, 0.5, 1.0, 1.5,
    1e-300, 1e9, 1e308, float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
WORDS = (
    "", " ", "0", "-1", "1e3", "none", "true", "nan", "full", "../../etc/passwd", "a" * 900,
    "\u202eabc", "\x1b[31mred", "<script>", "=1+1", "x\ny", "\x00", "\U0001f984", "bf16", "{}", "'",
    "M*-E", "1:30", "on", "Full", "%s", "12GB",
)  # fmt: skip
POLICIES = ("none", "selective", "full", "ffn", "norm", "sqrt", "op", "uniform:2", "block:1",
            "every:2", "ffn+norm", "full,none")  # fmt: skip
FLAGS: dict[str, tuple[Any, ...]] = {
    "--seq": (1, 128, 2048, 1000), "--micro-batch": (1, 2, 7), "--global-batch": (1, 64, 2**32),
    "--layers": (1, 2, 4, 12, 1024, 10**6), "--tp": (1, 2, 8, 3), "--pp": (1, 2, 4, 300),
    "--vpp": (1, 2, 3), "--cp": (1, 2), "--ep": (1, 2, 8), "--dp": (1, 2, 64), "--zero": (0, 1, 3),
    "--schedule": ("1f1b", "gpipe", "zb-h1", "zb-v", "dualpipe-v"), "--sp": (None,),
    "--precision": ("bf16", "fp32", "amp-bf16", "fp8"), "--attention": ("eager", "flash"),
    "--policy": POLICIES, "--units": ("GB", "GiB", "XX"), "--device": ("h100-80gb", "a100-80gb"),
    "--set": ("hidden=64", "kv_heads=1", "vocab=10", "moe.experts=4", "window=16", "mtp_layers=1"),
    "--framework": ("megatron", "transformers", "torchtitan", "paper"),
}  # fmt: skip
COMMANDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "compare": {"--efficiency": ("gemm=0.5", "gemm=1e-320", "hop_seconds=inf")},
    "breakdown": {}, "memory": {"--optimizer": ("adamw", "sgd", "muon"), "--max": ("seq",)},
    "plan": {"--memory": ("1GB", "40GiB", "1MB"), "--frontier": (None,), "--offload": (None,),
             "--semantics": ("module",), "--method": ("greedy",), "--time-limit": (0.5,)},
    "mfu": {"--step-time": ("1", "1e-300", "3h"), "--gpus": (1, 8)},
    "explain": {}, "advise": {}, "report": {"-o": ("report.html",)},
    "search": {"--gpus": (8, 16)},
    "sweep": {"--vary": ("tp=1,2", "seq=1024,2048")},
}  # fmt: skip
TERMS = ("34", "zero", "1f1b", "peak", "selective", "flash", "moe", "lora", "loss")

Case = tuple[list[str], dict[str, str | bytes]]
"""Arguments, and the files that they name."""


def junk(rng: random.Random) -> Any:
    """A value that is seldom what was asked for."""
    return rng.choice((rng.choice(NUMBERS), rng.choice(WORDS), None, True, [], {}, [1], {"a": "b"}))


def near(rng: random.Random, value: Any) -> Any:
    """A neighbour of a value."""
    if isinstance(value, bool):
        return rng.choice((not value, int(value), str(value)))
    if isinstance(value, int):
        return rng.choice(
            (value + 1, value - 1, -value, 0, str(value), float(value), value * 10**6)
        )
    if isinstance(value, str):
        return rng.choice((value.upper(), value + "x", value[1:], [value], value + "\n"))
    if isinstance(value, list):
        return rng.choice((value[:-1], value * 2, [value], [], [*value, None]))
    return rng.choice(({}, [value], None))


def mutated(rng: random.Random, document: Any, keys: tuple[str, ...], most: int = 3) -> Any:
    """A copy with one to ``most`` changes, anywhere."""
    document = copy.deepcopy(document)
    for _ in range(rng.randint(1, most)):
        spots: list[tuple[Any, Any]] = []
        pending = [document]
        while pending:
            inner = pending.pop()
            for key, value in inner.items() if isinstance(inner, dict) else enumerate(inner):
                spots.append((inner, key))
                if isinstance(value, dict | list):
                    pending.append(value)
        if not spots:
            break
        inner, key = rng.choice(spots)
        change = rng.randrange(7)
        if change == 0:
            del inner[key]
        elif change < 3:
            inner[key] = junk(rng)
        elif change < 6 or not isinstance(inner, dict):
            inner[key] = near(rng, inner[key])
        else:
            inner[rng.choice((*keys, *WORDS))] = junk(rng)
    return document


def text_of(rng: random.Random, document: Any, *, is_json: bool) -> str | bytes:
    """The document as a file, now and then damaged."""
    text = json.dumps(document) if is_json else yaml.safe_dump(json.loads(json.dumps(document)))
    if rng.random() > 0.1:
        return text
    start = rng.randrange(len(text) + 1)
    piece = "".join(rng.choice('0123456789{}[],:"-e.#&*!|> \n\t\\\u00e9') for _ in range(4))
    text = text[:start] + piece + text[start + rng.randrange(6) :]
    return text.encode(rng.choice(("utf-8", "utf-16", "latin-1")), "replace")


@cache
def fields() -> tuple[str, ...]:
    """Every field of the specs."""
    return tuple(sorted({n for s in (Model, Layout, Workload, Training) for n in s.field_names()}))


@cache
def config_of(name: str) -> dict[str, Any]:
    """The config.json of a preset; GPT-2's where it has none."""
    try:
        found: dict[str, Any] = json.loads(json.dumps(write_config(load_run(name).model)))
    except Exception:
        return config_of("gpt2")
    return found


def config(rng: random.Random) -> Case:
    """A config.json with a few keys dropped, changed or added."""
    one, other = (config_of(rng.choice(presets.names("models"))) for _ in range(2))
    content = text_of(rng, mutated(rng, one, tuple(other)), is_json=True)
    command = rng.choice(([], [], ["memory"], ["breakdown"], ["explain", "34"]))
    return [*command, "config.json", "--json", "--layers", "2"], {"config.json": content}


def run_file(rng: random.Random) -> Case:
    """A run file: fields of the specs with values of all sorts."""
    document: dict[str, Any] = {
        "model": {"preset": rng.choice(presets.names("models")), "layers": rng.choice((1, 2, 8))},
        "layout": {"tp": rng.choice((1, 2)), "pp": rng.choice((1, 2)), "zero": rng.choice((0, 1))},
        "workload": {"seq": rng.choice((128, 2048)), "micro_batch": 1},
        "training": {"optimizer": "adamw"}, "policies": rng.sample(POLICIES[:6], 2),
    }  # fmt: skip
    if rng.random() < 0.6:
        del document["layout"]
    if rng.random() < 0.6:
        document = mutated(rng, document, fields(), 2)
    content = text_of(rng, document, is_json=False)
    command = rng.choice(([], ["memory"], ["breakdown"], ["advise"], ["memory", "--emit", "yaml"]))
    json_too = [] if "--emit" in command else ["--json"]
    return [*command, "run.yaml", *json_too], {"run.yaml": content}


@cache
def options() -> tuple[str, ...]:
    """Every option that the reader of Megatron's arguments asks for."""
    import inspect
    import re

    from actcalc.io import megatron

    return tuple(sorted(set(re.findall(r'o\.\w+\(\s*"([a-z0-9-]+)"', inspect.getsource(megatron)))))


def arguments(rng: random.Random) -> Case:
    """Megatron's arguments, with options of any kind."""
    document: dict[str, Any] = {
        "num-layers": 4, "hidden-size": 64, "num-attention-heads": 4, "seq-length": 128,
        "micro-batch-size": 1, "vocab-size": 1000, "max-position-embeddings": 128, "bf16": True,
        "tensor-model-parallel-size": rng.choice((1, 2)), "world-size": 8,
    }  # fmt: skip
    for _ in range(rng.randrange(6)):
        document[rng.choice(options())] = rng.choice((True, False, 1, 4, "full", "selective"))
    if rng.random() < 0.6:
        document = mutated(rng, document, options(), 2)
    content = text_of(rng, document, is_json=True)
    return ["memory", "args.json", "--json"], {"args.json": content}


def flags(rng: random.Random) -> Case:
    """Flags whose values are each legal or nearly so, of every command."""
    command = rng.choice(tuple(COMMANDS))
    pool = {**FLAGS, **COMMANDS[command]}
    args = [command, *([rng.choice(TERMS)] if command == "explain" else [])]
    args += [rng.choice(presets.names("models"))]
    names = rng.sample(list(pool), rng.randrange(6))
    needed = {"mfu": ["--device"], "advise": ["--device"], "search": ["--device", "--gpus"],
              "plan": ["--memory"], "sweep": ["--vary"], "report": ["-o"]}  # fmt: skip
    names += [name for name in needed.get(command, []) if rng.random() < 0.9]
    if rng.random() < 0.7:
        names.append("--layers")
    for name in dict.fromkeys(names):
        value = rng.choice(pool[name])
        args += [name] if value is None else [name, str(value)]
    if command in ("search", "sweep"):
        args[1:1] = ["--time-limit", "5"]  # many runs at once are bounded by what is given
    if rng.random() < 0.15:
        args[-1] = str(junk(rng))
    return [*args, *(["--json"] if command != "report" and rng.random() < 0.8 else [])], {}


def problem(rng: random.Random) -> Case:
    """A planning problem on a random graph."""
    tensors, ops = {"x": rng.randrange(100)}, []
    for i in range(rng.randint(1, rng.choice((6, 6, 25)))):
        inputs = rng.sample(list(tensors), rng.randint(1, min(3, len(tensors))))
        ops.append({"name": f"op{i}", "inputs": inputs, "outputs": [f"t{i}"],
                    "cost": rng.choice((0, 1, 2**i, 10**6))})  # fmt: skip
        tensors[f"t{i}"] = rng.choice((0, 1, 2**i, rng.randrange(10**9)))
    saved = [name for name in tensors if rng.random() < 0.6]
    layer = {"input": "x", "tensors": tensors, "saved_for_backward": saved, "ops": ops}
    layers = rng.choice((1, 3, 40))
    document = {
        "layer_types": {"k": layer}, "stack": [["k", layers]], "inflight": rng.choice((1, 4)),
        "const_bytes": 0, "max_segment": rng.choice((1, 3)),
        "budget_bytes": max(1, int(layers * sum(tensors.values()) * rng.random() * 1.2)),
        "peak_model": rng.choice(
            ("stored", "stored+working", "timeline", "stored+working+segments")
        ),
    }  # fmt: skip
    if rng.random() < 0.5:
        document = mutated(rng, document, tuple(document), 2)
    content = text_of(rng, document, is_json=True)
    return ["plan", "problem.json", "--json", "--time-limit", "2"], {"problem.json": content}


def words(rng: random.Random) -> Case:
    """Free text where a name belongs."""
    word = str(junk(rng))
    shapes = (
        [word], ["explain", word], ["presets", "show", word], ["schema", word], ["help", word],
        ["gpt2", "--policy", word], ["gpt2", "--framework", word], ["gpt2", "--device", word],
        ["gpt2", "--format", word], ["gpt2", "--efficiency", word], ["gpt2", "--set", word],
        ["plan", "gpt2", "--memory", word], ["memory", "gpt2", "--max", word],
        ["gpt2", "--seq", word],
        ["check", "gpt2", "--log", word], ["sweep", "gpt2", "--vary", word],
        ["search", "gpt2", "--gpus", word], ["advise", word], ["memory", word, word],
    )  # fmt: skip
    return list(rng.choice(shapes)), {}


KINDS: dict[str, tuple[int, Callable[[random.Random], Case]]] = {
    "config": (25, config), "run": (20, run_file), "megatron": (15, arguments),
    "flags": (20, flags), "problem": (10, problem), "words": (10, words),
}  # fmt: skip
"""How often each kind is asked, and what makes it."""


def case(kind: str, seed: int, number: int, folder: Path) -> Case:
    """The input of that kind and number; its files are written to ``folder``."""
    args, files = KINDS[kind][1](random.Random(f"{seed}:{kind}:{number}"))
    for name, content in files.items():
        path = folder / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content, "utf-8", errors="replace")
    return args, files
