"""A user's own module: what it keeps on CUDA, the saved file, and bad input."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from actcalc.errors import SpecError
from actcalc.io.sources import read_layer
from actcalc.measure import (
    load_factory,
    measure_cuda,
    measure_module,
    measure_transformers,
    write_layer,
)
from actcalc.measure.cuda import run_step

torch = pytest.importorskip("torch", reason="needs actcalc[torch]")

BLOCK = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class MLP(nn.Module):
    def __init__(self, h):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(h, 4 * h), nn.GELU(), nn.Linear(4 * h, h)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    def __init__(self, h=256, wrapped=()):
        super().__init__()
        self.wrapped = wrapped
        self.norm1, self.norm2 = nn.RMSNorm(h), nn.LayerNorm(h)
        self.attn = nn.MultiheadAttention(h, 4, batch_first=True, dropout=0.1)
        self.mlp, self.drop = MLP(h), nn.Dropout(0.1)

    def run(self, name, *args, **kwargs):
        module = getattr(self, name)
        if name in self.wrapped:
            return checkpoint(module, *args, use_reentrant=False, **kwargs)
        return module(*args, **kwargs)

    def forward(self, x):
        y = self.run("norm1", x)
        x = x + self.run("attn", y, y, y, need_weights=False)[0]
        return x + self.drop(self.run("mlp", self.run("norm2", x)))


def made(**options):
    block = Block(**options).to(torch.bfloat16)
    return block, torch.empty(2, 128, 256, dtype=torch.bfloat16)


def plain():
    return made()


def wrapped_mlp():
    return made(wrapped=("mlp",))


def wrapped_all():
    return made(wrapped=("norm1", "attn", "norm2", "mlp"))
"""

T, H, A = 2 * 128, 256, 4


@pytest.fixture
def block(tmp_path):
    path = tmp_path / "block.py"
    path.write_text(BLOCK, encoding="utf-8")
    return str(path)


def test_kernels_are_cudas(block):
    result = measure_module(f"{block}:plain")
    found = {(t.module, t.op): (t.dtype, t.bytes) for t in result.tensors}
    assert found["norm1", "FusedRmsNormBackward0.result1"] == ("float32", 4 * T)
    assert found["norm2", "NativeLayerNormBackward0.result1"] == ("float32", 4 * T)
    assert found["drop", "NativeDropoutBackward0.result1"] == ("bool", T * H)
    lse = found["attn", "ScaledDotProductFlashAttentionBackward0.logsumexp"]
    assert lse == ("float32", 4 * A * T)
    assert result.attention_kernels == {"flash": 1}
    # norms' inputs and statistics, packed qkv and its input, attention's output, logsumexp and
    # random state, the MLP's input and two 4h wide tensors, the dropout's mask
    by_hand = 4 * T * H + 12 * T + 10 * T * H + 4 * A * T + 24 + 18 * T * H + T * H
    assert result.total_bytes == by_hand
    assert result.layers_bytes == (by_hand,)


@pytest.mark.parametrize(
    ("factory", "modules"),
    [("wrapped_mlp", ["mlp"]), ("wrapped_all", ["norm1", "attn", "norm2", "mlp"])],
)
def test_stored_bytes_is_what_checkpoint_keeps(block, factory, modules):
    layer = measure_module(f"{block}:plain", keep_layer=True).layer
    assert layer.stored_bytes(modules) == measure_module(f"{block}:{factory}").total_bytes
    assert layer.stored_bytes(modules) < layer.saved_bytes
    assert layer.stored_bytes([*modules, "mlp.up"]) == layer.stored_bytes(modules)


def test_whole_layer_keeps_its_input(block):
    layer = measure_module(f"{block}:plain", keep_layer=True).layer
    assert layer.stored_bytes([""]) == 2 * T * H
    assert layer.rerun_flops([""]) == layer.forward_flops
    assert layer.rerun_flops(["mlp"]) == 2 * T * 8 * H * H
    assert layer.rerun_flops(["mlp", "mlp.up"]) == layer.rerun_flops(["mlp"])


@pytest.mark.parametrize("ending", ["json", "yaml"])
def test_saved_layer_reads_back(block, tmp_path, ending):
    layer = measure_module(f"{block}:plain", keep_layer=True, name="mine").layer
    path = tmp_path / f"layer.{ending}"
    write_layer(layer, path)
    assert "actcalc/measured-layer/2" in path.read_text(encoding="utf-8")
    assert read_layer(path) == layer


