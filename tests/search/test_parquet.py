"""Parquet files of a search and of a sweep: the rows of the JSON, every column with its type."""

from __future__ import annotations

import pytest

from tests.agreement.asking import ask

parquet = pytest.importorskip("pyarrow.parquet")
RUN = "--framework megatron --device a100-80gb --global-batch 32"
SWEEP = (
    f"sweep gpt-22b {RUN} --gpus 16 --vary tp=1,3,8 --micro-batch 1 --policy full --zero 1 "
    "--tokens 300e9 --price-per-gpu-hour 2"
)


def table_of(cli, tmp_path, *line):
    path = tmp_path / "rows.parquet"
    assert cli(*line, "-o", path).code < 2
    return parquet.read_table(path)


def test_a_search_is_typed_also_where_nothing_fits(cli, tmp_path):
    line = f"search gpt-22b --gpus 8 --tp 8 {RUN}".split()
    found, none = (table_of(cli, tmp_path, *line, *more) for more in ((), ("--device", "l4")))
    assert (len(found), len(none)) == (ask(*line)["feasible"], 0)
    assert found.schema == none.schema
    best = found.slice(0, 1).to_pylist()[0]
    assert best["step_seconds"] == ask(*line)["results"][0]["step_seconds"]
    kinds = {field.name: str(field.type) for field in found.schema}
    assert (kinds["etp"], kinds["schedule"], kinds["sp"]) == ("int64", "string", "bool")


def test_a_sweep_is_typed_and_keeps_what_cannot_be(cli, tmp_path):
    found = table_of(cli, tmp_path, *SWEEP.split())
    rows = {row["tp"]: row for row in found.to_pylist()}
    asked = {row["values"]["tp"]: row for row in ask(*SWEEP.split())["rows"]}
    assert rows[8]["price"] == asked[8]["price"] > 0
    assert (rows[1]["fits"], rows[1]["gpus"]) == (False, 16)
    assert rows[3]["problem"] == asked[3]["problem"] == "tp 3 does not divide heads 64"
    assert str(found.schema.field("energy_kwh").type) == "double"
