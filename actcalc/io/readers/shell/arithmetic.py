"""Whole-number arithmetic of bash: ``$((...))``."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

_MOST = 2**63
_LONGEST = 300
_NAME = re.compile(r"\$?\{?([A-Za-z_]\w*)\}?")


def integer(text: str, look_up: Callable[[str], str | None]) -> int | None:
    """The value of an expression over whole numbers and variables; None where it has none.

    Division drops what is left over, as bash's does.
    """
    if len(text) > _LONGEST:
        return None
    missing: list[str] = []

    def named(found: re.Match[str]) -> str:
        value = look_up(found[1])
        if value is None or not re.fullmatch(r"-?\d{1,18}", value):
            missing.append(found[1])
            return "0"
        return f"({value})"

    plain = _NAME.sub(named, text.strip())
    plain = plain.replace("&&", " and ").replace("||", " or ")
    plain = re.sub(r"!(?!=)", " not ", plain)
    plain = re.sub(r"\b0+(\d)", r"\1", plain)
    if missing or not plain:
        return None
    try:
        tree = ast.parse(plain.strip(), mode="eval")
        return _value(tree.body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _bounded(value: int) -> int:
    if abs(value) >= _MOST:
        raise ValueError("out of range")
    return value


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp):
        inner = _value(node.operand)
        if isinstance(node.op, ast.USub):
            return -inner
        if isinstance(node.op, ast.Not):
            return int(not inner)
        if isinstance(node.op, ast.UAdd):
            return inner
    if isinstance(node, ast.BinOp):
        return _bounded(_binary(node.op, _value(node.left), _value(node.right)))
    if isinstance(node, ast.BoolOp):
        values = [_value(each) for each in node.values]
        return int(all(values) if isinstance(node.op, ast.And) else any(values))
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return int(_compared(node.ops[0], _value(node.left), _value(node.comparators[0])))
    raise ValueError("not arithmetic")


def _binary(kind: ast.operator, left: int, right: int) -> int:
    if isinstance(kind, ast.Add):
        return left + right
    if isinstance(kind, ast.Sub):
        return left - right
    if isinstance(kind, ast.Mult):
        return left * right
    if isinstance(kind, ast.Div):
        return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
    if isinstance(kind, ast.Mod):
        return abs(left) % abs(right) * (-1 if left < 0 else 1)
    if isinstance(kind, ast.Pow) and 0 <= right <= 63:
        return int(left**right)
    raise ValueError("not arithmetic")


def _compared(kind: ast.cmpop, left: int, right: int) -> bool:
    if isinstance(kind, ast.Eq | ast.NotEq):
        return (left == right) == isinstance(kind, ast.Eq)
    if isinstance(kind, ast.Lt | ast.GtE):
        return (left < right) == isinstance(kind, ast.Lt)
    if isinstance(kind, ast.Gt | ast.LtE):
        return (left > right) == isinstance(kind, ast.Gt)
    raise ValueError("not arithmetic")
