"""MFU and HFU of Korthikanti et al. 2022, table 5, from its iteration times."""

from __future__ import annotations

import pytest

from actcalc.cost.flops import model_flops, paper_model_flops, paper_selective_flops
from actcalc.io.runs import load_run
from actcalc.layers.model import model_graph
from tests.conftest import load_data

TABLE = load_data("korthikanti2022_table5.yaml")


@pytest.mark.parametrize("row", TABLE["rows"], ids=lambda row: row["model"])
def test_mfu_and_hfu(row):
    run = load_run(row["model"], workload={"micro_batch": row["batch"]})
    graph = model_graph(run.model, run.layout, run.workload, run.framework)
    assert model_flops(graph) == paper_model_flops(run.model, run.workload.seq, row["batch"])
    available = row["seconds"] * row["gpus"] * TABLE["peak_flops"]
    hardware = paper_selective_flops(run.model, run.workload.seq, row["batch"])
    # The times are printed with three or four digits: half a unit of the last is at most 0.5 %.
    assert model_flops(graph) / available == pytest.approx(row["mfu"], abs=0.0025)
    assert float(hardware) / available == pytest.approx(row["hfu"], abs=0.0025)
