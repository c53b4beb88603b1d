"""Which layers are windowed, which have experts, which have no rotary position.

Each rule is that of the type's configuration class or decoder layer in transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Callable

from actcalc.errors import SpecError
from actcalc.io.hub.family import Experts, Family
from actcalc.io.hub.values import Values

Kinds = tuple[str, ...]

_KINDS = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
}
WINDOWED = ("sliding", "chunked", "sparse", "compressed")


def window_of(family: Family, values: Values) -> int:
    """Window in tokens: the configuration's, or the library's default for a missing key."""
    key = values.first(family.window_keys)
    if key is not None:
        return values.integer(key, 0)
    if any(values.named(key) for key in family.window_keys):
        return 0
    return family.window_default


def _every(values: Values, layers: int, period: int) -> Kinds:
    """All sliding but every ``period``-th layer."""
    return tuple("full" if (i + 1) % period == 0 else "sliding" for i in range(layers))


def _letters(values: Values, layers: int, pattern: str) -> Kinds:
    """A pattern written in letters, L for sliding and G for full, repeated (EXAONE 4)."""
    if not pattern or set(pattern) - {"L", "G"} or len(pattern) > 1000:
        raise values.wrong(
            "sliding_window_pattern", "neither a number nor letters L and G", "write e.g. LLLG"
        )
    return tuple("sliding" if pattern[i % len(pattern)] == "L" else "full" for i in range(layers))


def _every_by_default(period: int) -> Callable[[Values, int], Kinds]:
    def rule(values: Values, layers: int) -> Kinds:
        key = "sliding_window_pattern"
        if isinstance(values.data.get(key), str):
            return _letters(values, layers, str(values.data[key]))
        return _every(values, layers, values.size((key,)) or period)

    return rule


def _uniform(values: Values, layers: int) -> Kinds:
    return ("sliding",) * layers


def _none(values: Values, layers: int) -> Kinds:
    return ()


def _full_every_4(values: Values, layers: int) -> Kinds:
    return tuple("full" if i % 4 == 0 else "sliding" for i in range(layers))


def _global_every_3(values: Values, layers: int) -> Kinds:
    every = values.size(("global_attn_every_n_layers",)) or 3
    return tuple("sliding" if i % every else "full" for i in range(layers))


def _upper(values: Values, layers: int, default: int) -> Kinds:
    first = values.integer("max_window_layers") if values.has("max_window_layers") else default
    return tuple("sliding" if i >= first else "full" for i in range(layers))


def _qwen_upper(values: Values, layers: int) -> Kinds:
    return _upper(values, layers, 28) if values.flag("use_sliding_window", False) else ()


def _qwen_upper_always(values: Values, layers: int) -> Kinds:
    return _upper(values, layers, 62)


def _qwen_even(values: Values, layers: int) -> Kinds:
    if not values.flag("use_sliding_window", False):
        return ()
    last = values.integer("max_window_layers") if values.has("max_window_layers") else 28
    return tuple("sliding" if i % 2 == 0 and i < last else "full" for i in range(layers))


def _qwen_all(values: Values, layers: int) -> Kinds:
    return ("sliding",) * layers if values.flag("use_sliding_window", False) else ()


def _smollm3(values: Values, layers: int) -> Kinds:
    if not values.flag("use_sliding_window", False):
        return ()
    still = _unrotated_every_4(values, layers, ())
    return tuple("sliding" if i in still else "full" for i in range(layers))


def _llama4(values: Values, layers: int) -> Kinds:
    still = _unrotated_every_4(values, layers, ())
    return tuple("full" if i in still else "chunked" for i in range(layers))


def _mimo_v2(values: Values, layers: int) -> Kinds:
    """The checkpoint's code marks windowed layers by 1; else the first and every sixth are full."""
    key = "hybrid_layer_pattern"
    listed = values.items(key, layers) if values.has(key) else None
    if listed is None:
        return tuple("full" if i == 0 or (i + 1) % 6 == 0 else "sliding" for i in range(layers))
    if any(entry not in (0, 1) for entry in listed):
        raise values.wrong(key, "not entries of 0 or 1", "give one per layer")
    return tuple("sliding" if entry else "full" for entry in listed)


_RATES = {0: "sliding", 4: "sparse", 128: "compressed"}
"""Kinds by the tokens of a compressed key (configuration_deepseek_v4.py)."""


