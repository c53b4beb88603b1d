"""What other estimators of training memory say of the runs that Megatron-LM's CI measured.

    python -m benchmarks.peers_memory --cookbook FILE --llm-analysis PYTHON --calculon FOLDER

``FILE`` is ``calc/calc_transformer_mem.py`` of EleutherAI/cookbook, ``PYTHON`` an interpreter that
has llm-analysis installed, ``FOLDER`` a checkout of calculon. What is not given is skipped, with
the reason on stderr, and stays as it is in the file that is printed anew, which is
``tests/data/peers_memory.json``. Each estimator is told all of a run that it has an option for; a
run with what it has no option for and that it would count as another is refused. The runs are those
of ``tests/data/megatron_estimator.json``, whose measured peak is that of the whole model's one
stage.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.published.memory_cases import DATA, ci_arguments

Arguments = Mapping[str, Any]
_ENVIRON = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

LLM_ANALYSIS = """
import json, logging, sys
logging.disable(logging.CRITICAL)
from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis
from llm_analysis.config import (DtypeConfig, ModelConfig, ParallelismConfig,
                                 get_gpu_config_by_name)
asked = json.load(sys.stdin)
training = asked["training"]
training["activation_recomputation"] = ActivationRecomputation(training["activation_recomputation"])
training["ds_zero"] = DSZeRO(training["ds_zero"])
analysis = LLMAnalysis(ModelConfig(**asked["model"]), get_gpu_config_by_name("h100-sxm-80gb"),
                       DtypeConfig(), ParallelismConfig(**asked["layout"]))
print("total", analysis.training(**training)["(weight+op_state+grad+act)_memory_per_gpu"])
"""


CALCULON = """
import json, logging, sys
from pathlib import Path
from calculon.io import read_json_file
from calculon.llm import Llm
from calculon.system import System
import calculon
asked = json.load(sys.stdin)
log = logging.getLogger()
root = Path(calculon.__file__).parents[1]
model = Llm(Llm.Application(asked["model"]), log)
found = read_json_file(str(root / "systems/h100_80g_nvl8.json"))
found["networks"] = [{**network, "size": 65536} for network in found["networks"]]
system = System(found)
model.compile(system, Llm.Execution.from_json(asked["run"]))
model.run(system)
print("total", model.get_mem_tier1_cap_req())
"""


def degrees(run: Arguments) -> dict[str, int]:
    """World size and degrees of a run."""
    tp, cp = (int(run.get(f"{name}-parallel-size", 1)) for name in ("tensor-model", "context"))
    ep = int(run.get("expert-model-parallel-size", 1))
    world = int(run["world-size"])
    return {"world": world, "tp": tp, "cp": cp, "ep": ep, "dp": world // (tp * cp)}


def ffn(run: Arguments) -> int:
    """Width of a feed-forward layer, or of an expert's."""
    own = run.get("moe-ffn-hidden-size") or run.get("ffn-hidden-size")
    return int(own or 4 * run["hidden-size"])


def cookbook(script: str, run: Arguments) -> float:
    """Bytes of a GPU by calc_transformer_mem.py, which prints hundredths of a GiB."""
    by, hidden, heads = degrees(run), int(run["hidden-size"]), int(run["num-attention-heads"])
    options = {
        "num-gpus": by["world"], "tensor-parallel-size": by["tp"],
        "zero-stage": int(bool(run.get("use-distributed-optimizer"))),
        "batch-size-per-gpu": run["micro-batch-size"],
        "sequence-length": run["seq-length"] // by["cp"], "vocab-size": run["vocab-size"],
        "hidden-size": hidden, "num-attention-heads": heads, "num-layers": run["num-layers"],
        "ffn-expansion-factor": ffn(run) / hidden, "num-mlp-linears": 3 if "swiglu" in run else 2,
        "kv-size-ratio": run.get("num-query-groups", heads) / heads,
        "num-experts": run.get("num-experts", 0), "expert-parallelism": by["ep"],
    }  # fmt: skip
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    words += ["--partition-activations"] if run.get("sequence-parallel") else []
    words += ["--checkpoint-activations"] if run.get("recompute-granularity") == "full" else []
    out = _ran([sys.executable, script, *words])
    return 2**30 * float(re.findall(r"Per-GPU Memory Required for Training: ([\d.]+)", out)[0])


def llm_analysis(python: str, run: Arguments) -> float:
    """Bytes of a GPU by LLMAnalysis.training: weights, states, gradients and activations."""
    by = degrees(run)
    recompute = {"selective": 1, "full": 2}.get(str(run.get("recompute-granularity")), 0)
    asked = {
        "model": {
            "name": "run", "num_layers": run["num-layers"], "n_head": run["num-attention-heads"],
            "hidden_dim": run["hidden-size"], "vocab_size": run["vocab-size"],
            "max_seq_len": run["seq-length"], "ffn_embed_dim": ffn(run),
            "num_key_value_heads": run.get("num-query-groups", run["num-attention-heads"]),
            "moe_num_experts": run.get("num-experts", 1),
            "moe_top_k": run.get("moe-router-topk", 1) if "num-experts" in run else 1,
        },
        "layout": {"tp_size": by["tp"], "dp_size": by["dp"] * by["cp"], "ep_size": by["ep"],
                   "sp_size": by["tp"] if run.get("sequence-parallel") else 1},
        "training": {
            "batch_size_per_gpu": run["micro-batch-size"], "seq_len": run["seq-length"] // by["cp"],
            "activation_recomputation": recompute,
            "ds_zero": int(bool(run.get("use-distributed-optimizer"))),
            "flash_attn": run.get("attention-backend") != "unfused",
            "softmax_dropout": run.get("attention-dropout", 0.1) != 0,
            "mlp_gated_linear_units": "swiglu" in run,
        },
    }  # fmt: skip
    out = _ran([python, "-c", LLM_ANALYSIS], json.dumps(asked))
    return float(re.findall(r"^total (.*)$", out, re.MULTILINE)[0])


