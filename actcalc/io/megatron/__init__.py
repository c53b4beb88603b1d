"""Megatron-LM's command-line options as a flat mapping -> fields of model, layout, workload.

Here stands which option becomes which field; what takes working out (patterns of layers, stages of
a pipeline, replicas of a batch) and what is only told are in the package's modules. Option names,
defaults and derived values are those of ``megatron/training/arguments.py`` and
``megatron/core/transformer/transformer_config.py`` (Megatron-Core 0.16). Only what decides memory
or FLOPs is read; options that move neither are ignored, options that name an architecture this
product does not describe are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from actcalc.errors import SpecError, shorten, suggestion
from actcalc.io.megatron.batch import fed, global_batch
from actcalc.io.megatron.layers import depth, frequency, hybrid
from actcalc.io.megatron.notes import graphs, refuse, unread
from actcalc.io.megatron.offload import offloaded
from actcalc.io.megatron.options import Options, plain
from actcalc.io.megatron.pipeline import stages
from actcalc.io.megatron.recompute import policies
from actcalc.io.megatron.timing import captured, dispatcher, fp8_recipe
from actcalc.io.megatron.tokenizers import vocabulary, word_pieces
from actcalc.specs.optimizers import OPTIMIZERS

_BACKENDS = ("auto", "flash", "fused", "unfused", "local")
"""Values of --attention-backend (transformer/enums.py AttnBackend)."""
MARKS = ("num-layers", "hidden-size", "micro-batch-size", "tensor-model-parallel-size",
         "encoder-num-layers", "seq-length")  # fmt: skip
OWN = {"micro-batch-size", "tensor-model-parallel-size", "encoder-num-layers"}
"""Names that no model's config.json has, whatever joins their words."""

# Names of element types in the parsed arguments.
_TORCH_TYPES = {
    "torch.float32": "fp32", "torch.float16": "fp16", "torch.bfloat16": "bf16",
    "torch.uint8": "fp8",
}  # fmt: skip
_POSITIONS = {
    "rope": "rotary", "rotary": "rotary", "yarn": "rotary", "mrope": "rotary", "none": "none",
    "relative": "relative", "alibi": "alibi",
}  # fmt: skip
_LEARNED = "learned_absolute"
_NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm", "layernorm1p": "layernorm",
          "low_precision_layernorm": "layernorm", "layer_norm": "layernorm",
          "rms_norm": "rmsnorm"}  # fmt: skip
_SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""ZeRO stages of Megatron-FSDP's --data-parallel-sharding-strategy."""
_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none", "sinkhorn")


@dataclass(frozen=True)
class Arguments:
    """Plain fields of the specs, to be validated by the caller."""

    model: dict[str, Any]
    layout: dict[str, Any]
    workload: dict[str, Any]
    training: dict[str, Any]
    framework: str
    policies: tuple[str, ...]
    warnings: tuple[str, ...]
    devices: int | None = None
    """Devices of the run, where world-size is given."""
    assumed: Mapping[str, str] = field(default_factory=dict)
    """What was taken for fields that no option gives, by the field's name."""
    needs: Mapping[str, SpecError] = field(default_factory=dict)
    """Fields of the model that must be given elsewhere, and the error that says so."""


def is_arguments(data: Mapping[str, Any]) -> bool:
    """Whether a mapping looks like Megatron's options, written with hyphens or underscores.

    With underscores a few names are those of a model's config.json too, which says what model it
    is; options that only a training script has, or all three sizes of a layer, tell them apart.
    """
    if any(str(key).lstrip("-") in MARKS for key in data):
        return True
    names = {plain(key) for key in data}
    if any("model_type" in str(key) or str(key) == "architectures" for key in data):
        return False
    return bool(names & OWN) or {"num-layers", "hidden-size", "num-attention-heads"} <= names


