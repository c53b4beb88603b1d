"""A measurement beside its prediction as sheets: the parts, then the middle layer's tensors."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from actcalc.answers.measure.figures import (
    BytesBeside,
    LayersBeside,
    Measurement,
    TensorBeside,
)
from actcalc.answers.measured_layer import LayerComparison
from actcalc.render.sheet import (
    Column,
    Row,
    Sheet,
    bytes_column,
    flops_column,
    rows_of,
    share_column,
    sizes_column,
)
from actcalc.render.units import count, flops, percent, size


def measure_sheets(result: Measurement, units: str) -> list[Sheet]:
    """The parts of the model with exact bytes, one layer tensor by tensor, and a real step."""
    sheets = [_parts(result), _tensors(result, units)]
    if result.gpu is not None:
        sheets.insert(1, _step(result, units))
    sheets[-1] = replace(sheets[-1], notes=result.notes)
    return sheets


def _parts(result: Measurement) -> Sheet:
    columns = [Column("part", "part", align="left"), _exact("measured", "measured\nB")]
    if result.predicted_bytes is not None:
        columns += [_exact("predicted", "predicted\nB"), _exact("difference", "difference\nB")]
    rows: list[tuple[str, BytesBeside]] = [(_of_layers(group), group) for group in result.layers]
    if len(result.layers) > 1 or any(group.count > 1 for group in result.layers):
        rows.append(("all layers", result.all_layers))
    predicted = result.predicted_bytes is not None
    ends = (
        ("embedding", result.embedding, predicted),
        ("head and loss" if result.layers else "the module", result.head, predicted),
    )
    rows += [
        (name, part)
        for name, part, always in ends
        if always or part.measured_bytes or part.difference_bytes
    ]
    total = BytesBeside(
        measured_bytes=result.measured_bytes,
        predicted_bytes=result.predicted_bytes,
        difference_bytes=result.difference_bytes,
    )
    width = len(columns)
    found = result.parameters
    number = ("parameters (number)", found.measured, found.predicted, found.difference)
    return Sheet(
        title=f"{result.name}: what PyTorch keeps for backward"
        + (", beside the prediction" if width > 2 else ""),
        columns=tuple(columns),
        rows=(
            *(Row(_figures(name, part)[:width]) for name, part in rows),
            Row(_figures("= whole model", total)[:width], "strong", rule_after=True),
            Row(number[:width]),
        ),
        answer=_verdict(result),
        fits=result.exact,
        above=_inputs(result),
    )


def _of_layers(group: LayersBeside) -> str:
    """``moe layer, 58 of them, each``; ``layer 0``."""
    name = "layer" if group.kind == "layer" else f"{group.kind} layer"
    return f"{name} {group.first}" if group.count == 1 else f"{name}, {group.count} of them, each"


def _exact(key: str, title: str) -> Column:
    return Column(key, title, lambda value: f"{value:,}")


def _figures(name: str, part: BytesBeside) -> tuple[Any, ...]:
    return (name, part.measured_bytes, part.predicted_bytes, part.difference_bytes)


def _inputs(result: Measurement) -> tuple[str, ...]:
    by = f"torch {result.torch_version}"
    if result.transformers_version:
        by += f", transformers {result.transformers_version}"
    work = []
    if result.seq is not None:
        work.append(f"s {result.seq:,}")
    if result.micro_batch is not None:
        work.append(f"b {result.micro_batch}")
    work.append(result.precision)
    if result.attention:
        work.append(f"{result.attention} attention")
    if result.attention_kernels:
        work.append("kernel " + ", ".join(result.attention_kernels))
    if result.dropout is not None:
        work.append("dropout" if result.dropout else "no dropout")
    if result.checkpointing:
        work.append("full recompute")
    return (f"{result.model_class}  {by}, fake CUDA tensors", "  ".join(work))


def _verdict(result: Measurement) -> str:
    if result.exact is None:
        return "Measured alone: nothing predicts it."
    profile = f"the {result.framework} profile"
    if result.exact:
        return f"No difference: {profile} predicts every part to the byte."
    measured, difference = result.measured_bytes, result.difference_bytes or 0
    share = f" ({percent(abs(difference) / measured)})" if measured else ""
    if not difference:
        return f"The totals agree, but not every part: see the differences to {profile} below."
    what = "more" if difference > 0 else "less"
    return f"PyTorch keeps {abs(difference):,} B {what} than {profile} says{share}."


def _tensors(result: Measurement, units: str) -> Sheet:
    tensors = result.tensors
    sizes = [max(t.measured_bytes, t.predicted_bytes or 0) for t in tensors]
    columns = [
        Column("module", "module", _path, align="left", wrap=True),
        Column("op", "saved by", _words, align="left", wrap=True),
        Column("shape", "shape", _shape, align="left"),
        Column("dtype", "type", _dtype, align="left"),
        bytes_column("measured_bytes", "measured", sizes, units),
    ]
    predicted = result.predicted_bytes is not None
    if predicted:
        columns += [
            bytes_column("predicted_bytes", "predicted", sizes, units),
            Column("predicted_tensor", "predicted\ntensor", _spaced, align="left", wrap=True),
        ]
    width = len(columns)
    below = []
    alone = [t for t in tensors if predicted and (t.op is None or t.predicted_tensor is None)]
    if alone:
        off = sum(abs(t.difference_bytes or 0) for t in alone)
        below.append(
            f"{len(alone)} tensors without a partner of the same size ({size(off, units)}): "
            "marked (none)."
        )
    elif predicted:
        below.append(
            "Every tensor has a partner of its size; those of one size are paired in op order."
        )
    where = f"layer {result.middle_layer}" if result.layers else "the module"
    return Sheet(
        title=f"What {where} keeps, tensor by tensor",
        columns=tuple(columns),
        rows=tuple(_row(tensor, width, predicted) for tensor in tensors),
        below=tuple(below),
    )


def _row(tensor: TensorBeside, width: int, predicted: bool) -> Row:
    values = (
        tensor.module if tensor.op is not None else "(none)",
        tensor.op,
        tensor.shape,
        tensor.dtype,
        tensor.measured_bytes,
        tensor.predicted_bytes,
        tensor.predicted_tensor or ("(none)" if predicted else None),
    )
    return Row(values[:width])


def _words(op: str) -> str:
    """``NativeLayerNormBackward0.input`` as ``native layer norm: input``."""
    node, _, attribute = op.partition(".")
    node = re.sub(r"Backward\d*$", "", node).removeprefix("ScaledDotProduct")
    named = _camel(node).lower() or node
    return f"{named}: {_spaced(attribute)}" if attribute else named


def _camel(name: str) -> str:
    """``LlamaAttention`` as ``Llama Attention``."""
    return re.sub(r"(?<=[a-zA-Z0-9])(?=[A-Z][a-z])", " ", name.replace("_", " "))


def _modules(policy: str) -> str:
    """Modules joined with ``+``, each in words."""
    return " + ".join(_path(part) for part in policy.split("+"))


def _spaced(name: str) -> str:
    """A name that may wrap between its words."""
    return name.replace("_", " ")


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _path(module: str) -> str:
    """A module's path that may wrap between its words."""
    return module.replace(".", " / ").replace("_", " ") or "(the layer itself)"


