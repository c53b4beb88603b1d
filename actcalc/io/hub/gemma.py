"""What Gemma 3n and Gemma 4 say of their layers, and the inverse.

Read as their configuration classes do (transformers 5.24, configuration_gemma3n.py and
configuration_gemma4.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from actcalc.io.hub.reading import Reading
from actcalc.specs.base import MAX_LAYERS

Model = Any
"""A ``specs.Model``: specs stand above this package, which reads their fields by name."""


def _kinds(reading: Reading) -> tuple[str, ...]:
    kinds = reading.fields.get("attention_pattern")
    usual = "sliding" if reading.fields.get("window") else "full"
    return tuple(kinds) if kinds else (usual,) * reading.layers


def _settle(reading: Reading, sizes: list[dict[str, int]]) -> None:
    """Add each layer's ``sizes`` to those that it has already, but for those that are usual."""
    known: tuple[dict[str, int], ...] = reading.fields.get("layer_sizes") or ({},) * reading.layers
    merged = tuple(
        {**old, **{name: size for name, size in new.items() if size != reading.fields[name]}}
        for old, new in zip(known, sizes, strict=True)
    )
    if any(merged):
        reading.fields["layer_sizes"] = merged


def _softcap_30(reading: Reading) -> None:
    """Gemma 3n caps its logits at 30 by default; null turns the cap off."""
    key = "final_logit_softcapping"
    off = reading.values.named(key) and not reading.values.has(key)
    reading.fields["logit_softcap"] = 0.0 if off else reading.values.number(key, 30.0)


def _gemma4(reading: Reading) -> None:
    """Layers without a window have wider heads, fewer of them for keys, which may serve as values;
    the last layer never has a window."""
    values, fields = reading.values, reading.fields
    seen = values.text("use_bidirectional_attention")
    if seen not in (None, "vision"):
        raise values.wrong(
            "use_bidirectional_attention", "an encoder of this type is not described",
            "leave it out",
        )  # fmt: skip
    if not values.flag("enable_moe_block", False):
        fields.pop("moe", None)
    kinds = _kinds(reading)
    if kinds[-1] != "full":
        kinds = (*kinds[:-1], "full")
        fields["attention_pattern"] = kinds
    serve = values.flag("attention_k_eq_v", False)
    fields["keys_as_values"] = serve
    _settle(reading, _own_sizes(reading, kinds))


def _own_sizes(reading: Reading, kinds: tuple[str, ...]) -> list[dict[str, int]]:
    """Sizes of layers without a window: listed by number (``per_layer_config``), or the same for
    all of them."""
    values, names = reading.values, {"head_dim": "head_dim", "num_key_value_heads": "kv_heads"}
    if not values.has("per_layer_config"):
        own = {"head_dim": values.size(("global_head_dim",)) or 512}
        if reading.fields["keys_as_values"] and values.has("num_global_key_value_heads"):
            own["kv_heads"] = values.integer("num_global_key_value_heads", 1)
        return [own if kind == "full" else {} for kind in kinds]
    listed = values.section("per_layer_config")
    sizes: list[dict[str, int]] = [{} for _ in kinds]
    for index in listed.data:
        here = listed.section(index)
        if not index.isdecimal() or int(index) >= len(kinds) or set(here.data) - set(names):
            raise values.wrong(
                "per_layer_config", "not head_dim and num_key_value_heads by number of layer",
                "give global_head_dim",
            )  # fmt: skip
        sizes[int(index)] = {name: here.integer(key, 1) for key, name in names.items()
                             if here.has(key)}  # fmt: skip
    return sizes


def _shared_keys(reading: Reading) -> None:
    """``num_kv_shared_layers``; layers that share may have a feed-forward twice as wide."""
    values, fields = reading.values, reading.fields
    key = "num_kv_shared_layers"
    default = 15 if reading.family.code.endswith("gemma3n.py") else 0
    shared = values.integer(key, 0, MAX_LAYERS) if values.has(key) else default
    fields["kv_shared_layers"] = shared
    if values.flag("use_double_wide_mlp", False):
        first = reading.layers - shared
        wide = {"ffn": 2 * fields["ffn"]}
        _settle(reading, [wide if i >= first else {} for i in range(reading.layers)])


