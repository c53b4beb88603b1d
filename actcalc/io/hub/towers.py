"""Vision towers and projectors of configurations of several parts."""

from __future__ import annotations

from typing import Any

from actcalc.errors import SpecError
from actcalc.io.hub.family import ACTIVATIONS
from actcalc.io.hub.reading import Reading
from actcalc.io.hub.values import Values, shown

WITH_TOWERS = ("llava", "gemma3")
"""Types whose tower is read: the others' is left out."""

_SIZES = {
    "clip_vision_model": {
        "layers": 12, "hidden": 768, "heads": 12, "ffn": 3072, "patch_size": 32,
        "image_size": 224, "activation": "quick_gelu",
    },
    "siglip_vision_model": {
        "layers": 12, "hidden": 768, "heads": 12, "ffn": 3072, "patch_size": 16,
        "image_size": 224, "activation": "gelu_pytorch_tanh",
    },
}  # fmt: skip
"""What the library takes for missing keys (configuration_clip.py, configuration_siglip.py)."""
_KEYS = {
    "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads",
    "ffn": "intermediate_size",
}  # fmt: skip


QWEN = {
    "qwen2_vl": "qwen2_vl_vision",
    "qwen2_5_vl": "qwen2_5_vl_vision",
    "qwen3_vl": "qwen3_vl_vision",
    "qwen3_vl_moe": "qwen3_vl_vision",
    "qwen3_5": "qwen3_vl_vision",
    "qwen3_5_moe": "qwen3_vl_vision",
}
"""Types with a tower that takes images of any size, and whose code it runs."""
_QWEN_TOKENS = 256
"""Tokens of an image where nothing says its size: a square of 16, of 448 or 512 pixels a side."""
_QWEN_DEFAULTS: dict[str, dict[str, int]] = {
    "qwen2_vl_vision": {"depth": 32, "embed_dim": 1280, "num_heads": 16, "patch_size": 14},
    "qwen2_5_vl_vision": {
        "depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "num_heads": 16,
        "patch_size": 14, "window_size": 112,
    },
    "qwen3_vl_vision": {
        "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
        "patch_size": 16, "num_position_embeddings": 2304,
    },
}  # fmt: skip
"""What the library takes for missing keys (configuration_qwen2_vl.py and its successors)."""


def _read_qwen(reading: Reading, family: str) -> None:
    """The tower of Qwen2-VL (whose ``hidden_size`` is the language model's), 2.5, 3 or 3.5."""
    vision = reading.outer.section("vision_config")
    usual = _QWEN_DEFAULTS[family]

    def size(key: str) -> int:
        return vision.size((key,)) or usual[key]

    patch, merge = size("patch_size"), vision.size(("spatial_merge_size",)) or 2
    frames = vision.size(("temporal_patch_size",)) or 2
    channels = vision.size(("in_channels", "in_chans")) or 3
    second = family == "qwen2_vl_vision"
    hidden = size("embed_dim" if second else "hidden_size")
    tower: dict[str, Any] = {
        "family": family,
        "layers": size("depth"),
        "hidden": hidden,
        "heads": size("num_heads"),
        "ffn": hidden * (vision.size(("mlp_ratio",)) or 4) if second else size("intermediate_size"),
        "patches": channels * frames * patch * patch,
        "activation": _QWEN_ACTIVATIONS[family],
        "projector": "merger",
        "merge": merge,
        "tokens": _QWEN_TOKENS,
    }
    named = vision.text("hidden_act")
    if named is not None and ACTIVATIONS.get(named) != tower["activation"]:
        raise vision.wrong("hidden_act", "not the described tower's", "leave it out")
    if family == "qwen2_5_vl_vision":
        whole = vision.indices("fullatt_block_indexes")
        listed = whole if vision.has("fullatt_block_indexes") else {7, 15, 23, 31}
        tower |= {
            "gated": True,
            "norm": "rmsnorm",
            "window": size("window_size") // patch,
            "whole_layers": tuple(sorted(i for i in listed if i < tower["layers"])),
        }
    if family == "qwen3_vl_vision":
        deep = vision.indices("deepstack_visual_indexes")
        if not vision.has("deepstack_visual_indexes") and reading.model_type.startswith("qwen3_vl"):
            deep = frozenset((8, 16, 24))
        tower |= {"positions": size("num_position_embeddings"), "deep_layers": tuple(sorted(deep))}
    out = vision.size(("hidden_size" if second else "out_hidden_size",))
    if out is not None and out != reading.fields["hidden"]:
        raise vision.wrong(
            "hidden_size" if second else "out_hidden_size",
            f"not the language model's width {reading.fields['hidden']}", "make them equal",
        )  # fmt: skip
    reading.fields["tower"] = tower


