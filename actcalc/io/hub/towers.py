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


def read_tower(reading: Reading, outer_type: str) -> bool:
    """Set the tower's fields; False where the type's tower is not one that is described."""
    outer = reading.outer
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
