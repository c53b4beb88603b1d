"""Megatron-Core's saved bytes, measured on its own layers, are reproduced to the byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actcalc.layers.graph import size_of
from actcalc.layers.model import ModelGraph, model_graph
from actcalc.policy.rules import parse_policy
from actcalc.policy.stage import StagePolicy
from actcalc.specs import KernelOptions, Layout, Mla, Model, Moe, Workload
from actcalc.specs.run import load_framework

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
    stage = StagePolicy(graph, parse_policy(policy_of(record), layers=len(layers)))
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
