"""Layer and iteration times of Korthikanti et al. 2022, tables 4 and 5, from one set of rates."""

from __future__ import annotations

import pytest

from actcalc.answers.compare import compare_run
from actcalc.io.runs import load_run
from tests.conftest import load_data

PAPER = load_data("korthikanti2022.yaml")


def compared(model, layout, workload, policy):
    run = load_run(
        model,
        layout={"tp": 8, **layout},
        workload=workload,
        device="a100-80gb",
        policies=("none", policy),
    )
    return compare_run(run).policies[-1]


def layer_ms(row):
    figure = compared("gpt-22b", {"sp": row["sp"]}, {"seq": 2048, "micro_batch": 4}, row["policy"])
    return 1e3 * figure.layer_forward_seconds, 1e3 * figure.layer_backward_seconds


BASELINE = PAPER["table4"][0]


@pytest.mark.parametrize("row", PAPER["table4"], ids=lambda r: f"{r['policy']}-sp{r['sp']}")
def test_table4(row):
    forward, backward = layer_ms(row)
    assert forward == pytest.approx(row["forward"], rel=0.1)
    assert backward == pytest.approx(row["backward"], rel=0.1)
    overhead = 100 * ((forward + backward) / sum(layer_ms(BASELINE)) - 1)
    assert overhead == pytest.approx(row["overhead"], abs=3)


def test_full_recompute_costs_more_than_a_third():
    """The re-run forward is exposed to its collectives; backward hides its own."""
    full = PAPER["table4"][2]
    plain = layer_ms(BASELINE)
    again = layer_ms(full)[1] - plain[1]
    assert again == pytest.approx(plain[0])
    assert again / sum(plain) > 1 / 3


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("row", PAPER["table5"], ids=lambda r: r["model"])
def test_table5_iteration_time(row, policy):
    layout = {"pp": row["pp"], "vpp": row["vpp"], "sp": policy == "selective"}
    figure = compared(row["model"], layout, {"global_batch": row["batch"]}, policy)
    assert figure.step_seconds == pytest.approx(row[policy], rel=0.1)