def _per_layer(reading: Reading) -> None:
    """An embedding of 256 by default in either type; 0 for none."""
    values = reading.values
    key, table = "hidden_size_per_layer_input", "vocab_size_per_layer_input"
    dim = values.integer(key) if values.has(key) else 256
    if dim:
        vocab = values.size((table,)) or 262144
        reading.fields["per_layer"] = {"dim": dim, "vocab": vocab}


def _gemma3n(reading: Reading) -> None:
    """Streams, one width of the feed-forward or one for each layer, and sparse layers."""
    values, fields = reading.values, reading.fields
    key = "intermediate_size"
    if isinstance(values.data.get(key), list):
        listed = values.items(key, reading.layers) or []
        widths = [type(values)({key: each}, values.path).integer(key, 1) for each in listed]
        fields["ffn"] = max(widths, key=widths.count)
        _settle(reading, [{"ffn": width} for width in widths])
    else:
        fields["ffn"] = values.size((key,)) or 16384
    if (values.integer("altup_active_idx") if values.has("altup_active_idx") else 0) != 0:
        raise values.wrong("altup_active_idx", "layers work on the first stream", "give 0")
    fields["streams"] = values.size(("altup_num_inputs",)) or 4
    fields["altup"] = {
        "laurel": values.size(("laurel_rank",)) or 64,
        "scaled": values.flag("altup_correct_scale", True),
        "clipped": values.has("altup_coef_clip") or not values.named("altup_coef_clip"),
    }
    fields["sparse_layers"] = _sparse(reading)


def _sparse(reading: Reading) -> tuple[int, ...]:
    """The first ten layers of more than ten, or those with a share in the listed pattern."""
    key = "activation_sparsity_pattern"
    listed = reading.values.items(key, reading.layers) if reading.values.has(key) else None
    if listed is None:
        return tuple(range(10)) if reading.layers > 10 else ()
    if any(isinstance(share, bool) or not isinstance(share, int | float) for share in listed):
        raise reading.values.wrong(key, "not a share for each layer", "e.g. [0.95, 0.0]")
    return tuple(i for i, share in enumerate(listed) if share > 0)


GEMMAS: dict[str, Callable[[Reading], None]] = {
    "softcap_30": _softcap_30,
    "gemma4": _gemma4,
    "shared_keys": _shared_keys,
    "per_layer": _per_layer,
    "gemma3n": _gemma3n,
}
"""Exceptions by name (``adjust.ADJUST``)."""


def _unread_gemma4(model: Model) -> dict[str, Any]:
    full = next((i for i in range(model.layers) if model.kind(i).attention == "full"), 0)
    own = model.of_kind(model.kind(full))
    return {
        "global_head_dim": own.head_dim,
        "attention_k_eq_v": model.keys_as_values,
        "num_global_key_value_heads": own.kv_heads if model.keys_as_values else None,
        "enable_moe_block": model.moe is not None,
        "use_double_wide_mlp": any(each.ffn for each in model.layer_sizes),
    }


def _unread_per_layer(model: Model) -> dict[str, Any]:
    spec = model.per_layer
    if spec is None:
        return {"hidden_size_per_layer_input": 0}
    return {
        "hidden_size_per_layer_input": spec.dim,
        "vocab_size_per_layer_input": spec.vocab,
    }


def _unread_gemma3n(model: Model) -> dict[str, Any]:
    spec = model.altup
    if spec is None:
        return {}
    widths = [each.ffn or model.ffn for each in model.layer_sizes] or [model.ffn] * model.layers
    return {
        "intermediate_size": widths,
        "altup_num_inputs": model.streams,
        "laurel_rank": spec.laurel,
        "altup_correct_scale": spec.scaled,
        "altup_coef_clip": 120.0 if spec.clipped else None,
        "activation_sparsity_pattern": [
            0.95 if i in model.sparse_layers else 0.0 for i in range(model.layers)
        ],
    }


UNADJUST_GEMMAS: dict[str, Callable[[Model], dict[str, Any]]] = {
    "softcap_30": lambda model: {"final_logit_softcapping": model.logit_softcap or None},
    "gemma4": _unread_gemma4,
    "shared_keys": lambda model: {"num_kv_shared_layers": model.kv_shared_layers},
    "per_layer": _unread_per_layer,
    "gemma3n": _unread_gemma3n,
}
"""Their inverses (``write.UNADJUST``)."""
