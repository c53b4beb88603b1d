"""Model types of the hub as data: which keys hold the sizes, and what the code fixes. One table.

Facts and defaults are those of the type's modelling code in transformers 5.24, in training mode;
types that the library does not hold (``remote``) follow the code published with the checkpoint.
"""

from __future__ import annotations

from dataclasses import replace

from actcalc.io.hub.encoders import BERT, ENCODERS
from actcalc.io.hub.family import NO_GROUPS, RATE, Experts, Family, Keys, code_of, more

_LINEAR = {"linear_attention": "linear"}
_STATE_SPACE = {"mamba": "mamba", "linear_attention": "mamba"}
_LOCAL: Keys = ("num_local_experts", "num_experts")
_ALL_BIAS = {"qkv_bias": ("attention_bias", False), "out_bias": ("attention_bias", False)}

LLAMA = Family(
    code=code_of("llama"),
    facts={
        "norm": "rmsnorm",
        "position": "rotary",
        "gated": True,
        "qkv_bias": False,
        "out_bias": False,
        "mlp_bias": False,
    },
    flags={**_ALL_BIAS, "mlp_bias": ("mlp_bias", False)},
    rates=RATE,
    windows="none",
    defaults={"hidden": 4096, "ffn": 11008, "layers": 32, "heads": 32, "vocab": 32000},
)
_PLAIN = more(LLAMA, code_of("llama"), flags={}, defaults={})
_PLAIN = replace(_PLAIN, flags={}, defaults={})
_ATTENTION_BIAS = replace(_PLAIN, flags=_ALL_BIAS)

MISTRAL = replace(
    _PLAIN,
    code=code_of("mistral"),
    windows="uniform",
    window_keys=("sliding_window", "sliding_window_size"),
    window_default=4096,
    defaults={
        "hidden": 4096, "ffn": 14336, "layers": 32, "heads": 32, "kv_heads": 8, "vocab": 32000,
    },
)  # fmt: skip
_NO_WINDOW = replace(MISTRAL, window_default=0)

