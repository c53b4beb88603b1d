"""Other calculators are timed where they are, and skipped with a reason where they are not."""

from __future__ import annotations

import pytest

from benchmarks import peers


def test_who_is_not_installed_is_skipped_with_the_reason(monkeypatch):
    monkeypatch.setattr(peers, "PEERS", {"nobody": ("no_such_module", lambda: iter(()))})
    assert list(peers.lines()) == ["nobody: skipped, No module named 'no_such_module'"]


def test_what_was_evaluated_in_time_is_counted():
    count, seconds = peers.rate(lambda: iter(range(1, 11)), seconds=60)
    assert count == 10
    assert seconds >= 0


def test_another_version_is_skipped(monkeypatch):
    def evaluate():
        raise AttributeError("gone")
        yield 1

    monkeypatch.setattr(peers, "PEERS", {"json": ("json", evaluate)})
    (line,) = peers.lines()
    assert line == "json: skipped, AttributeError: gone"


@pytest.mark.parametrize("degrees", peers.DEGREES[:3])
def test_the_grid_fills_its_gpus(degrees):
    tp, pp, dp, size = degrees
    assert tp * pp * dp == peers.GPUS
    assert peers.BATCH % (dp * size) == 0
