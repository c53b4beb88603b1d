"""Blocks of diffusion transformers: measured as modules, compared and planned from the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from actcalc.io.sources import read_layer
from actcalc.measure import measure_module
from tests.sweeps import sampled

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
BLOCKS = {
    "dit-xl-2": (28, 94_761_048),
    "sd3-medium": (24, 893_454_040),
    "flux-1-dev-double": (19, 727_394_328),
    "flux-1-dev-single": (38, 768_172_056),
}
"""Layers of the model, and bytes that one of them keeps."""


def kept(name):
    layer = read_layer(EXAMPLES / f"{name}.json")
    return sum(storage.bytes for storage in layer.storages if storage.saved_by)


@pytest.mark.parametrize("name", sampled(BLOCKS, ["dit-xl-2"]))
def test_compare_and_plan_read_the_layer(name, cli):
    layers, bytes_ = BLOCKS[name]
    assert kept(name) == bytes_
    path = EXAMPLES / f"{name}.json"
    rows = {row["policy"]: row for row in cli("compare", path, "--json").json["policies"]}
    assert rows["none"]["stored_bytes_per_layer"] == bytes_
    assert 0 < rows["full"]["stored_bytes_per_layer"] < bytes_ / 10
    budget = layers * bytes_ // 2
    plan = cli("plan", path, "--layers", layers, "--memory", f"{budget} B", "--json").json
    assert plan["feasible"] is True
    assert plan["peak_bytes"] <= budget


def test_dit_by_hand():
    """Twenty times the stream: input of two norms (2) and what they are scaled from (2), of q, k
    and v (1), these (3), attention's output (1) and its projection's (1), the input of the
    feed-forward (1), of its activation (4) and of its last product (4), and its output (1).
    """
    batch, tokens, width, heads = 8, 256, 1152, 16
    stream = batch * tokens * width * 2
    statistics = 2 * 2 * batch * tokens * 4
    logsumexp = batch * heads * tokens * 4
    row = batch * width * 2
    # time: sines, two layers and an activation; one row of six modulations is read by two gates
    condition = batch * 256 * 2 + 4 * row + batch * 8 + 6 * row + 2 * row
    assert kept("dit-xl-2") == 20 * stream + statistics + logsumexp + condition + 24


@pytest.mark.parametrize("name", BLOCKS)
def test_the_file_is_what_diffusers_does(name):
    pytest.importorskip("diffusers")
    torch = pytest.importorskip("torch")
    layer = read_layer(EXAMPLES / f"{name}.json")
    if layer.torch_version != torch.__version__:
        pytest.skip(f"kept from torch {layer.torch_version}")
    factory = f"{EXAMPLES / 'diffusion.py'}:{name.replace('-', '_')}"
    assert measure_module(factory, keep_layer=True).layer == layer


STACK = """
import torch
from torch import nn


class Gelu(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(64, 256)

    def forward(self, x):
        return nn.functional.gelu(self.proj(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.ModuleList([Gelu(), nn.Dropout(0.0), nn.Linear(256, 64)])

    def forward(self, x):
        y = x
        for part in self.net:
            y = part(y)
        return x + y


class Model(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def block():
    return Block(), torch.empty(2, 8, 64)


def one():
    return Model(1), torch.empty(2, 8, 64)


def three():
    return Model(3), torch.empty(2, 8, 64)
"""


@pytest.mark.parametrize(("factory", "layers"), [("block", 1), ("one", 1), ("three", 3)])
def test_parts_of_a_feed_forward_are_no_layers(tmp_path, factory, layers):
    pytest.importorskip("torch", reason="needs actcalc[torch]")
    path = tmp_path / "stack.py"
    path.write_text(STACK, encoding="utf-8")
    found = measure_module(f"{path}:{factory}", keep_layer=True)
    rows, wide = 2 * 8 * 64 * 4, 2 * 8 * 256 * 4
    assert found.layers_bytes == (rows + 2 * wide,) * layers
    assert found.layer is not None
    assert found.layer.cls == "Block"
    assert json.loads(found.layer.model_dump_json())["params"] == 2 * 64 * 256 + 256 + 64
