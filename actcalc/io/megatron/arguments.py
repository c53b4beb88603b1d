"""Megatron-LM's command-line options as a flat mapping -> fields of model, layout, workload.

Option names, defaults and derived values are those of ``megatron/training/arguments.py`` and
``megatron/core/transformer/transformer_config.py`` (Megatron-Core 0.16). Only what decides memory
or FLOPs is read; options that move neither are ignored, options that name an architecture this
product does not describe are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

from actcalc.errors import SpecError
from actcalc.io.megatron.options import (
    IDLE,
    LEFT_OUT,
    OF_A_SWITCH,
    REFUSED,
    by_option,
    plain,
)
from actcalc.specs.optimizers import OPTIMIZERS
from actcalc.specs.recompute import MODULES

_BACKENDS = ("auto", "flash", "fused", "unfused", "local")
"""Values of --attention-backend (transformer/enums.py AttnBackend)."""
MARKS = ("num-layers", "hidden-size", "micro-batch-size", "tensor-model-parallel-size",
         "encoder-num-layers", "seq-length")  # fmt: skip
OWN = {"micro-batch-size", "tensor-model-parallel-size", "encoder-num-layers"}
"""Names that no model's config.json has, whatever joins their words."""

# Entries of vocab.txt of bert-large-cased and bert-large-uncased (Devlin et al. 2018).
_WORD_PIECES = {"BertWordPieceCase": 28996, "BertWordPieceLowerCase": 30522}
# Names of element types in the parsed arguments.
_TORCH_TYPES = {
    "torch.float32": "fp32", "torch.float16": "fp16", "torch.bfloat16": "bf16",
    "torch.uint8": "fp8",
}  # fmt: skip
_MOST_LAYERS = 100_000
_MOST_TOLD = 24
_POSITIONS = {"rope": "rotary", "none": "none", "relative": "relative"}


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


class _Options:
    """Options by long name, with or without leading dashes, hyphens or underscores."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = by_option(data)
        self.read: set[str] = set()

    def _value(self, name: str) -> Any:
        self.read.add(name)
        return self.data.get(name)

    def has(self, name: str) -> bool:
        """Whether the option is given at all."""
        return self._value(name) is not None

    def flag(self, name: str) -> bool:
        """Whether a switch is on."""
        value = self._value(name)
        return value is True or str(value).lower() in ("true", "1", "yes", "")

    def text(self, name: str, default: str = "") -> str:
        """The option as text."""
        value = self._value(name)
        return default if value is None else str(value)

    def number(self, name: str, default: int) -> int:
        """The option as a whole number; ``SpecError`` for anything else."""
        value = self._value(name)
        if value is None:
            return default
        try:
            number = int(str(value), 10)
        except ValueError:
            raise SpecError(f"{name} is {value!r}, not a whole number", "give a number") from None
        if number < 0:
            raise SpecError(f"{name} is {number}", "give a number of at least 0")
        return number

    def real(self, name: str, default: float) -> float:
        """The option as a number."""
        value = self._value(name)
        try:
            return default if value is None else float(value)
        except (TypeError, ValueError):
            raise SpecError(f"{name} is {value!r}, not a number", "give a number") from None

    def words(self, name: str) -> tuple[str, ...]:
        """A list, written as a list or as words in brackets."""
        value = self._value(name)
        if value is None:
            return ()
        if isinstance(value, list | tuple):
            return tuple(str(word) for word in value)
        return tuple(str(value).strip("[]").replace(",", " ").split())


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


def read_arguments(data: Mapping[str, Any], name: str = "run") -> Arguments:
    """Fields that Megatron's options describe; raises ``SpecError`` naming option and value."""
    o = _Options(data)
    _refuse(o, name)
    if not o.has("hidden-size") or not o.has("num-attention-heads"):
        missing = "hidden-size" if not o.has("hidden-size") else "num-attention-heads"
        raise SpecError(f"{name}: {missing} is missing", f"give {missing}")
    warnings: list[str] = []
    model = _model(o, warnings)
    layout = _layout(o, model, warnings)
    _graphs(o, warnings)
    training, framework = _training(o), _framework(o)
    workload = _workload(o, layout, framework)
    if o.flag("defer-embedding-wgrad-compute"):
        training["deferred_head"] = o.number("wgrad-deferral-limit", 0) or max(
            1, workload.get("global_batch", 1) // (workload["micro_batch"] * layout.get("dp", 1))
        )
    devices = None
    if "dp" in layout:
        devices = layout["tp"] * layout["pp"] * layout["cp"] * layout["dp"]
    policies = _policies(o)
    _unread(o, warnings)
    return Arguments(
        model=model,
        layout=layout,
        workload=workload,
        training=training,
        framework=framework,
        policies=policies,
        warnings=tuple(warnings),
        devices=devices,
    )


