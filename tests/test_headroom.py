"""``--headroom``: the share of a device that stays free is one share for every command."""

from __future__ import annotations

import pytest

RUN = ("llama-3-8b", "--device", "a100-80gb")


def _memory(cli, *words):
    return cli("memory", *RUN, *words, "--json").json


def test_what_fits_is_the_devices_memory_less_five_per_cent(cli):
    found = _memory(cli, "--seq", 2048)
    usable = found["device"]["memory_bytes"]
    stage = found["stages"][0]
    assert found["headroom_ratio"] == 0.05
    assert stage["margin_bytes"] == int(usable * 0.95) - stage["total_bytes"]


def test_every_command_says_fits_by_the_same_share(cli):
    """A share just below what the run leaves free, and one just above it."""
    stage = _memory(cli, "--seq", 2048, "--headroom", "0")["stages"][0]
    free = stage["margin_bytes"] / (stage["margin_bytes"] + stage["total_bytes"])
    for share, fits in ((free - 1e-6, True), (free + 1e-6, False)):
        words = (*RUN, "--seq", 2048, "--headroom", f"{share:.9f}", "--policy", "none")
        assert cli("memory", *words, "--json").json["fits"] is fits
        assert cli("mfu", *words, "--json").json["fits"] is fits
        (policy,) = cli(*words, "--json").json["policies"]
        assert policy["fits"] is fits
        assert (policy["largest_micro_batch"] > 0) is fits
        plan = cli("plan", *words, "--json").json
        assert (plan["cost_seconds"] == 0) is fits
        assert plan["memory_bytes"] == int(
            (stage["margin_bytes"] + stage["total_bytes"]) * (1 - float(f"{share:.9f}"))
        )


def test_the_default_is_said(cli):
    assert "less 5 % headroom" in cli("memory", *RUN, columns=200).out
    assert "headroom" not in cli("memory", *RUN, "--headroom", "0", columns=200).out


def test_a_budget_of_ones_own_is_taken_as_it_is(cli):
    assert cli("plan", *RUN, "--memory", "80GB", "--json").json["memory_bytes"] == 80_000_000_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("memory", "gpt2", "--headroom", "5%"), "there is no device"),
        (("memory", *RUN, "--headroom", "5"), "did you mean 5%?"),
        (("memory", *RUN, "--headroom", "-1%"), "is no share"),
        (("memory", *RUN, "--headroom", "95%"), "leaves next to nothing"),
        (("plan", *RUN, "--memory", "70GB", "--headroom", "5%"), "taken as it is"),
        (("breakdown", "gpt2", "--headroom", "5%"), "breakdown does not depend"),
        (("check", "gpt2", "--log", "-", "--headroom", "5%"), "check does not depend"),
    ],
)
def test_a_share_without_sense_or_effect_is_refused(cli, words, message):
    done = cli(*words)
    assert done.code == 2
    assert message in done.err
