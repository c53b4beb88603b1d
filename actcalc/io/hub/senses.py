"""Exceptions of encoders by name: what the configuration of an encoder-decoder or a sense says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isqrt
from typing import Any

from actcalc.io.hub.family import SIZES
from actcalc.io.hub.reading import Reading
from actcalc.io.hub.values import Values
from actcalc.specs.base import MAX_LAYERS

Model = Any
"""A ``specs.Model``: specs stand above this package, which reads their fields by name."""

_MEASURE = "measure it: actcalc measure CONFIG --save layer.json"
_IMAGE_CHANNELS = 3
_PATCH = {
    "clip_vision_model": 32, "dinov2": 14,
}  # fmt: skip
"""Side of a patch that the library takes for a missing key, where that is not 16."""
_HEADLESS = {
    "vit": "ViTModel", "vit_msn": "ViTMSNModel", "deit": "DeiTModel", "ijepa": "IJepaModel",
    "dinov2": "Dinov2Model", "dinov2_with_registers": "Dinov2WithRegistersModel",
    "dinov3_vit": "DINOv3ViTModel",
}  # fmt: skip
"""The class of each type that ends after the last norm."""


def _encoder_decoder(reading: Reading) -> None:
    """Each half states its own sizes; they are described where both are the same."""
    values, fields = reading.values, reading.fields
    fields["encoder_layers"] = fields["layers"]
    fields["layers"] = values.size(("decoder_layers",), MAX_LAYERS) or fields["layers"]
    for what, name in (("attention_heads", "heads"), ("ffn_dim", "ffn")):
        key = f"decoder_{what}"
        if (values.size((key,)) or fields.get(name)) != fields.get(name):
            raise values.wrong(
                key, f"not the encoder's {fields.get(name)}: halves of one width are described",
                _MEASURE,
            )  # fmt: skip
    for key in ("encoder_layerdrop", "decoder_layerdrop"):
        if values.number(key) > 0:
            reading.warnings.append(f"{key} is ignored: every layer is counted")
    for name in reading.outer.items("architectures") or []:
        if isinstance(name, str) and not name.endswith(("ForConditionalGeneration", "Model")):
            reading.warnings.append(
                f"architectures names {name[:60]}: a language-model head is assumed"
            )


def _unread_encoder_decoder(model: Model) -> dict[str, Any]:
    return {
        "encoder_layers": model.encoder_layers,
        "decoder_layers": model.layers,
        "decoder_attention_heads": model.heads,
        "decoder_ffn_dim": model.ffn,
    }


def _whisper(reading: Reading) -> None:
    values, fields = reading.values, reading.fields
    fields["mel_bins"] = values.size(("num_mel_bins",)) or 80
    fields["decoder_positions"] = values.size(("max_target_positions",)) or 448
    if values.flag("apply_spec_augment", False):
        reading.warnings.append("apply_spec_augment: its masks of the input are not counted")


def _unread_whisper(model: Model) -> dict[str, Any]:
    return {"num_mel_bins": model.mel_bins, "max_target_positions": model.decoder_positions}


def _modernbert(reading: Reading) -> None:
    """Half of ``local_attention`` lies on each side of a token; the mask knows that half."""
    values, fields = reading.values, reading.fields
    if "window" in fields:
        fields["window"] //= 2
    if values.flag("sparse_prediction", False):
        raise values.wrong(
            "sparse_prediction", "logits of masked tokens alone are not described",
            "set it to false",
        )  # fmt: skip
    if (values.text("classifier_activation") or "gelu") != (
        values.text("hidden_activation") or "gelu"
    ):
        raise values.wrong(
            "classifier_activation", "not hidden_activation, which the head shares here",
            _MEASURE,
        )  # fmt: skip


def _deberta(reading: Reading) -> None:
    """Relative positions, in buckets where there are some; absolute ones where they are added."""
    values, fields = reading.values, reading.fields
    for key, wanted in (("relative_attention", True), ("legacy", True)):
        if values.flag(key, key == "legacy") is not wanted:
            raise values.wrong(key, f"only {str(wanted).lower()} is described", _MEASURE)
    if values.has("conv_kernel_size") and values.integer("conv_kernel_size"):
        raise values.wrong("conv_kernel_size", "a convolution beside layer 0", _MEASURE)
    if (values.size(("embedding_size",)) or fields["hidden"]) != fields["hidden"]:
        raise values.wrong("embedding_size", "an embedding narrower than hidden", _MEASURE)
    positions = reading.size("positions") or 512
    most = values.data.get("max_relative_positions", -1)
    span = most if isinstance(most, int) and most > 0 else positions
    buckets = values.data.get("position_buckets", -1)
    span = buckets if isinstance(buckets, int) and buckets > 0 else span
    named = values.data.get("pos_att_type")
    kinds = named.split("|") if isinstance(named, str) else values.items("pos_att_type") or ()
    fields["disentangled"] = {
        "span": span,
        "shared": values.flag("share_att_key", False),
        "content_to_position": "c2p" in kinds,
        "position_to_content": "p2c" in kinds,
        "normed": "layer_norm" in (values.text("norm_rel_ebd") or "none"),
    }
    fields["token_types"] = (
        values.integer("type_vocab_size") if values.has("type_vocab_size") else 0
    )
    if values.flag("position_biased_input", True):
        fields["position"], fields["max_positions"] = "learned", positions


def _unread_deberta(model: Model) -> dict[str, Any]:
    spec = model.disentangled
    if spec is None:
        return {}
    sides = {"c2p": spec.content_to_position, "p2c": spec.position_to_content}
    return {
        "relative_attention": True,
        "position_buckets": spec.span,
        "share_att_key": spec.shared,
        "pos_att_type": [name for name, on in sides.items() if on],
        "norm_rel_ebd": "layer_norm" if spec.normed else "none",
        "type_vocab_size": model.token_types,
        "position_biased_input": model.position == "learned",
    }


def _image(reading: Reading) -> None:
    """Patches of an image and the tokens before them; ``max_positions`` counts all of them."""
    values, fields = reading.values, reading.fields
    side = _pair(values, "image_size", 224)
    patch = _pair(values, "patch_size", _PATCH.get(str(fields["family"]), 16))
    channels = values.size(("num_channels",), 4096) or 3
    if side[0] % patch[0] or side[1] % patch[1]:
        raise values.wrong("patch_size", f"does not divide image_size {side[0]}", "use a divisor")
    count = (side[0] // patch[0]) * (side[1] // patch[1])
    fields["patches"] = channels * patch[0] * patch[1]
    fields["max_positions"] = count + fields.get("prefix_tokens", 1)


def _patches(reading: Reading) -> None:
    """An image, and a classifier if there are labels."""
    values, fields = reading.values, reading.fields
    _image(reading)
    named = reading.outer.items("architectures") or []
    labels = values.data.get("id2label")
    given = len(labels) if isinstance(labels, Mapping) else values.size(("num_labels",))
    headless = fields["family"] == "dinov3_vit"  # transformers has no classifier of it
    classifies = not named or any("Classification" in str(name) for name in named)
    if classifies and not headless:
        fields["head"] = "classifier"
        fields["labels"] = given or 2
    else:
        fields["head"] = "none"


def _tower_patches(reading: Reading) -> None:
    """An image whose side need not be a multiple of a patch: the rest is cut off."""
    values, fields = reading.values, reading.fields
    side = _pair(values, "image_size", 224)[0]
    patch = _pair(values, "patch_size", _PATCH.get(str(fields["family"]), 16))[0]
    fields["patches"] = (values.size(("num_channels",), 4096) or 3) * patch * patch
    fields["max_positions"] = (side // patch) ** 2 + fields.get("prefix_tokens", 1)


def _pair(values: Values, key: str, default: int) -> tuple[int, int]:
    found = values.data.get(key)
    if isinstance(found, list | tuple):
        if len(found) != 2:
            raise values.wrong(key, "not a height and a width", "give one number or two")
        pair = [Values({key: item}, values.path).integer(key, 1, 65536) for item in found]
        return pair[0], pair[1]
    one = values.integer(key, 1, 65536) if values.has(key) else default
    return one, one


def _unread_image(model: Model) -> dict[str, Any]:
    """A square image of three channels in square patches."""
    patch = isqrt(model.patches // _IMAGE_CHANNELS)
    side = isqrt(model.max_positions - model.prefix_tokens)
    return {
        "patch_size": patch,
        "image_size": patch * side,
        "num_channels": _IMAGE_CHANNELS,
        "max_position_embeddings": ...,
    }


def _unread_patches(model: Model) -> dict[str, Any]:
    config = _unread_image(model)
    if model.head == "classifier":
        return {**config, "num_labels": model.labels}
    return {**config, "architectures": [_HEADLESS[model.family]]}


def _dinov2(reading: Reading) -> None:
    """The width is a multiple of hidden; two thirds of it with a gate (Dinov2SwiGLUFFN)."""
    values, fields = reading.values, reading.fields
    wide = (values.size(("mlp_ratio",), 1024) or 4) * fields["hidden"]
    if values.flag("use_swiglu_ffn", False):
        fields["gated"], fields["activation"] = True, "silu"
        wide = (wide * 2 // 3 + 7) // 8 * 8
    fields["ffn"] = wide


def _unread_dinov2(model: Model) -> dict[str, Any]:
    wide = model.ffn * 3 // 2 if model.gated else model.ffn
    config: dict[str, Any] = {"mlp_ratio": wide // model.hidden, "use_swiglu_ffn": model.gated}
    return {**config, "intermediate_size": ...}


def _registers(reading: Reading) -> None:
    key = "num_register_tokens"
    default = 4 if reading.fields["family"] == "dinov2_with_registers" else 0
    found = reading.values.integer(key) if reading.values.has(key) else default
    reading.fields["prefix_tokens"] = 1 + found
    reading.fields["registers"] = found


def _unread_registers(model: Model) -> dict[str, Any]:
    return {"num_register_tokens": model.prefix_tokens - 1}


def _dinov3(reading: Reading) -> None:
    """Each projection has its own switch of a bias; values go with queries here."""
    values, fields = reading.values, reading.fields
    _registers(reading)
    if values.flag("value_bias", True) != fields["qkv_bias"]:
        raise values.wrong(
            "value_bias", "not that of queries: their biases are described together",
            _MEASURE,
        )  # fmt: skip
    if fields["key_bias"] and not fields["qkv_bias"]:
        raise values.wrong(
            "key_bias", "a bias that queries and values have not", "set query_bias and value_bias"
        )
    fields["key_bias"] = fields["key_bias"] or not fields["qkv_bias"]


def _unread_dinov3(model: Model) -> dict[str, Any]:
    return {
        **_unread_registers(model),
        "value_bias": model.qkv_bias,
        "key_bias": model.key_bias and model.qkv_bias,
    }


def _drop_path(reading: Reading) -> None:
    if reading.values.number("drop_path_rate") > 0:
        reading.warnings.append("drop_path_rate: its one number per image and layer is not counted")


def _siglip_pooling(reading: Reading) -> None:
    used = reading.values.flag("vision_use_head", True)
    if used:
        reading.fields["pooling"] = "attention"
    else:
        reading.fields["head"] = "none"


def _unread_siglip_pooling(model: Model) -> dict[str, Any]:
    return {"vision_use_head": model.head != "none"}


def _siglip_head(reading: Reading) -> None:
    """A projection of the pooled token follows the last norm."""
    reading.fields["labels"] = reading.values.size(("projection_size",)) or reading.fields["hidden"]


def _tower_positions(reading: Reading) -> None:
    if not reading.fields.get("max_positions"):
        siglip = reading.fields["family"] == "siglip_text_model"
        reading.fields["max_positions"] = 64 if siglip else 77
        reading.missing = [key for key in reading.missing if key != SIZES["positions"][0]]


SENSES: dict[str, Callable[[Reading], None]] = {
    "encoder_decoder": _encoder_decoder,
    "whisper": _whisper,
    "modernbert": _modernbert,
    "deberta": _deberta,
    "patches": _patches,
    "tower_patches": _tower_patches,
    "dinov2": _dinov2,
    "registers": _registers,
    "dinov3": _dinov3,
    "drop_path": _drop_path,
    "siglip_pooling": _siglip_pooling,
    "siglip_head": _siglip_head,
    "tower_positions": _tower_positions,
}
"""Exceptions by name (``adjust.ADJUST``)."""

UNADJUST_SENSES: dict[str, Callable[[Model], dict[str, Any]]] = {
    "encoder_decoder": _unread_encoder_decoder,
    "whisper": _unread_whisper,
    "deberta": _unread_deberta,
    "modernbert": lambda model: {
        "local_attention": 2 * model.window,
        "classifier_activation": model.activation,
    },
    "patches": _unread_patches,
    "tower_patches": _unread_image,
    "dinov2": _unread_dinov2,
    "registers": _unread_registers,
    "dinov3": _unread_dinov3,
    "siglip_pooling": _unread_siglip_pooling,
    "siglip_head": lambda model: {"projection_size": model.labels},
}
"""Their inverses (``write.UNADJUST``)."""
