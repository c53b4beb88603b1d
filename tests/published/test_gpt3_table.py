"""The GPT-3 table and the documents' other figures, from the command line and the library."""

from __future__ import annotations

import pytest

from actcalc.api import breakdown, compare
from actcalc.policy.checkpoints import segment_memory
from actcalc.specs import Layout
from tests.conftest import load_data

TABLE = load_data("gpt3_table.yaml")


@pytest.mark.parametrize("case", ["with_sp", "without_sp", "one_gpu"])
def test_stored_bytes_are_the_papers(case):
    layout = Layout(**TABLE[case]["layout"])
    names = list(TABLE[case]["per_layer"])
    result = compare(TABLE["model"], layout, policies=names)
    for figure in result.policies:
        assert figure.stored_bytes_per_layer == TABLE[case]["per_layer"][figure.policy]
        assert figure.stored_bytes == TABLE["layers"] * figure.stored_bytes_per_layer
        if figure.policy in TABLE[case]["formulas"]:
            assert figure.formula == TABLE[case]["formulas"][figure.policy]


def test_ratios_of_selective():
    result = compare(TABLE["model"], Layout(tp=8, sp=True))
    selective = next(f for f in result.policies if f.policy == "selective")
    assert selective.saved_ratio == pytest.approx(TABLE["selective_saves_ratio"], abs=5e-5)
    assert selective.hardware_flops_per_model_flops_ratio == pytest.approx(
        TABLE["selective_hardware_ratio"], abs=5e-5
    )
    assert selective.recompute_forward_ratio == pytest.approx(
        TABLE["selective_forward_ratio"], abs=5e-6
    )


def test_full_runs_every_layer_once_more():
    result = compare(TABLE["model"], Layout(tp=8, sp=True))
    full = next(f for f in result.policies if f.policy == "full")
    assert full.recompute_forward_ratio == 1
    layers = full.recompute_flops
    assert 3 * layers + full.recompute_flops == 4 * layers  # four thirds of the layers' FLOPs
    assert full.hardware_flops_per_model_flops_ratio == pytest.approx(
        (result.model_flops + layers) / result.model_flops
    )


def test_checkpoint_optimum():
    best = compare(TABLE["model"], Layout(tp=8, sp=True)).checkpoint_optimum
    assert best.layer_bytes_per_input_bytes_ratio == TABLE["checkpoints"]["ratio"]
    assert best.continuous == pytest.approx(TABLE["checkpoints"]["continuous"], abs=5e-3)
    # 74 checkpoints over 96 layers need segments of two layers and hold more than 96 do.
    # The working segment's first input is the checkpoint itself.
    sizes = {
        "layers": 96,
        "input_bytes": best.input_bytes,
        "layer_bytes": best.layer_bytes,
        "counted_bytes": best.input_bytes,
    }
    assert segment_memory(74, **sizes) > segment_memory(96, **sizes) == best.total_bytes
    assert best.integer == 96


def test_sqrt_n_scheme_keeps_19_6_layers_worth():
    case = TABLE["checkpoints"]["equal_layers"]
    layers, segments = case["layers"], case["segments"]
    assert segments + layers / segments == pytest.approx(case["worth"])
    # With whole layers the longest of the ten segments has ten.
    assert segment_memory(segments, layers=layers, input_bytes=1, layer_bytes=1) == 20


def test_bert_layer_is_more_than_the_articles_three_tensors():
    case = load_data("article_bert.yaml")
    result = breakdown(case["model"])
    by_name = {leaf.tensor: leaf.bytes for leaf in result.tensors}
    assert by_name["probs"] == case["score_matrix_bytes"]
    assert by_name["activation_out"] == case["wide_tensor_bytes"]
    assert by_name["input"] == case["stream_tensor_bytes"]
    assert result.stored_bytes_per_layer == case["layer_bytes"]
    assert result.formula == "sbh(34+5as/h)"
