"""YAML as people write it, through PyYAML, which is loaded when there is YAML to read."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any, ClassVar

import yaml

from actcalc.errors import SpecError, shorten
from actcalc.io.yamlfile import MAX_ENTRIES, whole_number

_BASE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_WHOLE = re.compile(r"[-+]?(0b[0-1_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)\Z")
_REAL = re.compile(
    r"[-+]?([0-9][0-9_]*\.[0-9_]*([eE][-+][0-9]+)?|\.[0-9][0-9_]*([eE][-+][0-9]+)?"
    r"|\.(inf|Inf|INF))\Z|\.(nan|NaN|NAN)\Z"
)
_NUMBERS = {"tag:yaml.org,2002:int": _WHOLE, "tag:yaml.org,2002:float": _REAL}
"""Numbers as YAML 1.1 writes them, but those in base 60 (1:30): they are texts, as in YAML 1.2."""


class _Loader(_BASE):  # type: ignore[misc]
    """A safe loader that refuses a key with two values, and whole numbers nobody writes."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        first: [(tag, _NUMBERS.get(tag, pattern)) for tag, pattern in rules]
        for first, rules in _BASE.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build one mapping; raises ``SpecError`` for a key of two values or an unhashable one."""
        mapping: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, Hashable):
                raise SpecError(f"line {line}: a key must be a plain word", "remove the brackets")
            value = self.construct_object(value_node, deep=True)
            if key in mapping and (isinstance(value, dict | list) or mapping[key] != value):
                raise SpecError(
                    f"key {shorten(key)} is given twice (line {line})", "keep one of them"
                )
            mapping[key] = value
        return mapping

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """A whole number; ``SpecError`` for one of very many digits."""
        return whole_number(node.value, super().construct_yaml_int, node)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def parsed(text: str, where: str) -> Any:
    """What YAML says; raises as :func:`actcalc.io.yamlfile.parse_yaml` does."""
    if text.count(",") + text.count("\n") > MAX_ENTRIES:
        raise SpecError(
            f"{where}: more than {MAX_ENTRIES:,} lines and values", "a run has a few hundred"
        )
    try:
        # Only a star can be an alias: without one the events need no second look.
        for event in yaml.parse(text, Loader=_BASE) if "*" in text else ():
            if isinstance(event, yaml.AliasEvent):
                line = event.start_mark.line + 1 if event.start_mark else 0
                raise SpecError(
                    f"{where}: alias of {shorten(event.anchor)} (line {line})",
                    "write the value out: anchors and aliases are not read",
                )
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where_in = f" at line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "it is not YAML"
        raise SpecError(f"{where}: {problem}{where_in}", "check the YAML syntax") from error
    except RecursionError as error:
        raise SpecError(f"{where}: nested too deeply", "flatten it") from error
    except (ValueError, OverflowError) as error:
        raise SpecError(f"{where}: {error}", "check the values") from error
