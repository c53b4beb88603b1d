"""T5 in Megatron-Core: parameters, what a decoder layer keeps, arguments, refusals."""

from __future__ import annotations

from typing import Any

import pytest

from actcalc.answers.memory import memory_run
from actcalc.errors import SpecError
from actcalc.io import presets
from actcalc.io.megatron import read_arguments
from actcalc.io.runs import load_framework, load_run
from actcalc.layers.core.context import whole
from actcalc.layers.model import ModelGraph, model_graph, parameters
from actcalc.specs import Layout, Model, Workload

SMALL: dict[str, Any] = {
    "name": "t5", "family": "t5", "layers": 3, "encoder_layers": 2, "hidden": 768, "heads": 12,
    "ffn": 3072, "vocab": 29184, "max_positions": 512, "head_bias": True, "hidden_dropout": 0.1,
    "attention_dropout": 0.1, "embedding_dropout": 0.1,
}  # fmt: skip
ARGUMENTS: dict[str, Any] = {
    "encoder-num-layers": 2, "decoder-num-layers": 3, "hidden-size": 768,
    "num-attention-heads": 12, "encoder-seq-length": 512, "decoder-seq-length": 128,
    "max-position-embeddings": 512, "micro-batch-size": 4, "bf16": True,
    "tokenizer-type": "BertWordPieceCase", "vocab-extra-ids": 100,
}  # fmt: skip


def graph(framework: str, work: dict[str, Any], **layout: Any) -> ModelGraph:
    workload = Workload(**{"seq": 512, "decoder_seq": 128, "micro_batch": 4, **work})
    return model_graph(Model(**SMALL), Layout(**layout), workload, load_framework(framework))


def stored(model: ModelGraph) -> list[int]:
    sizes = model.sizes
    found = []
    for run in model.runs:
        own = [n for n in run.graph.saved if n not in run.graph.shared]
        found.append(sum(int(run.graph.tensors[n].bytes.value(sizes)) for n in own))
    return found


@pytest.mark.parametrize("name", [n for n in presets.names("models") if n.startswith("t5-")])
def test_as_many_parameters_as_published(name: str) -> None:
    run = load_run(name, framework="megatron")
    built = model_graph(run.model, Layout(), run.workload, run.framework)
    stated = presets.load("models", name).values["parameters"]
    assert parameters(built, whole(dict(built.sizes))) == stated


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("sp", [False, True])
def test_layers_with_eager_attention(tp: int, sp: bool) -> None:
    """Encoder layers are the paper's with norm statistics; a decoder's add a second attention."""
    if sp and tp == 1:
        return
    encoder, decoder = stored(graph("megatron", {"attention": "eager"}, tp=tp, sp=sp))
    b, h, a, long, short = 4, 768, 12, 512, 128
    c = tp if sp else 1

    def layer(s: int) -> int:
        return s * b * (10 * h // c + 24 * h // tp + 16 // c) + 5 * a * s * s * b // tp

    assert encoder == layer(long)
    # A norm and its input, the queries' product, dropout; packed keys and values; scores; context.
    outer = short * b * (2 * h + 2 * h + h + 8) // c
    inner = short * b * (2 * h + 2 * h) // tp + long * b * 4 * h // tp
    assert decoder == layer(short) + outer + inner + 5 * a * short * long * b // tp


def test_every_decoder_layer_reads_one_encoder_output() -> None:
    model = graph("megatron", {"attention": "eager"}, tp=2, sp=True)
    decoder = model.runs[1].graph
    assert "encoder_output" in decoder.shared
    assert int(decoder.tensors["encoder_output"].bytes.value(model.sizes)) == 512 * 4 * 768 * 2 // 2


def test_local_layers_get_masks_made_once() -> None:
    odd = {"attention": "eager", "decoder_seq": 126}
    decoder = graph("megatron-local", odd).runs[1].graph
    assert {"decoder_mask", "cross_mask"} <= set(decoder.shared)
    assert "causal_mask" not in decoder.tensors


@pytest.mark.parametrize(
    ("tokenizer", "vocab"),
    [("BertWordPieceCase", 28996 + 102), ("BertWordPieceLowerCase", 30522 + 102),
     ("", 30522 + 102)],
)  # fmt: skip
def test_arguments(tokenizer: str, vocab: int) -> None:
    options = {**ARGUMENTS, "tokenizer-type": tokenizer or None}
    found = read_arguments(options)
    assert (found.model["encoder_layers"], found.model["layers"]) == (2, 3)
    assert (found.workload["seq"], found.workload["decoder_seq"]) == (512, 128)
    assert found.model["vocab"] == vocab
    assert found.model["head_bias"]
    assert any(str(vocab) in warning for warning in found.warnings)


def test_a_given_vocabulary_wins() -> None:
    assert read_arguments({**ARGUMENTS, "vocab-size": 32128}).model["vocab"] == 32128


@pytest.mark.parametrize(
    ("framework", "layout", "model"),
    [
        ("megatron", {"pp": 2}, {}),
        ("megatron", {"cp": 2}, {}),
        ("megatron-local", {}, {"position": "relative", "relative_buckets": 32,
                                "max_positions": 0}),
        ("megatron", {}, {"kv_heads": 4}),
        ("paper", {}, {}),
    ],
)  # fmt: skip
def test_what_is_not_modelled_is_refused(
    framework: str, layout: dict[str, Any], model: dict[str, Any]
) -> None:
    with pytest.raises(SpecError) as caught:
        model_graph(
            Model(**{**SMALL, **model, "layers": 2}),
            Layout(**layout),
            Workload(seq=512, decoder_seq=128),
            load_framework(framework),
        )
    assert caught.value.hint


def test_a_decoder_s_length_is_for_encoder_decoders() -> None:
    with pytest.raises(SpecError, match="decoder_seq"):
        load_run("gpt2", workload={"decoder_seq": 64})


def test_a_shorter_decoder_holds_less() -> None:
    totals = [
        memory_run(
            load_run("t5-base", framework="megatron", workload={"seq": 512, "decoder_seq": seq})
        ).peak_bytes
        for seq in (64, 128, 512)
    ]
    assert totals == sorted(totals)
    same = memory_run(load_run("t5-base", framework="megatron", workload={"seq": 512}))
    assert totals[-1] == same.peak_bytes