def read_arguments(data: Mapping[str, Any], name: str = "run", idle: str = "") -> Arguments:
    """Fields that Megatron's options describe; raises ``SpecError`` naming option and value.

    ``idle`` matches options of a program around Megatron that change neither memory nor time.
    """
    o = Options(data)
    refuse(o, name)
    if not o.has("hidden-size") or not o.has("num-attention-heads"):
        missing = "hidden-size" if not o.has("hidden-size") else "num-attention-heads"
        raise SpecError(f"{name}: {missing} is missing", f"give {missing}")
    warnings: list[str] = []
    assumed: dict[str, str] = {}
    needs: dict[str, SpecError] = {}
    model = _model(o, warnings, needs)
    layout = _layout(o, model, warnings, assumed, needs)
    graphs(o, warnings)
    training, framework = _training(o), _framework(o)
    workload = _workload(o, layout, engine=framework == _ENGINE)
    if o.flag("defer-embedding-wgrad-compute"):
        training["deferred_head"] = o.number("wgrad-deferral-limit", 0) or max(
            1, workload.get("global_batch", 1) // (workload["micro_batch"] * layout.get("dp", 1))
        )
    devices = None
    if "dp" in layout:
        devices = layout["tp"] * layout["pp"] * layout["cp"] * layout["dp"]
    chosen = policies(o)
    unread(o, warnings, idle)
    return Arguments(
        model=model,
        layout=layout,
        workload=workload,
        training=training,
        framework=framework,
        policies=chosen,
        warnings=tuple(warnings),
        devices=devices,
        assumed=assumed,
        needs=needs,
    )


def _model(o: Options, warnings: list[str], needs: dict[str, SpecError]) -> dict[str, Any]:
    hidden, heads = o.number("hidden-size", 0), o.number("num-attention-heads", 0, least=1)
    mixed = hybrid(o)
    layers, encoder = (len(mixed["pattern"]), 0) if mixed else depth(o)
    gated = any(o.flag(name) for name in ("swiglu", "quick-geglu", "gated-linear-unit"))
    ffn = o.number("ffn-hidden-size", 0)
    if not ffn:
        # arguments.py: 4h, with a gate two thirds of it, down to a multiple of 64.
        ffn = int((4 * hidden * 2 / 3) / 64) * 64 if gated else 4 * hidden
    bias = not o.flag("disable-bias-linear")
    position = o.text("position-embedding-type", _LEARNED, (_LEARNED, *_POSITIONS))
    if o.flag("use-rotary-position-embeddings"):
        position = "rope"
    pieces = word_pieces(o) and not encoder
    bert = o.flag("bert-no-binary-head") or o.text("model-family") == "bert" or pieces
    kv = o.number("num-query-groups", 1) if o.flag("group-query-attention") else heads
    words = "BertWordPieceLowerCase" if bert or encoder else ""
    fields: dict[str, Any] = {
        "family": "bert" if bert else "t5" if encoder else "gpt",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv,
        "head_dim": o.number("kv-channels", 0),
        "ffn": ffn,
        **vocabulary(o, words, warnings, needs),
        "position": _POSITIONS.get(position, "learned"),
        "norm": _NORMS[o.text("normalization", "LayerNorm", tuple(_NORMS))],
        "activation": _activation(o, gated),
        "gated": gated,
        "qkv_bias": bias or o.flag("add-qkv-bias"),
        "out_bias": bias,
        "mlp_bias": bias,
        "packed_qkv": True,
        "tied": not o.flag("untie-embeddings-and-output-weights"),
        "hidden_dropout": o.real("hidden-dropout", 0.1),
        "attention_dropout": o.real("attention-dropout", 0.1),
        "embedding_dropout": o.real("hidden-dropout", 0.1),
    }
    if o.flag("embed-layernorm"):
        fields["embedding_norm"] = True  # Megatron-DeepSpeed's BLOOM
    if o.flag("post-self-attn-layernorm") and o.flag("post-mlp-layernorm"):
        fields["norm_placement"] = "sandwich"
    if fields["position"] == "learned":
        fields["max_positions"] = o.number("max-position-embeddings", 0)
    if fields["position"] == "rotary" and o.real("rotary-percent", 1.0) < 1.0:
        width = fields["head_dim"] or hidden // heads
        fields["rotary_dim"] = int(width * o.real("rotary-percent", 1.0))
    if o.flag("qk-layernorm") and not o.flag("multi-latent-attention"):
        fields["qk_norm"] = "head"
    fields |= _bert(o) if bert else {}
    fields |= _t5(o, encoder, fields) if encoder else {}
    fields |= _moe(o, layers, ffn) | _latent(o) | mixed
    if o.number("mtp-num-layers", 0) and "mtp_layers" not in fields:
        fields["mtp_layers"] = o.number("mtp-num-layers", 0)
    if fields.get("mtp_layers", 0) and o.flag("mtp-use-repeated-layer"):
        fields["mtp_shared"] = True
    return fields


