"""Long sweeps: a sample of their cases in every run, all of them in CI (marker ``sweep``)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

SAMPLE = (
    "gpt2", "gpt-22b", "opt-125m", "bert-base", "llama-3-8b", "qwen3-0.6b", "gemma-3-1b",
    "falcon-7b", "phi-2", "bloom-7b1", "mixtral-8x7b", "qwen1.5-moe-a2.7b", "deepseek-v2-lite",
    "deepseek-v3", "gpt-oss-20b", "smollm3-3b", "llama-4-scout", "t5-small", "vit-b-16",
    "mamba2-130m", "nemotron-h-56b", "dbrx", "kimi-k2", "chatglm3-6b", "roberta-base",
    "minimax-m2", "olmo-1b", "mpt-7b", "command-r7b", "exaone-3.5-7.8b",
)  # fmt: skip
"""Presets of models, one of every kind of layer."""


ALL = True
"""Whether this run has the long sweeps; conftest.py says so before tests are collected."""


def examples(number: int) -> int:
    """Examples that Hypothesis tries: so many in a run of all sweeps, else a quarter."""
    return number if ALL else number // 4


def sampled(values: Iterable[Any], keep: Collection[Any] = SAMPLE) -> list[Any]:
    """Parameters of a test: those in ``keep`` in every run, the others as a sweep."""
    return [v if v in keep else pytest.param(v, marks=pytest.mark.sweep) for v in values]


def every(step: int, values: Iterable[Any]) -> list[Any]:
    """Parameters of a test: one in ``step`` in every run, the others as a sweep."""
    marks = pytest.mark.sweep
    return [v if i % step == 0 else pytest.param(v, marks=marks) for i, v in enumerate(values)]
