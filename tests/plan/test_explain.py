"""``explain`` for the words of ``memory`` and ``plan``: its numbers are those of the commands."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from actcalc.answers.explain import peak, pipelines, states
from actcalc.answers.explain.terms import TERMS, explain_term, term_of
from actcalc.errors import SpecError
from actcalc.io.runs import load_run
from actcalc.run.schedule import in_flight
from actcalc.specs.numbers import percent

Cli = Callable[..., Any]


def text_of(term: str, run: Any) -> str:
    return "\n".join(explain_term(term, run).lines)


def numbers(text: str) -> list[int]:
    return [int(found.replace(",", "")) for found in re.findall(r"\d[\d,]*", text)]


OF_MEMORY = sorted(term.name for part in (states, pipelines, peak) for term in part.TERMS)


@pytest.mark.parametrize("term", sorted(TERMS))
def test_every_term_reads_at_80_columns(cli: Cli, term: str) -> None:
    outcome = cli("explain", term)
    assert outcome.code == 0
    assert "source: " in outcome.out
    assert max(len(line) for line in outcome.out.splitlines()) <= 80
    assert "…" not in outcome.out
    document = cli("explain", term, "--json").json
    assert document["term"] == term
    assert document["lines"]
    assert document["source"]


@pytest.mark.parametrize("term", OF_MEMORY)
@pytest.mark.parametrize("model", ["gpt2", "mixtral-8x7b", "deepseek-v3", "bert-large"])
def test_every_term_holds_for_other_models(term: str, model: str) -> None:
    own, other = load_run(model), load_run("gpt3-175b", layout={"tp": 8, "sp": True})
    if term == "plan" and model == "deepseek-v3":
        own = load_run(model, model={"layers": 4})
    lines = explain_term(term, own).lines
    if term != "bubble":  # of equal layers it is the same for every model
        assert lines != explain_term(term, other).lines
    assert all(line.strip() for line in lines)


def test_names_lead_to_terms() -> None:
    words = [(word, term.name) for term in TERMS.values() for word in term.words]
    for word, name in words:
        assert term_of(word) == name
    assert len(dict(words)) == len(words)
    assert not dict(words).keys() & set(TERMS)


@pytest.mark.parametrize(
    ("word", "hint"),
    [("selectiv", "did you mean selective?"), ("interleave", "did you mean interleaved?"),
     ("bubbel", "did you mean bubble?"), ("17", "terms: "), ("81", "terms: "), ("x", "terms: ")],
)  # fmt: skip
def test_near_misses(word: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        term_of(word)
    assert (caught.value.hint or "").startswith(hint)


def test_states_are_those_of_memory(cli: Cli) -> None:
    base = ["gpt3-175b", "--tp", "8", "--sp", "--pp", "8"]
    stage = cli("memory", *base, "--json").json["stages"][0]
    run = load_run("gpt3-175b", layout={"tp": 8, "sp": True, "pp": 8})
    found = numbers(text_of("18", run))
    parts = ("weights_bytes", "gradients_bytes", "optimizer_bytes")
    assert sum(stage[part] for part in parts) in found
    assert stage["parameters"] in found
    assert "= 18 B a parameter" in text_of("18", run)
    assert "mixed: 2 + 2 + 4 + 8 = 16 B" in text_of("18", run)
    sharded = load_run("gpt3-175b", layout={"tp": 8, "sp": True, "pp": 8, "dp": 4})
    lines = text_of("zero", sharded)
    assert "ZeRO 1: 2 + 4 + 12/4 = 9 B a parameter" in lines
    one = cli("memory", *base, "--dp", "4", "--zero", "1", "--json").json["stages"][0]
    total = sum(one[part] for part in parts)
    assert f"{total / 1e9:,.4g} GB" in lines
    assert "No --dp given" not in lines
    assert "No --dp given" in text_of("zero", run)


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_pipelines_hold_what_their_schedules_hold(pp: int) -> None:
    run = load_run("gpt3-175b", layout={"tp": 8, "sp": True, "pp": pp})
    m = 4 * pp
    for term, schedule, v in (("1f1b", "1f1b", 1), ("interleaved", "interleaved", 3)):
        held = in_flight(schedule, pp, m, v)
        assert "hold " + ", ".join(str(n) for n in held) in text_of(term, run)
    layer = 358_612_992  # sbh(34 + 5as/h)/t of GPT-3 (Korthikanti et al. 2022)
    assert f"{96 * layer:,} B" in text_of("1f1b", run)
    chunks = 3 * pp + pp - 1  # l(1 + (p-1)/(pv)) layers, in chunks of l/(pv)
    assert f"{chunks * 96 // (3 * pp) * layer:,} B" in text_of("interleaved", run)
    assert f"p + 1 = {pp + 1} at most" in text_of("dualpipe", run)


def test_bubbles_are_run_not_typed() -> None:
    short, long = (
        load_run("gpt3-175b", layout={"pp": 8}, workload={"global_batch": m}) for m in (8, 64)
    )
    assert "1f1b: 0.875, closed form (p-1)/m = 0.875" in text_of("bubble", short)
    assert "1f1b: 0.1094, closed form (p-1)/m = 0.1094" in text_of("bubble", long)
    assert "zb-h1: " in text_of("bubble", long)
    # Fewer micro-batches than a group of them: that schedule cannot run, and is left out.
    odd = load_run("gpt3-175b", layout={"pp": 8}, workload={"global_batch": 9})
    assert "interleaved" not in text_of("bubble", odd)


def test_the_peak_is_that_of_memory(cli: Cli) -> None:
    args = ["llama-3-8b", "--policy", "full", "--device", "h100-80gb"]
    stage = cli("memory", *args, "--json").json["stages"][0]
    lines = "\n".join(cli("explain", "peak", *args, "--json").json["lines"])
    assert f"= {stage['total_bytes']:,} B" in lines
    assert stage["peak_at"] in lines


def test_adapters_are_those_of_memory(cli: Cli) -> None:
    tuned = cli("memory", "llama-3-8b", "--lora-rank", "8", "--json").json["stages"][0]
    lines = "\n".join(
        cli("explain", "lora", "llama-3-8b", "--set", "lora_rank=8", "--json").json["lines"]
    )
    assert "q: 8·(4,096 + 4,096) = 65,536 of 16,777,216" in lines
    assert "No lora_rank set" not in lines
    assert f"weights {tuned['weights_bytes'] / 1e9:,.4g} GB" in lines


def test_plan_shows_its_proof() -> None:
    run = load_run("gpt3-175b", layout={"tp": 8, "sp": True})
    lines = text_of("plan", run)
    assert "34,426,847,232" in lines  # all kept: 96 layers of the paper's closed form
    assert "Proven" in lines
    timed = load_run("gpt3-175b", layout={"tp": 8, "sp": True}, device="a100-80gb")
    assert " ms." in text_of("plan", timed)


def test_selective_has_the_models_own_terms() -> None:
    """Shares are of the model at hand; the paper's closed form is for the paper's layer alone."""
    llama = text_of("selective", load_run("llama-3-8b"))
    assert "72b" not in llama
    assert "s/18h" not in llama
    seq, h, ffn, kv = 8192, 4096, 14336, 1024
    core, rest = 4 * seq * h, 4 * h * h + 4 * h * kv + 6 * h * ffn  # per token, b = 1
    assert percent(core / (core + rest), 2) in llama
    assert percent(core / (core + rest) / 3, 2) in llama
    gpt = text_of("selective", load_run("gpt3-175b", layout={"tp": 8, "sp": True}))
    assert f"s/18h = {percent(2048 / (18 * 12288), 2)} of 72bsh²" in gpt
    assert "2.70 %" in gpt


def test_flags_that_change_no_number_are_refused(cli: Cli) -> None:
    for args in (["18", "--zero", "1"], ["zero", "--zero", "2"], ["lora", "--device", "h200"],
                 ["34", "--vpp", "2"], ["1f1b", "--policy", "full"]):  # fmt: skip
        code, _, err = cli("explain", *args)
        assert code == 2
        assert f"explain {args[0]} does not depend on {args[1]}" in err
    few = cli("explain", "1f1b", "gpt3-175b", "--pp", "8", "--global-batch", "4", "--json").json
    assert any("hold 4, 4, 4, 4, 4, 3, 2, 1" in line for line in few["lines"])


@pytest.mark.parametrize(
    ("text", "term"),
    [
        ("sbh(34+5as/h)/t", "34"), ("sbh(34 + 5as/h)", "34"), ("34sbh/t", "selective"),
        ("34sbh", "selective"), ("2sbh", "full"), ("2sbh/t", "full-sharded"),
        ("26sbh/t", "attention"),
        ("sbh(18+5as/h)/t", "ffn"), ("sbh(10+24/t+5as/(ht))", "34"), ("8sbh/t", "34"),
        ("1+s/6h", "selective"), ("1 + s/6h", "selective"), ("2.7%", "selective"),
        ("2.7 %", "selective"), ("33%", "overhead"), ("39", "overhead"), ("cstar", "c*"),
        ("checkpoint", "policies"), ("gradient checkpointing", "policies"), ("slower", "overhead"),
        ("qlora", "lora"), ("rng", "rng"), ("preserve_rng_state", "rng"), ("96", "96"),
        ("cp", "cp"), ("--cp", "cp"), ("--attention", "flash"), ("attention", "attention"),
        ("--sp", "tp"),
        ("--peak", "mfu"), ("peak", "peak"), ("OOM", "peak"), ("out of memory", "peak"),
        ("6ΨD", "8psi"), ("6nd", "8psi"), ("<0.01%", "ends"), ("0.57 %", "ends"),
        ("35-40%", "ffn-only"), ("12%", "ffn-only"), ("S≈H", "s=4h"), ("√n", "c*"),
        ("96Bslh²(1+s/6h+V/16lh)", "96"), ("fsdp", "zero"), ("l(1 + (p-1)/(pv))", "interleaved"),
        ("greedy by ratio", "greedy"), ("--micro-batch", "34"), ("vpp", "interleaved"),
    ],
)  # fmt: skip
def test_formulas_flags_and_words_find_their_term(text: str, term: str) -> None:
    assert term_of(text) == term


def test_a_models_own_formula_finds_its_term(cli: Cli) -> None:
    compared = cli("llama-3-8b", "--policy", "attention", "--json").json
    formula = compared["policies"][0]["formula"]
    assert cli("explain", formula, "llama-3-8b", "--json").json["term"] == "attention"
    assert cli("explain", formula).code == 2


CONTRACT = (
    "--seq", "--micro-batch", "--global-batch", "--layers", "--tp", "--sp", "--pp", "--vpp", "--cp",
    "--ep", "--etp", "--dp", "--zero", "--precision", "--optimizer", "--attention", "--dropout",
    "--framework", "--device", "--policy", "--units", "--memory", "--memory-model",
    "--activations-only", "--semantics", "--method", "--frontier", "--emit",
)  # fmt: skip


@pytest.mark.parametrize("flag", CONTRACT)
def test_every_flag_of_the_contract_finds_a_term(flag: str) -> None:
    assert term_of(flag) in (*TERMS, "overhead")


def test_flags_of_terms_are_flags(cli: Cli) -> None:
    """A term that explains a flag which has gone says so here."""
    shown = "".join(
        cli(command, "--help").out for command in ("memory", "plan", "mfu", "compare", "search")
    )
    for term in TERMS.values():
        for flag in term.flags:
            assert "--" + flag.replace("_", "-") in shown, flag


def test_the_answer_comes_first(cli: Cli) -> None:
    for term in ("overhead", "34"):
        said = cli("explain", term, "--json").json
        printed = cli("explain", term, columns=400).out.splitlines()
        assert printed[0].startswith(f"{term}: ")
        assert printed[1] == said["result"]
    tables = cli("explain", "overhead", columns=120).out
    assert tables.index("source: ") < tables.index("\nfull: one layer, one micro-batch")


def test_every_term_is_listed(cli: Cli) -> None:
    listed = cli("explain", "--json").json["terms"]
    assert [row["term"] for row in listed if row["term"] != "overhead"] == list(TERMS)
    printed = cli("explain", columns=80).out
    assert all(row["term"] in printed for row in listed)
    assert max(len(line) for line in printed.splitlines()) <= 80


def test_states_of_generators_are_torchs() -> None:
    torch = pytest.importorskip("torch", reason="needs actcalc[torch]")
    text = text_of("rng", load_run("gpt2"))
    assert f"A state is {torch.get_rng_state().numel():,} B" in text
    assert "12 x 5,072 B = 60,864 B" in text


def test_the_papers_ends_are_more_than_it_says() -> None:
    run = load_run("gpt-22b", layout={"tp": 8, "sp": True})
    exact = (1 / 48 + 4 / 48 * (1 + 51200 / 6144)) / (34 + 5 * 64 * 2048 / 6144)
    assert explain_term("ends", run).result.startswith(
        f"Embedding, output layer and loss add {percent(exact, 2)}"
    )


def test_narayanans_96_is_72_and_a_forward() -> None:
    s, h, v, depth = 2048, 12288, 51200, 96
    closed = 96 * s * depth * h * h + 16 * s * s * depth * h + 6 * s * h * v
    assert f"closed form {closed:,}" in text_of("96", load_run("gpt3-175b"))
    assert f"= {closed:,}" in text_of("96", load_run("gpt3-175b"))
    assert "no GPT's" in text_of("96", load_run("llama-3-8b"))
