"""Framework profiles: typed data, each choice known to the layers and read by them, no name asked.

A profile that is misspelt is refused, whatever is misspelt; a copy of a profile under another name
gives the answers of the first; and a new profile is one YAML file.
"""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import yaml

import actcalc
from actcalc.answers.compare import compare_run
from actcalc.answers.memory import memory_run
from actcalc.errors import SpecError
from actcalc.io import presets
from actcalc.io.hf import known_types
from actcalc.io.runs import load_framework, load_run
from actcalc.layers.core.norm import NORM_KERNELS
from actcalc.layers.megatron.core import CORE_KERNELS
from actcalc.layers.pytorch import moe, rotary
from actcalc.specs import Framework, Model, Moe, Workload
from actcalc.specs.kinds import KINDS
from actcalc.specs.tower import Tower
from actcalc.specs.validate import build

PROFILES = presets.names("frameworks")
DATA = ("name", "title", "kernels", "families")
TRAITS = tuple(field.name for field in fields(Framework) if field.name not in DATA)


@cache
def sources() -> dict[Path, ast.Module]:
    """Every module of the package, parsed."""
    package = Path(actcalc.__file__).parent
    found = sorted(package.rglob("*.py"))
    return {path.relative_to(package): ast.parse(path.read_text()) for path in found}


@cache
def constants(path: Path) -> frozenset[object]:
    """The literals of a module."""
    return frozenset(n.value for n in ast.walk(sources()[path]) if isinstance(n, ast.Constant))


def values(name: str) -> dict:
    preset = presets.load("frameworks", name)
    return {"name": name, "title": preset.title, **deepcopy(dict(preset.values))}


def mapping(data: dict, path: tuple[str, ...]) -> dict:
    for key in path:
        data = data[key]
    return data


def kernels_of(data: dict) -> Iterator[tuple[str, ...]]:
    """Where the mappings of kinds to kernels lie."""
    yield ("kernels",)
    for family in data.get("families", {}):
        yield "families", family


def misspelt(data: dict) -> Iterator[tuple[str, dict]]:
    """Copies of a profile with one letter too many in one key or one value."""
    for path in [(), *kernels_of(data)]:
        for key, value in mapping(data, path).items():
            if key in DATA[:2]:
                continue
            changed = deepcopy(data)
            inner = mapping(changed, path)
            inner[f"{key}e"] = inner.pop(key)
            yield f"{'.'.join((*path, key))} as a key", changed
            if not isinstance(value, dict):
                changed = deepcopy(data)
                mapping(changed, path)[key] = f"{value}e"
                yield f"{'.'.join((*path, key))}: {value}", changed


@pytest.mark.parametrize("name", PROFILES)
def test_a_misspelt_profile_is_refused(name):
    build(Framework, values(name), name, vetted=True)
    count = 0
    for what, changed in misspelt(values(name)):
        with pytest.raises(SpecError) as caught:
            build(Framework, changed, name, vetted=True)
        assert caught.value.hint, what
        count += 1
    assert count > 2 * len(TRAITS)


@pytest.mark.parametrize("name", PROFILES)
def test_nothing_is_left_out_in_silence(name):
    data = values(name)
    needed = [k for k, kind in KINDS[data["layers"]].items() if kind.needed]
    for path, key in [((), t) for t in TRAITS] + [(("kernels",), k) for k in needed]:
        changed = deepcopy(data)
        del mapping(changed, path)[key]
        with pytest.raises(SpecError, match=f"{key} is missing"):
            build(Framework, changed, name, vetted=True)


def test_hints_name_the_word_that_was_meant():
    data = values("megatron")
    data["kernels"]["norm_fusion"] = "fusd"
    with pytest.raises(SpecError) as caught:
        build(Framework, data, "framework megatron", vetted=True)
    assert "kernels.norm_fusion is 'fusd'" in str(caught.value)
    assert caught.value.hint == "did you mean fused?"
    data = values("transformers")
    data["families"]["gpt2"] = {"sofmax": "input"}
    with pytest.raises(SpecError) as caught:
        build(Framework, data, "framework transformers", vetted=True)
    assert "families.gpt2" in str(caught.value)
    assert caught.value.hint == "did you mean softmax?"