def _bert(o: Options) -> dict[str, Any]:
    """Segments and a second head, of sentence order, come together (pretrain_bert.py)."""
    binary = not o.flag("bert-no-binary-head")
    return {
        "causal": False, "head": "mlm", "head_bias": True, "sentence_head": binary,
        "token_types": 2 if binary else 0,
    }  # fmt: skip


def _t5(o: Options, encoder: int, fields: dict[str, Any]) -> dict[str, Any]:
    """The output has a bias where it shares the embedding (t5_model.py T5LMHead)."""
    found: dict[str, Any] = {"encoder_layers": encoder, "head_bias": fields["tied"]}
    if fields["position"] == "relative":
        found["relative_buckets"] = o.number("relative-attention-num-buckets", 32)
    return found


def _activation(o: Options, gated: bool) -> str:
    if o.flag("squared-relu"):
        return "relu2"
    if o.flag("quick-geglu"):
        return "quick_gelu"
    if gated and not o.flag("swiglu"):
        # transformer_config.py: a gate alone keeps the default function, or the one named.
        return "silu" if "silu" in o.text("activation-func") else "gelu"
    return "silu" if gated else "gelu"


def _moe(o: Options, layers: int, ffn: int) -> dict[str, Any]:
    experts = o.number("num-experts", 0)
    if not experts:
        return {}
    sigmoid = o.text("moe-router-score-function", "softmax", ("softmax", "sigmoid")) == "sigmoid"
    before = not sigmoid and o.flag("moe-router-pre-softmax")
    moe: dict[str, Any] = {
        "experts": experts,
        "topk": o.number("moe-router-topk", 2),
        "ffn": o.number("moe-ffn-hidden-size", 0) or ffn,
        "shared_ffn": o.number("moe-shared-expert-intermediate-size", 0),
        "shared_gate": o.flag("moe-shared-expert-gate"),
        "latent": o.number("moe-latent-size", 0),
        # moe_utils.py topk_routing_with_score_function: weights of a softmax over all experts stay
        # as they are, one over the chosen experts sums to one.
        "router": "sigmoid" if sigmoid else "softmax" if before else "softmax_topk",
        "normalize_topk": not before,
        "correction_bias": o.flag("moe-router-enable-expert-bias"),
        "groups": o.number("moe-router-num-groups", 1),
        "topk_groups": o.number("moe-router-group-topk", 1),
        # transformer/moe/experts.py: grouped experts have no bias unless they are TE's with bias
        "bias": not o.flag("disable-bias-linear"),
        "aux_loss": any(_coefficients(o)),
    }
    fields: dict[str, Any] = {"moe": moe}
    pattern = frequency(o.text("moe-layer-freq", "1"), layers)
    if not all(pattern):
        fields["mlp_pattern"] = tuple("moe" if each else "dense" for each in pattern)
    return fields


def _coefficients(o: Options) -> tuple[float, ...]:
    """Coefficients of the load-balancing losses: one, or one for each kind of loss."""
    try:
        return tuple(float(word) for word in o.words("moe-aux-loss-coeff"))
    except ValueError:
        text = o.text("moe-aux-loss-coeff")
        raise SpecError(f"moe-aux-loss-coeff is {text!r}, not a number", "give a number") from None


def _latent(o: Options) -> dict[str, Any]:
    if not o.flag("multi-latent-attention"):
        return {}
    return {
        "mla": {
            "q_lora": o.number("q-lora-rank", 0),
            "kv_lora": o.number("kv-lora-rank", 512),
            "nope_dim": o.number("qk-head-dim", 128),
            "rope_dim": o.number("qk-pos-emb-head-dim", 64),
            "v_dim": o.number("v-head-dim", 128),
        },
        "position": "rotary",
        "max_positions": 0,
    }


