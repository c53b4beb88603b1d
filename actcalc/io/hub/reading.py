"""What is being read, and what came of it so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from actcalc.errors import SpecError
from actcalc.io.hub.family import SIZES, Family, Keys
from actcalc.io.hub.values import Values, shown


@dataclass
class Reading:
    """What is being read: the language model's values, the whole file's, and what came of it."""

    family: Family
    model_type: str
    values: Values
    outer: Values
    nested: bool
    fields: dict[str, Any] = field(default_factory=dict)
    workload: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def layers(self) -> int:
        """Number of layers read."""
        return int(self.fields["layers"])

    def size(self, name: str, most: int | None = None) -> int | None:
        """The size called ``name`` (a key of ``SIZES``), the library's default where it has one."""
        keys = tuple(dict.fromkeys((*self.family.keys.get(name, ()), *SIZES[name])))
        if name in self.family.keys and not self.family.keys[name]:
            return None
        found = self.values.size(keys, most) if most else self.values.size(keys)
        if found is not None:
            self._contradiction(name, keys, found)
            return found
        default = self.family.defaults.get(name)
        if default is None or any(self.values.named(key) for key in keys):
            return None
        if name not in ("kv_heads", "head_dim", "positions") and not self.nested:
            return None
        self.warnings.append(f"{keys[0]} is missing: {default}, the library's default, is used")
        return default

    def _contradiction(self, name: str, keys: Keys, found: int) -> None:
        if name in ("ffn", "positions", "vocab", "head_dim"):
            return
        for key in keys:
            if self.values.has(key) and self.values.data[key] != found:
                first = self.values.first(keys) or keys[0]
                raise SpecError(
                    f"{first} is {found} but {key} is {shown(self.values.data[key])}",
                    "keep one of them",
                )
