"""Model types with an encoder that `families` does not hold: sequence to sequence, and senses."""

from __future__ import annotations

from dataclasses import replace

from actcalc.io.hub.family import NO_GROUPS, RATE, Family, code_of, more

BERT = Family(
    code=code_of("bert"),
    facts={
        "position": "learned",
        "embedding_norm": True,
        "norm_placement": "post",
        "final_norm": False,
        "causal": False,
        "head": "mlm",
        "head_bias": True,
    },
    keys=NO_GROUPS,
    rates={
        "hidden_dropout": (("hidden_dropout_prob",), 0.1),
        "attention_dropout": (("attention_probs_dropout_prob",), 0.1),
        "embedding_dropout": (("hidden_dropout_prob",), 0.1),
    },
    activation=("hidden_act", "gelu"),
    tied=True,
    windows="none",
    defaults={"positions": 512},
    adjust=("token_types", "encoder_head"),
)
PRE_NORM_BERT = replace(
    BERT, code=code_of("roberta_prelayernorm"),
    facts={**BERT.facts, "norm_placement": "pre", "final_norm": True},
)  # fmt: skip
_UNNORMED = {**PRE_NORM_BERT.facts, "embedding_norm": False}
BART = Family(
    code=code_of("bart"),
    facts={
        "position": "learned",
        "embedding_norm": True,
        "norm_placement": "post",
        "final_norm": False,
    },
    keys={
        **NO_GROUPS,
        "layers": ("encoder_layers",),
        "heads": ("encoder_attention_heads",),
        "ffn": ("encoder_ffn_dim",),
    },
    rates={
        "hidden_dropout": (("dropout",), 0.1),
        "attention_dropout": (("attention_dropout",), 0.0),
        "embedding_dropout": (("dropout",), 0.1),
        "activation_dropout": (("activation_dropout",), 0.0),
    },
    activation=("activation_function", "gelu"),
    tied=True,
    windows="none",
    defaults={"positions": 1024},
    adjust=("two_more_positions", "encoder_decoder"),
)
MBART = replace(
    BART,
    code=code_of("mbart"),
    facts={**BART.facts, "norm_placement": "pre", "final_norm": True},
)
WHISPER = replace(
    BART,
    code=code_of("whisper"),
    facts={"position": "learned", "key_bias": False},
    keys={**BART.keys, "positions": ("max_source_positions",)},
    rates={name: (keys, 0.0) for name, (keys, _) in BART.rates.items()},
    defaults={"positions": 1500},
    adjust=("encoder_decoder", "whisper"),
)

