"""``compare --device``: times, what fits, the largest micro-batch, several models at once."""

from __future__ import annotations

import pytest

ARTICLE = ("bert-base", "bert-large", "gpt2-medium")
POLICIES = ("none", "full", "ffn", "attention")


def by_name(document):
    return {policy["policy"]: policy for policy in document["policies"]}


def test_no_times_without_a_device(cli):
    for policy in cli("gpt2", "--json").json["policies"]:
        assert policy["step_seconds"] is None
        assert policy["largest_micro_batch"] is None


def test_times_and_fit(cli):
    done = cli("gpt-22b", "--tp", 8, "--device", "a100-80gb", "--json").json
    found = by_name(done)
    none = found["none"]
    assert none["slowdown_ratio"] == 0
    for policy in found.values():
        assert policy["layer_forward_seconds"] == pytest.approx(none["layer_forward_seconds"])
        assert policy["slowdown_ratio"] == pytest.approx(
            policy["step_seconds"] / none["step_seconds"] - 1
        )
        budget = int(done["device"]["memory_bytes"] * (1 - done["headroom_ratio"]))
        assert policy["fits"] == (policy["device_bytes"] <= budget)
        assert policy["fits"] == (policy["largest_micro_batch"] >= 4)


def test_more_batch_for_less_memory(cli):
    found = by_name(cli("bert-base", "--device", "a100-40gb", "--json").json)
    order = [found[name]["largest_micro_batch"] for name in ("none", "ffn", "attention", "full")]
    assert order == sorted(set(order))
    for policy in found.values():
        samples = policy["largest_micro_batch"] / policy["largest_step_seconds"]
        assert policy["largest_samples_per_second"] == pytest.approx(samples)
        assert policy["largest_tokens_per_second_per_gpu"] == pytest.approx(512 * samples)


def test_the_articles_experiment_is_one_command(cli):
    arguments = (*ARTICLE, "--device", "a100-40gb", "--policy", ",".join(POLICIES))
    done = cli(*arguments, "--json").json
    assert [model["model"]["name"] for model in done["models"]] == list(ARTICLE)
    for model in done["models"]:
        found = by_name(model)
        assert tuple(found) == POLICIES
        base = found["none"]["largest_samples_per_second"]
        for policy in found.values():
            ratio = policy["largest_samples_per_second"] / base
            assert policy["relative_throughput_ratio"] == pytest.approx(ratio)
    table = cli(*arguments)
    assert all(f"{name}: none has the highest throughput" in table.out for name in ARTICLE)
    assert max(map(len, table.out.splitlines())) <= 80


def test_several_models_without_a_device(cli):
    table = cli("bert-base", "bert-large")
    assert table.code == 0
    assert "re-run" in table.out
    assert "largest" not in table.out


def test_cheapest_that_fits(cli):
    roomy = cli("gpt2", "--device", "h100-80gb")
    assert roomy.out.startswith("Fits: none is the fastest policy that does")
    tight = cli("gpt3-175b", "--device", "h100-80gb")
    assert tight.out.startswith("Does not fit: ")
    middle = cli("gpt-22b", "--tp", 8, "--micro-batch", 4, "--device", "a100-80gb")
    assert middle.out.startswith("Fits: ")


def test_frameworks_and_models_together_are_refused(cli):
    done = cli("gpt2", "bert-base", "--framework", "paper,megatron")
    assert done.code == 2
    assert done.err.startswith("error: ")


def test_no_policy_fits(cli):
    run = ("llama-3.1-70b", "--tp", 2, "--sp", "--device", "h100-80gb", "--policy", "none,full")
    done = cli(*run)
    assert done.code == 1
    assert done.out.startswith("Does not fit: full, the smallest, needs ")
    assert cli(*run[:4]).code == 0  # without a device nothing is judged
    assert cli(*run[:-1], "none").code == 0  # one policy alone is no choice
    one = cli("gpt-22b", "--tp", 8, "--device", "a100-80gb")
    assert one.code == 0
    assert "Does not fit" not in one.out
