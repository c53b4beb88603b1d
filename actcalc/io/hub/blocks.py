"""Types whose layers differ in size: how each spells the sizes of its layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from actcalc.io.hub.reading import Reading
from actcalc.io.hub.values import Values

_MULTIPLE = 256
"""Feed-forward widths are rounded up to a multiple of it (modeling_decilm.py)."""


def _mimo_v2(reading: Reading) -> None:
    """Windowed layers have twice the key/value heads, or what ``swa_`` keys say.

    Which layers have sinks is told by the checkpoint's own code alone.
    """
    values, fields = reading.values, reading.fields
    width = values.size(("v_head_dim",)) or 128
    if width != fields["head_dim"]:
        fields["value_dim"] = width
    scale = values.data.get("attention_value_scale", 0.707)
    fields["values_scaled"] = scale not in (None, 1)
    own = {
        "heads": values.size(("swa_num_attention_heads",)) or fields["heads"],
        "kv_heads": values.size(("swa_num_key_value_heads",)) or 2 * fields["kv_heads"],
        "head_dim": values.size(("swa_head_dim",)) or fields["head_dim"],
    }
    if (values.size(("swa_v_head_dim",)) or width) != width:
        raise values.wrong("swa_v_head_dim", f"not v_head_dim {width}", "make them equal")
    own = {name: size for name, size in own.items() if size != fields[name]}
    kinds = fields.get("attention_pattern") or ("sliding" if fields.get("window") else "full",)
    kinds = kinds if len(kinds) > 1 else kinds * reading.layers
    if own and "sliding" in kinds:
        fields["layer_sizes"] = tuple(own if kind == "sliding" else {} for kind in kinds)
    key = "sliding_window_size"
    if values.has(key) and fields.get("window"):
        # The query itself is not among the tokens that this key counts.
        fields["window"] = values.integer(key, 1) + 1
    if values.flag("add_full_attention_sink_bias", False):
        fields["sinks_in"] = "every"
    if not values.flag("add_swa_attention_sink_bias", True):
        fields["attention_sinks"] = False
        fields["sinks_in"] = "every"


def _blocks(reading: Reading) -> None:
    """Nemotron-NAS: attention with a number of heads a group, or none; a feed-forward of some
    width, or none."""
    values, fields = reading.values, reading.fields
    listed = values.items("block_configs", reading.layers)
    if listed is None:
        reading.missing.append("block_configs")
        return
    hidden, heads = fields["hidden"], fields["heads"]
    words, kinds, sizes = [], [], []
    for index, block in enumerate(listed):
        whole = Values({"block": block}, f"block_configs[{index}]").section("block")
        attention, ffn = whole.section("attention"), whole.section("ffn")
        for part in (attention, ffn):
            _refuse_odd(part)
        here: dict[str, int] = {}
        words.append("none" if attention.flag("no_op", False) else "full")
        if words[-1] == "full":
            group = attention.integer("n_heads_in_group", 1)
            if heads % group:
                raise attention.wrong("n_heads_in_group", f"does not divide {heads} heads", "do")
            here["kv_heads"] = heads // group
        kinds.append("none" if ffn.flag("no_op", False) else "dense")
        if kinds[-1] == "dense":
            wide = int(2 * ffn.number("ffn_mult") * hidden / 3)
            if not wide:
                raise ffn.wrong("ffn_mult", "not above 0", "give each feed-forward its width")
            here["ffn"] = -(-wide // _MULTIPLE) * _MULTIPLE
        sizes.append(here)
    _settle(fields, words, kinds, sizes)


def _refuse_odd(part: Values) -> None:
    """Raise ``SpecError`` for a block that is neither attention nor a feed-forward."""
    for key in ("replace_with_linear", "sparsify", "window_length", "num_sink_tokens", "mamba",
                "llama4", "moe"):  # fmt: skip
        if part.data.get(key) not in (None, False, 0):
            raise part.wrong(key, "no block of this kind is described", "leave it out")


def _settle(
    fields: dict[str, Any], words: list[str], kinds: list[str], sizes: list[dict[str, int]]
) -> None:
    """The most frequent sizes become the model's; each layer keeps what differs from them."""
    for name, usual in (("kv_heads", fields["heads"]), ("ffn", 4 * fields["hidden"])):
        given = [here[name] for here in sizes if name in here]
        fields[name] = max(given, key=given.count) if given else usual
        for here in sizes:
            if here.get(name) == fields[name]:
                del here[name]
    if "none" in words:
        fields["attention_pattern"] = tuple(words)
    if "none" in kinds:
        fields["mlp_pattern"] = tuple(kinds)
    if any(sizes):
        fields["layer_sizes"] = tuple(sizes)


def _kv_heads_per_layer(reading: Reading) -> None:
    """DeciLM-7B: each layer has its own number of key/value heads."""
    values, fields = reading.values, reading.fields
    key = "num_key_value_heads_per_layer"
    listed = values.items(key, reading.layers)
    if listed is None:
        reading.missing.append(key)
        return
    sizes = [{"kv_heads": Values({key: entry}, values.path).integer(key, 1)} for entry in listed]
    _settle(fields, [], [], sizes)


BLOCKS: dict[str, Callable[[Reading], None]] = {
    "mimo_v2": _mimo_v2,
    "blocks": _blocks,
    "kv_heads_per_layer": _kv_heads_per_layer,
}
"""Rules by the names that ``families.py`` gives them."""
