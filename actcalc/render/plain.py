"""Text in ASCII, for streams that cannot take the signs of formulas and rules."""

from __future__ import annotations

import codecs
import unicodedata
from typing import Any

_SIGNS = {
    "√": "sqrt", "·": "*", "×": "x", "−": "-", "–": "-", "—": "-", "≈": "~", "≤": "<=", "≥": ">=",
    "≠": "!=", "→": "->", "←": "<-", "…": "...", "µ": "u", "∞": "inf", "∑": "sum", "Σ": "sum",
    "²": "^2", "³": "^3", "⌈": "ceil(", "⌉": ")", "⌊": "floor(", "⌋": ")", "Ψ": "Psi", "ψ": "psi",
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "Δ": "Delta", "ε": "eps", "λ": "lambda",
    "μ": "u", "π": "pi", "σ": "sigma", "τ": "tau", "φ": "phi", "ω": "omega", "∈": "in", "∝": "~",
    "─": "-", "━": "-", "│": "|", "┃": "|", "█": "#", "▓": "#", "▒": "+", "░": ".", "•": "*",
    "‘": "'", "’": "'", "“": '"', "”": '"', "\u00a0": " ", "\u202f": " ", "⁄": "/", "⌀": "avg",
}  # fmt: skip
_TABLE = str.maketrans(_SIGNS)
HANDLER = "actcalc-ascii"
"""Name of the handler of encoding errors that :func:`guard` registers."""


def takes_signs(encoding: str | None) -> bool:
    """Whether a stream of this encoding takes every sign; None is a stream without one."""
    try:
        return encoding is None or codecs.lookup(encoding).name.startswith("utf")
    except LookupError:
        return False


def ascii_text(text: str) -> str:
    """``text`` in ASCII: signs by name or likeness, letters without their accents, else ``?``."""
    if text.isascii():
        return text
    flat = unicodedata.normalize("NFKD", text.translate(_TABLE))
    return (
        "".join(c for c in flat if not unicodedata.combining(c)).encode("ascii", "replace").decode()
    )


def guard(*streams: Any) -> None:
    """Let streams that are not UTF-8 take any text: what they cannot encode becomes ASCII."""
    for stream in streams:
        if not takes_signs(getattr(stream, "encoding", None)) and hasattr(stream, "reconfigure"):
            codecs.register_error(HANDLER, _replace)
            stream.reconfigure(errors=HANDLER)


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return ascii_text(error.object[error.start : error.end]), error.end
