"""Model types that no graph here describes, and why: they are refused, not approximated."""

from __future__ import annotations

from actcalc.errors import SpecError
from actcalc.io.hub.families import ALIASES, FAMILIES
from actcalc.io.hub.family import MEASURE_HINT
from actcalc.io.hub.transformers_types import TRANSFORMERS_TYPES
from actcalc.io.hub.values import Values, shown

_MAMBA = "its layers are state-space (Mamba) layers, not attention"
_HYBRID = "it mixes state-space (Mamba) layers with attention"
_LINEAR = "it has linear_attention layers (a recurrent state, not attention scores)"
_CONV = "it mixes short-convolution layers with attention"
_RECURRENT = "its layers are recurrent, not attention"
_SPARSE = "its attention picks keys by a learned indexer"
_VISION = "vision backbones of this kind are not described"

# Layer kinds are stated by each type's modelling code in transformers 5.24 (or, where it has
# none, by the code published with the checkpoint).
REFUSED: dict[str, str] = {
    "mamba-2": _MAMBA,
    **dict.fromkeys(
        (
            "zamba", "nemotron_h_omni", "hymba", "plamo2",
            "bailing_hybrid",
        ),
        _HYBRID,
    ),
    **dict.fromkeys(
        (
            "minimax_text_01", "MiniMaxText01",
        ),
        _LINEAR,
    ),
    **dict.fromkeys(("lfm2_vl", "lfm3", "lfm3_vl"), _CONV),
    **dict.fromkeys(("rwkv5", "rwkv6", "xlstm", "recurrent_gemma", "retnet"), _RECURRENT),
    **dict.fromkeys(
        ("step3p5", "step3p7"),
        "its gates are clamped after the activation, and layers differ in rotary width",
    ),
    "minimax_m3_vl_text": _SPARSE,
    "glm5_next": _SPARSE + " (sparse attention over latent keys)",
    "gemma4_unified": "layers differ in head width and share keys and values",
    "gemma4_unified_text": "layers differ in head width and share keys and values",
    "mllama_text_model": "some of its layers attend to an image instead of the text",
    "phi4_multimodal": "adapters for image and speech are part of every layer",
    "ernie4_5_vl_moe_text": "text and image tokens have experts of their own",
    "aria_text": "its experts are packed beside shared ones of another width",
    "hrm_text": "its layers run several times, in two nested loops",
    "openelm": "each layer has its own number of heads and feed-forward width",
    "albert": "its layers share one set of weights",
    "jetmoe": "its attention heads are a mixture of experts",
    "doge": "its attention weighs keys by a learned dynamic mask",
    "diffllama": "its attention is the difference of two softmaxes",
    "bitnet": "its projections are ternary, with norms inside attention and feed-forward",
    "nanochat": "its norms have no weights",
    "gpt_neox_japanese": "only its last layer has an output bias",
    "apertus": "its activation xIELU has learned parameters",
    "longcat_flash": "its layers hold two attentions and a shortcut mixture of experts",
    "arctic": "a dense feed-forward runs beside the mixture of experts",
    "grok-1": "its norms and routing are not described",
    "hyperclovax": "its norm placement is not described",
    "modernbert-decoder": "its first layer has no norm and its head no bias",
    "deberta": "its disentangled attention packs projections that DeBERTa-v2 has apart",
    "xlnet": "its two-stream attention is not described",
    "led": "its encoder's attention is windowed with global tokens",
    "moonshine": "an encoder of raw sound through three convolutions",
    "blenderbot-small": "a decoder that adds positions after its embedding's norm",
    "reformer": "its layers are reversible, with hashed attention",
    "longformer": "its attention is windowed with global tokens",
    "big_bird": "its attention is block-sparse",
    "longt5": "its encoder attention is local or transient-global",
    "switch_transformers": "its experts drop tokens beyond a capacity",
    **dict.fromkeys(
        (
            "pegasus", "marian", "m2m_100", "nllb-moe", "speech_to_text",
        ),
        "an encoder-decoder whose positions are sinusoids that are not trained",
    ),
    **dict.fromkeys(
        (
            "swin", "swinv2", "convnext", "convnextv2", "resnet", "beit", "dinov3_convnext",
            "siglip2_vision_model", "pixtral", "sam", "detr", "vit_mae",
        ),
        _VISION,
    ),
}  # fmt: skip

