"""Megatron-Core's saved bytes, measured on its own layers, are reproduced to the byte."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actcalc.errors import SpecError
from actcalc.io.runs import load_framework
from actcalc.layers.core.graph import size_of
from actcalc.layers.model import ModelGraph, model_graph
from actcalc.policy.outcome import layer_outcome
from actcalc.policy.rules import parse_policy
from actcalc.policy.stage import StagePolicy
from actcalc.specs import KernelOptions, Layout, Mla, Model, Moe, Workload

DATA = Path(__file__).parent.parent / "data" / "megatron_core_saved_bytes.json"
RECORDS: list[dict[str, Any]] = json.loads(DATA.read_text())["records"]


def model_of(record: dict[str, Any]) -> Model:
    gpt = record["normalization"] == "LayerNorm"
    moe = mla = None
    if "num_moe_experts" in record:
        shared = record.get("shared_expert_ffn", 0)
        moe = Moe(
            experts=record["num_moe_experts"],
            topk=record["topk"],
            ffn=record["moe_ffn"],
            shared_ffn=shared,
            router="sigmoid" if shared else "softmax",
            correction_bias=bool(shared),
        )
    if "mla" in record:
        ranks = record["mla"]
        mla = Mla(
            q_lora=ranks["q_lora_rank"],
            kv_lora=ranks["kv_lora_rank"],
            nope_dim=ranks["qk_head_dim"],
            rope_dim=ranks["qk_pos_emb_head_dim"],
            v_dim=ranks["v_head_dim"],
        )
    bias = bool(record.get("add_bias_linear", gpt))
    return Model(
        name=record["case"],
        layers=int(record.get("layers", 1)),
        hidden=record["h"],
        heads=record["a"],
        kv_heads=record["kv"],
        ffn=record["ffn"],
        vocab=record.get("vocab", 51200),
        max_positions=record["s"] if gpt else 0,
        position="learned" if gpt else "rotary",
        norm="layernorm" if gpt else "rmsnorm",
        activation="silu" if record["swiglu"] else "gelu",
        gated=record["swiglu"],
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        tied=gpt,
        qk_norm="head" if record.get("qk_layernorm") and not mla else "none",
        moe=moe,
        mla=mla,
        hidden_dropout=record["hidden_dropout"],
        attention_dropout=record["attention_dropout"],
        embedding_dropout=record["hidden_dropout"],
    )


def kernels_of(record: dict[str, Any]) -> KernelOptions:
    case = record["case"]
    return KernelOptions(
        masked_softmax_fusion=record.get("masked_softmax_fusion", True),
        attention_softmax_in_fp32=record.get("attention_softmax_in_fp32", True),
        bias_activation_fusion="unfused_swiglu" not in case
        and record.get("bias_activation_fusion", True),
        activation_func_fp8_input_store="fp8_store" in case,
        moe_grouped_gemm="on" if "GroupedMLP" in case else "auto",
        moe_token_dispatcher_type=record.get("dispatcher", "alltoall"),
        moe_router_dtype="fp32" if record.get("moe_router_dtype") == "fp32" else "auto",
        moe_router_load_balancing_type=record.get("router_load_balancing", "auto"),
        cross_entropy_loss_fusion="ce_fusion=True" in case,
    )


def graph_of(record: dict[str, Any], framework: str) -> ModelGraph:
    model = model_of(record)
    attention = record.get("attention", "flash")
    return model_graph(
        model,
        Layout(tp=record["tp"], sp=record["sp"], ep=record.get("ep", 1), cp=record["cp"]),
        Workload(
            seq=record["s"],
            micro_batch=record["b"],
            attention="eager" if attention == "DotProductAttention" else "flash",
            padding_mask=record.get("attention_mask_passed") == "full",
            kernels=kernels_of(record),
        ),
        load_framework(framework),
    )


def policy_of(record: dict[str, Any]) -> str:
    recompute = record["recompute"].removesuffix("+distribute_saved")
    if recompute.startswith("selective:"):
        return str(recompute.removeprefix("selective:").replace(",", "+"))
    if recompute.startswith("full:"):
        method = recompute.removeprefix("full:")
        word = method.rstrip("0123456789")
        return f"{word}:{method.removeprefix(word)}"
    return str(recompute)


def stored(record: dict[str, Any], graph: ModelGraph) -> int:
    """Bytes kept, averaged over the layers; the ends alone for records of the ends."""
    if "-ends/" in record["case"]:
        return sum(
            int(size_of(end, end.saved, graph.sizes)) for end in (graph.embedding, graph.head)
        )
    layers = range(graph.context.model.layers)
    stage = StagePolicy(graph, parse_policy(policy_of(record)))
    kept = sum(segment.stored_bytes for segment in stage.segments(layers))
    if record["recompute"].endswith("+distribute_saved"):
        # distribute_saved_activations splits the stored input over the tensor-parallel group.
        kept //= record["tp"]
    return kept // len(layers)


def profile_of(record: dict[str, Any]) -> str:
    """The records with Transformer Engine's copies of q, k, v and out are that profile's."""
    return "megatron" if "TE's" in str(record.get("attention")) else "megatron-local"


def ident(record: dict[str, Any]) -> str:
    return "-".join(
        str(part)
        for part in (
            record["case"], f"tp{record['tp']}", "sp" * record["sp"],
            f"ep{record.get('ep', 1)}", record["recompute"],
        )
        if part
    )  # fmt: skip


def test_all_records_are_here() -> None:
    assert len(RECORDS) == 275


@pytest.mark.parametrize("record", RECORDS, ids=ident)
def test_saved_bytes(record: dict[str, Any]) -> None:
    graph = graph_of(record, profile_of(record))
    assert stored(record, graph) == record["total_saved_bytes_per_layer"]


LAYOUTS: list[dict[str, Any]] = json.loads(
    (DATA.parent / "megatron_core_layouts.json").read_text()
)["records"]


@pytest.mark.parametrize("record", LAYOUTS, ids=lambda record: record["name"])
def test_other_models_and_layouts(record: dict[str, Any]) -> None:
    """Saved bytes and parameters of one rank: kv heads < tp, etp, latent attention with tp, ..."""
    model = Model.model_validate(record["model"])
    graph = model_graph(
        model,
        Layout.model_validate(record["layout"]),
        # where a record says nothing of attention, it was eager
        Workload.model_validate({"attention": "eager", **record["workload"]}),
        load_framework(record["framework"]),
    )
    layer = graph.runs[0].graph
    outcome = layer_outcome(graph, layer, parse_policy(record["policy"]))
    assert outcome.sizes(graph).stored == record["stored_bytes"]
    weights = sum(int(weight.parameters.value(graph.sizes)) for weight in layer.weights)
    assert weights == record["parameters_per_rank"]


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, int, int, int, int, int, int, bool]:
    """Sizes s, b, a, k, d, f, t and sequence parallelism that fit together."""
    t = draw(st.sampled_from([1, 2, 4, 8]))
    k = t * draw(st.integers(1, 4))
    return (
        t * draw(st.integers(1, 900)),
        draw(st.integers(1, 5)),
        k * draw(st.integers(2, 4)),
        k,
        2 * draw(st.integers(4, 64)),
        t * draw(st.integers(1, 3000)),
        t,
        t > 1 and draw(st.booleans()),
    )


def llama(a: int, k: int, d: int, f: int, **changes: Any) -> Model:
    return Model(
        layers=1, hidden=a * d, heads=a, kv_heads=k, ffn=f, vocab=1024 * a, position="rotary",
        norm="rmsnorm", activation="silu", gated=True, qkv_bias=False, out_bias=False,
        mlp_bias=False, tied=False, **changes,
    )  # fmt: skip


def saved(framework: str, model: Model, layout: Layout, workload: Workload) -> int:
    graph = model_graph(model, layout, workload, load_framework(framework))
    layer = graph.runs[0].graph
    own = (name for name in layer.saved if name not in layer.shared)
    return int(size_of(layer, own, graph.sizes))


@settings(max_examples=120, deadline=None)
@given(runs())
def test_llama_closed_form(sizes: tuple[int, int, int, int, int, int, int, bool]) -> None:
    """Per token 8hc + 8c + [2(h+2kvd) + 2(h+kvd) + 2h + 4a + 6f]/t, plus tables and random state.

    Transformer Engine copies q, k and v: the packed projection gives way to v alone, and several
    sequences keep a copy of the output.
    """
    s, b, a, k, d, f, t, sp = sizes
    h, kvd, tokens, c = a * d, k * d, s * b, Fraction(1, t if sp else 1)
    region = 8 * h * c + 8 * c
    rest = 8 * s * d + 24
    work = Workload(seq=s, micro_batch=b, attention="flash")
    model, layout = llama(a, k, d, f), Layout(tp=t, sp=sp)
    split = 2 * (h + 2 * kvd) + 2 * (h + kvd) + 2 * h + 4 * a + 6 * f
    assert saved("megatron-local", model, layout, work) == (
        tokens * (region + Fraction(split, t)) + rest
    )
    split += 2 * kvd - 2 * (h + 2 * kvd) + (2 * h if b > 1 else 0)
    assert saved("megatron", model, layout, work) == tokens * (region + Fraction(split, t)) + rest


@settings(max_examples=120, deadline=None)
@given(runs(), st.integers(1, 8), st.integers(1, 4), st.sampled_from([1, 2, 4]))
def test_moe_closed_form(
    sizes: tuple[int, int, int, int, int, int, int, bool], local: int, topk: int, ep: int
) -> None:
    """Beside the norm's output: K(2h + 6w) of the gathered tokens and a router of 7E + 22K."""
    s, b, a, k, d, w, t, _ = sizes
    experts = local * ep
    topk = min(topk, experts)
    h, tokens = a * d, s * b
    moe = Moe(experts=experts, topk=topk, ffn=w, router="softmax_topk")
    work = Workload(seq=s, micro_batch=b, attention="flash")
    layout = Layout(tp=t, sp=t > 1, ep=ep)
    dense = saved("megatron-local", llama(a, k, d, w), Layout(tp=t, sp=t > 1), work)
    sparse = saved("megatron-local", llama(a, k, d, 4 * h, moe=moe), layout, work)
    feed_forward = tokens * Fraction(6 * w, t)
    # Of the router's 22K, the 2K of the permuted weights are those of the gathered tokens.
    router = Fraction(tokens, t) * (7 * experts + 20 * topk) + 2 * topk * tokens
    expert = tokens * topk * (2 * h + Fraction(6 * w, t))
    assert sparse == dense - feed_forward + router + expert + 8 * experts + 4