MIXTRAL = replace(
    _NO_WINDOW, code=code_of("mixtral"), experts=Experts(count=_LOCAL, width=("intermediate_size",))
)
QWEN2 = replace(
    _PLAIN,
    code=code_of("qwen2"),
    facts={**_PLAIN.facts, "qkv_bias": True},
    windows="qwen_upper",
    defaults={"hidden": 4096, "ffn": 22016, "layers": 32, "heads": 32, "vocab": 151936},
)
QWEN3 = replace(
    _ATTENTION_BIAS,
    code=code_of("qwen3"),
    facts={**_PLAIN.facts, "qk_norm": "head"},
    windows="qwen_upper",
    defaults={
        "hidden": 4096, "ffn": 22016, "layers": 32, "heads": 32, "head_dim": 128, "vocab": 151936,
    },
)  # fmt: skip
_QWEN_EXPERTS = Experts(layers="qwen", optional=True, normalize=("norm_topk_prob", False))
QWEN3_NEXT = replace(
    _ATTENTION_BIAS,
    code=code_of("qwen3_next"),
    facts={
        **_PLAIN.facts, "norm": "gemma_rmsnorm", "qk_norm": "head", "attention_gate": "packed",
    },
    windows="linear",
    mixers=_LINEAR,
    rotary=0.25,
    experts=replace(
        _QWEN_EXPERTS, shared_width=("shared_expert_intermediate_size",),
        facts={"shared_gate": True}, normalize=("norm_topk_prob", True),
    ),
    defaults={"head_dim": 256, "kv_heads": 2, "vocab": 151936},
    adjust=("gated_delta",),
)  # fmt: skip
GEMMA = replace(
    _ATTENTION_BIAS,
    code=code_of("gemma"),
    facts={**_PLAIN.facts, "norm": "gemma_rmsnorm"},
    activation=("hidden_act", "gelu_pytorch_tanh"),
    tied=True,
    defaults={"head_dim": 256, "kv_heads": 16},
)
GEMMA2 = replace(
    GEMMA,
    code=code_of("gemma2"),
    facts={**GEMMA.facts, "norm_placement": "sandwich"},
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    windows="every_2",
    window_default=4096,
    defaults={
        "hidden": 2304, "ffn": 9216, "layers": 26, "heads": 8, "kv_heads": 4, "head_dim": 256,
        "vocab": 256000,
    },
    adjust=("softcaps_gemma2",),
    eager=True,
)  # fmt: skip
GEMMA3 = replace(
    GEMMA2,
    code=code_of("gemma3"),
    facts={**GEMMA2.facts, "qk_norm": "head"},
    windows="every_6",
    defaults={**GEMMA2.defaults, "vocab": 262208},
    adjust=("softcaps",),
    eager=False,
)
"""The type's code gives every query head its own key and value."""
GEMMA3N = replace(
    GEMMA,
    code=code_of("gemma3n"),
    facts={
        **GEMMA.facts,
        "norm": "rmsnorm",
        "norm_placement": "sandwich",
        "qk_norm": "head",
        "v_norm": True,
    },
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    windows="every_5",
    window_default=512,
    keys={"ffn": ()},
    defaults={"head_dim": 256, "kv_heads": 2, "vocab": 262400},
    adjust=("softcap_30", "shared_keys", "per_layer", "gemma3n"),
)
GEMMA4 = replace(
    GEMMA3N,
    code=code_of("gemma4"),
    windows="every_6",
    keys={},
    defaults={"head_dim": 256, "kv_heads": 4, "vocab": 262144},
    experts=Experts(
        count=("num_experts",), topk=("top_k_experts",), optional=True, aux=False,
        facts={"beside_dense": True},
    ),
    adjust=("softcaps", "gemma4", "shared_keys", "per_layer"),
)  # fmt: skip
GPT2 = Family(
    code=code_of("gpt2"),
    facts={"position": "learned", "packed_qkv": True},
    keys=NO_GROUPS,
    rates={
        "hidden_dropout": (("resid_pdrop",), 0.1),
        "attention_dropout": (("attn_pdrop",), 0.1),
        "embedding_dropout": (("embd_pdrop",), 0.1),
    },
    activation=("activation_function", "gelu_new"),
    tied=True,
    windows="none",
    defaults={"positions": 1024},
    wide=True,
)
GPTJ = Family(
    code=code_of("gptj"),
    facts={
        "position": "rotary",
        "parallel": "one_norm",
        "qkv_bias": False,
        "out_bias": False,
        "head_bias": True,
    },
    keys=NO_GROUPS,
    rates={
        "hidden_dropout": (("resid_pdrop",), 0.0),
        "attention_dropout": (("attn_pdrop",), 0.0),
        "embedding_dropout": (("embd_pdrop",), 0.0),
    },
    activation=("activation_function", "gelu_new"),
    windows="none",
    wide=True,
    adjust=("rotary_dim_64",),
)
GPT_NEOX = Family(
    code=code_of("gpt_neox"),
    facts={"position": "rotary", "packed_qkv": True},
    keys=NO_GROUPS,
    flags={"qkv_bias": ("attention_bias", True), "out_bias": ("attention_bias", True)},
    rates={
        "hidden_dropout": (("hidden_dropout",), 0.0),
        "attention_dropout": (("attention_dropout",), 0.0),
        "embedding_dropout": (("hidden_dropout",), 0.0),
    },
    activation=("hidden_act", "gelu"),
    windows="none",
    rotary=0.25,
    adjust=("parallel_residual",),
)
PHI = Family(
    code=code_of("phi"),
    facts={"position": "rotary", "parallel": "one_norm", "head_bias": True},
    rates={
        "hidden_dropout": (("resid_pdrop",), 0.0),
        "attention_dropout": (("attention_dropout", "attn_pdrop"), 0.0),
        "embedding_dropout": (("embd_pdrop",), 0.0),
    },
    activation=("hidden_act", "gelu_new"),
    windows="none",
    rotary=0.5,
    adjust=("qk_layernorm",),
)
T5 = Family(
    code=code_of("t5"),
    facts={
        "norm": "rmsnorm",
        "position": "relative",
        "qkv_bias": False,
        "out_bias": False,
        "mlp_bias": False,
    },
    keys={**NO_GROUPS, "head_dim": ("d_kv",)},
    rates={
        "hidden_dropout": (("dropout_rate",), 0.1),
        "attention_dropout": (("dropout_rate",), 0.1),
        "embedding_dropout": (("dropout_rate",), 0.1),
        "activation_dropout": (("dropout_rate",), 0.1),
    },
    activation=("", ""),
    tied=True,
    windows="none",
    defaults={"head_dim": 64},
    adjust=("t5",),
)
COHERE = replace(
    _ATTENTION_BIAS,
    code=code_of("cohere"),
    facts={
        **_PLAIN.facts,
        "norm": "layernorm",
        "norm_bias": False,
        "parallel": "one_norm",
    },
    tied=True,
    adjust=("cohere_qk_norm",),
)
OLMO2 = replace(
    _ATTENTION_BIAS,
    code=code_of("olmo2"),
    facts={**_PLAIN.facts, "norm_placement": "post_sublayer", "qk_norm": "full"},
)
_LATENT = replace(
    _PLAIN,
    latent=True,
    flags=_ALL_BIAS,
    experts=Experts(
        layers="first_dense",
        shared_count=("n_shared_experts",),
        aux_key="aux_loss_alpha",
        optional=True,
        normalize=("norm_topk_prob", True),
    ),
    adjust=("expert_groups", "prediction_layers"),
)
DEEPSEEK_V2 = replace(
    _LATENT,
    experts=replace(_LATENT.experts or Experts(), shared_default=2, normalize=("", False)),
    code=code_of("deepseek_v2"),
    flags={**_ALL_BIAS, "mlp_bias": ("mlp_bias", False)},
)
_BIAS_FREE_BALANCE = {"correction_bias": True}
DEEPSEEK_V3 = replace(
    _LATENT,
    code=code_of("deepseek_v3"),
    experts=replace(
        _LATENT.experts or Experts(),
        router="sigmoid",
        facts=_BIAS_FREE_BALANCE,
        # The modelling code has no balancing loss; training has a sequence-wise one
        # (DeepSeek-V3 technical report, section 2.1.2).
        aux=True,
        shared_default=1,
    ),
)
DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    code=code_of("deepseek_v32"),
    mixers={"indexed_attention": "full"},
    experts=replace(DEEPSEEK_V3.experts or Experts(), layers="listed_first_3_dense"),
    adjust=(*DEEPSEEK_V3.adjust, "indexer"),
)
GLM = replace(
    _PLAIN,
    code=code_of("glm"),
    facts={**_PLAIN.facts, "packed_gate": True},
    flags={"qkv_bias": ("attention_bias", True)},
    rotary=0.5,
    defaults={"head_dim": 128, "kv_heads": 2},
)
GLM4_MOE = replace(
    _PLAIN,
    code=code_of("glm4_moe"),
    flags={"qkv_bias": ("attention_bias", False)},
    rotary=0.5,
    experts=DEEPSEEK_V3.experts,
    adjust=("use_qk_norm", "expert_groups", "prediction_layers"),
)
GRANITE_MOE = replace(
    _ATTENTION_BIAS,
    code=code_of("granitemoe"),
    experts=Experts(count=_LOCAL, router="softmax_topk", width=("intermediate_size",)),
)
FALCON = Family(
    code=code_of("falcon"),
    facts={"packed_qkv": True},
    flags={
        "qkv_bias": ("bias", False),
        "out_bias": ("bias", False),
        "mlp_bias": ("bias", False),
    },
    keys={"ffn": ("ffn_hidden_size",)},
    rates={
        "hidden_dropout": (("hidden_dropout",), 0.0),
        "attention_dropout": (("attention_dropout",), 0.0),
    },
    activation=("activation", "gelu"),
    tied=True,
    windows="none",
    wide=True,
    adjust=("falcon",),
)
LFM2 = replace(
    _PLAIN,
    code=code_of("lfm2"),
    facts={**_PLAIN.facts, "qk_norm": "head"},
    rates={},
    keys={"ffn": ("block_ff_dim", "intermediate_size")},
    activation=("", "silu"),
    tied=True,
    windows="indexed_attention",
    mixers={"conv": "linear"},
    defaults={"kv_heads": 8},
    adjust=("short_conv", "rounded_ffn", "tied_embedding"),
)
_MAMBA = Family(
    code=code_of("mamba"),
    facts={"position": "none", "norm": "rmsnorm"},
    activation=("hidden_act", "silu"),
    tied=True,
    windows="none",
    mixers=_STATE_SPACE,
    attentionless=True,
    eager=True,
    adjust=("mamba1",),
)

