"""Megatron's options for layers that are not a GPT's: each is honoured or refused by its name."""

from __future__ import annotations

import json

import pytest

BASE = {
    "num-layers": 8, "hidden-size": 1024, "num-attention-heads": 8, "seq-length": 2048,
    "max-position-embeddings": 2048, "micro-batch-size": 1, "global-batch-size": 8,
    "vocab-size": 32000, "world-size": 8,
}  # fmt: skip


@pytest.fixture
def ask(cli, tmp_path):
    def asked(**options):
        path = tmp_path / "launch.json"
        path.write_text(json.dumps(BASE | {k.replace("_", "-"): v for k, v in options.items()}))
        return cli("memory", path, "--from", "megatron", "--json")

    return asked


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"spec": ["slime_plugins.models.qwen3_5", "get_qwen3_5_spec"]}, "get_qwen3_5_spec"),
        ({"spec": ["my.module", "my_spec"]}, "my_spec"),
        ({"post_self_attn_layernorm": True}, "post-self-attn-layernorm"),
        ({"post_mlp_layernorm": True}, "post-mlp-layernorm"),
        ({"linear_attention_freq": 4}, "linear-attention-freq"),
        ({"linear_key_head_dim": 128}, "linear-key-head-dim"),
        ({"experimental_attention_variant": "gated_delta_net"}, "experimental-attention-variant"),
        ({"attention_output_gate": True}, "attention-output-gate"),
    ],
)
def test_what_is_not_a_plain_layer_is_refused_by_name(ask, options, named):
    done = ask(**options)
    assert done.code == 2
    assert named in done.err
    assert "hint:" in done.err


def test_norms_after_both_parts_and_gates_are_read(ask):
    plain = json.loads(ask().out)["model"]
    both = json.loads(ask(post_self_attn_layernorm=True, post_mlp_layernorm=True).out)["model"]
    assert (plain["norm_placement"], both["norm_placement"]) == ("pre", "sandwich")
    gated = json.loads(ask(gated_linear_unit=True).out)["model"]
    assert (plain["gated"], gated["gated"]) == (False, True)
