"""Random legal GPT runs."""

from __future__ import annotations

from hypothesis import strategies as st

from actcalc.specs import Layout, Model, Workload


@st.composite
def gpt_runs(draw, *, max_tp: int = 8):
    """A GPT-like model with a layout and a workload that fit together."""
    tp = draw(st.sampled_from([t for t in (1, 2, 4, 8) if t <= max_tp]))
    sp = tp > 1 and draw(st.booleans())
    heads = tp * draw(st.integers(1, 12))
    head_dim = draw(st.sampled_from([8, 64, 80, 96, 128]))
    hidden = heads * head_dim
    ffn = draw(st.sampled_from([4 * hidden, 3 * hidden, tp * draw(st.integers(1, 5000))]))
    rates = {"hidden_dropout": 0.1, "attention_dropout": 0.1} if draw(st.booleans()) else {}
    model = Model(
        layers=draw(st.integers(1, 40)),
        hidden=hidden,
        heads=heads,
        ffn=ffn,
        vocab=tp * draw(st.integers(1, 8000)),
        norm_placement=draw(st.sampled_from(["pre", "post"])),
        **rates,
    )
    workload = Workload(
        seq=tp * draw(st.integers(1, 600)),
        micro_batch=draw(st.integers(1, 9)),
        attention=draw(st.sampled_from(["eager", "flash"])),
        dropout=draw(st.booleans()),
    )
    return model, Layout(tp=tp, sp=sp), workload