@settings(max_examples=80, deadline=None)
@given(runs())
def test_head_and_embedding_closed_form(
    sizes: tuple[int, int, int, int, int, int, int, bool],
) -> None:
    """4·V·T/t fp32 softmax, 4hc norm and projection, statistics, labels, ids."""
    s, b, a, k, d, f, t, sp = sizes
    model = llama(a, k, d, f)
    graph = model_graph(
        model, Layout(tp=t, sp=sp), Workload(seq=s, micro_batch=b), load_framework("megatron")
    )
    tokens, c = s * b, Fraction(1, t if sp else 1)
    head = int(size_of(graph.head, graph.head.saved, graph.sizes))
    # 9 B of labels per token: the shifted label and the mask of those on other ranks.
    assert head == tokens * (Fraction(4 * model.vocab, t) + (4 * a * d + 4) * c + 9)
    ids = int(size_of(graph.embedding, graph.embedding.saved, graph.sizes))
    assert ids == tokens * (9 if t > 1 else 8)


def test_long_sequences_lose_the_fused_softmax() -> None:
    """4096 keys are the limit of the fused kernel; beyond it runs unfused, and says so."""
    model = llama(8, 8, 16, 256, attention_dropout=0.1)
    local = load_framework("megatron-local")
    at, above = (
        model_graph(model, Layout(), Workload(seq=seq, attention="eager"), local).runs[0].graph
        for seq in (4096, 4100)
    )
    assert not at.notes
    assert "17 to 4096 keys, here are 4100" in above.notes[0]
    assert "probs_fp32" in above.saved
    assert "probs_fp32" not in at.saved