def test_saved_layer_of_a_model_is_its_middle_layer():
    pytest.importorskip("transformers", reason="needs actcalc[torch]")
    result = measure_transformers(
        {"model_type": "llama", "num_hidden_layers": 4}, seq=128, keep_layer=True
    )
    # the first layer pays for the rotary tables, the saved one does not
    assert result.layer.saved_bytes == result.per_layer_bytes < result.layers_bytes[0]
    assert result.layer.stored_bytes([""]) == 2 * 128 * 4096


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.pop("schema"),
        lambda c: c.update(schema="actcalc/compare/1"),
        lambda c: c.update(extra=1),
        lambda c: c["modules"][0].update(inputs=[999]),
        lambda c: c["storages"][0].update(bytes="many"),
    ],
)
def test_broken_file_is_refused(block, tmp_path, change):
    path = tmp_path / "layer.json"
    write_layer(measure_module(f"{block}:plain", keep_layer=True).layer, path)
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(SpecError, match=r"layer\.json"):
        read_layer(path)


def test_unknown_module_names_the_known_ones(block):
    layer = measure_module(f"{block}:plain", keep_layer=True).layer
    with pytest.raises(SpecError, match="mpl") as caught:
        layer.stored_bytes(["mpl"])
    assert "'mlp'" in caught.value.hint


@pytest.mark.parametrize(
    ("source", "reference", "message"),
    [
        ("", "{}", "names no function"),
        ("", "{}:factory", "has no function"),
        ("import nonsense_module", "{}:factory", "ModuleNotFoundError"),
        ("def factory(): return 1", "{}:factory", "returned int"),
        ("def factory(): return 1, 2", "{}:factory", "int where a module"),
        ("def factory(): raise KeyError('x')", "{}:factory", "KeyError"),
        (
            "import torch\n"
            "class M(torch.nn.Linear):\n"
            "    def forward(self, x):\n"
            "        return super().forward(x) if x.sum() > 0 else x\n"
            "def factory(): return M(4, 4), torch.zeros(2, 4)",
            "{}:factory",
            "reads a tensor's values",
        ),
        (
            "import torch\ndef factory(): return torch.nn.Linear(4, 4), torch.zeros(2, 5)",
            "{}:factory",
            "Linear failed",
        ),
        (
            "import torch\n"
            "class M(torch.nn.Linear):\n"
            "    def forward(self, x):\n"
            "        return 3\n"
            "def factory(): return M(4, 4), torch.zeros(2, 4)",
            "{}:factory",
            "nothing that has a gradient",
        ),
    ],
)
def test_bad_factory(tmp_path, source, reference, message):
    path = tmp_path / "mine.py"
    path.write_text(source, encoding="utf-8")
    with pytest.raises(SpecError, match=message) as caught:
        measure_module(reference.format(path))
    assert caught.value.hint


def test_the_hint_points_into_the_users_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\n"
        "class M(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x @ x\n"
        "def factory(): return M(), torch.zeros(2, 5)",
        encoding="utf-8",
    )
    with pytest.raises(SpecError) as caught:
        measure_module(f"{path}:factory")
    assert caught.value.hint == f"see {path}:4"


def test_missing_file():
    with pytest.raises(SpecError, match="no file"):
        load_factory("nowhere.py:factory")


@pytest.mark.parametrize("inputs", ["x", "(x,)", "{'input': x}"])
def test_ways_to_give_inputs(tmp_path, inputs):
    path = tmp_path / "mine.py"
    path.write_text(
        f"import torch\ndef factory():\n    x = torch.zeros(8, 4)\n"
        f"    return torch.nn.Linear(4, 4), {inputs}",
        encoding="utf-8",
    )
    assert measure_module(f"{path}:factory").total_bytes == 4 * 8 * 4


STACK = """
import torch
from torch import nn


class Half(nn.Module):
    def __init__(self, h):
        super().__init__()
        self.inner = nn.Linear(h, h)

    def forward(self, x):
        return self.inner(x)


class Model(nn.Module):
    def __init__(self, h=8):
        super().__init__()
        self.first = nn.Linear(h, h)
        self.blocks = nn.ModuleList(Half(h) for _ in range(3))
        self.experts = nn.ModuleList(Half(h) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return sum(expert(x) for expert in self.experts)


def factory():
    return Model(), torch.zeros(16, 8)
"""


@pytest.mark.parametrize(
    ("layers", "phases"),
    [
        (None, ["embedding", "layer0", "layer1", "layer2", "head"]),
        ("", ["layer0"] * 5),
        ("experts", ["embedding"] * 4 + ["layer0"]),
    ],
)
def test_layers_are_found_or_named(tmp_path, layers, phases):
    path = tmp_path / "mine.py"
    path.write_text(STACK, encoding="utf-8")
    result = measure_module(f"{path}:factory", layers=layers)
    # both experts read, and keep, the same tensor
    assert [tensor.phase for tensor in result.tensors] == phases
    assert result.total_bytes == 5 * 4 * 16 * 8
    with pytest.raises(SpecError, match="no list of layers at 'blocs'"):
        measure_module(f"{path}:factory", layers="blocs")