def _layout(
    o: Options,
    model: dict[str, Any],
    warnings: list[str],
    assumed: dict[str, str],
    needs: dict[str, SpecError],
) -> dict[str, Any]:
    tp = o.number("tensor-model-parallel-size", 1, least=1)
    pp = o.number("pipeline-model-parallel-size", 1, least=1)
    cp = o.number("context-parallel-size", 1, least=1)
    ep = o.number("expert-model-parallel-size", 1)
    etp = o.number("expert-tensor-parallel-size", 0)
    world = o.number("world-size", 0)
    layout: dict[str, Any] = {
        "tp": tp, "pp": pp, "cp": cp, "ep": ep,
        "sp": o.flag("sequence-parallel") and tp > 1,
    }  # fmt: skip
    if etp and model.get("moe"):
        layout["etp"] = etp
    if world:
        inside = tp * pp * cp
        if world % inside:
            needs["layout.dp"] = SpecError(
                f"world-size {world} is not a multiple of tp {tp} x pp {pp} x cp {cp} = {inside}",
                "check the parallel sizes, or give --dp",
            )
        else:
            layout["dp"] = fed(o, world // inside, warnings)
    else:
        assumed["layout.dp"] = "world-size is not given: one replica is taken (dp 1)."
    if not model.get("moe"):
        layout["ep"] = 1
    layout["zero"] = _zero(o)
    layout |= stages(o, model["layers"], pp)
    # arguments.py: pp where it is not given; without chunks to interleave it is not used.
    group = o.number("microbatch-group-size-per-virtual-pipeline-stage", 0)
    if group and layout.get("vpp", 1) > 1:
        layout["microbatch_group"] = group
    return layout


def _zero(o: Options) -> int:
    if o.number("zero-stage", 0):  # Megatron-DeepSpeed
        return o.number("zero-stage", 0)
    if o.flag("use-torch-fsdp2"):
        return 2 if o.flag("torch-fsdp2-no-reshard-after-forward") else 3
    if o.flag("use-megatron-fsdp"):
        return _SHARDING[o.text("data-parallel-sharding-strategy", "no_shard", tuple(_SHARDING))]
    return 1 if o.flag("use-distributed-optimizer") or o.text("optimizer") == "dist_muon" else 0


def _workload(o: Options, layout: dict[str, Any], *, engine: bool) -> dict[str, Any]:
    """Fields of the workload; ``engine`` says that Transformer Engine runs the layers."""
    precision = "bf16" if o.flag("bf16") else "fp16" if o.flag("fp16") else "fp32"
    # Without bf16 or fp16 weights and activations stay fp32, whatever the products run in.
    backend = o.text("attention-backend", "auto").removeprefix("AttnBackend.")
    if backend not in _BACKENDS:
        raise SpecError(f"attention-backend is {backend!r}", "use " + ", ".join(_BACKENDS))
    flash = backend in ("flash", "fused") or o.flag("use-flash-attn")
    if backend == "auto" and engine:
        flash = True
    if backend in ("unfused", "local"):
        flash = False
    kernels: dict[str, Any] = {
        "masked_softmax_fusion": not o.flag("no-masked-softmax-fusion"),
        "apply_rope_fusion": not o.flag("no-rope-fusion") and engine,
        "cross_entropy_loss_fusion": o.flag("cross-entropy-loss-fusion"),
        "cross_entropy_fusion_impl": _engine(o),
        "activation_func_fp8_input_store": o.flag("activation-func-fp8-input-store"),
        "bias_activation_fusion": not _unfused_activation(o),
        "use_fused_weighted_squared_relu": o.flag("use-fused-weighted-squared-relu"),
        "make_vocab_size_divisible_by": o.number("make-vocab-size-divisible-by", 128),
        "async_tensor_model_parallel_allreduce": not o.flag(
            "no-async-tensor-model-parallel-allreduce"
        ),
        "tp_comm_overlap": o.flag("tp-comm-overlap") and engine,
        "cuda_graphs": captured(o),
        "fp8_recipe": fp8_recipe(o),
    }
    if backend in ("flash", "fused", "unfused"):
        kernels["attention_backend"] = backend
    if o.has("num-experts"):
        kernels["moe_grouped_gemm"] = "on" if o.flag("moe-grouped-gemm") else "off"
        kernels["moe_token_dispatcher_type"] = dispatcher(o)
        kernels["moe_shared_expert_overlap"] = o.flag("moe-shared-expert-overlap")
        kernels["overlap_moe_expert_parallel_comm"] = o.flag("overlap-moe-expert-parallel-comm")
        if o.text("moe-router-dtype", "", ("fp32", "fp64")) == "fp32":
            kernels["moe_router_dtype"] = "fp32"
        balancing = _balancing(o)
        if balancing != "sinkhorn":
            if not any(_coefficients(o)):
                balancing = "none"
            kernels["moe_router_load_balancing_type"] = balancing
    work: dict[str, Any] = {
        "seq": o.number("encoder-seq-length", 0) or o.number("seq-length", 2048),
        "micro_batch": o.number("micro-batch-size", 1, least=1),
        "precision": precision,
        "fp8": o.text("fp8-format", "", ("e4m3", "hybrid")) != "",
        "attention": "flash" if flash else "eager",
        "kernels": kernels,
    }
    if o.number("decoder-seq-length", 0):
        work["decoder_seq"] = o.number("decoder-seq-length", 0)
    if o.has("global-batch-size"):
        work["global_batch"] = global_batch(o, work["micro_batch"], layout.get("dp", 1))
    return work


def _balancing(o: Options) -> str:
    """How tokens are balanced over experts; of several losses the first decides what is kept."""
    for word in o.words("moe-router-load-balancing-type"):
        if word not in _BALANCING:
            raise SpecError(
                f"moe-router-load-balancing-type is {shorten(word)}",
                suggestion(word, _BALANCING) or "use one of " + ", ".join(_BALANCING),
            )
    return (*o.words("moe-router-load-balancing-type"), "aux_loss")[0]


def _unfused_activation(o: Options) -> bool:
    """Whether bias and activation are apart: each kind has its switch (arguments.py).

    ``core_transformer_config_from_args`` asks the one of SwiGLU where it runs, else GeLU's.
    """
    apart = {name: o.flag(f"no-bias-{name}-fusion") for name in ("gelu", "swiglu")}
    return apart["swiglu" if o.flag("swiglu") else "gelu"]


def _engine(o: Options) -> str:
    """Which fused cross-entropy runs."""
    name = o.text("cross-entropy-fusion-impl", "native")
    if name not in ("native", "te"):
        raise SpecError(f"cross-entropy-fusion-impl is {name!r}", "use native or te")
    return name


_ENGINE, _LOCAL = "megatron", "megatron-local"
"""Profiles of Transformer Engine's layers and of Megatron's own."""


def _framework(o: Options) -> str:
    """Megatron's own layers, or Transformer Engine's (pretrain_bert.py reads the former's spec)."""
    known = ("transformer_engine", "local", "inference_optimized")
    asked = o.text("transformer-impl", known[0], known)
    local = asked == "local" or o.words("spec") == ("local",)
    return _LOCAL if local else _ENGINE


def _training(o: Options) -> dict[str, Any]:
    optimizer = o.text("optimizer", "adam")
    names = {theirs: name for name, row in OPTIMIZERS.items() for theirs in row.megatron}
    if optimizer not in names:
        raise SpecError(f"optimizer is {optimizer!r}", "use one of " + ", ".join(names))
    training: dict[str, Any] = {
        "optimizer": names[optimizer],
        "gradient_fusion": not o.flag("no-gradient-accumulation-fusion"),
        "gradients_in_16_bit": (
            not o.flag("bf16")
            and o.flag("fp16")
            and not o.flag("accumulate-allreduce-grads-in-fp32")
        )
        or o.flag("grad-reduce-in-bf16"),
        "deterministic": o.flag("deterministic-mode"),
        "overlapped_messages": not o.flag("no-overlap-p2p-communication"),
        "overlapped_reduction": o.flag("overlap-grad-reduce"),
        "overlapped_gather": o.flag("overlap-param-gather"),
        "fp8_weights": o.flag("fp8-param-gather"),
        "persistent_buffers": o.flag("fsdp-double-buffer"),
    }
    if OPTIMIZERS[names[optimizer]].newton_schulz and _zero(o) == 1:
        older = optimizer == "dist_muon" or o.flag("no-use-layer-wise-param-layout")
        training["whole_weights"] = "dealt" if older else "packed"
    training["instances"] = max(1, o.number("num-distributed-optimizer-instances", 1))
    outer = o.text("outer-dp-sharding-strategy", "no_shard", tuple(_SHARDING))
    o.text("expert-outer-dp-sharding-strategy", "no_shard", tuple(_SHARDING))
    training["instances_share_states"] = outer == "optim" and o.flag("use-megatron-fsdp")
    if o.flag("use-precision-aware-optimizer"):
        sizes = [_itemsize(o, "exp-avg-dtype"), _itemsize(o, "exp-avg-sq-dtype")]
        training["moments_bytes"] = sum(sizes)
        training["master_bytes"] = _itemsize(o, "main-params-dtype")
    if o.flag("optimizer-cpu-offload"):
        training["offload"] = "optimizer"
    return {**training, **offloaded(o)}


def _itemsize(o: Options, name: str) -> int:
    """Bytes of an element type that an option names; fp32 by default."""
    sizes = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
    word = o.text(name, "fp32")
    word = _TORCH_TYPES.get(word, word)
    if word not in sizes:
        raise SpecError(f"{name} is {word!r}", "use one of " + ", ".join(sizes))
    return sizes[word]
