"""What a configuration may not hold, how defaults are filled in, and how files are read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from actcalc.errors import SpecError
from actcalc.io.hf import read_config, read_config_file
from actcalc.specs import Model
from actcalc.specs.validate import build

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "vocab_size": 1000,
    "max_position_embeddings": 256,
}


def read(**changes: Any) -> Model:
    return build(Model, read_config({**LLAMA, **changes}).fields, "model")


def test_missing_kv_heads_are_as_many_as_heads():
    assert read().kv_heads == 8
    assert read(num_key_value_heads=None).kv_heads == 8


def test_null_counts_as_missing():
    assert read(head_dim=None, rope_scaling=None).head_dim == 16


def test_head_width_that_is_not_hidden_over_heads():
    spec = read(head_dim=48)
    assert (spec.head_dim, spec.q_dim) == (48, 384)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads"])
@pytest.mark.parametrize("value", [True, "128", -1, 0, 128.0, 1.5, [128], {}, 10**30])
def test_sizes_must_be_positive_whole_numbers(key, value):
    with pytest.raises(SpecError) as caught:
        read(**{key: value})
    assert key in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize("value", [1.0, -0.1, "0.1", True, 2])
def test_dropout_must_be_a_probability(value):
    with pytest.raises(SpecError, match="attention_dropout"):
        read(attention_dropout=value)


@pytest.mark.parametrize("value", ["yes", 2, 0.0, []])
def test_flags_must_be_true_or_false(value):
    with pytest.raises(SpecError, match="attention_bias"):
        read(attention_bias=value)


def test_not_a_number_is_refused_wherever_it_is():
    with pytest.raises(SpecError, match=r"rope_scaling\.factor"):
        read(rope_scaling={"factor": float("inf")})
    with pytest.raises(SpecError, match="nan"):
        read(rms_norm_eps=float("nan"))


def test_deep_nesting_is_refused():
    nested: Any = 1
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(SpecError, match="nested too deeply"):
        read(extra=nested)


def test_missing_keys_are_named():
    with pytest.raises(SpecError, match="missing hidden_size, vocab_size"):
        read(hidden_size=None, vocab_size=None)
    with pytest.raises(SpecError, match="missing num_local_experts"):
        read_config({**LLAMA, "model_type": "mixtral"})
    with pytest.raises(SpecError, match="missing kv_lora_rank"):
        read_config({**LLAMA, "model_type": "deepseek_v3"})


def test_unknown_type_with_llama_keys_is_read_with_a_warning():
    imported = read_config({**LLAMA, "model_type": "brandnew"})
    assert imported.fields["norm"] == "rmsnorm"
    assert any("brandnew" in text and "Llama" in text for text in imported.warnings)


def test_unknown_type_without_them_is_refused_naming_them():
    with pytest.raises(SpecError, match=r"brandnew.*missing intermediate_size"):
        read_config({**LLAMA, "model_type": "brandnew", "intermediate_size": None})


@pytest.mark.parametrize(
    "extra", [{"layer_norm_eps": 1e-5}, {"num_experts": 8}, {"type_vocab_size": 2}]
)
def test_unknown_type_that_is_no_llama_is_refused(extra):
    with pytest.raises(SpecError, match="not built like Llama"):
        read_config({**LLAMA, "model_type": "brandnew", **extra})


@pytest.mark.parametrize(
    "extra",
    [
        {"layer_types": ["mamba", "full_attention"] * 3},
        {"ssm_state_size": 16},
        {"linear_key_head_dim": 64},
        {"block_configs": [{}]},
    ],
)
def test_unknown_hybrid_is_never_priced_as_attention(extra):
    with pytest.raises(SpecError, match="cannot be described"):
        read_config({**LLAMA, "model_type": "brandnew", **extra})


def test_spellings_that_contradict_each_other():
    with pytest.raises(SpecError, match="hidden_size is 128 but n_embd is 64"):
        read(n_embd=64)


def test_layer_lists_must_have_one_entry_per_layer():
    kinds = ["sliding_attention", "full_attention"]
    spec = build(
        Model,
        read_config(
            {**LLAMA, "model_type": "qwen3", "layer_types": kinds * 3, "sliding_window": 32}
        ).fields,
        "model",
    )
    assert spec.attention_pattern == ("sliding", "full") * 3
    with pytest.raises(SpecError, match="layer_types has 2 entries for 6 layers"):
        read_config({**LLAMA, "model_type": "qwen3", "layer_types": kinds})


QWEN_MOE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}


@pytest.mark.parametrize(
    ("extra", "experts"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"decoder_sparse_step": 2}, [1, 3, 5]),
        ({"mlp_only_layers": [0, 5]}, [1, 2, 3, 4]),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, [5]),
        ({"num_experts": 0}, []),
    ],
)
def test_which_qwen_layers_have_experts(extra, experts):
    spec = build(Model, read_config({**QWEN_MOE, **extra}).fields, "model")
    assert [i for i in range(6) if spec.kind(i).mlp == "moe"] == experts


@pytest.mark.parametrize(
    ("extra", "sliding"),
    [
        ({"use_sliding_window": False}, []),
        ({"use_sliding_window": True, "max_window_layers": 4}, [4, 5]),
        ({"use_sliding_window": True, "sliding_window": None}, []),
    ],
)
def test_which_qwen_layers_are_windowed(extra, sliding):
    config = {**LLAMA, "model_type": "qwen2", "sliding_window": 64, **extra}
    spec = build(Model, read_config(config).fields, "model")
    assert [i for i in range(6) if spec.kind(i).attention == "sliding"] == sliding


def test_nested_values_with_library_defaults():
    imported = read_config(
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "sliding_window": 1024,
            },
            "vision_config": {"hidden_size": 1152, "image_size": 896, "patch_size": 14},
        }
    )
    spec = build(Model, imported.fields, "gemma-3-4b")
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.vocab) == (8, 4, 256, 262208)
    assert [i for i in range(12) if spec.kind(i).attention == "full"] == [5, 11]
    assert any("num_attention_heads is missing: 8" in text for text in imported.warnings)


def test_tying_is_inherited_from_the_outer_level():
    inner = {key: value for key, value in LLAMA.items() if key != "model_type"}
    outer = {"model_type": "llava", "text_config": {"model_type": "llama", **inner}}
    assert read_config(outer).fields["tied"] is False
    assert read_config({**outer, "tie_word_embeddings": True}).fields["tied"] is True


def test_training_dropouts_come_from_the_configuration():
    gpt2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 99}
    fields = read_config({**gpt2, "n_positions": 32, "attn_pdrop": 0.25}).fields
    assert (fields["hidden_dropout"], fields["attention_dropout"]) == (0.1, 0.25)


def write(tmp_path, text: str):
    path = tmp_path / "config.json"
    path.write_text(text)
    return path


def test_file_or_folder(tmp_path):
    path = write(tmp_path, json.dumps(LLAMA))
    assert read_config_file(path) == read_config_file(tmp_path) == read_config(LLAMA)


def test_folder_without_config(tmp_path):
    with pytest.raises(SpecError, match=r"holds no config\.json"):
        read_config_file(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"vocab_size": 1, "vocab_size": 2}', "'vocab_size' is given twice"),
        ("[1, 2]", "not a mapping"),
        ("3", "not a mapping"),
        ("", "at line 1"),
        ('{"a": }', "at line 1"),
        ("[" * 200_000, "nested too deeply"),
        ('{"model_type": "llama", "x": NaN}', "'x' is nan"),
        ('{"model_type": "llama", "x": [-Infinity]}', "'x' is -inf"),
        ('{"model_type": "llama", "x": 1e999}', "'x' is inf"),
        ('{"vocab_size": ' + "9" * 5000 + "}", "digits"),
    ],
)
def test_bad_files(tmp_path, text, message):
    with pytest.raises(SpecError) as caught:
        read_config_file(write(tmp_path, text))
    assert message in str(caught.value)


def test_binary_junk_and_size(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(bytes(range(256)) * 40)
    with pytest.raises(SpecError, match="not text"):
        read_config_file(path)
    path.write_bytes(b" " * 5_000_001)
    with pytest.raises(SpecError, match="larger than 5 MB"):
        read_config_file(path)


def test_code_beside_a_configuration_never_runs(tmp_path):
    marker = tmp_path / "ran"
    (tmp_path / "modeling.py").write_text(f"open({str(marker)!r}, 'w')")
    write(tmp_path, json.dumps({**LLAMA, "auto_map": {"AutoModel": "modeling.Model"}}))
    imported = read_config_file(tmp_path)
    assert not marker.exists()
    assert any("auto_map" in text for text in imported.warnings)