@pytest.mark.parametrize("where", ["device='cpu'", "device='cuda'", "device='cuda:0'"])
def test_devices_in_a_factory_do_not_matter(tmp_path, where):
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\n"
        f"def factory(): return torch.nn.Linear(4, 4, {where}), torch.zeros(8, 4, {where})",
        encoding="utf-8",
    )
    assert measure_module(f"{path}:factory").total_bytes == 4 * 8 * 4


def test_moving_to_the_gpu_in_a_factory_is_allowed(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\n"
        "def factory():\n"
        "    return torch.nn.Linear(4, 4).cuda().to('cuda'), torch.zeros(8, 4).cuda()",
        encoding="utf-8",
    )
    assert measure_module(f"{path}:factory").total_bytes == 4 * 8 * 4


@pytest.mark.parametrize(
    ("move", "noted"),
    [
        ("to('cuda')", False),
        ("to(torch.device('cuda'))", False),
        ("to(device='cuda')", False),
        ("cuda()", False),
        ("cpu()", True),
    ],
)
def test_moves_inside_a_module(tmp_path, move, noted):
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\n"
        "class M(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        f"        return torch.nn.functional.dropout(x.{move}, 0.5)\n"
        "def factory(): return M(), torch.zeros(8, 4)",
        encoding="utf-8",
    )
    result = measure_module(f"{path}:factory")
    # one byte of mask per element on a GPU, noise in the input's dtype on the CPU
    assert result.total_bytes == (4 if noted else 1) * 8 * 4
    assert bool(result.notes) == noted


def test_autocast_keeps_casts(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\ndef factory(): return torch.nn.Linear(64, 32), torch.zeros(8, 64)",
        encoding="utf-8",
    )
    # bf16 copies of the input and of the weight
    assert measure_module(f"{path}:factory", amp="bf16").total_bytes == 2 * 8 * 64 + 2 * 64 * 32


def test_token_ids_are_the_batch(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\n"
        "def factory():\n"
        "    return torch.nn.Embedding(9, 4), torch.zeros(2, 8, dtype=torch.int64)",
        encoding="utf-8",
    )
    assert measure_module(f"{path}:factory").total_bytes == 0


def test_a_large_model_costs_nothing(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\n"
        "def factory(): return torch.nn.Linear(1 << 20, 1 << 20), torch.zeros(1 << 20, 1 << 20)",
        encoding="utf-8",
    )
    assert measure_module(f"{path}:factory").total_bytes == 1 << 42


def test_nothing_stays_behind(block):
    measure_module(f"{block}:wrapped_mlp", flops=True)
    gc.collect()
    before = sum(type(thing).__name__ == "FakeTensor" for thing in gc.get_objects())
    measure_module(f"{block}:wrapped_mlp", flops=True, keep_layer=True)
    gc.collect()
    assert sum(type(thing).__name__ == "FakeTensor" for thing in gc.get_objects()) == before
    # and real tensors run as before
    x = torch.ones(3, 8, requires_grad=True)
    torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]).sum().backward()
    assert x.grad.shape == (3, 8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is present")
def test_no_gpu_is_said():
    with pytest.raises(SpecError, match="no GPU") as caught:
        measure_cuda({"model_type": "llama"})
    assert caught.value.hint


def test_a_real_step_reads_the_counters_around_forward_and_backward():
    # The allocator is played by a counter that grows with every call that allocates.
    events = []
    allocated = {"forward": 0, "backward": 0}

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            allocated["forward"] = 100
            return x.sum()

        @staticmethod
        def backward(ctx, gradient):
            allocated["backward"] = 1000
            return gradient.expand(4)

    cuda = SimpleNamespace(
        synchronize=lambda: events.append("synchronize"),
        empty_cache=lambda: events.append("empty"),
        reset_peak_memory_stats=lambda: events.append("reset"),
        memory_allocated=lambda: 7 + sum(allocated.values()),
        max_memory_allocated=lambda: 7 + sum(allocated.values()),
        max_memory_reserved=lambda: 4096,
        get_device_name=lambda: "a GPU",
    )
    x = torch.ones(4, requires_grad=True)
    step = run_step(SimpleNamespace(cuda=cuda), lambda: {"loss": Loss.apply(x)}, None)
    assert (step.before_bytes, step.after_forward_bytes) == (7, 107)
    assert (step.peak_allocated_bytes, step.peak_reserved_bytes) == (1107, 4096)
    assert events == ["synchronize", "empty", "reset", "synchronize"]
    assert x.grad is not None


def test_torch_is_imported_late():
    program = "import sys, actcalc.measure; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_missing_extra_says_how_to_install(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SpecError, match="not installed") as caught:
        measure_transformers({"model_type": "llama"})
    assert caught.value.hint.endswith("[torch]' (a torch for CPUs is enough)")
