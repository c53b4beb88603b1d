"""Emitted PyTorch code, executed: same gradients, dropout included, and the bytes it promised."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from actcalc.planner.emit import emitted
from actcalc.planner.emit_torch import selective_options
from actcalc.planner.stages import PlanSettings, RunPlanner
from actcalc.specs.run import load_run

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SEQ, BATCH = 64, 2


def gpt2(attention: str) -> Any:
    return transformers.GPT2Config(
        n_layer=6, n_head=4, n_embd=64, vocab_size=101, n_positions=SEQ, use_cache=False,
        attn_implementation=attention,
    )  # fmt: skip


def llama(attention: str) -> Any:
    return transformers.LlamaConfig(
        num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, hidden_size=64,
        intermediate_size=172, vocab_size=101, use_cache=False, attn_implementation=attention,
    )  # fmt: skip


CASES: list[tuple[str, Callable[[str], Any], str]] = [
    ("gpt2", gpt2, "eager"),
    ("llama", llama, "sdpa"),
    ("llama", llama, "eager"),
]


def planner(config: Any, attention: str, folder: Path) -> RunPlanner:
    """The planner of one small model as the transformers profile sees it."""
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    run = load_run(
        str(folder),
        framework="transformers",
        workload={
            "seq": SEQ, "micro_batch": BATCH, "precision": "fp32", "attention": attention,
        },
        device="a100-80gb",
    )  # fmt: skip
    return RunPlanner(run, PlanSettings(memory_model="stored"))


@contextmanager
def selective_bytes(found: list[Any]) -> Iterator[None]:
    """Collect the storages that selective checkpoints cache."""
    from torch.utils import checkpoint

    original = checkpoint.create_selective_checkpoint_contexts

    def recording(policy: Any, *rest: Any, **more: Any) -> Any:
        first, second = original(policy, *rest, **more)
        found.append(first)
        return first, second

    checkpoint.create_selective_checkpoint_contexts = recording
    try:
        yield
    finally:
        checkpoint.create_selective_checkpoint_contexts = original


def tensors(value: Any) -> Iterator[Any]:
    """Every tensor inside nested containers and wrappers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from tensors(inner)
    elif hasattr(value, "val"):
        yield from tensors(value.val)


def stored_by_layers(model: Any, layers: Any, batch: Any) -> tuple[int, Any]:
    """Bytes of storages that layers keep for backward (parameters and shared tables left out)."""
    kept: dict[int, int] = {}
    outside = {p.untyped_storage().data_ptr() for p in model.parameters()}
    outside |= {b.untyped_storage().data_ptr() for b in model.buffers()}
    inside = [False]
    alive: list[Any] = []

    def keep(tensor: Any) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in outside and tensor.is_floating_point() | (
            tensor.dtype is torch.bool
        ):
            alive.append(tensor)
            kept[storage.data_ptr()] = storage.nbytes()

    def pack(tensor: Any) -> Any:
        if inside[0]:
            keep(tensor)
        return tensor

    def enter(_module: Any, inputs: Any, kwargs: Any) -> None:
        inside[0] = True
        # Masks and rotary tables exist once for all layers.
        for tensor in tensors((*inputs[1:], kwargs)):
            outside.add(tensor.untyped_storage().data_ptr())

    def leave(*_: Any) -> None:
        inside[0] = False

    handles = []
    for layer in layers:
        handles.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(layer.register_forward_hook(leave))
    caches: list[Any] = []
    with selective_bytes(caches), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(**batch).loss
    for cache in caches:
        for tensor in tensors(cache.storage):
            keep(tensor)
    for handle in handles:
        handle.remove()
    return sum(kept.values()), loss


def run_step(model: Any, batch: Any) -> dict[str, Any]:
    """Gradients of one step, with the random generator at the same place each time."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    model(**batch).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("name", "make", "attention"), CASES)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9])
def test_same_gradients_and_promised_bytes(
    name: str, make: Callable[[str], Any], attention: str, share: float, tmp_path: Path
) -> None:
    config = make(attention)
    plans = planner(config, attention, tmp_path)
    special = RunPlanner(plans.run, plans.settings, options=selective_options)
    budget = special.smallest + int(share * (special.free - special.smallest))
    found = emitted("torch", plans, budget)
    assert found.feasible
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    ids = torch.randint(0, 101, (BATCH, SEQ))
    batch = {"input_ids": ids, "labels": ids}
    reference = run_step(model, batch)
    planned = copy.deepcopy(model)
    layers = planned.transformer.h if name == "gpt2" else planned.model.layers
    space: dict[str, Any] = {}
    exec(compile(found.text, "emitted", "exec"), space)
    assert any(kept is not None for _, kept in space["PLAN"][0])
    space["apply"](layers)
    again = run_step(planned, batch)
    assert reference.keys() == again.keys()
    for key, gradient in reference.items():
        assert torch.equal(gradient, again[key]), key
    stored, _ = stored_by_layers(planned, layers, batch)
    (plan,) = special.plan(budget)
    assert found.peak_bytes == plan.stored_bytes
    assert plan.stored_bytes is not None
    assert plan.stored_bytes <= budget
    assert stored == plan.stored_bytes