_QWEN_ACTIVATIONS = {
    "qwen2_vl_vision": "quick_gelu", "qwen2_5_vl_vision": "silu", "qwen3_vl_vision": "gelu_tanh",
}  # fmt: skip


def _read_internvl(reading: Reading) -> None:
    """InternVL's tower, of one size of image, and the squares that its projector reads."""
    outer, vision = reading.outer, reading.outer.section("vision_config")
    side = _side(vision, "image_size", 448) // _side(vision, "patch_size", 14)
    patch = _side(vision, "patch_size", 14)
    merge = _merge(outer, "downsample_ratio", side)
    layer = outer.data.get("vision_feature_layer", -1)
    if layer != -1:
        raise outer.wrong("vision_feature_layer", "only the last layer's are described", "use -1")
    named = vision.text("hidden_act") or "gelu"
    if ACTIVATIONS.get(named) not in ("gelu", "gelu_tanh", "quick_gelu"):
        raise vision.wrong("hidden_act", "no activation of a described tower", "use gelu")
    kind = vision.text("norm_type") or "layer_norm"
    if kind not in ("layer_norm", "rms_norm"):
        raise vision.wrong("norm_type", "neither layer_norm nor rms_norm", "use one of them")
    reading.fields["tower"] = {
        "family": "internvl_vision",
        "layers": vision.size(("num_hidden_layers",)) or 24,
        "hidden": vision.size(("hidden_size",)) or 1024,
        "heads": vision.size(("num_attention_heads",)) or 16,
        "ffn": vision.size(("intermediate_size",)) or 4096,
        "patches": (vision.size(("num_channels",)) or 3) * patch * patch,
        "grid": side * side,
        "activation": ACTIVATIONS[named],
        "norm": "rmsnorm" if kind == "rms_norm" else "layernorm",
        "qkv_bias": vision.flag("attention_bias", False),
        "qk_norm": vision.flag("use_qk_norm", False),
        "layer_scale": True,
        "last_norm": not vision.flag("use_mean_pooling", True),
        "projector": "shuffled",
        "merge": merge,
        "tokens": (side // merge) ** 2,
    }


def _read_llama4(reading: Reading) -> None:
    """Llama 4's tower, of one size of image (a tile), whose class takes GELU whatever is named."""
    vision = reading.outer.section("vision_config")
    patch = _side(vision, "patch_size", 14)
    side = _side(vision, "image_size", 448) // patch
    hidden, ffn = (vision.size((key,)) or usual for key, usual in _LLAMA4_WIDTHS)
    merge = _merge(vision, "pixel_shuffle_ratio", side)
    if ffn != hidden * merge**2:
        raise vision.wrong(
            "intermediate_size", f"not the width {hidden * merge**2} of {merge}x{merge} patches, "
            "which the adapter takes it for", f"use {hidden * merge**2}",
        )  # fmt: skip
    widths = {key: vision.size((key,)) or usual for key, usual in _LLAMA4_PROJECTOR.items()}
    if len(set(widths.values())) > 1:
        raise vision.wrong(
            "vision_output_dim", f"not one width with the projector's {widths}", "make them equal"
        )
    for key in ("projector_dropout", "attention_dropout"):
        if vision.number(key, 0.0):
            raise vision.wrong(key, "a tower with dropout is not described", "use 0")
    reading.fields["tower"] = {
        "family": "llama4_vision_model",
        "layers": vision.size(("num_hidden_layers",)) or 34,
        "hidden": hidden,
        "heads": vision.size(("num_attention_heads",)) or 16,
        "ffn": ffn,
        "patches": (vision.size(("num_channels",)) or 3) * patch * patch,
        "grid": side * side,
        "activation": "gelu",
        "projector": "three",
        "projector_width": widths["vision_output_dim"],
        "merge": merge,
        "tokens": (side // merge) ** 2,
    }


_LLAMA4_WIDTHS = (("hidden_size", 768), ("intermediate_size", 5632))
_LLAMA4_PROJECTOR = {
    "vision_output_dim": 7680, "projector_input_dim": 4096, "projector_output_dim": 4096,
}  # fmt: skip
"""What the library takes for missing keys (configuration_llama4.py)."""


def _merge(values: Values, key: str, side: int) -> int:
    """The side of a square of patches that becomes one token, from the share that is left of it."""
    share = values.number(key, 0.5)
    merge = int(1 / share) if share else 0
    if merge < 1 or side % merge:
        raise values.wrong(key, f"does not divide {side} patches", "use 0.5")
    return merge


def _side(vision: Values, key: str, usual: int) -> int:
    """A side in pixels, of a square given by one number or by two."""
    found = vision.items(key) if isinstance(vision.data.get(key), list | tuple) else None
    if found is None:
        return vision.size((key,)) or usual
    if len(found) != 2 or found[0] != found[1]:
        raise vision.wrong(key, "not a square", "give one number, or two that are equal")
    return Values({key: found[0]}, vision.path).integer(key, 1, 65536)


_OWN = {"internvl": _read_internvl, "llama4": _read_llama4}
"""Types whose tower has keys of its own."""


def read_tower(reading: Reading, outer_type: str) -> bool:
    """Set the tower's fields; False where the type's tower is not one that is described."""
    outer = reading.outer
    if outer_type in QWEN and outer.has("vision_config"):
        _read_qwen(reading, QWEN[outer_type])
        return True
    if outer_type in _OWN and outer.has("vision_config"):
        _OWN[outer_type](reading)
        return True
    vision = outer.section("vision_config")
    family = vision.text("model_type") or ("siglip_vision_model" if outer_type == "gemma3" else "")
    if outer_type not in WITH_TOWERS or family not in _SIZES:
        return False
    usual = _SIZES[family]
    tower: dict[str, Any] = {"family": family}
    for name, key in _KEYS.items():
        tower[name] = vision.size((key,)) or usual[name]
    patch = vision.size(("patch_size",)) or int(str(usual["patch_size"]))
    side = (vision.size(("image_size",)) or int(str(usual["image_size"]))) // patch
    tower["patches"] = (vision.size(("num_channels",)) or 3) * patch * patch
    tower["grid"] = side * side
    name = vision.text("hidden_act") or str(usual["activation"])
    if ACTIVATIONS.get(name) not in ("quick_gelu", "gelu_tanh", "gelu"):
        raise vision.wrong("hidden_act", "no activation of a described tower", "use quick_gelu")
    tower["activation"] = ACTIVATIONS[name]
    if outer_type == "gemma3":
        tokens = outer.size(("mm_tokens_per_image",)) or 256
        tower |= {"projector": "pooled", "tokens": tokens}
    else:
        _read_llava(outer, tower)
    reading.fields["tower"] = tower
    return True


def _read_llava(outer: Values, tower: dict[str, Any]) -> None:
    """One layer's output is read, the class token's left out (modeling_llava.py)."""
    layer = outer.data.get("vision_feature_layer", -2)
    depth = tower["layers"]
    if isinstance(layer, bool) or not isinstance(layer, int) or not -depth <= layer < depth + 1:
        raise SpecError(
            f"vision_feature_layer is {shown(layer)}: only one layer's features are described",
            f"give one layer of {depth}",
        )
    whole = outer.text("vision_feature_select_strategy") == "full"
    if (tower["family"] == "clip_vision_model") == whole:
        raise SpecError(
            "vision_feature_select_strategy is not described for this tower: the class token is "
            "left out, or there is none",
            "use default with CLIP, full with SigLIP",
        )
    # Index 0 is what enters the first layer; -1 is the last layer's output.
    tower["unread"] = -1 - layer if layer < 0 else depth - layer
    tower |= {"projector": "mlp", "tokens": tower["grid"]}
