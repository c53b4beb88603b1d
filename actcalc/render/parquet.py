"""The main table of an answer as a Parquet file, which data frames read with types."""

from __future__ import annotations

import io
from typing import Any

from actcalc.errors import MissingExtraError
from actcalc.render.sheet import Sheet
from actcalc.render.text import tables


def arrow() -> Any:
    """PyArrow; ``MissingExtraError`` with what to install where it is missing."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError(
            "a Parquet file needs pyarrow, which is not installed",
            "pip install 'actcalc[parquet]'; -o FILE.csv needs nothing more",
        ) from error
    return pyarrow


def parquet(sheets: list[Sheet]) -> bytes:
    """The first table under its keys; a column of several types is one of text.

    One without any value has the type that it has elsewhere, so that files can be joined.
    """
    pa = arrow()
    first = tables(sheets)[0]
    columns = [list(column) for column in zip(*first.rows, strict=True)] or [[] for _ in first.keys]
    pairs = list(zip(first.keys, columns, strict=True))
    found = pa.table({k: _typed(pa, v, first.types.get(k)) for k, v in pairs})
    out = io.BytesIO()
    pa.parquet.write_table(found, out)
    return out.getvalue()


def _typed(pa: Any, values: list[Any], kind: type | None) -> Any:
    if kind is not None and all(value is None for value in values):
        named = {int: pa.int64(), float: pa.float64(), bool: pa.bool_(), str: pa.string()}
        return pa.array(values, named[kind])
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return pa.array([None if value is None else str(value) for value in values])
