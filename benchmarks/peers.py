"""Layouts a second of other calculators, each on as much of one grid as it does in some seconds.

The grid is GPT-3 175B on 1,024 GPUs with 1,536 sequences a step: tensor and pipeline degrees,
micro-batches and recomputation, as far as a calculator has them. calculon evaluates them by the
function of its own search; llm-analysis and SimuMax layout by layout, as their examples do. A
calculator that is not installed is skipped, with the reason.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

GPUS, BATCH, LAYERS = 1024, 1536, 96
DEGREES = [
    (tp, pp, GPUS // tp // pp, size)
    for tp in (1, 2, 4, 8)
    for pp in (1, 2, 4, 8, 16, 32)
    for size in (1, 2, 4, 8)
    if BATCH % (GPUS // tp // pp * size) == 0
]
"""tp, pp, dp and micro-batch."""


def calculon() -> Iterator[int]:
    """Layouts evaluated, after each of its searches: one for tp, pp, chunks and policy."""
    import calculon as package
    from calculon.llm import Llm
    from calculon.llm.optimal_execution import OptimalExecution
    from calculon.system import System

    root = Path(package.__file__).parents[1]
    app = Llm.Application(package.io.read_json_file(str(root / "models/gpt3-175B.json")))
    system = System(package.io.read_json_file(str(root / "systems/a100_80g.json")))
    count = 0
    for tp, pp, dp, _ in DEGREES:
        for chunks in Llm.get_valid_pipeline_interleavings(app.num_blocks, pp):
            for policy, sharded in itertools.product(("full", "attn_only", "none"), (True, False)):
                found = OptimalExecution.search(
                    False, 1, False, GPUS, BATCH, "float16", app, system, tp, pp, dp, chunks,
                    BATCH, policy, sharded, "rs_ag", "true", False, True, True,
                )  # fmt: skip
                count += found[1]
                yield count


def llm_analysis() -> Iterator[int]:
    """Layouts evaluated, after each."""
    from llm_analysis.analysis import train

    policies = range(4)
    for count, (degrees, policy) in enumerate(itertools.product(DEGREES, policies), start=1):
        tp, pp, dp, size = degrees
        with contextlib.suppress(AssertionError, ValueError, ZeroDivisionError):
            train(
                model_name="megatron-lm-175b", gpu_name="a100-sxm-80gb", log_level="ERROR",
                batch_size_per_gpu=size, global_batch_size=BATCH, seq_len=2048,
                activation_recomputation=policy, tp_size=tp, pp_size=pp, sp_size=tp, dp_size=dp,
                total_num_gpus=GPUS,
            )  # fmt: skip
        yield count


def simumax() -> Iterator[int]:
    """Layouts evaluated, after each."""
    from simumax.core.config import ModelConfig, StrategyConfig, SystemConfig
    from simumax.core.perf_llm import PerfLLM
    from simumax.utils import (
        get_simu_model_config,
        get_simu_strategy_config,
        get_simu_system_config,
    )

    plain = StrategyConfig.read_json_file(get_simu_strategy_config("tp2_pp1_dp4_mbs1"))
    model = ModelConfig.init_from_config_file(get_simu_model_config("gpt3-175b"))
    system = SystemConfig.init_from_config_file(get_simu_system_config("a100_pcie"))
    for count, (tp, pp, dp, size) in enumerate(DEGREES, start=1):
        strategy = {
            **plain, "tp_size": tp, "pp_size": pp, "world_size": GPUS, "micro_batch_size": size,
            "micro_batch_num": BATCH // dp // size, "enable_sequence_parallel": tp > 1,
        }  # fmt: skip
        perf = PerfLLM()
        perf.configure(
            strategy_config=StrategyConfig.init_from_dict(strategy),
            model_config=model, system_config=system,
        )  # fmt: skip
        perf.run_estimate()
        perf.analysis_mem()
        perf.analysis_cost()
        yield count


PEERS: dict[str, tuple[str, Callable[[], Iterator[int]]]] = {
    "calculon": ("calculon", calculon),
    "llm-analysis": ("llm_analysis", llm_analysis),
    "SimuMax": ("simumax", simumax),
}
"""Name, the module that has to be there, and what evaluates layouts."""


def rate(evaluate: Callable[[], Iterator[int]], seconds: float) -> tuple[int, float]:
    """Layouts that were evaluated within so many seconds of one core, and the seconds taken."""
    began, done = time.process_time(), 0
    with contextlib.redirect_stdout(io.StringIO()):
        for count in evaluate():
            done = count
            if time.process_time() - began > seconds:
                break
    return done, time.process_time() - began


def lines(seconds: float = 10.0) -> Iterator[str]:
    """What each calculator does, or why it is skipped."""
    for name, (module, evaluate) in PEERS.items():
        try:
            importlib.import_module(module)
        except ImportError as error:
            yield f"{name}: skipped, {error}"
            continue
        try:
            count, taken = rate(evaluate, seconds)
        except Exception as error:  # another version than its driver knows
            yield f"{name}: skipped, {type(error).__name__}: {str(error)[:200]}"
            continue
        yield f"{name}: {count:,} layouts in {taken:.1f} s of one core, {count / taken:,.1f}/s"