def _dtype(name: str) -> str:
    """PyTorch's name of an element type in the short form of the other tables."""
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
    return short.get(name, name)


def _step(result: Measurement, units: str) -> Sheet:
    step = result.gpu
    if step is None:
        return Sheet("", (), ())
    values = (
        ("allocated before the step", step.before_bytes),
        ("kept by the forward", step.kept_bytes),
        ("peak allocated, with gradients", step.peak_allocated_bytes),
        ("peak reserved", step.peak_reserved_bytes),
    )
    return Sheet(
        title=f"One real step on {step.device}, by the caching allocator",
        columns=(
            Column("part", "part", align="left"),
            bytes_column("bytes", "size", [value for _, value in values], units),
        ),
        rows=tuple(Row(value) for value in values),
        below=(
            "No optimizer; the allocator rounds up, and libraries take workspace on first use.",
        ),
    )


def layer_sheets(result: LayerComparison, units: str) -> list[Sheet]:
    """Modules of a measured layer, each wrapped in a checkpoint, side by side."""
    policies = result.policies
    columns = (
        Column("policy", "policy", _modules, align="left", wrap=True),
        Column(
            "class", "class", _camel, align="left", wrap=True, get=lambda p: "+".join(p.classes)
        ),
        sizes_column("stored_bytes_per_layer", "per layer", policies, units),
        sizes_column("stored_bytes", "all layers", policies, units),
        share_column("saved_ratio", "saved\n "),
        flops_column("recompute_flops", "re-run", policies),
        share_column("recompute_forward_ratio", "of fwd\n "),
    )
    layers = "1 layer" if result.layers == 1 else f"{result.layers} layers"
    return [
        Sheet(
            title=f"{result.name}: a measured {result.layer_class}, what its modules keep",
            answer=_of_modules(result, units),
            columns=columns,
            rows=rows_of(columns, policies),
            above=(
                f"{count(result.parameters)} parameters  {result.precision}  {layers}  "
                f"{flops(result.forward_flops)} forward  torch {result.torch_version}",
            ),
            notes=result.notes,
        )
    ]


def _of_modules(result: LayerComparison, units: str) -> str:
    """What the layer keeps, and the module that frees most of it."""
    first, *rest = result.policies
    kept = f"One layer keeps {size(first.stored_bytes_per_layer, units)} under {first.policy}"
    if not rest:
        return f"{kept}."
    best = max(rest, key=lambda policy: policy.saved_ratio)
    return f"{kept}; re-running {_modules(best.policy)} frees {percent(best.saved_ratio)} of it."
