"""Emitted PyTorch code, executed: same gradients, dropout included, and the bytes it promised."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from actcalc.io.runs import load_run
from actcalc.plan.emit.targets import emitted
from actcalc.plan.emit.torch import selective_options
from actcalc.plan.planner import PlanSettings, RunPlanner
from actcalc.solve import Option
from tests.sweeps import sampled

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SEQ, BATCH = 64, 2


def gpt2(attention: str, dropout: float = 0.1) -> Any:
    return transformers.GPT2Config(
        n_layer=6, n_head=4, n_embd=64, vocab_size=101, n_positions=SEQ, use_cache=False,
        attn_implementation=attention, resid_pdrop=dropout, attn_pdrop=dropout, embd_pdrop=dropout,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


def gpt2_plain(attention: str) -> Any:
    return gpt2(attention, dropout=0.0)


def llama(attention: str) -> Any:
    return transformers.LlamaConfig(
        num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, hidden_size=64,
        intermediate_size=172, vocab_size=101, use_cache=False, attn_implementation=attention,
    )  # fmt: skip


# What a CPU saves differs in two kernels: a dropout's mask has the input's type there (one byte per
# element on CUDA), and attention is another kernel. Bytes are compared where neither runs.
CASES: list[tuple[Callable[[str], Any], str, bool]] = [
    (gpt2, "eager", False),
    (gpt2_plain, "eager", True),
    (llama, "sdpa", False),
    (llama, "eager", True),
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
def selective_bytes(space: dict[str, Any], found: list[Any]) -> Iterator[None]:
    """Collect the contexts of the selective checkpoints that the emitted code in ``space`` runs."""
    name = "create_selective_checkpoint_contexts"
    original = space[name]

    def recording(policy: Any, *rest: Any, **more: Any) -> Any:
        first, second = original(policy, *rest, **more)
        found.append(first)
        return first, second

    space[name] = recording
    try:
        yield
    finally:
        space[name] = original


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


def stored_by_layers(model: Any, layers: Any, batch: Any, space: dict[str, Any]) -> int:
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
    with (
        selective_bytes(space, caches),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
    ):
        loss = model(**batch).loss
    for cache in caches:
        for tensor in tensors(cache.storage):
            keep(tensor)
    for handle in handles:
        handle.remove()
    del loss
    return sum(kept.values())


def run_step(model: Any, batch: Any) -> dict[str, Any]:
    """Gradients of one step, with the random generator at the same place each time."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    model(**batch).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("make", "attention", "same_bytes"), CASES)
@pytest.mark.parametrize("share", sampled([0.0, 0.3, 0.6, 0.9], (0.3,)))
def test_same_gradients_and_promised_bytes(
    make: Callable[[str], Any], attention: str, same_bytes: bool, share: float, tmp_path: Path
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
    layers = planned.transformer.h if "gpt2" in make.__name__ else planned.model.layers
    space: dict[str, Any] = {}
    exec(compile(found.text, "emitted", "exec"), space)
    assert any(kept is not None for _, kept in space["PLAN"][0])
    space["apply"](layers)
    again = run_step(planned, batch)
    assert reference.keys() == again.keys()
    for key, gradient in reference.items():
        assert torch.equal(gradient, again[key]), key
    (plan,) = special.plan(budget)
    assert found.peak_bytes == plan.stored_bytes
    assert plan.stored_bytes is not None
    assert plan.stored_bytes <= budget
    if same_bytes:
        assert stored_by_layers(planned, layers, batch, space) == plan.stored_bytes


def test_dropout_inside_a_fused_kernel_runs_again(tmp_path: Path) -> None:
    """Keeping its output would leave the random generator behind for the masks after it."""
    config = gpt2("sdpa")
    special = RunPlanner(
        planner(config, "sdpa", tmp_path).run, PlanSettings(), options=selective_options
    )
    options = special.stages[0].groups[0].options
    sources = [options.source(i) for i in range(len(options))]
    kept = {name for one in sources if isinstance(one, Option) for name in one.payload.names}
    graph = special.stages[0].graphs[0]
    assert [op.name for op in graph.ops if op.kind == "core"] == ["sdpa_efficient"]
    assert kept
    assert not any(graph.op(name).kind == "core" for name in kept)