def test_traits_of_other_layers_are_refused():
    for name, trait in (("transformers", "multi_token_prediction"), ("megatron", "autocast")):
        with pytest.raises(SpecError, match=trait):
            build(Framework, {**values(name), trait: True}, name, vetted=True)


def test_families_are_model_types_or_families_of_presets():
    families = {
        presets.load("models", n).values["model"]["family"] for n in presets.names("models")
    }
    for name in PROFILES:
        known = {*known_types(), *families, *get_args(get_type_hints(Tower)["family"])}
        assert set(values(name).get("families", {})) <= known


# --- the table and the layers ---------------------------------------------------------------------


def attributes(tree: ast.AST) -> set[str]:
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def test_every_trait_is_read():
    read = set()
    for path, tree in sources().items():
        if path != Path("specs/framework.py"):
            read |= attributes(tree)
    assert set(TRAITS) <= read


def choices(spec: type, name: str) -> tuple[str, ...]:
    annotation = next(field.type for field in fields(spec) if field.name == name)
    return get_args(eval(annotation, vars(__import__(spec.__module__, fromlist=["_"]))))


PARTS = {
    "core_": tuple(f"core_{name}" for name in choices(Workload, "attention")),
    "router_": tuple(f"router_{name}" for name in choices(Moe, "router")),
}
"""Kinds that are asked for by a beginning and a choice of the run."""
NORMS = (*choices(Model, "norm"), "unweighted")


def kinds_asked(tree: ast.AST) -> set[str]:
    """Kinds of kernels that a module asks the context for; a kind in a variable is a norm's."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if node.func.attr != "kernel" or not node.args:
            continue
        kind = node.args[0]
        if isinstance(kind, ast.Constant):
            found.add(kind.value)
        elif isinstance(kind, ast.JoinedStr):
            found |= set(PARTS[kind.values[0].value])
        else:
            found |= set(NORMS)
    return found


@cache
def asked(layers: str) -> dict[Path, set[str]]:
    """What each module asks for, the builders of the other family left out."""
    others = [Path("layers") / name for name in KINDS if name != layers]
    return {
        path: kinds_asked(tree)
        for path, tree in sources().items()
        if path != Path("layers/core/context.py")
        and not any(path.is_relative_to(other) for other in others)
    }


@pytest.mark.parametrize("layers", KINDS)
def test_every_kind_is_read_and_every_kind_read_is_declared(layers):
    read = set().union(*asked(layers).values())
    if layers == "megatron":
        read -= {"unweighted"}  # Megatron-Core has no norm of queries and keys without weights
    assert read == set(KINDS[layers])


@pytest.mark.parametrize("layers", KINDS)
def test_every_kernel_is_told_apart_where_its_kind_is_read(layers):
    """All kernels of a kind but one, which is what runs else, are named beside the question."""
    for kind, row in KINDS[layers].items():
        words: set[object] = set()
        for path, kinds in asked(layers).items():
            if kind in kinds:
                words |= constants(path)
        silent = set(row.kernels) - words
        assert len(silent) <= 1, (layers, kind, silent)


def test_tables_of_kernels_hold_what_is_declared():
    def declared(layers: str, kinds: tuple[str, ...]) -> set[str]:
        return {kernel for k in kinds if k in KINDS[layers] for kernel in KINDS[layers][k].kernels}

    assert declared("megatron", NORMS) | declared("pytorch", NORMS) == set(NORM_KERNELS)
    assert declared("megatron", PARTS["core_"]) == set(CORE_KERNELS)
    assert declared("pytorch", PARTS["router_"]) == set(moe.ROUTERS)
    assert declared("pytorch", ("rotary",)) == set(rotary.ROTARY_KERNELS)
    assert declared("pytorch", ("experts",)) == set(moe.EXPERT_KERNELS)


def test_every_kernel_declared_is_some_profiles():
    """What no profile runs is dead, and dead code goes."""
    used: dict[str, set[tuple[str, str]]] = {layers: set() for layers in KINDS}
    for name in PROFILES:
        data = values(name)
        for path in kernels_of(data):
            used[data["layers"]] |= set(mapping(data, path).items())
    for layers, kinds in KINDS.items():
        declared = {(kind, kernel) for kind, row in kinds.items() for kernel in row.kernels}
        assert declared == used[layers]


# --- no name is asked -----------------------------------------------------------------------------


def names_a_profile(node: ast.AST) -> bool:
    """Whether an expression holds the name of a profile (``run.framework.name``)."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and inner.attr == "name":
            owner = inner.value
            called = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            if called in ("framework", "profile"):
                return True
    return False