@pytest.mark.parametrize(
    ("framework", "changes", "layout", "words"),
    [
        ("megatron", {"norm_placement": "post"}, {}, "no post-norm layers"),
        ("megatron", {"position": "alibi"}, {}, "no alibi positions"),
        ("megatron-local", {"parallel": "one_norm"}, {}, "parallel attention"),
        ("megatron-local", {"norm": "gemma_rmsnorm"}, {}, "gemma rmsnorm"),
        ("megatron-local", {}, {"cp": 2}, "no context parallelism"),
        ("megatron", {"moe": Moe(experts=8, topk=2, ffn=64)}, {"tp": 2}, "sequence parallelism"),
    ],
)
def test_what_megatron_does_not_run_is_refused(
    framework: str, changes: dict[str, Any], layout: dict[str, Any], words: str
) -> None:
    model = llama(8, 8, 16, 256).model_copy(update=changes)
    work = Workload(seq=64, attention="flash")
    with pytest.raises(SpecError, match=words) as caught:
        model_graph(model, Layout(**layout), work, load_framework(framework))
    assert caught.value.hint


def test_transformer_engine_fuses_the_norm_into_the_projection() -> None:
    """``layernorm`` recompute frees both outputs in the local spec and none in a TE dense layer."""
    model, work = llama(8, 8, 16, 256), Workload(seq=64, attention="flash")

    def freed(framework: str, policy: str) -> int:
        graph = model_graph(model, Layout(), work, load_framework(framework))
        layer = graph.runs[0].graph
        before, after = (
            layer_outcome(graph, layer, parse_policy(name)).sizes(graph).stored
            for name in ("none", policy)
        )
        return before - after

    outputs = 2 * 64 * (2 * 128 + 4)
    assert freed("megatron-local", "layernorm") == outputs
    assert freed("megatron", "layernorm") == 0
    assert freed("megatron", "mlp") - freed("megatron-local", "mlp") == outputs // 2