def _compressed(values: Values, layers: int) -> Kinds:
    """``compress_ratios`` of at least as many layers; else two of many tokens, then by turns."""
    key = "compress_ratios"
    listed = values.items(key)
    if listed is None:
        turns = tuple("sparse" if i % 2 else "compressed" for i in range(max(layers - 2, 0)))
        return (*("compressed",) * min(layers, 2), *turns)
    if len(listed) < layers or any(entry not in _RATES for entry in listed):
        raise values.wrong(key, f"not {layers} entries of 0, 4 or 128", "give one per layer")
    return tuple(_RATES[entry] for entry in listed[:layers])


def _gpt_neo(values: Values, layers: int) -> Kinds:
    """``[[["global", "local"], 12]]``: groups of layer kinds, each repeated."""
    key = "attention_types"
    wrong = values.wrong(key, "not groups of layer kinds", 'write [[["global", "local"], 12]]')
    listed = values.items("attention_layers")
    if listed is None:
        listed = []
        for group in values.items(key) or [[["global", "local"], layers // 2]]:
            if not (isinstance(group, list | tuple) and len(group) == 2):
                raise wrong
            kinds, count = group
            if not isinstance(kinds, list) or isinstance(count, bool):
                raise wrong
            if not isinstance(count, int) or not 0 <= count * len(kinds) <= layers:
                raise wrong
            listed += kinds * count
    if len(listed) != layers:
        raise SpecError(
            f"{values.label(key)} describes {len(listed)} layers, there are {layers}",
            "give one kind per layer",
        )
    if any(kind not in ("global", "local") for kind in listed):
        raise wrong
    return tuple("sliding" if kind == "local" else "full" for kind in listed)


def _linear(values: Values, layers: int) -> Kinds:
    """Linear attention, full in every fourth (``full_attention_interval``-th) layer."""
    interval = values.size(("full_attention_interval",)) or 4
    return tuple("linear" if (i + 1) % interval else "full" for i in range(layers))


def _linear_and_last(values: Values, layers: int) -> Kinds:
    """Linear attention, full in every fourth layer and at least in the last (OLMo Hybrid)."""
    kinds = _linear(Values({}), layers)
    return kinds if "full" in kinds else (*kinds[:-1], "full")


def _kimi(values: Values, layers: int) -> Kinds:
    """``linear_attn_config`` numbers both kinds of layer from 1; else every fourth is full."""
    section = values.section("linear_attn_config")
    full, delta = section.indices("full_attn_layers"), section.indices("kda_layers")
    if not section.has("full_attn_layers") or not section.has("kda_layers"):
        return tuple("full" if i and i % 4 == 0 else "linear" for i in range(layers))
    if full & delta or full | delta != frozenset(range(1, layers + 1)):
        raise section.wrong(
            "kda_layers",
            f"with full_attn_layers not each of {layers} layers once",
            "number every layer from 1, in one of the two",
        )
    return tuple("full" if i + 1 in full else "linear" for i in range(layers))


def _jamba(values: Values, layers: int) -> Kinds:
    period = values.size(("attn_layer_period",)) or 8
    offset = values.integer("attn_layer_offset") if values.has("attn_layer_offset") else 4
    return tuple("full" if i % period == offset else "mamba" for i in range(layers))


def _bamba(values: Values, layers: int) -> Kinds:
    attention = values.indices("attn_layer_indices")
    return tuple("full" if i in attention else "mamba" for i in range(layers))


def _indexed_attention(values: Values, layers: int) -> Kinds:
    """Attention in the layers of ``full_attn_idxs``, everywhere without it (LFM2)."""
    if not values.has("full_attn_idxs"):
        return ("full",) * layers
    attention = values.indices("full_attn_idxs")
    return tuple("full" if i in attention else "linear" for i in range(layers))


def _listed_alone(values: Values, layers: int) -> Kinds:
    """No rule stands in for a list that is missing (LFM2-MoE)."""
    raise SpecError(f"{values.label('layer_types')} is missing", "name each layer's kind")


def _zamba2(values: Values, layers: int) -> Kinds:
    """The list of Zamba2-2.7B: a block shared by layers before nine of 54 mixers."""
    shared = (6, 12, 18, 24, 30, 36, 42, 47, 51)
    return tuple("shared+mamba" if i in shared else "mamba" for i in range(layers))


WINDOW_RULES: dict[str, Callable[[Values, int], Kinds]] = {
    "none": _none,
    "uniform": _uniform,
    "listed_or_uniform": _uniform,
    "listed": _smollm3,
    "every_2": lambda values, layers: _every(values, layers, 2),
    "every_4": _every_by_default(4),
    "every_5": lambda values, layers: _every(values, layers, 5),
    "every_6": _every_by_default(6),
    "full_every_4": _full_every_4,
    "global_every_3": _global_every_3,
    "qwen_upper": _qwen_upper,
    "qwen_upper_always": _qwen_upper_always,
    "qwen_even": _qwen_even,
    "qwen_all": _qwen_all,
    "mimo_v2": _mimo_v2,
    "compressed": _compressed,
    "gpt_neo": _gpt_neo,
    "llama4": _llama4,
    "linear": _linear,
    "afmoe": lambda values, layers: _every(
        values, layers, values.size(("global_attn_every_n_layers",)) or 4
    ),
    "linear_and_last": _linear_and_last,
    "kimi": _kimi,
    "jamba": _jamba,
    "bamba": _bamba,
    "lettered": _none,
    "beside_mamba": lambda values, layers: ("mamba+attention",) * layers,
    "zamba2": _zamba2,
    "listed_alone": _listed_alone,
    "indexed_attention": _indexed_attention,
    "every_2_linear": lambda values, layers: (*("full", "linear") * layers,)[:layers],
    "listed_mamba": lambda values, layers: ("mamba",) * layers,
}
"""Rule name -> kinds of attention, empty for all full. ``layer_types`` overrides any rule."""


def attention_kinds(family: Family, values: Values, layers: int, window: int) -> Kinds:
    """What mixes tokens in each layer; empty when every layer attends to all tokens."""
    if family.windows == "lettered":
        return ()
    key = values.first(("layer_types", "layers_block_type"))
    listed = values.items(key, layers) if key else None
    if key and listed is not None:
        known = {**_KINDS, **family.mixers}
        if any(not isinstance(kind, str) or kind not in known for kind in listed):
            raise values.wrong(key, "not layer kinds", "name each layer's attention")
        kinds = tuple(known[kind] for kind in listed)
    elif not window and not family.mixers:
        return ()
    else:
        kinds = WINDOW_RULES[family.windows](values, layers)
    if not window:
        kinds = tuple("full" if kind in WINDOWED else kind for kind in kinds)
    return kinds if any(kind != "full" for kind in kinds) else ()


def _unrotated_every_4(values: Values, layers: int, kinds: Kinds) -> tuple[int, ...]:
    """``no_rope_layers`` marks layers without rotary position by 0; else every fourth is one."""
    listed = values.items("no_rope_layers") or None
    if listed is not None:
        if len(listed) != layers or any(entry not in (0, 1) for entry in listed):
            raise values.wrong("no_rope_layers", f"not {layers} entries of 0 or 1", "one per layer")
        return tuple(i for i, entry in enumerate(listed) if not entry)
    key = "no_rope_layer_interval"
    interval = values.size((key,)) or 4
    return tuple(i for i in range(layers) if (i + 1) % interval == 0)


def _unrotated_full(values: Values, layers: int, kinds: Kinds) -> tuple[int, ...]:
    if not kinds:
        return tuple(range(layers))
    return tuple(i for i, kind in enumerate(kinds) if kind == "full")


def _unrotated_full_if_windowed(values: Values, layers: int, kinds: Kinds) -> tuple[int, ...]:
    return tuple(i for i, kind in enumerate(kinds) if kind == "full")


ROPE_RULES: dict[str, Callable[[Values, int, Kinds], tuple[int, ...]]] = {
    "every_4": _unrotated_every_4,
    "full_attention": _unrotated_full,
    "full_attention_if_windowed": _unrotated_full_if_windowed,
}
"""Rule name -> indices of layers without rotary position."""


def _qwen(values: Values, layers: int) -> Kinds:
    step = values.size(("decoder_sparse_step",)) or 1
    dense = values.indices("mlp_only_layers")
    return tuple(
        "moe" if i not in dense and (i + 1) % step == 0 else "dense" for i in range(layers)
    )


def _first_dense(values: Values, layers: int) -> Kinds:
    first = values.integer("first_k_dense_replace") if values.has("first_k_dense_replace") else 0
    key = "moe_layer_freq"
    if isinstance(values.data.get(key), list):
        listed = values.items(key, layers) or []
        if any(entry not in (0, 1) for entry in listed):
            raise values.wrong(key, "not entries of 0 or 1", "give one per layer")
        return tuple("moe" if entry else "dense" for entry in listed)
    every = values.size((key,)) or 1
    return tuple("moe" if i >= first and i % every == 0 else "dense" for i in range(layers))


def _listed_first_dense(values: Values, layers: int) -> Kinds:
    if values.has("first_k_dense_replace") or values.has("moe_layer_freq"):
        return _first_dense(values, layers)
    return ("dense",) + ("moe",) * (layers - 1)


def _listed_first_3_dense(values: Values, layers: int) -> Kinds:
    if values.has("first_k_dense_replace"):
        return _first_dense(values, layers)
    return ("dense",) * min(3, layers) + ("moe",) * (layers - 3)


def _jamba_experts(values: Values, layers: int) -> Kinds:
    period = values.size(("expert_layer_period",)) or 2
    offset = values.integer("expert_layer_offset") if values.has("expert_layer_offset") else 1
    if (values.size(("num_experts",)) or 16) == 1:
        return ("dense",) * layers
    return tuple("moe" if i % period == offset else "dense" for i in range(layers))


def _num_dense(values: Values, layers: int, default: int = 1) -> Kinds:
    first = values.integer("num_dense_layers") if values.has("num_dense_layers") else default
    return tuple("moe" if i >= first else "dense" for i in range(layers))


def _interval(values: Values, layers: int) -> Kinds:
    """ERNIE 4.5: every ``moe_layer_interval``-th layer from a first to a last index."""
    interval = values.size(("moe_layer_interval",)) or 1
    start = _index(values, "moe_layer_start_index", 1)
    end = _index(values, "moe_layer_end_index", -1)
    last = layers - 1 if end < 0 else end
    return tuple(
        "moe" if (i + 1) % interval == 0 and start <= i <= last else "dense" for i in range(layers)
    )


def _index(values: Values, key: str, default: int) -> int:
    if not values.has(key):
        return default
    if values.data[key] == -1 and not isinstance(values.data[key], bool):
        return -1
    found = values.data[key]
    if isinstance(found, list | tuple):
        if not found or len(set(map(repr, found))) != 1:
            raise values.wrong(key, "differs between text and image experts", "give one number")
        return Values({key: found[0]}, values.path).integer(key)
    return values.integer(key)


def _interleave(values: Values, layers: int) -> Kinds:
    listed = values.indices("moe_layers") if values.has("moe_layers") else None
    if listed is None:
        step = values.size(("interleave_moe_layer_step",)) or 1
        listed = frozenset(range(step - 1, layers, step))
    return tuple("moe" if i in listed else "dense" for i in range(layers))


MLP_RULES: dict[str, Callable[[Values, int], Kinds]] = {
    "all": lambda values, layers: ("moe",) * layers,
    "qwen": _qwen,
    "first_dense": _first_dense,
    "listed_first_dense": _listed_first_dense,
    "listed_first_3_dense": _listed_first_3_dense,
    "num_dense": _num_dense,
    "num_dense_2": lambda values, layers: _num_dense(values, layers, 2),
    "jamba": _jamba_experts,
    "lettered": lambda values, layers: ("moe",) * layers,
    "interval": _interval,
    "interleave": _interleave,
}
"""Rule name -> kind of feed-forward per layer. ``mlp_layer_types`` overrides any rule."""


def mlp_kinds(experts: Experts, values: Values, layers: int) -> Kinds:
    """Kind of feed-forward per layer."""
    listed = values.items("mlp_layer_types", layers) if values.has("mlp_layer_types") else None
    if listed is None:
        return MLP_RULES[experts.layers](values, layers)
    # by a hash of the token (DeepSeek-V4), or by a router: the experts are the same
    names = {"sparse": "moe", "moe": "moe", "hash_moe": "moe", "dense": "dense"}
    if any(not isinstance(kind, str) or kind not in names for kind in listed):
        raise values.wrong("mlp_layer_types", "not sparse or dense", "name each layer's kind")
    return tuple(names[kind] for kind in listed)