def calculon(folder: str, run: Arguments) -> float:
    """Bytes of a GPU's first tier of memory by ``Llm``, whose models are GPT-3's kind alone."""
    by, heads = degrees(run), int(run["num-attention-heads"])
    lacking = [
        ("swiglu", "gated feed-forward"), ("num-experts", "experts"),
        ("num-query-groups", "grouped queries"), ("multi-latent-attention", "latent attention"),
    ]  # fmt: skip
    for key, what in lacking:
        if run.get(key) and run[key] != heads:
            raise ValueError(f"calculon has no {what}")
    if by["cp"] > 1:
        raise ValueError("calculon has no context parallelism")
    # a full recompute re-runs attention too; selective is attention's core alone
    recompute = {"selective": "attn_only", "full": "full"}
    sequence = bool(run.get("sequence-parallel")) and by["tp"] > 1
    asked = {
        "model": {
            "hidden": run["hidden-size"], "feedforward": ffn(run), "seq_size": run["seq-length"],
            "attn_heads": heads, "num_blocks": run["num-layers"],
            "attn_size": run.get("kv-channels", run["hidden-size"] // heads),
        },
        "run": {
            "num_procs": by["world"], "tensor_par": by["tp"], "pipeline_par": 1,
            "data_par": by["dp"], "tensor_par_net": 0, "pipeline_par_net": 0, "data_par_net": 0,
            "batch_size": run["global-batch-size"], "microbatch_size": run["micro-batch-size"],
            "datatype": "float16", "fused_activation": True, "attention_type": "multihead",
            "activation_recompute": recompute.get(str(run.get("recompute-granularity")), "none"),
            "pipeline_interleaving": 1,
            "optimizer_sharding": bool(run.get("use-distributed-optimizer")) and by["dp"] > 1,
            "tensor_par_comm_type": "rs_ag" if sequence else "ar", "tensor_par_overlap": "none",
            "seq_par_ag_redo": False, "data_par_overlap": False, "weight_offload": False,
            "activations_offload": False, "optimizer_offload": False, "training": True,
        },
    }  # fmt: skip
    out = _ran([sys.executable, "-c", CALCULON], json.dumps(asked), {"PYTHONPATH": folder})
    return float(re.findall(r"^total (.*)$", out, re.MULTILINE)[0])


def _ran(command: list[str], given: str = "", more: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, check=False,
        env={**_ENVIRON, **(more or {})},
    )  # fmt: skip
    if done.returncode:
        raise ValueError((done.stderr.strip().splitlines() or ["no reason given"])[-1][:200])
    return done.stdout


def estimated(estimate: Callable[[Arguments], float]) -> dict[str, Any]:
    """Bytes by case; of what an estimator refuses, its reason."""
    names = json.loads((DATA / "megatron_estimator.json").read_text("utf-8"))["total_bytes"]
    found: dict[str, Any] = {"total_bytes": {}, "refused": {}}
    for case in json.loads((DATA / "megatron_ci_memory.json").read_text("utf-8"))["cases"]:
        name = case["id"].removeprefix("mlm-golden/")
        if name not in names:
            continue
        try:
            found["total_bytes"][name] = round(estimate(ci_arguments(case)))
        except ValueError as error:
            found["refused"][name] = str(error)
    return found


def main() -> int:
    """Print the figures of each estimator that is there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--cookbook", help="calc_transformer_mem.py of EleutherAI/cookbook")
    parser.add_argument("--cookbook-commit", default="unknown")
    parser.add_argument("--llm-analysis", help="an interpreter that has llm-analysis")
    parser.add_argument("--calculon", help="a checkout of calculon")
    parser.add_argument("--calculon-commit", default="unknown")
    given = parser.parse_args()
    found: dict[str, Any] = json.loads((DATA / "peers_memory.json").read_text("utf-8"))
    if given.calculon:
        folder = given.calculon
        found["calculon"] = {
            "source": f"calculon-ai/calculon at {given.calculon_commit}, Llm",
            **estimated(lambda run: calculon(folder, run)),
        }
    else:
        print("skipped: no --calculon FOLDER", file=sys.stderr)
    if given.cookbook and Path(given.cookbook).is_file():
        script = given.cookbook
        source = f"EleutherAI/cookbook at {given.cookbook_commit}, calc/calc_transformer_mem.py"
        found["calc_transformer_mem"] = {
            "source": source,
            **estimated(lambda run: cookbook(script, run)),
        }
    else:
        print("skipped: no --cookbook FILE", file=sys.stderr)
    if given.llm_analysis:
        python = given.llm_analysis
        version = "from importlib.metadata import version; print(version('llm-analysis'))"
        found["llm-analysis"] = {
            "source": f"llm-analysis {_ran([python, '-c', version]).strip()}, LLMAnalysis.training",
            **estimated(lambda run: llm_analysis(python, run)),
        }
    else:
        print("skipped: no --llm-analysis PYTHON", file=sys.stderr)
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
