"""The base of rows: a table is rows of one class, and every column of a row is given."""

from __future__ import annotations

from typing import Any, Self, dataclass_transform


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Row:
    """One row, whose columns are the annotated names of its class; none has a default.

    It is what a frozen dataclass would be, without the code that one compiles at every start.
    """

    def __init__(self, **columns: Any) -> None:
        """``TypeError`` names a column that is forgotten or that the table does not have."""
        wanted = self.columns()
        wrong = [name for name in wanted if name not in columns]
        wrong += [name for name in columns if name not in wanted]
        if wrong:
            what = f"{type(self).__name__} {columns.get('name')!r}"
            raise TypeError(f"{what}: forgotten or unknown: {', '.join(wrong)}")
        self.__dict__.update(columns)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is a row and does not change: {name}")

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(cls.__annotations__)

    def changed(self, **columns: Any) -> Self:
        """A row with some columns changed."""
        return type(self)(**{**vars(self), **columns})