def _unread(o: _Options, warnings: list[str]) -> None:
    """Say which options were not read, once and all together; those that move nothing aside."""
    for name, what, idle in LEFT_OUT:
        o.read.add(name)
        if o.data.get(name) not in (None, False, *idle):
            warnings.append(f"{name} is not modelled; it {what}.")
    off = tuple(group for switch, group in OF_A_SWITCH if o.data.get(switch) in (None, False))
    names = [
        name
        for name, value in o.data.items()
        if name not in o.read
        and value not in (None, False)
        and not IDLE.fullmatch(name)
        and not name.startswith(off)
    ]
    if not names:
        return
    import difflib

    close = {name: difflib.get_close_matches(name, o.read, n=1, cutoff=0.85) for name in names}
    told = [f"{name} (is it {close[name][0]}?)" if close[name] else name for name in sorted(names)]
    more = f" and {len(told) - _MOST_TOLD} more" if len(told) > _MOST_TOLD else ""
    warnings.append(
        f"Options not read, taken to change neither memory nor FLOPs: "
        f"{', '.join(told[:_MOST_TOLD])}{more}."
    )


def _refuse(o: _Options, name: str) -> None:
    for option, what in REFUSED:
        if o.text(option) not in ("", "False"):
            raise SpecError(
                f"{name}: {option} describes {what}, which the megatron profile does not model",
                f"drop {option} for the figures of the plain decoder or encoder",
            )


