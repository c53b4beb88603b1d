"""Configurations that are measured in part, by another class, or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from actcalc.errors import SpecError
from actcalc.measure import measure_transformers

pytest.importorskip("torch", reason="needs actcalc[torch]")
transformers = pytest.importorskip("transformers", reason="needs actcalc[torch]")

LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 99}


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"hidden_size": 64}, {}, "no model_type"),
        ({"model_type": "no-such-model"}, {}, "does not know model_type 'no-such-model'"),
        ({**LLAMA, "num_attention_heads": 7}, {}, "llama|Llama"),
        (LLAMA, {"attention": "magic"}, "unknown attention 'magic'"),
        (LLAMA, {"dtype": "fp8"}, "unknown dtype 'fp8'"),
        (LLAMA, {"batch": 0}, "batch is 0"),
        (LLAMA, {"seq": -1}, "seq is -1"),
        (LLAMA, {"layers": 0}, "layers is 0"),
        (LLAMA, {"cls": "LlamaForEverything"}, "no class 'LlamaForEverything'"),
        ({"model_type": "bloom", "n_layer": 2}, {"attention": "sdpa"}, "does not support"),
        ({"model_type": "convnext"}, {}, "reads a tensor's values"),
        ({"model_type": "funnel"}, {"layers": 2}, "not one number"),
        ({"model_type": "musicgen"}, {}, "several text models"),
        ({"model_type": "segformer"}, {}, "no image_size"),
        ({"model_type": "resnet"}, {"layers": 2}, "no number of layers"),
        ({"model_type": "xlnet", "n_layer": 2}, {}, "XLNetLMHeadModel failed with RuntimeError"),
        ("no/such/folder", {}, "cannot read no/such/folder"),
    ],
)
def test_refused(config, options, message):
    with pytest.raises(SpecError, match=message) as caught:
        measure_transformers(config, **{"seq": 16, **options})
    assert caught.value.hint
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[]", "3"])
def test_bad_file(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError, match=r"config\.json"):
        measure_transformers(path)


def test_folder_and_mapping_agree(tmp_path):
    remote = {"auto_map": {"AutoModelForCausalLM": "evil.Code"}, "dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | remote), encoding="utf-8")
    assert measure_transformers(tmp_path, seq=16) == measure_transformers(LLAMA, seq=16)


def test_transformers_chooses_the_attention():
    assert measure_transformers({"model_type": "bloom", "n_layer": 2}, seq=16).attention == "eager"
    assert measure_transformers(LLAMA, seq=16).attention == "sdpa"


def test_text_part_of_a_multimodal_model():
    config = {"model_type": "gemma3", "text_config": {"num_hidden_layers": 2}}
    result = measure_transformers(config, seq=16)
    assert result.n_layers == 2
    assert any("text model" in note for note in result.notes)


def test_state_space_layers_are_noted():
    config = {"model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 64}
    notes = measure_transformers(config, seq=8).notes
    assert any("mamba-ssm" in note for note in notes)
    assert measure_transformers(LLAMA, seq=16).notes == ()


def test_encoder_decoder_counts_both_stacks():
    config = {"model_type": "t5", "num_layers": 2, "num_decoder_layers": 3}
    result = measure_transformers(config, seq=32)
    assert result.n_layers == 5
    assert result.between_bytes > 0
    parts = (result.embedding_bytes, result.between_bytes, result.head_bytes)
    assert sum(parts) + sum(result.layers_bytes) == result.total_bytes


def test_a_real_padding_mask_takes_flash_away():
    config = {**LLAMA, "num_attention_heads": 4}
    free = measure_transformers(config, seq=16, batch=2)
    masked = measure_transformers(config, seq=16, batch=2, padding_mask=True)
    assert set(free.attention_kernels) == {"flash"}
    assert set(masked.attention_kernels) == {"efficient"}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_latent_attention_has_a_key_for_each_head(attention):
    """Its class's default of key/value heads is that of DeepSeek-V3, whatever the heads."""
    config = {
        "model_type": "deepseek_v3", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96,
        "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8,
    }  # fmt: skip
    measured = measure_transformers(config, seq=32, attention=attention, flops=True)
    assert measured.flops is not None
    assert measured.flops.backward_flops > measured.flops.forward_flops > 0


LLAMA4_TOWER = {
    "model_type": "llama4_vision_model",
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "image_size": 112,
    "patch_size": 14,
    "vision_output_dim": 128,
    "projector_input_dim": 128,
    "projector_output_dim": 128,
    "pixel_shuffle_ratio": 0.5,
}


def test_a_tower_that_no_row_describes_is_measured_and_its_layer_compared(cli, tmp_path):
    """Llama 4's vision tower, which reads images though its class does not name them first."""
    path, layer = tmp_path / "tower.json", tmp_path / "layer.json"
    path.write_text(json.dumps(LLAMA4_TOWER), encoding="utf-8")
    found = cli("measure", path, "--micro-batch", 2, "--save", layer, "--json").json
    assert found["model_class"] == "Llama4VisionModel"
    assert [group["count"] for group in found["layers"]] == [3]
    rows = cli("compare", layer, "--json").json["policies"]
    assert rows[0]["stored_bytes_per_layer"] == found["layers"][0]["measured_bytes"]


@pytest.mark.sweep
def test_llama_4_is_measured_with_images_as_predicted(cli, tmp_path):
    """Its class fails by itself: it hands on what its language model's output has not."""
    traced = Path(__file__).parent.parent / "data" / "towers_traced.json"
    models = {model["name"]: model for model in json.loads(traced.read_text())["models"]}
    path = tmp_path / "llama4.json"
    path.write_text(json.dumps(models["llama4"]["config"]), encoding="utf-8")
    words = ("measure", path, "--seq", 96, "--image-tokens", 8, "--check")
    found = cli(*words, "--json")
    assert found.code == 0
    assert found.json["model_class"] == "Llama4ForConditionalGeneration"
