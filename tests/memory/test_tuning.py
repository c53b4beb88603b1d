"""Fine-tuning: which weights are trained, which layers no gradient passes, what is refused."""

from __future__ import annotations

import pytest

from actcalc.errors import SpecError
from actcalc.io.runs import load_run
from actcalc.memory.stage import StageMemory
from actcalc.run.staged import StagedRun
from actcalc.specs.targets import Targets, module_names


def run_with(**training):
    return load_run("llama-3-8b", framework="transformers", training=training)


def trained(**training) -> int:
    return StageMemory.of(run_with(**training)).parameters(0).trained


H, FFN, KV, LAYERS, VOCAB, R = 4096, 14336, 1024, 32, 128256, 16
Q, V = R * (H + H), R * (H + KV)
DOWN = R * (FFN + H)


@pytest.mark.parametrize(
    ("targets", "parameters"),
    [
        ("q,v", LAYERS * (Q + V)),
        ("q_proj+v_proj", LAYERS * (Q + V)),
        (r".*\.(q|v)_proj", LAYERS * (Q + V)),
        (r".*\.(30|31)\.self_attn\.q_proj", 2 * Q),
        ("layers.0.mlp.down_proj", DOWN),
        ("attention", LAYERS * (2 * Q + 2 * V)),
        ("mlp", LAYERS * 3 * DOWN),
        ("all-linear", LAYERS * (2 * Q + 2 * V + 3 * DOWN)),
        ("q,lm_head", LAYERS * Q + R * (H + VOCAB)),
    ],
)
def test_adapters_are_on_exactly_what_is_named(targets, parameters):
    assert trained(lora_rank=R, lora_targets=targets) == parameters


def test_magnitudes_are_one_number_an_output():
    plain = trained(lora_rank=R, lora_targets="q,down_proj")
    assert trained(lora_rank=R, lora_targets="q,down_proj", dora=True) == plain + LAYERS * 2 * H


@pytest.mark.parametrize(
    ("fields", "parameters"),
    [
        ({"train": ("head",)}, VOCAB * H),
        ({"train": ("embeddings", "head")}, 2 * VOCAB * H),
        ({"train": ("norms",)}, (2 * LAYERS + 1) * H),
    ],
)
def test_parts_alone_and_beside_adapters(fields, parameters):
    assert trained(**fields) == parameters
    beside = trained(lora_rank=R, lora_targets="q", **fields)
    assert beside == parameters + LAYERS * Q


def test_a_trained_copy_leaves_the_frozen_one():
    plain = StageMemory.of(run_with(lora_rank=R)).figure(0)
    copied = StageMemory.of(run_with(lora_rank=R, train=("head",))).figure(0)
    assert copied.weights_bytes - plain.weights_bytes == 2 * VOCAB * H


def test_frozen_layers_keep_nothing_and_have_no_backward():
    frozen, last = (StagedRun(run_with(freeze=f)) for f in (30, -2))
    for staged in (frozen, last):
        assert [kind.count for kind in staged.kinds] == [30, 2]
        first, rest = staged.kinds
        under = staged.under(staged.policy("none"))
        assert under.layer_bytes(first.graph).stored == 0
        assert under.layer_bytes(rest.graph).stored > 0
        assert staged.main is not None
        assert staged.main.graph is rest.graph
    moments = StageMemory.of(run_with(freeze=30)).figure(0, timeline=True).moments
    assert not any(moment.at == "in backward of layer 29" for moment in moments)
    assert any(moment.at == "in backward of layer 30" for moment in moments)


def test_an_embedding_that_is_trained_passes_gradients_through_frozen_layers():
    staged = StagedRun(run_with(train=("embeddings", "head")))
    assert {kind.graph.gradient for kind in staged.kinds} == {"passes"}
    assert {kind.graph.gradient for kind in StagedRun(run_with(train=("head",))).kinds} == {"stops"}


def test_galore_keeps_moments_of_the_lower_rank():
    plain = StageMemory.of(run_with()).figure(0)
    low = StageMemory.of(run_with(galore_rank=128)).figure(0)
    shapes = [(H, H), (KV, H), (KV, H), (H, H), (FFN, H), (FFN, H), (H, FFN)]
    saved = sum(m * n * 2 - 128 * (2 * max(m, n) + min(m, n)) for m, n in shapes)
    assert plain.optimizer_bytes - low.optimizer_bytes == 2 * LAYERS * saved


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"lora_rank": 8, "lora_targets": "qq"}, "'qq'"),
        ({"lora_rank": 8, "lora_targets": "qkv_proj"}, "names no projection of llama-3-8b"),
        ({"lora_rank": 8, "lora_targets": "(q"}, "neither names nor a pattern"),
        ({"train": ("heads",)}, "no part of a model"),
        ({"dora": True}, "dora changes nothing"),
        ({"freeze": 33}, "the model has 32 layers"),
        ({"freeze": 32, "lora_rank": 8}, "names no projection"),
        ({"freeze": 32, "train": ("layers",)}, "nothing would be trained"),
        ({"lora_rank": 8, "galore_rank": 8}, "galore_rank 8"),
        ({"lora_rank": 8, "train": ("layers",)}, "adapters stand for them"),
    ],
)
def test_what_changes_nothing_or_names_nothing_is_refused(fields, words):
    with pytest.raises(SpecError, match=r".") as refused:
        StagedRun(run_with(**fields))
    assert words in str(refused.value)
    assert refused.value.hint


def test_names_of_modules_are_those_of_the_model():
    model = run_with().model
    assert module_names(model, "q+v") == ("q_proj", "v_proj")
    assert module_names(model, "attention") == ("q_proj", "k_proj", "v_proj", "o_proj")
    assert module_names(model, "all") == ("all-linear",)
    assert Targets("q_proj,nothing").foreign == ("nothing",)
