"""Damaged files are read or refused: never anything but a ``SpecError``."""

from __future__ import annotations

import random

import pytest

from actcalc.errors import SpecError
from actcalc.io.runs import resolve
from actcalc.io.sources import sources
from tests.io.test_readers import CASES, written
from tests.sweeps import examples

ROUNDS = examples(40)
_BITS = ("", "\n", '"', "'", "{", "}", "[", ": ", "=", "null", "-1", "1e30", "true", "$X", "$(x)",
         "\\", "#", "--", "[1, 2]", "{a: b}", "999999999999999999999", "NaN", "(", ")")  # fmt: skip


def damaged(text: str, rng: random.Random) -> str:
    """The text with a few pieces cut, doubled or replaced."""
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(text) + 1)
        stop = min(len(text), start + rng.randint(0, 12))
        piece = rng.choice((*_BITS, text[start:stop] * 2, text[::-1][start:stop]))
        text = text[:start] + piece + text[stop:]
    return text


@pytest.mark.parametrize(("kind", "case"), CASES, ids=[f"{k}-{c['file']}" for k, c in CASES])
def test_damaged_files(kind, case, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rng = random.Random(f"{kind}{case['file']}")
    for _ in range(ROUNDS):
        texts = case["text"] if isinstance(case["text"], list) else [case["text"]]
        broken = {**case, "text": [damaged(text, rng) for text in texts]}
        broken["file"] = case["file"] if isinstance(case["file"], list) else [case["file"]]
        try:
            for origin in sources(written(broken, tmp_path)):
                resolve(origin)
        except SpecError:
            continue
