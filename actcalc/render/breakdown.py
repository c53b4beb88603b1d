"""The breakdown of saved tensors as sheets: groups with subtotals, a total, the ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from actcalc.answers.breakdown import Breakdown
from actcalc.policy.leaves import Leaf
from actcalc.render.compare import in_units, run_lines
from actcalc.render.sheet import Column, Row, Sheet, bytes_column
from actcalc.render.units import percent, size


def breakdown_sheets(result: Breakdown, units: str) -> list[Sheet]:
    """One sheet per kind of layer, one for what exists once, one for embedding and head."""
    units = in_units(result, units)
    inputs = run_lines(result.model, result.layout, result.workload, result.framework)
    sheets = []
    for index, total in enumerate(result.layers):
        own = [leaf for leaf in result.tensors if leaf.layer == total.layer]
        kind = "layer" if len(result.layers) == 1 else f"{total.layer} layer"
        sheets.append(
            _sheet(
                f"{result.title}: what one {kind} keeps ({result.policy}), per GPU",
                own,
                units,
                above=inputs if index == 0 else (),
                below=(f"one layer = {total.formula} = {total.bytes:,} B, {total.count} of them",),
                grouped=True,
            )
        )
    if result.shared:
        sheets.append(_sheet("Once for all layers", result.shared, units, below=()))
    if result.ends:
        sheets.append(
            _sheet("Embedding and output head (not in the layers' figures)", result.ends, units)
        )
    sheets[-1] = replace(sheets[-1], notes=result.notes)
    sheets[0] = replace(sheets[0], answer=_answer(result, units))
    return sheets


def _answer(result: Breakdown, units: str) -> str:
    """What one layer keeps, and the largest tensor of it."""
    first = result.layers[0]
    own = [leaf for leaf in result.tensors if leaf.layer == first.layer]
    kind = "layer" if len(result.layers) == 1 else f"{first.layer} layer"
    text = f"One {kind} keeps {size(first.bytes, units)} under {result.policy}"
    if not own:
        return f"{text}."
    most = max(own, key=lambda leaf: leaf.bytes)
    share = percent(most.bytes / first.bytes) if first.bytes else "0 %"
    many = "1 tensor" if len(own) == 1 else f"{len(own)} tensors"
    return f"{text}, in {many}; {_words(most.tensor)} is {share} of it."


def _sheet(
    title: str,
    leaves: Sequence[Leaf],
    units: str,
    *,
    above: tuple[str, ...] = (),
    below: tuple[str, ...] = (),
    grouped: bool = False,
) -> Sheet:
    columns = (
        Column("module", "module", align="left"),
        Column("op", "op", _words, align="left", wrap=True, rank=2),
        Column("tensor", "tensor", _words, align="left", wrap=True),
        Column("shape", "shape", align="left", wrap=True, rank=3),
        Column("formula", "formula", align="left", wrap=True, rank=1),
        Column("dtype", "type", align="left", rank=4),
        bytes_column("bytes", "size", [leaf.bytes for leaf in leaves], units),
    )
    rows: list[Row] = []
    groups = dict.fromkeys(leaf.module for leaf in leaves)
    for group in groups:
        members = [leaf for leaf in leaves if leaf.module == group]
        rows += [_row(leaf) for leaf in members]
        if grouped and len(groups) > 1:
            amount = sum(leaf.bytes for leaf in members)
            rows.append(
                Row((f"= {group}", None, None, None, None, None, amount), "strong", rule_after=True)
            )
    rows.append(
        Row(
            ("= all", None, None, None, None, None, sum(leaf.bytes for leaf in leaves)),
            "strong",
        )
    )
    return Sheet(title=title, columns=columns, rows=tuple(rows), above=above, below=below)


def _row(leaf: Leaf) -> Row:
    also = "".join(f", {name}" for name in leaf.shared_with)
    return Row(
        (leaf.module, leaf.op + also, leaf.tensor, leaf.shape, leaf.formula, leaf.dtype, leaf.bytes)
    )


def _words(name: str) -> str:
    """A name that may wrap between its words."""
    return name.replace("_", " ")
