"""Every public configuration at hand imports, or is refused for the right reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actcalc.io.hf import read_config_file
from actcalc.io.sources import source
from actcalc.specs import Model, Sizes, Workload
from actcalc.specs.validate import build

DATA = Path(__file__).parent.parent / "data"
FOLDER = DATA / "configs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))

# What makes each configuration odd (config_sources.json), read as it is meant.
READ: dict[str, dict[str, Any]] = {
    "AI21-Jamba-1.5-Mini": {
        "attention_pattern": ((*["mamba"] * 4, "full", *["mamba"] * 3)) * 4,
        "mlp_pattern": ("dense", "moe") * 16,
        "position": "none",
        "kv_heads": 8,
    },
    "deepseek-ai--DeepSeek-V4-Flash": {
        "attention_pattern": ("sliding", "sliding", *("sparse", "compressed") * 20, "sparse"),
        "streams": 4,
        "rotary_dim": 64,
        "kv_heads": 1,
        "mtp_layers": 1,
    },
    "XiaomiMiMo--MiMo-V2-Flash": {
        "window": 129,
        "value_dim": 128,
        "rotary_dim": 64,
        "sinks_in": "windowed",
        "layer_sizes": tuple(
            Sizes(kv_heads=0 if i == 0 or (i + 1) % 6 == 0 else 8) for i in range(48)
        ),
        "mlp_pattern": ("dense",) + ("moe",) * 47,
    },
    "nvidia--Llama-3_3-Nemotron-Super-49B-v1": {"kv_heads": 8, "ffn": 28672, "layers": 80},
    "falcon-mamba-7b": {"pattern": "M" * 64, "heads": 1, "fp32_stream": True},
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": {"layers": 52, "position": "none"},
    "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8": {
        "layers": 88,
        "mtp_layers": 1,
        "mtp_pattern": "*E",
        "gated": False,
    },
    "nvidia--Nemotron-H-56B-Base-8K": {"head_dim": 128, "ffn": 32768, "moe": None},
    "zai-org--GLM-5": {"layers": 78, "mlp_pattern": ("dense",) * 3 + ("moe",) * 75},
    "Qwen--Qwen3.5-122B-A10B": {
        "attention_pattern": (*["linear"] * 3, "full") * 12,
        "attention_gate": "packed",
        "rotary_dim": 64,
        "mtp_layers": 1,
        "norm": "gemma_rmsnorm",
    },
    "Qwen--Qwen3.5-35B-A3B": {
        "attention_pattern": (*["linear"] * 3, "full") * 10,
        "kv_heads": 2,
        "head_dim": 256,
    },
    "Qwen--Qwen3-235B-A22B": {"layers": 94, "kv_heads": 4, "head_dim": 128, "qk_norm": "head"},
    "bloom-176b": {"layers": 70, "heads": 112, "ffn": 57344, "position": "alibi"},
    "dbrx": {"kv_heads": 8, "ffn": 10752, "clip_qkv": True, "norm": "layernorm"},
    "deepseek-ai--DeepSeek-V3": {"mtp_layers": 1, "mlp_pattern": ("dense",) * 3 + ("moe",) * 58},
    "falcon-40b-RefinedWeb-legacy": {"kv_heads": 8, "parallel": "two_norms", "family": "falcon"},
    "falcon-7b": {"kv_heads": 1, "heads": 71, "parallel": "one_norm", "tied": True},
    "meta-llama--Llama-4-Scout-17B-16E-Instruct": {
        "ffn": 16384,
        "window": 8192,
        "no_rope_layers": tuple(range(3, 48, 4)),
        "attention_pattern": (*["chunked"] * 3, "full") * 12,
        "qk_norm": "unweighted",
    },
    "meta-llama--Meta-Llama-3.1-405B": {"layers": 126, "heads": 128, "kv_heads": 8},
    "meta-llama--Meta-Llama-3.1-70B": {"kv_heads": 8, "qkv_bias": False, "norm": "rmsnorm"},
    "mistralai--Mixtral-8x7B-v0.1": {"window": 0, "ffn": 14336},
    "mlc_aya-23": {"parallel": "one_norm", "tied": True, "norm_bias": False, "qk_norm": "none"},
    "mlc_chatglm": {"kv_heads": 2, "ffn": 13696, "vocab": 65024, "rotary_dim": 64, "layers": 28},
    "mlc_codellama_34b": {"kv_heads": 8, "vocab": 32016},
    "mlc_deepseek": {"mlp_pattern": ("dense",) + ("moe",) * 27, "mla": None},
    "mlc_deepseek_v2_lite": {"mlp_pattern": ("dense",) + ("moe",) * 26},
    "mlc_gemma2_2b": {
        "head_dim": 256,
        "attention_softcap": 50.0,
        "logit_softcap": 30.0,
        "norm_placement": "sandwich",
        "attention_pattern": ("sliding", "full") * 13,
        "window": 4096,
    },
    "mlc_gemma3_1b_it": {
        "attention_pattern": ((*["sliding"] * 5, "full") * 5)[:26],
        "window": 512,
        "qk_norm": "head",
        "attention_softcap": 0.0,
    },
    "mlc_gpt2": {
        "ffn": 3072,
        "tied": True,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
        "max_positions": 1024,
    },
    "mlc_gpt_bigcode": {"kv_heads": 1, "ffn": 8192, "activation": "gelu_tanh"},
    "mlc_internlm2_5_7b": {"kv_heads": 8, "qkv_bias": False},
    "mlc_llama2_13b": {"kv_heads": 40, "tied": False},
    "mlc_llama3_2_1b": {"tied": True, "head_dim": 64},
    "mlc_ministral3_3b_2512": {"head_dim": 128, "tied": True, "window": 0, "layers": 26},
    "mlc_mistral_7b": {"window": 4096, "attention_pattern": ()},
    "mlc_phi-1_5": {"ffn": 8192, "kv_heads": 32, "rotary_dim": 32, "parallel": "one_norm"},
    "mlc_qwen": {"ffn": 5504, "head_dim": 128, "qkv_bias": True, "out_bias": False},
    "mlc_qwen2": {"window": 0, "attention_pattern": (), "qkv_bias": True, "tied": True},
    "mlc_smollm_135m": {"heads": 9, "kv_heads": 3},
    "mlc_stablelm": {"rotary_dim": 20, "norm": "layernorm"},
    "mpt-7b-instruct": {"position": "alibi", "max_positions": 0, "ffn": 16384, "norm_bias": False},
    "mt0-small": {"head_dim": 64, "hidden": 512, "heads": 6, "encoder_layers": 8, "gated": True},
    "openai--gpt-oss-120b": {"head_dim": 64, "attention_pattern": ("sliding", "full") * 18},
    "openai--gpt-oss-20b": {
        "head_dim": 64,
        "hidden": 2880,
        "attention_pattern": ("sliding", "full") * 12,
        "attention_sinks": True,
        "activation": "swiglu_oai",
        "qkv_bias": True,
    },
    "opt-350m": {
        "embedding_dim": 512,
        "norm_placement": "post",
        "final_norm": False,
        "max_positions": 2050,
        "activation": "relu",
        "hidden_dropout": 0.1,
    },
    "t5-v1_1-xxl-encoder": {"encoder_layers": 0, "causal": False, "head": "none", "layers": 24},
    "umt5-encoder-null-decoder": {"encoder_layers": 24, "layers": 24, "relative_every_layer": True},
}

MOE: dict[str, dict[str, Any]] = {
    "deepseek-ai--DeepSeek-V4-Flash": {"experts": 256, "topk": 6, "router": "sqrtsoftplus"},
    "XiaomiMiMo--MiMo-V2-Flash": {"experts": 256, "topk": 8, "ffn": 2048, "router": "sigmoid"},
    "AI21-Jamba-1.5-Mini": {"experts": 16, "topk": 2, "ffn": 14336},
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": {"shared_ffn": 3712, "latent": 0},
    "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8": {"experts": 512, "latent": 1024},
    "zai-org--GLM-5": {"experts": 256, "topk": 8, "ffn": 2048},
    "Qwen--Qwen3.5-122B-A10B": {"experts": 256, "topk": 8, "shared_gate": True},
    "Qwen--Qwen3.5-35B-A3B": {"ffn": 512, "shared_ffn": 512},
    "Qwen--Qwen3-235B-A22B": {"experts": 128, "topk": 8, "ffn": 1536, "router": "softmax"},
    "dbrx": {"experts": 16, "topk": 4, "ffn": 10752},
    "deepseek-ai--DeepSeek-V3": {
        "experts": 256,
        "topk": 8,
        "shared_ffn": 2048,
        "router": "sigmoid",
        "groups": 8,
        "topk_groups": 4,
        "correction_bias": True,
    },
    "meta-llama--Llama-4-Scout-17B-16E-Instruct": {"ffn": 8192, "shared_ffn": 8192, "topk": 1},
    "mistralai--Mixtral-8x7B-v0.1": {"experts": 8, "topk": 2, "ffn": 14336},
    "mlc_deepseek": {"experts": 64, "topk": 6, "ffn": 1408, "shared_ffn": 2816},
    "mlc_deepseek_v2_lite": {"experts": 64, "shared_ffn": 2816, "groups": 1},
    "openai--gpt-oss-20b": {"experts": 32, "topk": 4, "router": "softmax_topk", "bias": True},
    "openai--gpt-oss-120b": {"experts": 128, "topk": 4},
}

WARNS = {
    "deepseek-ai--DeepSeek-V4-Flash": ("fp8",),
    "XiaomiMiMo--MiMo-V2-Flash": ("fp8",),
    "nvidia--Llama-3_3-Nemotron-Super-49B-v1": ("auto_map",),
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("auto_map",),
    "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8": ("auto_map",),
    "nvidia--Nemotron-H-56B-Base-8K": ("auto_map",),
    "deepseek-ai--DeepSeek-V3": ("fp8", "auto_map"),
    "openai--gpt-oss-20b": ("mxfp4",),
    "openai--gpt-oss-120b": ("mxfp4",),
    "meta-llama--Llama-4-Scout-17B-16E-Instruct": ("text_config",),
    "mlc_ministral3_3b_2512": ("text_config",),
    "mlc_phi-1_5": ("auto_map",),
    "mlc_qwen": ("auto_map",),
    "umt5-encoder-null-decoder": ("num_decoder_layers is null",),
}


def model(name: str) -> Model:
    return build(Model, read_config_file(FOLDER / f"{name}.json").fields, name)


def test_each_file_is_decided_and_sourced():
    assert set(NAMES) == set(READ)
    assert set(NAMES) == set(json.loads((DATA / "config_sources.json").read_text()))


@pytest.mark.parametrize("name", sorted(READ))
def test_read_as_meant(name):
    spec = model(name)
    assert {key: getattr(spec, key) for key in READ[name]} == READ[name]


@pytest.mark.parametrize("name", sorted(MOE))
def test_experts_read_as_meant(name):
    moe = model(name).moe
    assert moe is not None
    assert {key: getattr(moe, key) for key in MOE[name]} == MOE[name]


@pytest.mark.parametrize("name", sorted(set(READ) - set(MOE)))
def test_dense_models_have_no_experts(name):
    assert model(name).moe is None


@pytest.mark.parametrize(
    ("name", "q_lora"), [("deepseek-ai--DeepSeek-V3", 1536), ("mlc_deepseek_v2_lite", 0)]
)
def test_latent_attention(name, q_lora):
    mla = model(name).mla
    assert mla is not None
    assert (mla.q_lora, mla.kv_lora, mla.qk_dim, mla.rope_dim, mla.v_dim) == (
        q_lora, 512, 192, 64, 128,
    )  # fmt: skip


PRESETS = {
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "nemotron-3-nano-30b-a3b",
    "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8": "nemotron-3-super-120b-a12b",
    "nvidia--Nemotron-H-56B-Base-8K": "nemotron-h-56b",
    "Qwen--Qwen3-235B-A22B": "qwen3-235b-a22b",
    "deepseek-ai--DeepSeek-V3": "deepseek-v3",
    "falcon-40b-RefinedWeb-legacy": "falcon-40b",
    "falcon-7b": "falcon-7b",
    "meta-llama--Llama-4-Scout-17B-16E-Instruct": "llama-4-scout",
    "meta-llama--Meta-Llama-3.1-405B": "llama-3.1-405b",
    "meta-llama--Meta-Llama-3.1-70B": "llama-3.1-70b",
    "mistralai--Mixtral-8x7B-v0.1": "mixtral-8x7b",
    "mlc_deepseek_v2_lite": "deepseek-v2-lite",
    "mlc_gemma2_2b": "gemma-2-2b",
    "mlc_gemma3_1b_it": "gemma-3-1b",
    "mlc_llama2_13b": "llama-2-13b",
    "mlc_llama3_2_1b": "llama-3.2-1b",
    "mlc_mistral_7b": "mistral-7b-v0.1",
    "mlc_stablelm": "stablelm-3b",
    "openai--gpt-oss-20b": "gpt-oss-20b",
    "openai--gpt-oss-120b": "gpt-oss-120b",
    "opt-350m": "opt-350m",
    "bloom-176b": "bloom-176b",
    "dbrx": "dbrx",
}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_preset_and_configuration_describe_one_model(name):
    preset = build(Model, source(PRESETS[name]).model, name)
    assert model(name).model_copy(update={"name": preset.name}) == preset


@pytest.mark.parametrize("name", sorted(READ))
def test_warnings_say_what_is_left_out(name):
    warnings = read_config_file(FOLDER / f"{name}.json").warnings
    expected = WARNS.get(name, ())
    assert len(warnings) == len(expected)
    for text, warning in zip(expected, warnings, strict=True):
        assert text in warning


@pytest.mark.parametrize("name", sorted(READ))
def test_workload_is_valid(name):
    workload = build(Workload, read_config_file(FOLDER / f"{name}.json").workload, name)
    assert 1 <= workload.seq <= 4096
    assert workload.micro_batch == 1