_RWKV = Family(
    code=code_of("rwkv"),
    facts={"position": "none", "norm": "layernorm"},
    keys={"positions": ("context_length", "max_position_embeddings")},
    defaults={"positions": 1024},
    activation=("", "relu2"),
    windows="none",
    wide=True,
    attentionless=True,
    eager=True,
    adjust=("wkv",),
)

FAMILIES: dict[str, Family] = {
    # Llama and what differs from it in a few facts
    "llama": LLAMA,
    "internlm3": more(
        LLAMA,
        "transformers 5.24, configuration_internlm3.py (runs modeling_llama.py)",
        adjust=("internlm3",),
    ),
    "exaone": more(
        LLAMA,
        "transformers 5.24, configuration_exaone.py (runs modeling_llama.py)",
        activation=("activation_function", "silu"),
    ),
    "granite": more(LLAMA, code_of("granite")),
    "granite_swa": replace(
        LLAMA, code=code_of("granite_swa"), facts={**LLAMA.facts, "attention_sinks": True},
        windows="full_every_4", window_default=128, tied=True, eager=True, defaults={},
    ),
    "smollm3": replace(
        LLAMA, code=code_of("smollm3"), windows="listed", no_rope="every_4", tied=True,
        defaults={"kv_heads": 4},
    ),
    "cwm": replace(
        _PLAIN, code=code_of("cwm"), flags={"mlp_bias": ("mlp_bias", False)},
        windows="full_every_4", window_default=8192, defaults={"head_dim": 128, "kv_heads": 8},
    ),
    "seed_oss": replace(
        LLAMA,
        code=code_of("seed_oss"),
        flags={"qkv_bias": ("attention_bias", True), "out_bias": ("attention_out_bias", False),
               "mlp_bias": ("mlp_bias", False)},
        rates={"attention_dropout": (("attention_dropout",), 0.1),
               "hidden_dropout": (("residual_dropout",), 0.1)},
        defaults={"head_dim": 128, "kv_heads": 8},
    ),
    "arcee": replace(
        LLAMA, code=code_of("arcee"), facts={**LLAMA.facts, "gated": False},
        activation=("hidden_act", "relu2"), defaults={},
    ),
    "helium": replace(
        LLAMA, code=code_of("helium"),
        flags={"qkv_bias": ("attention_bias", False), "mlp_bias": ("mlp_bias", False)},
        defaults={"head_dim": 128},
    ),
    "jais2": replace(
        LLAMA,
        code=code_of("jais2"),
        facts={**LLAMA.facts, "norm": "layernorm", "gated": False},
        flags={"qkv_bias": ("attention_bias", True), "out_bias": ("attention_bias", True),
               "mlp_bias": ("mlp_bias", True)},
        activation=("hidden_act", "relu2"),
        defaults={},
    ),
    "nemotron": replace(
        LLAMA, code=code_of("nemotron"),
        facts={**LLAMA.facts, "norm": "layernorm", "gated": False},
        activation=("hidden_act", "relu2"), rotary=0.5, defaults={},
    ),
    "ernie4_5": replace(
        LLAMA,
        code=code_of("ernie4_5"),
        flags={"qkv_bias": ("use_bias", False), "out_bias": ("use_bias", False),
               "mlp_bias": ("use_bias", False)},
        rates={},
        tied=True,
        defaults={"head_dim": 128, "kv_heads": 2},
    ),
    "ernie4_5_moe": replace(
        LLAMA,
        code=code_of("ernie4_5_moe"),
        flags={"qkv_bias": ("use_bias", False), "out_bias": ("use_bias", False),
               "mlp_bias": ("use_bias", False), "head_bias": ("use_bias", False)},
        rates={},
        tied=True,
        defaults={"kv_heads": 4},
        experts=Experts(
            count=("moe_num_experts",), topk=("moe_k",), shared_count=("moe_num_shared_experts",),
            shared_default=2,
            layers="interval", facts=_BIAS_FREE_BALANCE,
        ),
        adjust=("no_expert_bias",),
    ),
    "hunyuan_v1_dense": replace(
        _ATTENTION_BIAS, code=code_of("hunyuan_v1_dense"),
        facts={**_PLAIN.facts, "qk_norm": "head"},
    ),
    "hunyuan_v1_moe": replace(
        _ATTENTION_BIAS, code=code_of("hunyuan_v1_moe"), facts={**_PLAIN.facts, "qk_norm": "head"},
        experts=Experts(
            topk=("moe_topk",), width=("intermediate_size",), shared_count=(),
        ),
        adjust=("hunyuan_experts",),
    ),
    # Mistral
    "mistral": MISTRAL,
    "ministral": replace(MISTRAL, code=code_of("ministral"), windows="listed_or_uniform"),
    "ministral3": replace(
        _NO_WINDOW, code=code_of("ministral3"),
        defaults={**_NO_WINDOW.defaults, "head_dim": 128, "layers": 34, "vocab": 131072},
    ),
    "mixtral": MIXTRAL,
    "mistral4": replace(
        _LATENT, code=code_of("mistral4"),
        experts=Experts(layers="first_dense", shared_count=("n_shared_experts",)),
    ),
    "phimoe": replace(
        _ATTENTION_BIAS,
        code=code_of("phimoe"),
        facts={**_PLAIN.facts, "norm": "layernorm"},
        flags={**_ALL_BIAS, "head_bias": ("lm_head_bias", False)},
        windows="uniform",
        experts=Experts(count=_LOCAL, width=("intermediate_size",)),
        defaults={"kv_heads": 8},
    ),
    "minimax": replace(
        _PLAIN,
        code=code_of("minimax"),
        facts={**_PLAIN.facts, "norm_placement": "normed_stream"},
        windows="every_2_linear",
        mixers=_LINEAR,
        experts=Experts(count=_LOCAL, width=("intermediate_size",)),
        defaults={"kv_heads": 8},
        adjust=("lightning",),
    ),
    "minimax_m2": replace(
        _PLAIN,
        code=code_of("minimax_m2"),
        facts={**_PLAIN.facts, "qk_norm": "full"},
        experts=Experts(count=_LOCAL,
            router="sigmoid", width=("intermediate_size",), facts=_BIAS_FREE_BALANCE,
        ),
        defaults={"head_dim": 128, "kv_heads": 8},
        adjust=("rotary_dim", "prediction_modules"),
    ),
    # Qwen
    "qwen": Family(
        code="Qwen/Qwen-7B modeling_qwen.py",
        facts={**_PLAIN.facts, "qkv_bias": True, "packed_qkv": True},
        keys={"head_dim": ("kv_channels",)},
        rates={
            "attention_dropout": (("attn_dropout_prob", "attn_pdrop"), 0.0),
            "embedding_dropout": (("emb_dropout_prob", "embd_pdrop"), 0.0),
        },
        activation=("", "silu"),
        windows="none",
        adjust=("qwen1",),
    ),
    "qwen2": QWEN2,
    "qwen2_moe": replace(
        QWEN2,
        code=code_of("qwen2_moe"),
        flags={"qkv_bias": ("qkv_bias", True)},
        windows="qwen_even",
        experts=replace(
            _QWEN_EXPERTS, shared_width=("shared_expert_intermediate_size",),
            facts={"shared_gate": True},
        ),
        defaults={},
    ),
    "qwen2_vl_text": replace(QWEN2, code=code_of("qwen2_vl"), flags={}, defaults={}),
    "qwen2_5_vl_text": replace(QWEN2, code=code_of("qwen2_5_vl"), flags={}, defaults={}),
    "qwen3": QWEN3,
    "qwen3_vl_text": replace(QWEN3, code=code_of("qwen3_vl"), windows="none"),
    "qwen3_vl_moe_text": replace(
        QWEN3, code=code_of("qwen3_vl_moe"), windows="none", defaults={},
        experts=replace(_QWEN_EXPERTS, normalize=("", True)),
    ),
    "qwen3_moe": replace(
        QWEN3, code=code_of("qwen3_moe"), windows="qwen_all", experts=_QWEN_EXPERTS, defaults={},
    ),
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5_text": replace(
        QWEN3_NEXT, code=code_of("qwen3_5"), experts=None,
        defaults={"head_dim": 256, "kv_heads": 4, "vocab": 248320},
        adjust=("gated_delta", "qwen3_5_predicts"),
    ),
    "qwen3_5_moe_text": replace(
        QWEN3_NEXT, code=code_of("qwen3_5_moe"),
        experts=replace(
            QWEN3_NEXT.experts or Experts(), layers="all", optional=False, normalize=("", True)
        ),
        defaults={"head_dim": 256, "kv_heads": 2, "vocab": 248320},
        adjust=("gated_delta", "qwen3_5_predicts"),
    ),
    "mimo_v2_flash": replace(
        _PLAIN,
        code=code_of("mimo_v2_flash"),
        facts={**_PLAIN.facts, "attention_sinks": True, "sinks_in": "windowed"},
        flags={"qkv_bias": ("attention_bias", False)},
        windows="mimo_v2",
        window_default=129,
        rotary=0.334,
        experts=replace(
            DEEPSEEK_V3.experts or Experts(), layers="listed_first_dense", shared_count=(),
        ),
        defaults={"head_dim": 192, "kv_heads": 4},
        eager=True,
        adjust=("mimo_v2", "expert_groups"),
    ),
    "nemotron-nas": replace(
        LLAMA,
        code="nvidia/Llama-3_3-Nemotron-Super-49B-v1 modeling_decilm.py",
        keys={"ffn": (), "kv_heads": ()},
        windows="none",
        blocks=True,
        adjust=("blocks",),
    ),
    "deci": replace(
        LLAMA,
        code="Deci/DeciLM-7B modeling_decilm.py",
        keys={"kv_heads": ()},
        windows="none",
        adjust=("kv_heads_per_layer",),
    ),
    "mimo": replace(
        QWEN2, code="XiaomiMiMo/MiMo-7B modeling_mimo.py", adjust=("prediction_layers",),
    ),
    # Gemma
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "gemma3n_text": GEMMA3N,
    "gemma4_text": GEMMA4,
    "vaultgemma": replace(
        GEMMA2, code=code_of("vaultgemma"), facts={**GEMMA.facts, "norm_placement": "pre"},
    ),
    # Phi
    "phi": PHI,
    "phi3": replace(
        _PLAIN,
        code=code_of("phi3"),
        facts={**_PLAIN.facts, "packed_qkv": True, "packed_gate": True},
        rates={"attention_dropout": (("attention_dropout",), 0.0),
               "hidden_dropout": (("resid_pdrop",), 0.0)},
        windows="uniform",
    ),
    # GPT and its relatives
    "gpt2": GPT2,
    "gpt_bigcode": replace(
        GPT2, code=code_of("gpt_bigcode"), activation=("activation_function", "gelu_pytorch_tanh"),
        adjust=("multi_query",),
    ),
    "gpt_neo": Family(
        code=code_of("gpt_neo"),
        facts={"position": "learned", "qkv_bias": False},
        keys=NO_GROUPS,
        rates={
            "hidden_dropout": (("resid_dropout",), 0.0),
            "attention_dropout": (("attention_dropout",), 0.0),
            "embedding_dropout": (("embed_dropout",), 0.0),
        },
        activation=("activation_function", "gelu_new"),
        tied=True,
        wide=True,
        windows="gpt_neo",
        defaults={"positions": 2048},
        window_keys=("window_size",),
        window_default=256,
        eager=True,
    ),
    "gptj": GPTJ,
    "codegen": replace(
        GPTJ, code=code_of("codegen"), facts={**GPTJ.facts, "packed_qkv": True},
    ),
    "gpt_neox": GPT_NEOX,
    "phi-msft": replace(
        PHI, code="microsoft/phi-1_5 modeling_phi.py",
        facts={**PHI.facts, "packed_qkv": True, "family": "phi"},
        activation=("activation_function", "gelu_new"),
        wide=True,
        adjust=("rotary_dim",),
    ),
    "falcon": FALCON,
    "opt": Family(
        code=code_of("opt"),
        facts={"position": "learned"},
        flags={"qkv_bias": ("enable_bias", True), "out_bias": ("enable_bias", True),
               "mlp_bias": ("enable_bias", True)},
        keys={**NO_GROUPS, "ffn": ("ffn_dim",)},
        rates={"hidden_dropout": (("dropout",), 0.1),
               "attention_dropout": (("attention_dropout",), 0.0)},
        activation=("activation_function", "relu"),
        tied=True,
        windows="none",
        defaults={"positions": 2048},
        adjust=("opt",),
    ),
    "bloom": Family(
        code=code_of("bloom"),
        facts={"position": "alibi", "embedding_norm": True, "packed_qkv": True},
        keys={"ffn": ()},
        rates={"hidden_dropout": (("hidden_dropout",), 0.0),
               "attention_dropout": (("attention_dropout",), 0.0)},
        activation=("", "gelu_pytorch_tanh"),
        tied=True,
        wide=True,
        windows="none",
        eager=True,
        adjust=("bloom",),
    ),
    "mpt": Family(
        code=code_of("mpt"),
        facts={"norm_bias": False, "qkv_bias": False, "out_bias": False, "mlp_bias": False,
               "packed_qkv": True},
        keys={"ffn": ()},
        activation=("", "gelu"),
        tied=True,
        wide=True,
        windows="none",
        eager=True,
        adjust=("mpt",),
    ),
    "dbrx": Family(
        code=code_of("dbrx"),
        facts={**_PLAIN.facts, "norm": "layernorm", "norm_bias": False, "packed_qkv": True},
        keys={"ffn": ()},
        rates={"hidden_dropout": (("resid_pdrop",), 0.0)},
        activation=("", "silu"),
        windows="none",
        adjust=("dbrx",),
    ),
    "biogpt": Family(
        code=code_of("biogpt"),
        facts={"position": "learned"},
        rates={
            "hidden_dropout": (("hidden_dropout_prob",), 0.1),
            "attention_dropout": (("attention_probs_dropout_prob",), 0.1),
            "embedding_dropout": (("hidden_dropout_prob",), 0.1),
            "activation_dropout": (("activation_dropout",), 0.0),
        },
        activation=("hidden_act", "gelu"),
        tied=True,
        windows="none",
        defaults={"positions": 1024},
        adjust=("two_more_positions",),
    ),
    "xglm": Family(
        code=code_of("xglm"),
        facts={"position": "none"},
        keys={**NO_GROUPS, "heads": ("attention_heads",), "ffn": ("ffn_dim",)},
        rates={
            "hidden_dropout": (("dropout",), 0.1),
            "attention_dropout": (("attention_dropout",), 0.1),
            "embedding_dropout": (("dropout",), 0.1),
            "activation_dropout": (("activation_dropout",), 0.0),
        },
        activation=("activation_function", "gelu"),
        tied=True,
        windows="none",
        eager=True,
    ),
    "starcoder2": Family(
        code=code_of("starcoder2"),
        facts={"position": "rotary"},
        flags={"qkv_bias": ("use_bias", True), "out_bias": ("use_bias", True),
               "mlp_bias": ("use_bias", True)},
        rates={
            "hidden_dropout": (("residual_dropout",), 0.0),
            "attention_dropout": (("attention_dropout",), 0.0),
            "embedding_dropout": (("embedding_dropout",), 0.0),
        },
        activation=("hidden_act", "gelu_pytorch_tanh"),
        tied=True,
        windows="uniform",
        defaults={"kv_heads": 2},
    ),
    "stablelm": Family(
        code=code_of("stablelm"),
        facts={**_PLAIN.facts, "norm": "layernorm"},
        flags={"qkv_bias": ("use_qkv_bias", False)},
        rates={"attention_dropout": (("attention_dropout",), 0.0),
               "hidden_dropout": (("hidden_dropout",), 0.0)},
        windows="none",
        rotary=0.25,
        adjust=("stablelm", "stablelm_qk_norm"),
    ),
    "persimmon": Family(
        code=code_of("persimmon"),
        facts={"position": "rotary", "packed_qkv": True},
        keys=NO_GROUPS,
        rates={"attention_dropout": (("attention_dropout",), 0.0),
               "hidden_dropout": (("hidden_dropout",), 0.0)},
        activation=("hidden_act", "relu2"),
        windows="none",
        rotary=0.5,
        adjust=("persimmon_qk_norm",),
    ),
    # OLMo
    "olmo": replace(
        _ATTENTION_BIAS, code=code_of("olmo"), facts={**_PLAIN.facts, "norm": "nonparametric"},
        adjust=("clip_qkv",),
    ),
    "olmo2": OLMO2,
    "olmo3": replace(OLMO2, code=code_of("olmo3"), windows="every_4", window_default=4096),
    "olmo_hybrid": replace(
        OLMO2, code=code_of("olmo_hybrid"), windows="linear_and_last", mixers=_LINEAR,
        adjust=("gated_delta_olmo",),
    ),
    "olmoe": replace(
        _ATTENTION_BIAS, code=code_of("olmoe"), facts={**_PLAIN.facts, "qk_norm": "full"},
        experts=Experts(width=("intermediate_size",), normalize=("norm_topk_prob", False)),
        adjust=("clip_qkv",),
    ),
    "flex_olmo": replace(
        OLMO2, code=code_of("flex_olmo"),
        experts=Experts(width=("intermediate_size",), normalize=("norm_topk_prob", False)),
    ),
    # Cohere
    "cohere": COHERE,
    "cohere2": replace(
        COHERE, code=code_of("cohere2"), windows="every_4", window_default=4096,
        no_rope="full_attention", adjust=(),
    ),
    # DeepSeek, Kimi
    "deepseek": replace(
        _ATTENTION_BIAS, code="deepseek-ai/deepseek-moe-16b-base modeling_deepseek.py",
        experts=Experts(
            layers="first_dense", shared_count=("n_shared_experts",), aux_key="aux_loss_alpha",
            optional=True, normalize=("norm_topk_prob", False),
        ),
    ),
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
    "kimi_k2": replace(
        DEEPSEEK_V3, code="moonshotai/Kimi-K2-Base modeling_deepseek.py (the DeepSeek-V3 code)",
    ),
    "deepseek_v32": DEEPSEEK_V32,
    "deepseek_v4": replace(
        _PLAIN,
        code=code_of("deepseek_v4"),
        facts={**_PLAIN.facts, "attention_sinks": True, "clamped_gate": True},
        flags={},
        keys={"ffn": ()},
        windows="compressed",
        window_default=128,
        mixers={
            "compressed_sparse_attention": "sparse", "heavily_compressed_attention": "compressed",
        },
        experts=replace(
            DEEPSEEK_V3.experts or Experts(), layers="all", router="sqrtsoftplus",
            normalize=("", True),
        ),
        defaults={"head_dim": 512, "kv_heads": 1},
        eager=True,
        adjust=("compression", "prediction_layers"),
    ),
    "glm_moe_dsa": replace(
        DEEPSEEK_V32, code=code_of("glm_moe_dsa"), adjust=(*DEEPSEEK_V32.adjust, "shared_picks"),
    ),
    "kimi_linear": replace(
        DEEPSEEK_V3,
        code=code_of("kimi_linear"),
        facts={**_PLAIN.facts, "position": "none"},
        windows="kimi",
        mixers=_LINEAR,
        experts=replace(
            DEEPSEEK_V3.experts or Experts(),
            layers="listed_first_dense",
            shared_count=("n_shared_experts", "num_shared_experts"),
            normalize=("moe_renormalize", True),
        ),
        adjust=("kimi_delta", "kimi_groups"),
    ),
    "dots1": replace(
        _ATTENTION_BIAS, code=code_of("dots1"), facts={**_PLAIN.facts, "qk_norm": "head"},
        windows="qwen_upper_always",
        window_default=4096,
        experts=replace(
            DEEPSEEK_V3.experts or Experts(), normalize=("norm_topk_prob", False), shared_default=0
        ),
        adjust=("expert_groups",),
    ),
    # GLM
    "glm": GLM,
    "glm4": replace(
        GLM, code=code_of("glm4"), facts={**GLM.facts, "norm_placement": "sandwich"},
    ),
    "glm4_moe": GLM4_MOE,
    "solar_open": replace(
        _PLAIN,
        code=code_of("solar_open"),
        flags={"qkv_bias": ("attention_bias", False)},
        defaults={"head_dim": 128, "kv_heads": 8},
        experts=replace(GLM4_MOE.experts or Experts(), layers="all"),
        adjust=("expert_groups",),
    ),
    "glm4_moe_lite": replace(
        DEEPSEEK_V3,
        code=code_of("glm4_moe_lite"),
        experts=replace(DEEPSEEK_V3.experts or Experts(), layers="listed_first_dense"),
    ),
    "chatglm": Family(
        code="THUDM/chatglm3-6b modeling_chatglm.py",
        facts={**_PLAIN.facts, "packed_qkv": True, "packed_gate": True},
        keys={
            "ffn": ("ffn_hidden_size",),
            "layers": ("num_layers",),
            "vocab": ("padded_vocab_size", "vocab_size"),
            "kv_heads": ("multi_query_group_num",),
            "head_dim": ("kv_channels",),
            "positions": ("seq_length",),
        },
        flags={
            "qkv_bias": ("add_qkv_bias", False),
            "out_bias": ("add_bias_linear", False),
            "mlp_bias": ("add_bias_linear", False),
            "final_norm": ("post_layer_norm", True),
        },
        rates={"attention_dropout": (("attention_dropout",), 0.0),
               "hidden_dropout": (("hidden_dropout",), 0.0)},
        activation=("", "silu"),
        windows="none",
        rotary=0.5,
        adjust=("chatglm",),
    ),
    # Granite
    "granitemoe": GRANITE_MOE,
    "granitemoeshared": replace(
        GRANITE_MOE, code=code_of("granitemoeshared"),
        experts=replace(
            GRANITE_MOE.experts or Experts(), shared_width=("shared_intermediate_size",)
        ),
    ),
    # OpenAI, Meta
    "gpt_oss": replace(
        _PLAIN,
        code=code_of("gpt_oss"),
        facts={**_PLAIN.facts, "attention_sinks": True},
        flags={"qkv_bias": ("attention_bias", True), "out_bias": ("attention_bias", True)},
        activation=("", "swiglu_oai"),
        windows="every_2",
        window_default=128,
        experts=Experts(count=_LOCAL,
            router="softmax_topk", width=("intermediate_size",),
            facts={"bias": True, "router_bias": True},
        ),
        defaults={"head_dim": 64, "kv_heads": 8},
        eager=True,
    ),
    "llama4_text": replace(
        _ATTENTION_BIAS,
        code=code_of("llama4"),
        keys={"ffn": ("intermediate_size_mlp",)},
        windows="llama4",
        window_keys=("attention_chunk_size",),
        window_default=8192,
        no_rope="every_4",
        experts=Experts(count=_LOCAL,
            router="sigmoid", width=("intermediate_size",), shared_width=("intermediate_size",),
            layers="interleave", facts={"scale_input": True},
        ),
        defaults={
            "hidden": 5120, "ffn": 16384, "layers": 48, "heads": 40, "kv_heads": 8,
            "head_dim": 128, "vocab": 202048,
        },
        adjust=("llama4_qk_norm",),
    ),
    # State-space models and their hybrids
    "rwkv": _RWKV,
    "mamba": _MAMBA,
    "falcon_mamba": replace(_MAMBA, code=code_of("falcon_mamba")),
    "mamba2": replace(_MAMBA, code=code_of("mamba2"), tied=False, adjust=("mamba2",)),
    "nemotron_h": replace(
        _ATTENTION_BIAS,
        code=code_of("nemotron_h"),
        facts={**_PLAIN.facts, "position": "none", "gated": False},
        flags={**_ALL_BIAS, "mlp_bias": ("mlp_bias", False)},
        activation=("mlp_hidden_act", "relu2"),
        windows="lettered",
        mixers={**_STATE_SPACE, "moe": "moe", "mlp": "mlp"},
        defaults={"head_dim": 128, "kv_heads": 8},
        experts=replace(
            DEEPSEEK_V3.experts or Experts(), count=("n_routed_experts",), layers="lettered",
            shared_count=(),
            shared_width=("moe_shared_expert_intermediate_size",),
        ),
        adjust=("lettered", "expert_groups"),
    ),
    "jamba": replace(
        _PLAIN,
        code=code_of("jamba"),
        facts={**_PLAIN.facts, "position": "none"},
        windows="jamba",
        mixers=_STATE_SPACE,
        defaults={"kv_heads": 8},
        experts=Experts(layers="jamba", width=("intermediate_size",), normalize=("", False)),
        adjust=("mamba_jamba",),
    ),
    "bamba": replace(
        _ATTENTION_BIAS, code=code_of("bamba"), windows="bamba", mixers=_STATE_SPACE, rotary=0.5,
        flags={**_ALL_BIAS, "mlp_bias": ("mlp_bias", False)},
        defaults={"kv_heads": 8}, adjust=("mamba_bamba",),
    ),
    "falcon_h1": replace(
        LLAMA,
        code=code_of("falcon_h1"),
        windows="beside_mamba",
        mixers={"hybrid": "mamba+attention"},
        defaults={"kv_heads": 8}, adjust=("falcon_h1",),
    ),
    "lfm2": LFM2,
    "lfm2_moe": replace(
        LFM2,
        code=code_of("lfm2_moe"),
        windows="listed_alone",
        experts=Experts(
            router="sigmoid", layers="num_dense_2", normalize=("norm_topk_prob", True), aux=False,
        ),
        adjust=("short_conv", "expert_bias"),
    ),
    "zamba2": replace(
        _PLAIN,
        code=code_of("zamba2"),
        facts={**_PLAIN.facts, "packed_gate": True},
        flags={"mlp_bias": ("add_bias_linear", False)},
        activation=("hidden_act", "gelu"),
        tied=True,
        wide=True,
        windows="zamba2",
        mixers={**_STATE_SPACE, "hybrid": "shared+mamba"},
        adjust=("zamba2",),
    ),
    "granitemoehybrid": replace(
        GRANITE_MOE,
        code=code_of("granitemoehybrid"),
        facts={**_PLAIN.facts, "packed_gate": True},
        windows="listed_mamba",
        mixers=_STATE_SPACE,
        experts=Experts(
            count=_LOCAL, router="softmax_topk", width=("intermediate_size",), optional=True,
            shared_width=("shared_intermediate_size",),
        ),
        adjust=("mamba_bamba", "granite_hybrid"),
    ),
    # Code published with the checkpoint
    "minicpm": replace(
        _ATTENTION_BIAS, code="openbmb/MiniCPM-2B-sft-bf16 modeling_minicpm.py", tied=True,
    ),
    "minicpm3": replace(
        _LATENT, code=code_of("minicpm3"), tied=True, experts=None,
        flags={**_ALL_BIAS, "mlp_bias": ("mlp_bias", False)}, adjust=(),
    ),
    "internlm": replace(
        _PLAIN, code="internlm/internlm-7b modeling_internlm.py",
        flags={"qkv_bias": ("bias", True), "out_bias": ("bias", True)},
    ),
    "internlm2": replace(
        _PLAIN, code="internlm/internlm2-7b modeling_internlm2.py",
        facts={**_PLAIN.facts, "packed_qkv": True},
        flags={"qkv_bias": ("bias", False), "out_bias": ("bias", False)},
    ),
    "baichuan": replace(
        _PLAIN, code="baichuan-inc/Baichuan2-7B-Base modeling_baichuan.py",
        facts={**_PLAIN.facts, "packed_qkv": True}, rates={}, adjust=("baichuan",),
    ),
    "exaone4": replace(
        _PLAIN,
        code=code_of("exaone4"),
        facts={**_PLAIN.facts, "norm_placement": "post_sublayer", "qk_norm": "head"},
        windows="every_4",
        window_default=4096,
        no_rope="full_attention_if_windowed",
    ),
    "exaone_moe": replace(
        _PLAIN,
        code=code_of("exaone_moe"),
        facts={**_PLAIN.facts, "qk_norm": "head"},
        windows="every_4",
        window_default=4096,
        no_rope="full_attention_if_windowed",
        experts=replace(
            DEEPSEEK_V3.experts or Experts(), layers="listed_first_dense",
            shared_count=("num_shared_experts",),
        ),
        adjust=("expert_groups", "prediction_layers"),
    ),
    "afmoe": replace(
        _PLAIN,
        code=code_of("afmoe"),
        facts={
            **_PLAIN.facts, "qk_norm": "head", "norm_placement": "sandwich",
            "attention_gate": "own",
        },
        windows="afmoe",
        window_default=1024,
        no_rope="full_attention",
        defaults={"head_dim": 128},
        experts=Experts(
            router="sigmoid", shared_count=("num_shared_experts",), shared_default=2,
            layers="num_dense", facts=_BIAS_FREE_BALANCE,
        ),
    ),
    # Encoders
    "eurobert": replace(
        LLAMA, code=code_of("eurobert"), facts={**LLAMA.facts, "causal": False}, defaults={},
        flags={**LLAMA.flags, "head_bias": ("mlp_bias", False)},
    ),
    "bert": BERT,
    "roberta": replace(BERT, code=code_of("roberta")),
    "xlm-roberta": replace(BERT, code=code_of("xlm_roberta")),
    "camembert": replace(BERT, code=code_of("camembert")),
    "ernie": replace(BERT, code=code_of("ernie"), adjust=("ernie_task", *BERT.adjust)),
    "data2vec-text": replace(BERT, code=code_of("data2vec_text")),
    "electra": replace(BERT, code=code_of("electra"), adjust=(*BERT.adjust, "embedding_size")),
    "distilbert": replace(
        BERT,
        code=code_of("distilbert"),
        keys={**NO_GROUPS, "ffn": ("hidden_dim",)},
        rates={
            "hidden_dropout": (("dropout",), 0.1),
            "attention_dropout": (("attention_dropout",), 0.1),
            "embedding_dropout": (("dropout",), 0.1),
        },
        activation=("activation", "gelu"),
        adjust=("encoder_head", "distilbert"),
    ),
    # Encoder-decoders, and encoders of `encoders`: vision, sound, towers
    **ENCODERS,
    "t5": T5,
    "mt5": replace(T5, code=code_of("mt5"), adjust=("t5_gated",)),
    "umt5": replace(
        T5, code=code_of("umt5"), facts={**T5.facts, "relative_every_layer": True},
        adjust=("t5_gated",),
    ),
}  # fmt: skip
"""Every model type that can be read."""

ALIASES: dict[str, str] = {
    "RefinedWeb": "falcon",
    "RefinedWebModel": "falcon",
    "gpt-sw3": "gpt2",
    "stablelm_epoch": "stablelm",
    "Yi": "llama",
    "yi": "llama",
    "aquila": "llama",
    "xverse": "llama",
    "siglip2_text_model": "siglip_text_model",
    "hunyuan": "hunyuan_v1_dense",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "llama4": "llama4_text",
    "clip": "clip_text_model",
    "siglip": "siglip_text_model",
    "mistral3": "mistral",
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
    "emu3_text_model": "llama",
    "iquestcoder": "llama",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "phi3_v": "phi3",
    "mimo_v2": "mimo_v2_flash",
}
"""Other names of those types: old spellings, and the language models of vision-language types."""

NESTS: Keys = ("text_config", "llm_config", "language_config")
"""Where a model of several parts keeps its language model."""