_ALSO = dict.fromkeys(
    ("minimax_text_01", "MiniMaxText01"),
    "the config.json of MiniMax-Text-01-hf (model_type minimax) or the preset minimax-text-01",
)
"""Where another configuration of the same model is described."""

# Keys that only layers other than attention have; they mark a type the table does not know.
_MARKS: dict[str, str] = {
    "ssm_state_size": "state-space (Mamba) layers",
    "state_size": "state-space (Mamba) layers",
    "mamba_d_state": "state-space (Mamba) layers",
    "mamba_num_heads": "state-space (Mamba) layers",
    "mamba_d_ssm": "state-space (Mamba) layers",
    "hybrid_override_pattern": "a hybrid pattern of layers",
    "linear_key_head_dim": "linear_attention layers",
    "linear_conv_kernel_dim": "linear_attention layers",
    "linear_attn_config": "linear_attention layers",
    "conv_L_cache": "short-convolution layers",
    "lru_width": "recurrent layers",
    "block_configs": "blocks with sizes of their own",
    "index_topk": "attention that picks keys by a learned indexer",
    "compress_ratios": "attention over compressed keys",
}

ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention", "attention")


def refuse(model_type: str, values: Values) -> None:
    """Raise ``SpecError`` naming the layer type when no graph describes this configuration."""
    other = values.data.get("_class_name")
    if isinstance(other, str) and not model_type:
        raise SpecError(
            f"{shown(other)} is a class of diffusers, whose blocks no graph here describes",
            "measure it: write a function that returns (module, inputs), as "
            "docs/examples/diffusion.py does for DiT, SD3 and FLUX, then "
            "actcalc measure --module FILE.py:FUNCTION --save layer.json, and actcalc compare and "
            "plan layer.json",
        )
    family = FAMILIES.get(ALIASES.get(model_type, model_type))
    mixers = tuple(family.mixers) if family else ()
    reason = REFUSED.get(model_type)
    if reason is None and not mixers:
        reason = next(
            (
                f"{values.label(key)} says it has {what}"
                for key, what in _MARKS.items()
                if values.has(key) and not (family and family.blocks and key == "block_configs")
            ),
            None,
        )
    odd = other_layers(values, mixers)
    if odd:
        counted = ", ".join(f"{count} {name}" for name, count in odd.items())
        reason = (
            f"{reason}: {values.label('layer_types')} lists {counted}"
            if reason
            else f"{values.label('layer_types')} lists {counted}, which are not attention layers"
        )
    if reason:
        raise SpecError(
            f"model_type {shown(model_type)} cannot be described: {reason}", _nearest(model_type)
        )


def _nearest(model_type: str) -> str:
    """What works in place of a description."""
    if model_type in _ALSO:
        return f"read {_ALSO[model_type]}, the same model as transformers runs it"
    if model_type in REFUSED and model_type not in TRANSFORMERS_TYPES:
        return (
            "measure one layer of its code: actcalc measure --module FILE.py:FUNCTION --save "
            "layer.json, then actcalc compare and plan layer.json"
        )
    return MEASURE_HINT


def other_layers(values: Values, mixers: tuple[str, ...] = ()) -> dict[str, int]:
    """Layer types listed that are neither attention nor among ``mixers``, with their number."""
    listed = values.data.get("layer_types") or values.data.get("layers_block_type")
    counts: dict[str, int] = {}
    if isinstance(listed, list):
        for name in listed:
            if isinstance(name, str) and name not in (*ATTENTION_LAYERS, *mixers):
                label = shown(name).strip("'")
                counts[label] = counts.get(label, 0) + 1
    return dict(sorted(counts.items())[:4])