def test_kernels_are_asked_for_by_their_kind_alone():
    """A profile's table is read by ``Context.kernel``, which knows families and what is missing."""
    for path, tree in sources().items():
        if path == Path("specs/framework.py"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in ("kernels", "families"):
                assert ast.unparse(node.value).split(".")[-1] not in ("framework", "profile"), path


def test_no_profile_is_recognised_by_its_name():
    for path, tree in sources().items():
        for node in ast.walk(tree):
            method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            asks = isinstance(node, ast.Compare | ast.Subscript | ast.Match) or (
                method and node.func.attr in ("startswith", "endswith", "get")
            )
            if asks:
                assert not names_a_profile(node), f"{path}:{node.lineno}"


@pytest.fixture
def profiles(tmp_path, monkeypatch):
    """A folder of presets of its own, whose profiles a test may add to."""
    root = presets.presets_root()
    for folder in root.iterdir():
        if folder.name not in ("frameworks", "compiled"):
            shutil.copytree(folder, tmp_path / folder.name)
    folder = tmp_path / "frameworks"
    folder.mkdir()
    for path in (root / "frameworks").glob("*.yaml"):
        (folder / path.name).write_text(path.read_text())
    monkeypatch.setattr(presets, "presets_root", lambda: tmp_path)
    presets.names.cache_clear()
    yield folder
    presets.names.cache_clear()


RUNS = {
    "plain": {},
    "fp32": {"workload": {"precision": "fp32"}},
    "per op": {"policies": ["op"]},
    "full, data parallel": {"layout": {"dp": 4}, "policies": ["full"], "device": "h100-80gb"},
    "interleaved": {
        "layout": {"tp": 2, "sp": True, "pp": 2, "vpp": 2},
        "device": "h100-80gb",
        "policies": ["selective"],
    },
    "Transformer Engine's loss": {
        "layout": {"tp": 2},
        "workload": {
            "kernels": {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}
        },
    },
}


def answers(model: str, framework: str, **parts) -> list[str]:
    """What compare and memory say, the profile's name aside; or why they refuse."""
    found = []
    for answer in (compare_run, memory_run):
        try:
            run = load_run(model, framework=framework, **parts)
            document = json.dumps(answer(run).document(), ensure_ascii=False)
        except SpecError as error:
            document = str(error)
        found.append(document.replace(framework, "PROFILE"))
    return found


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_under_another_name_gives_the_same_answers(name, profiles):
    (profiles / "renamed.yaml").write_text((profiles / f"{name}.yaml").read_text())
    presets.names.cache_clear()
    for what, parts in RUNS.items():
        own, other = answers("llama-3-8b", name, **parts), answers("llama-3-8b", "renamed", **parts)
        assert [text.replace(name, "PROFILE") for text in other] == own, what


def test_a_new_framework_is_one_file(profiles):
    """megatron with another rotary kernel: less is kept, and nothing but the file says so."""
    data = yaml.safe_load((profiles / "megatron.yaml").read_text())
    data["title"] = "Megatron-Core, rotary fused"
    data["kernels"]["rotary"] = {"value": "fused", "source": "a run's own kernels"}
    (profiles / "mine.yaml").write_text(yaml.safe_dump(data))
    presets.names.cache_clear()
    assert load_framework("mine").title == "Megatron-Core, rotary fused"
    layout = {"tp": 2, "sp": True}
    old, new = (load_run("llama-3-8b", framework=f, layout=layout) for f in ("megatron", "mine"))
    for run in (old, new):
        assert compare_run(run).policies
    assert memory_run(new).framework == "mine"
    assert memory_run(new).peak_bytes < memory_run(old).peak_bytes
    data["kernels"]["rotary"] = {"value": "fusde", "source": "a slip"}
    (profiles / "mine.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(SpecError, match="fusde"):
        load_framework("mine")


@pytest.mark.parametrize("name", PROFILES)
def test_a_policy_the_framework_lacks_says_so(name):
    notes = load_run("llama-3-8b", framework=name, policies=["op"]).warnings
    assert bool(notes) is not name.startswith("torchtitan")
    assert all(name in note and "torchtitan" in note for note in notes)