MODERNBERT = Family(
    code=code_of("modernbert"),
    facts={
        "position": "rotary",
        "embedding_norm": True,
        "first_norm": False,
        "causal": False,
        "gated": True,
        "packed_gate": True,
        "packed_qkv": True,
        "head": "mlm",
    },
    keys=NO_GROUPS,
    flags={
        "norm_bias": ("norm_bias", False),
        "qkv_bias": ("attention_bias", False),
        "out_bias": ("attention_bias", False),
        "mlp_bias": ("mlp_bias", False),
        "head_bias": ("decoder_bias", True),
        "transform_bias": ("classifier_bias", False),
    },
    rates={
        "attention_dropout": (("attention_dropout",), 0.0),
        "embedding_dropout": (("embedding_dropout",), 0.0),
        "activation_dropout": (("mlp_dropout",), 0.0),
    },
    activation=("hidden_activation", "gelu"),
    tied=True,
    windows="global_every_3",
    window_keys=("local_attention",),
    window_default=128,
    adjust=("encoder_head", "modernbert"),
)
DEBERTA_V2 = more(
    BERT,
    code_of("deberta_v2"),
    facts={"position": "none"},
    eager=True,
    adjust=("encoder_head", "deberta"),
)
VIT = Family(
    code=code_of("vit"),
    facts={"position": "learned", "causal": False, "tied": False},
    keys=NO_GROUPS,
    flags={"qkv_bias": ("qkv_bias", True)},
    rates={
        "hidden_dropout": (("hidden_dropout_prob",), 0.0),
        "attention_dropout": (("attention_probs_dropout_prob",), 0.0),
        "embedding_dropout": (("hidden_dropout_prob",), 0.0),
    },
    activation=("hidden_act", "gelu"),
    windows="none",
    vision=True,
    adjust=("patches",),
)
DINOV2 = replace(
    VIT,
    code=code_of("dinov2"),
    facts={**VIT.facts, "layer_scale": True, "pooling": "first_and_mean"},
    flags={"qkv_bias": ("qkv_bias", True), "mask_token": ("use_mask_token", True)},
    adjust=("dinov2", "patches", "drop_path"),
)
DINOV3 = replace(
    VIT,
    code=code_of("dinov3_vit"),
    facts={**VIT.facts, "position": "rotary", "layer_scale": True, "mask_token": True},
    flags={
        "qkv_bias": ("query_bias", True),
        "key_bias": ("key_bias", False),
        "out_bias": ("proj_bias", True),
        "mlp_bias": ("mlp_bias", True),
        "gated": ("use_gated_mlp", False),
    },
    rates={"attention_dropout": (("attention_dropout",), 0.0)},
    adjust=("dinov3", "patches", "drop_path"),
)
_TOWER_SIZES = {"hidden": 768, "ffn": 3072, "layers": 12, "heads": 12}
CLIP_VISION = replace(
    VIT,
    code=code_of("clip"),
    facts={
        **VIT.facts, "embedding_norm": True, "patch_bias": False, "head": "pooled",
        "pooled_norm": True,
    },
    flags={},
    rates=RATE,
    activation=("hidden_act", "quick_gelu"),
    defaults=_TOWER_SIZES,
    adjust=("tower_patches",),
)  # fmt: skip
SIGLIP_VISION = replace(
    CLIP_VISION,
    code=code_of("siglip"),
    facts={**VIT.facts, "prefix_tokens": 0, "head": "pooled"},
    activation=("hidden_act", "gelu_pytorch_tanh"),
    adjust=("tower_patches", "siglip_pooling"),
)
CLIP_TEXT = Family(
    code=code_of("clip"),
    facts={"position": "learned", "head": "pooled", "pooling": "picked", "tied": False},
    keys=NO_GROUPS,
    rates=RATE,
    activation=("hidden_act", "quick_gelu"),
    windows="none",
    defaults={"hidden": 512, "ffn": 2048, "layers": 12, "heads": 8, "vocab": 49408},
    adjust=("tower_positions",),
)
SIGLIP_TEXT = replace(
    CLIP_TEXT,
    code=code_of("siglip"),
    facts={**CLIP_TEXT.facts, "causal": False, "pooling": "last"},
    activation=("hidden_act", "gelu_pytorch_tanh"),
    defaults={**_TOWER_SIZES, "vocab": 32000},
    adjust=("tower_positions", "siglip_head"),
)

ENCODERS: dict[str, Family] = {
    "roberta-prelayernorm": PRE_NORM_BERT,
    "megatron-bert": replace(BERT, code=code_of("megatron_bert"), facts=_UNNORMED, eager=True),
    "xlm-roberta-xl": replace(BERT, code=code_of("xlm_roberta_xl"), facts=_UNNORMED),
    "bart": BART,
    "mbart": MBART,
    "plbart": replace(BART, code=code_of("plbart")),
    "blenderbot": replace(
        MBART, code=code_of("blenderbot"), facts={**MBART.facts, "embedding_norm": False},
        defaults={"positions": 128}, adjust=("encoder_decoder",),
    ),
    "whisper": WHISPER,
    "modernbert": MODERNBERT,
    "deberta-v2": DEBERTA_V2,
    "vit": VIT,
    "vit_msn": replace(VIT, code=code_of("vit_msn")),
    "deit": replace(
        VIT, code=code_of("deit"), facts={**VIT.facts, "prefix_tokens": 2},
    ),
    "ijepa": replace(
        VIT, code=code_of("ijepa"), facts={**VIT.facts, "prefix_tokens": 0, "pooling": "mean"},
    ),
    "dinov2": DINOV2,
    "dinov2_with_registers": replace(
        DINOV2, code=code_of("dinov2_with_registers"),
        adjust=("dinov2", "registers", "patches", "drop_path"),
    ),
    "dinov3_vit": DINOV3,
    "clip_vision_model": CLIP_VISION,
    "clip_text_model": CLIP_TEXT,
    "siglip_vision_model": SIGLIP_VISION,
    "siglip_text_model": SIGLIP_TEXT,
}  # fmt: skip
"""Rows of the table of model types (``families.FAMILIES``)."""