def test_ring_attention_splits_everything_but_random_states() -> None:
    """Under cp each rank keeps its part of the sequence, its keys and values as one buffer."""
    model = llama(8, 2, 16, 256)
    whole, half = (
        saved("megatron", model, Layout(cp=cp), Workload(seq=128 * cp, attention="flash"))
        for cp in (1, 2)
    )
    # One rank of two with twice the sequence: k and v of the ring replace those of flash.
    assert half - whole == 16 * 2 - 24


def test_imbalance_scales_what_the_experts_receive() -> None:
    moe = Moe(experts=8, topk=2, ffn=64)
    model = llama(8, 8, 16, 256, moe=moe)

    def bytes_at(imbalance: float, ep: int) -> int:
        work = Workload(seq=64, attention="flash", moe_imbalance=imbalance)
        return saved("megatron-local", model, Layout(ep=ep), work)

    assert bytes_at(1.0, 4) == bytes_at(1.0, 1)
    assert bytes_at(1.5, 1) == bytes_at(1.0, 1)
    received = 64 * 2 * (2 * 128 + 6 * 64 + 2)
    assert bytes_at(1.5, 4) - bytes_at(1.0, 4) == received // 2


def test_vocabulary_padding_is_asked_for() -> None:
    model = llama(8, 8, 16, 256).model_copy(update={"vocab": 50257})

    def head(multiple: int, tp: int) -> int:
        work = Workload(seq=64, kernels=KernelOptions(make_vocab_size_divisible_by=multiple))
        graph = model_graph(model, Layout(tp=tp), work, load_framework("megatron"))
        return int(graph.head.op("head").weights[0].parameters.value(graph.sizes))

    assert head(0, 1) == 50257 * 128
    assert head(128, 8) == 51200 // 8 * 128
