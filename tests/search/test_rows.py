"""Rows of a search are what a single run answers: bytes exactly, seconds to 1e-9."""

from __future__ import annotations

import random

import pytest

from actcalc.cost.roofline import roofline_of
from actcalc.cost.step import step_time
from actcalc.io.runs import load_run
from actcalc.memory.stage import total_bytes
from actcalc.run.staged import StagedRun
from actcalc.search.find import Found, find
from actcalc.search.space import Space, choice_of

A100, H100 = "a100-80gb", "h100-80gb"


def choices(**texts: str) -> dict:
    return {name: choice_of(text, name) for name, text in texts.items()}


def searched(model, gpus, batch, device=A100, space=None, **run) -> Found:
    workload = {"global_batch": batch, **run.pop("workload", {})}
    loaded = load_run(model, workload=workload, device=device, **run)
    return find(loaded, Space(gpus=gpus, **(space or {})), everything=True)


def compare_rows(found: Found, count: int) -> None:
    """``count`` random rows with the run that each stands for."""
    chosen = random.Random(len(found.peak)).sample(range(len(found.peak)), count)
    for row in chosen:
        run = found.one(row)
        staged = StagedRun(run)
        policy = staged.first_policy
        what = f"{run.layout} b {run.workload.micro_batch} {policy.name}"
        assert total_bytes(staged, policy) == found.peak[row], what
        seconds = step_time(policy, roofline_of(staged)).total
        assert found.seconds[row] == pytest.approx(seconds, rel=1e-9), what


MEGATRON, TITAN = {"framework": "megatron"}, {"framework": "torchtitan"}
CASES = {
    "paper": (150, "gpt3-175b", 1024, 1536, A100, {}, {}),
    "tied, small": (100, "gpt2", 16, 64, A100, choices(micro_batch="..16"), MEGATRON),
    "dropout, vpp": (150, "gpt-22b", 64, 128, A100, {}, MEGATRON),
    "grouped keys, cp": (150, "llama-3-8b", 64, 128, H100, choices(tp="..8", cp="..4"),
                         {**MEGATRON, "workload": {"seq": 16384}}),
    "uneven stages": (60, "llama-3.1-405b", 1024, 1024, H100,
                      choices(tp="8", pp="8,16,18", micro_batch="1,2"), MEGATRON),
    "experts": (120, "mixtral-8x7b", 64, 128, H100, choices(tp="..4", micro_batch="1,2"),
                MEGATRON),
    "two kinds of layers, prediction": (
        60, "deepseek-v3", 1024, 1024, H100,
        choices(tp="1,2", ep="16,64", pp="8,16", micro_batch="1"), MEGATRON),
    "every schedule": (80, "gpt-22b", 32, 64, A100,
                       {**choices(tp="1,4", pp="2,4,8", micro_batch="1,2"),
                        "schedules": ("1f1b", "gpipe", "zb-h1", "zb-v", "dualpipe-v")}, MEGATRON),
    "ZeRO 2 and 8-bit": (80, "llama-3-8b", 16, 64, A100, choices(tp="1,2", zero="0..2"),
                         {**MEGATRON, "training": {"optimizer": "adam8bit"}}),
    "sharded by FSDP": (80, "llama-3-8b", 16, 64, H100, choices(tp="1,2"), TITAN),
    "FSDP alone, one micro-batch too": (60, "llama-3-8b", 16, 64, H100, choices(pp="1"), TITAN),
    "FSDP, tied": (60, "llama-3.2-1b", 8, 16, H100, {}, TITAN),
    "FSDP, experts": (60, "deepseek-v3", 256, 512, H100,
                      choices(tp="1,2", ep="1,8,64", pp="1,4", micro_batch="1,2"), TITAN),
    "FSDP, weights of the host": (60, "llama-3-8b", 8, 16, H100, choices(tp="1,2", pp="1,2"),
                                  {**TITAN, "training": {"offload": "weights"}}),
    "FSDP, adapters": (60, "llama-3-8b", 8, 16, H100, choices(pp="1,2"),
                       {**TITAN, "training": {"lora_rank": 16}}),
    "FSDP over some": (40, "llama-3-8b", 16, 32, H100, choices(pp="1", zero="3", cp="1"),
                       {**TITAN, "layout": {"zero": 3, "dp": 16}, "training": {"shards": 4}}),
    "every ZeRO stage": (80, "mixtral-8x7b", 16, 32, H100,
                         choices(tp="1,2", pp="1,2", zero="0..3", micro_batch="1,2"), MEGATRON),
    "weights of the host": (60, "llama-3-8b", 8, 16, H100, choices(tp="1,2", pp="1,2"),
                            {**MEGATRON, "training": {"offload": "weights"}}),
    "data parallel": (40, "llama-3-8b", 8, 64, H100, {}, {"framework": "transformers"}),
    "data parallel, amp": (40, "llama-3-8b", 8, 64, H100, {},
                           {"framework": "transformers", "workload": {"precision": "amp-bf16"}}),
    "fp8": (60, "llama-3-8b", 16, 64, H100, choices(tp="1,2"),
            {**MEGATRON, "workload": {"precision": "fp8"}}),
    "exchange beside other work": (
        60, "mixtral-8x7b", 32, 64, H100, choices(tp="1,2", ep="2,8", micro_batch="1,2"),
        {**MEGATRON, "workload": {"kernels": {"overlap_moe_expert_parallel_comm": True}}}),
    "collectives beside the work": (
        60, "llama-3-8b", 16, 64, H100, choices(tp="1,2,4"),
        {**MEGATRON, "training": {"overlapped_reduction": True, "overlapped_gather": True}}),
    "eager scores": (60, "gpt2", 8, 48, A100, {},
                     {**MEGATRON, "workload": {"attention": "eager"}}),
    "Muon": (30, "llama-3-8b", 16, 64, H100, choices(tp="1,2", pp="1,2", vpp="1"),
             {**MEGATRON, "training": {"optimizer": "muon"}}),
    "adapters": (40, "llama-3-8b", 8, 64, H100, choices(tp="1,2"),
                 {**MEGATRON, "training": {"lora_rank": 16}}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_random_rows_are_single_runs(name):
    count, model, gpus, batch, device, space, run = CASES[name]
    found = searched(model, gpus, batch, device, space, **run)
    compare_rows(found, min(count, len(found.peak)))


@pytest.mark.sweep
@pytest.mark.parametrize("name", CASES)
def test_thousands_of_random_rows_are_single_runs(name):
    _, model, gpus, batch, device, space, run = CASES[name]
    found = searched(model, gpus, batch, device, space, **run)
    compare_rows(found, min(400, len(found.peak)))