def _model(o: _Options, warnings: list[str]) -> dict[str, Any]:
    hidden, heads = o.number("hidden-size", 0), o.number("num-attention-heads", 0)
    hybrid = _hybrid(o)
    layers, encoder = (len(hybrid["pattern"]), 0) if hybrid else _depth(o)
    gated = o.flag("swiglu")
    ffn = o.number("ffn-hidden-size", 0)
    if not ffn:
        # arguments.py: 4h, with a gate two thirds of it, down to a multiple of 64.
        ffn = int((4 * hidden * 2 / 3) / 64) * 64 if gated else 4 * hidden
    bias = not o.flag("disable-bias-linear")
    position = o.text("position-embedding-type", "learned_absolute")
    if o.flag("use-rotary-position-embeddings"):
        position = "rope"
    pieces = o.text("tokenizer-type") in _WORD_PIECES and not encoder
    bert = o.flag("bert-no-binary-head") or o.text("model-family") == "bert" or pieces
    kv = o.number("num-query-groups", 1) if o.flag("group-query-attention") else heads
    words = "BertWordPieceLowerCase" if bert or encoder else ""
    vocab = o.number("vocab-size", 0) or _vocabulary(o, words, warnings)
    fields: dict[str, Any] = {
        "family": "bert" if bert else "t5" if encoder else "gpt",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv,
        "head_dim": o.number("kv-channels", 0),
        "ffn": ffn,
        "vocab": vocab,
        "position": _POSITIONS.get(position, "learned"),
        "norm": "rmsnorm" if o.text("normalization") == "RMSNorm" else "layernorm",
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
    if fields["position"] == "learned":
        fields["max_positions"] = o.number("max-position-embeddings", 0)
    if fields["position"] == "rotary" and o.real("rotary-percent", 1.0) < 1.0:
        width = fields["head_dim"] or hidden // heads
        fields["rotary_dim"] = int(width * o.real("rotary-percent", 1.0))
    if o.flag("qk-layernorm") and not o.flag("multi-latent-attention"):
        fields["qk_norm"] = "head"
    if bert:
        # pretrain_bert.py: segments and a second head, of sentence order, come together
        binary = not o.flag("bert-no-binary-head")
        fields |= {"causal": False, "head": "mlm", "head_bias": True, "sentence_head": binary}
        fields["token_types"] = 2 if binary else 0
    if encoder:
        # t5_model.py T5LMHead: the output has a bias where it shares the embedding
        fields |= {"encoder_layers": encoder, "head_bias": fields["tied"]}
        if fields["position"] == "relative":
            fields["relative_buckets"] = o.number("relative-attention-num-buckets", 32)
    fields |= _moe(o, layers, ffn) | _latent(o) | hybrid
    if o.number("mtp-num-layers", 0) and "mtp_layers" not in fields:
        fields["mtp_layers"] = o.number("mtp-num-layers", 0)
    if fields.get("mtp_layers", 0) and o.flag("mtp-use-repeated-layer"):
        fields["mtp_shared"] = True
    return fields


def _pattern(o: _Options) -> str:
    """The layers of a hybrid as written, stages and prediction layers included; "" for others.

    Older runs give shares of attention and feed-forward layers, and what is inside prediction
    layers apart (arguments.py; hybrid_layer_allocation.py pattern_from_ratios).
    """
    written = o.text("hybrid-layer-pattern") or o.text("hybrid-override-pattern")
    stack = any(word in " ".join(o.words("spec")) for word in ("mamba_stack", "hybrid_stack"))
    if not written and (o.flag("is-hybrid-model") or stack):
        written = _spread(
            o.number("num-layers", 0),
            o.real("hybrid-attention-ratio", 0.0),
            o.real("hybrid-mlp-ratio", 0.0),
        )
    inside = o.text("mtp-hybrid-override-pattern")
    if written and inside and "/" not in written:
        written += f"/{inside}" * o.number("mtp-num-layers", 1)
    return written


def _spread(layers: int, attention: float, mlp: float) -> str:
    """``layers`` state-space layers, a share of them replaced by others at even distances."""
    if layers > _MOST_LAYERS or not 0 <= attention + mlp <= 1 or min(attention, mlp) < 0:
        raise SpecError(
            f"hybrid-attention-ratio {attention} and hybrid-mlp-ratio {mlp} of {layers} layers "
            "are no shares",
            "give shares of at most 1 together, or hybrid-layer-pattern",
        )
    letters = ["M"] * layers
    for letter, share in (("*", attention), ("-", mlp)):
        places = [index for index, each in enumerate(letters) if each == "M"]
        count = round(layers * share)
        for number in range(count):
            letters[places[(2 * number + 1) * len(places) // (2 * count)]] = letter
    return "".join(letters)


def _hybrid(o: _Options) -> dict[str, Any]:
    """Fields of a hybrid of state-space, attention and feed-forward layers.

    A slash introduces what is inside each prediction layer; a bar divides pipeline stages
    (models/hybrid/hybrid_layer_allocation.py).
    """
    written = _pattern(o)
    if not written:
        return {}
    main, *inside = written.split("/")
    inside = [part for part in inside if part]
    if len(set(inside)) > 1:
        raise SpecError(
            f"hybrid-layer-pattern {written!r} has different prediction layers",
            "write the same pattern after each slash",
        )
    plain = main.replace("|", "")
    for letter in set(plain + "".join(inside)) - set("M*-E"):
        raise SpecError(
            f"hybrid-layer-pattern has {letter!r} layers, which are not modelled",
            "M (Mamba), * (attention), - (feed-forward) and E (experts) are",
        )
    fields: dict[str, Any] = {
        "pattern": plain,
        "mamba": {
            "state": o.number("mamba-state-dim", 128),
            "head_dim": o.number("mamba-head-dim", 64),
            "groups": o.number("mamba-num-groups", 8),
            "heads": o.number("mamba-num-heads", 0),
        },
    }
    if inside:
        fields |= {"mtp_layers": len(inside), "mtp_pattern": inside[0]}
    return fields


def _depth(o: _Options) -> tuple[int, int]:
    """Layers, and those of an encoder before them (0: there is none).

    arguments.py sets num-layers to encoder-num-layers; a decoder of its own makes it T5.
    """
    encoder, decoder = o.number("encoder-num-layers", 0), o.number("decoder-num-layers", 0)
    layers = o.number("num-layers", 0) or encoder
    if not layers:
        raise SpecError("num-layers is missing", "give num-layers")
    if decoder or o.number("decoder-seq-length", 0) or o.text("model-family") == "t5":
        return decoder or layers, layers
    return layers, 0


def _vocabulary(o: _Options, default: str, warnings: list[str]) -> int:
    """Entries of the vocabulary that the tokenizer's type implies, where none is given.

    The WordPiece types read BERT's vocabulary files; the tokenizer adds [BOS], [EOS] and the
    extra ids (training/tokenizer/tokenizer.py _BertWordPieceTokenizer). Without a type BERT and
    T5 take the lower-case one (args_defaults of pretrain_bert.py and pretrain_t5.py).
    """
    kind = o.text("tokenizer-type") or default
    words = _WORD_PIECES.get(kind)
    if words is None:
        warnings.append(
            "vocab-size is not given: GPT-2's 50257 entries are taken (padded like Megatron does)."
        )
        return 50257
    vocab = words + 2 + o.number("vocab-extra-ids", 0)
    warnings.append(
        f"vocab-size is not given: {vocab} entries are taken, those of {kind} with BERT's own "
        f"file ({words}), [BOS], [EOS] and the extra ids."
    )
    return vocab


def _activation(o: _Options, gated: bool) -> str:
    if o.flag("squared-relu"):
        return "relu2"
    if o.flag("quick-geglu"):
        return "quick_gelu"
    return "silu" if gated else "gelu"


def _moe(o: _Options, layers: int, ffn: int) -> dict[str, Any]:
    experts = o.number("num-experts", 0)
    if not experts:
        return {}
    sigmoid = o.text("moe-router-score-function", "softmax") == "sigmoid"
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
    pattern = _frequency(o.text("moe-layer-freq", "1"), layers)
    if not all(pattern):
        fields["mlp_pattern"] = tuple("moe" if each else "dense" for each in pattern)
    return fields


def _coefficients(o: _Options) -> tuple[float, ...]:
    """Coefficients of the load-balancing losses: one, or one for each kind of loss."""
    try:
        return tuple(float(word) for word in o.words("moe-aux-loss-coeff"))
    except ValueError:
        text = o.text("moe-aux-loss-coeff")
        raise SpecError(f"moe-aux-loss-coeff is {text!r}, not a number", "give a number") from None


def _frequency(text: str, layers: int) -> list[int]:
    """``moe-layer-freq``: every n-th layer, or a list written like ``([0]*3+[1]*11)``."""
    word = text.replace(" ", "")
    if re.fullmatch(r"\d{1,6}", word):
        every = max(1, int(word))
        return [1 if index % every == 0 else 0 for index in range(layers)]
    result: list[int] = []
    for part in word.strip("()").split("+"):
        found = re.fullmatch(r"\(?\[([01](?:,[01])*)\]\)?(?:\*(\d{1,4}))?", part)
        if not found:
            raise SpecError(
                f"moe-layer-freq {text!r} is neither a number nor a list",
                "write 1, or ([0]*3+[1]*11)",
            )
        result += [int(bit) for bit in found[1].split(",")] * int(found[2] or 1)
    if len(result) != layers:
        raise SpecError(
            f"moe-layer-freq lists {len(result)} layers, num-layers is {layers}",
            "list as many as there are layers",
        )
    return result


def _latent(o: _Options) -> dict[str, Any]:
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


def _layout(o: _Options, model: dict[str, Any], warnings: list[str]) -> dict[str, Any]:
    tp = o.number("tensor-model-parallel-size", 1)
    pp = o.number("pipeline-model-parallel-size", 1)
    cp = o.number("context-parallel-size", 1)
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
            raise SpecError(
                f"world-size {world} is not a multiple of tp {tp} x pp {pp} x cp {cp} = {inside}",
                "check the parallel sizes",
            )
        layout["dp"] = _fed(o, world // inside, warnings)
    else:
        warnings.append("world-size is not given: one replica is taken (dp 1).")
    if not model.get("moe"):
        layout["ep"] = 1
    layout["zero"] = _zero(o)
    layout |= _pipeline(o, model, pp)
    # arguments.py: pp where it is not given; without chunks to interleave it is not used.
    group = o.number("microbatch-group-size-per-virtual-pipeline-stage", 0)
    if group and layout.get("vpp", 1) > 1:
        layout["microbatch_group"] = group
    return layout


def _graphs(o: _Options, warnings: list[str]) -> None:
    """Say what CUDA graphs do to memory, which is not modelled.

    Captured modules read static copies of their inputs, one for each layer and micro-batch in
    flight, and what they save lives in private pools: reserved all the time, but no longer counted
    as allocated (transformer/cuda_graphs.py; torch.cuda.graph pools).
    """
    implementation = o.text("cuda-graph-impl", "none")
    on = implementation if implementation != "none" else ""
    for name in ("enable-cuda-graph", "external-cuda-graph"):
        on = on or (name if o.flag(name) else "")
    if on:
        warnings.append(
            f"CUDA graphs ({on}) are not modelled: static inputs and private pools of captured "
            "modules add memory to these figures, and what captured modules save is reserved "
            "rather than allocated."
        )


def _fed(o: _Options, given: int, warnings: list[str]) -> int:
    """Replicas that a step feeds: a world-size of the whole machine may have more.

    A global batch of fewer sequences than one micro-batch for each replica cannot have run on all.
    """
    batch, micro_batch = o.number("global-batch-size", given), o.number("micro-batch-size", 1)
    if not o.has("global-batch-size") or batch >= micro_batch * given or batch % micro_batch:
        return given
    possible = gcd(given, batch // micro_batch)
    warnings.append(
        f"world-size has {given} replicas, but a global batch of {batch} feeds {possible}: the "
        "others are taken to be idle (Megatron refuses such a world-size)."
    )
    return possible


def _global_batch(o: _Options, micro_batch: int, replicas: int) -> int:
    """Sequences of one step; ``num_microbatches_calculator.py`` refuses what does not divide."""
    batch, step = o.number("global-batch-size", 1), micro_batch * replicas
    if batch % step == 0:
        return batch
    near = [size for size in (batch // step * step, -(-batch // step) * step) if size]
    fit = [str(b) for b in range(1, micro_batch) if batch % (b * replicas) == 0]
    hint = "use global-batch-size " + " or ".join(map(str, near))
    raise SpecError(
        f"global-batch-size {batch} is not divisible by micro-batch-size {micro_batch} x {replicas}"
        f" replicas (world-size over tp, pp and cp) = {step}; Megatron refuses it",
        hint + (f", or micro-batch-size {fit[-1]}" if fit else ""),
    )


def _zero(o: _Options) -> int:
    if o.flag("use-torch-fsdp2"):
        return 2 if o.flag("torch-fsdp2-no-reshard-after-forward") else 3
    if o.flag("use-megatron-fsdp"):
        strategy = o.text("data-parallel-sharding-strategy", "no_shard")
        return {"optim_grads_params": 3, "optim_grads": 2, "optim": 1}.get(strategy, 0)
    return 1 if o.flag("use-distributed-optimizer") or o.text("optimizer") == "dist_muon" else 0


def _pipeline(o: _Options, model: dict[str, Any], pp: int) -> dict[str, Any]:
    layers: int = model["layers"]
    if pp == 1:
        return {}
    stages = _pattern(o).split("/")[0].split("|")
    if len(stages) > 1:
        if len(stages) % pp:
            raise SpecError(
                f"hybrid-layer-pattern has {len(stages)} stages for pp {pp}", "check the pattern"
            )
        split_up: dict[str, Any] = {"layers_per_stage": tuple(len(stage) for stage in stages)}
        return split_up | ({"vpp": len(stages) // pp} if len(stages) > pp else {})
    described = o.text("pipeline-model-parallel-layout")
    if described:
        return _described(described, pp, layers)
    vpp = o.number("num-virtual-stages-per-pipeline-rank", 1)
    per = o.number("num-layers-per-virtual-pipeline-stage", 0)
    ends = (
        o.flag("account-for-embedding-in-pipeline-split"),
        o.flag("account-for-loss-in-pipeline-split"),
    )
    counted = layers + sum(ends)
    if per:
        vpp = max(1, counted // pp // per)
    first = o.number("decoder-first-pipeline-num-layers", 0)
    last = o.number("decoder-last-pipeline-num-layers", 0)
    result: dict[str, Any] = {"vpp": vpp} if vpp > 1 else {}
    if any(ends):
        chunk = counted // (pp * vpp)
        split = [chunk] * (pp * vpp)
        split[0] -= ends[0]
        split[-1] -= ends[1]
        result["layers_per_stage"] = tuple(split)
    elif first or last:
        middle = layers - first - last
        rest = pp - (1 if first else 0) - (1 if last else 0)
        if vpp > 1 or rest < 1 or middle % rest:
            raise SpecError(
                f"{middle} layers do not divide over the {rest} stages in the middle",
                "give layers_per_stage through --layers-per-stage",
            )
        split = ([first] if first else []) + [middle // rest] * rest + ([last] if last else [])
        result["layers_per_stage"] = tuple(split)
    return result


def _described(text: str, pp: int, layers: int) -> dict[str, Any]:
    """``pipeline-model-parallel-layout``: E embedding, t layer, m prediction layer, L loss.

    Stages are divided by ``|``; ``x*n`` repeats a character, ``(...)*n`` a group
    (``pipeline_parallel_layer_layout.py``).
    """
    # A shell's escapes of bars and brackets stay where the arguments come from a file.
    plain = re.sub(r"[\s,\\'\"]", "", text)
    plain = re.sub(r"\(([^()]*)\)\*(\d{1,4})", lambda m: m[1] * int(m[2]), plain)
    plain = re.sub(r"([EtmL|])\*(\d{1,4})", lambda m: m[1] * int(m[2]), plain)
    if not re.fullmatch(r"[EtmL|]*", plain):
        raise SpecError(f"pipeline-model-parallel-layout {text!r} does not read", "use E t m L |")
    counts = [stage.count("t") for stage in plain.split("|")]
    if len(counts) % pp or sum(counts) != layers:
        raise SpecError(
            f"pipeline-model-parallel-layout has {len(counts)} stages and {sum(counts)} layers, "
            f"for pp {pp} and {layers} layers",
            "check the layout",
        )
    vpp = len(counts) // pp
    return {"layers_per_stage": tuple(counts), **({"vpp": vpp} if vpp > 1 else {})}


def _workload(o: _Options, layout: dict[str, Any], framework: str) -> dict[str, Any]:
    precision = "bf16" if o.flag("bf16") else "fp16" if o.flag("fp16") else "fp32"
    # Without bf16 or fp16 weights and activations stay fp32, whatever the products run in.
    backend = o.text("attention-backend", "auto").removeprefix("AttnBackend.")
    if backend not in _BACKENDS:
        raise SpecError(f"attention-backend is {backend!r}", "use " + ", ".join(_BACKENDS))
    flash = backend in ("flash", "fused") or o.flag("use-flash-attn")
    if backend == "auto" and framework == "megatron":
        flash = True
    if backend in ("unfused", "local"):
        flash = False
    kernels: dict[str, Any] = {
        "masked_softmax_fusion": not o.flag("no-masked-softmax-fusion"),
        "apply_rope_fusion": not o.flag("no-rope-fusion") and framework == "megatron",
        "cross_entropy_loss_fusion": o.flag("cross-entropy-loss-fusion"),
        "cross_entropy_fusion_impl": _engine(o),
        "activation_func_fp8_input_store": o.flag("activation-func-fp8-input-store"),
        "bias_activation_fusion": not _unfused_activation(o),
        "use_fused_weighted_squared_relu": o.flag("use-fused-weighted-squared-relu"),
        "make_vocab_size_divisible_by": o.number("make-vocab-size-divisible-by", 128),
        "async_tensor_model_parallel_allreduce": not o.flag(
            "no-async-tensor-model-parallel-allreduce"
        ),
        "tp_comm_overlap": o.flag("tp-comm-overlap") and framework == "megatron",
    }
    if backend in ("flash", "fused", "unfused"):
        kernels["attention_backend"] = backend
    if o.has("num-experts"):
        kernels["moe_grouped_gemm"] = "on" if o.flag("moe-grouped-gemm") else "off"
        kernels["moe_token_dispatcher_type"] = (
            "allgather" if o.text("moe-token-dispatcher-type", "allgather") == "allgather"
            else "alltoall"
        )  # fmt: skip
        if o.text("moe-router-dtype") == "fp32":
            kernels["moe_router_dtype"] = "fp32"
        balancing = o.text("moe-router-load-balancing-type", "aux_loss")
        if balancing in ("aux_loss", "seq_aux_loss", "global_aux_loss", "none"):
            if not any(_coefficients(o)):
                balancing = "none"
            kernels["moe_router_load_balancing_type"] = balancing
    work: dict[str, Any] = {
        "seq": o.number("encoder-seq-length", 0) or o.number("seq-length", 2048),
        "micro_batch": o.number("micro-batch-size", 1),
        "precision": precision,
        "fp8": o.text("fp8-format") not in ("", "False"),
        "attention": "flash" if flash else "eager",
        "kernels": kernels,
    }
    if o.number("decoder-seq-length", 0):
        work["decoder_seq"] = o.number("decoder-seq-length", 0)
    if o.has("global-batch-size"):
        work["global_batch"] = _global_batch(o, work["micro_batch"], layout.get("dp", 1))
    return work


def _unfused_activation(o: _Options) -> bool:
    """Whether bias and activation are apart: each kind has its switch (arguments.py).

    ``core_transformer_config_from_args`` asks the one of SwiGLU where it runs, else GeLU's.
    """
    apart = {name: o.flag(f"no-bias-{name}-fusion") for name in ("gelu", "swiglu")}
    return apart["swiglu" if o.flag("swiglu") else "gelu"]


def _engine(o: _Options) -> str:
    """Which fused cross-entropy runs."""
    name = o.text("cross-entropy-fusion-impl", "native")
    if name not in ("native", "te"):
        raise SpecError(f"cross-entropy-fusion-impl is {name!r}", "use native or te")
    return name


def _framework(o: _Options) -> str:
    """Megatron's own layers, or Transformer Engine's (pretrain_bert.py reads the former's spec)."""
    local = o.text("transformer-impl") == "local" or o.words("spec") == ("local",)
    return "megatron-local" if local else "megatron"


def _training(o: _Options) -> dict[str, Any]:
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
        "fp8_weights": o.flag("fp8-param-gather"),
        "persistent_buffers": o.flag("fsdp-double-buffer"),
    }
    if OPTIMIZERS[names[optimizer]].newton_schulz and _zero(o) == 1:
        older = optimizer == "dist_muon" or o.flag("no-use-layer-wise-param-layout")
        training["whole_weights"] = "dealt" if older else "packed"
        training["overlapped_reduction"] = o.flag("overlap-grad-reduce")
    training["instances"] = max(1, o.number("num-distributed-optimizer-instances", 1))
    outer = o.text("outer-dp-sharding-strategy", "no_shard")
    o.text("expert-outer-dp-sharding-strategy")
    training["instances_share_states"] = outer == "optim" and o.flag("use-megatron-fsdp")
    if o.flag("use-precision-aware-optimizer"):
        sizes = [_itemsize(o, "exp-avg-dtype"), _itemsize(o, "exp-avg-sq-dtype")]
        training["moments_bytes"] = sum(sizes)
        training["master_bytes"] = _itemsize(o, "main-params-dtype")
    if o.flag("optimizer-cpu-offload"):
        training["offload"] = "optimizer"
    return {**training, **_offloaded(o)}


def _offloaded(o: _Options) -> dict[str, Any]:
    """Modules whose activations are offloaded.

    Refuses what ``transformer_config.py`` and ``training/arguments.py`` refuse.
    """
    modules, least = o.words("offload-modules"), o.number("min-offloaded-tensor-size", 1024 * 1024)
    layers = _offloaded_layers(o)
    if not o.flag("fine-grained-activation-offloading"):
        return layers
    if not modules:
        raise SpecError(
            "fine-grained-activation-offloading names no modules",
            "give --offload-modules, as in core_attn attn_proj",
        )
    return {"offload_modules": modules, "offload_elements": least, **layers}


def _offloaded_layers(o: _Options) -> dict[str, Any]:
    """Layers whose activations are offloaded; weights are not any more (TE cpu_offload.py)."""
    count = o.number("cpu-offloading-num-layers", 0)
    kept = o.has("cpu-offloading-activations") and not o.flag("cpu-offloading-activations")
    if not o.flag("cpu-offloading") or kept:
        return {}
    if o.text("cuda-graph-impl", "none") != "none" or o.flag("enable-cuda-graph"):
        raise SpecError("cpu-offloading and CUDA graphs exclude each other", "drop one of them")
    if count and count >= o.number("num-layers", count + 1):
        raise SpecError(
            f"cpu-offloading-num-layers is {count}, but the last layer is never offloaded",
            f"use at most {o.number('num-layers', 1) - 1}",
        )
    if o.flag("fine-grained-activation-offloading"):
        raise SpecError(
            "fine-grained-activation-offloading and cpu-offloading exclude each other",
            "drop one of them",
        )
    return {"offload_layers": count}


def _itemsize(o: _Options, name: str) -> int:
    """Bytes of an element type that an option names; fp32 by default."""
    sizes = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
    word = o.text(name, "fp32")
    word = _TORCH_TYPES.get(word, word)
    if word not in sizes:
        raise SpecError(f"{name} is {word!r}", "use one of " + ", ".join(sizes))
    return sizes[word]


def _policies(o: _Options) -> tuple[str, ...]:
    """Recompute options as a policy (transformer_config.py recompute_granularity and others)."""
    granularity = o.text("recompute-granularity")
    if o.flag("recompute-activations") and not granularity:
        granularity = "selective"
    if granularity == "selective":
        ours = {row.megatron: name for name, row in MODULES.items()}
        modules = o.words("recompute-modules") or ("core_attn",)
        return ("+".join(ours.get(name, name) for name in modules),)
    if granularity == "full":
        method, count = o.text("recompute-method", "uniform"), o.number("recompute-num-layers", 1)
        if o.flag("distribute-saved-activations"):
            return ("full-sharded",)
        if method == "uniform":
            return ("full",) if count == 1 else (f"uniform:{count}",)
        return (f"block:{count}",)
    return ("none",)
