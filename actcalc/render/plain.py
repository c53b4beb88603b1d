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
    """``text`` in ASCII: signs by name, letters without accents, all others as escapes."""
    if text.isascii():
        return text
    parts = unicodedata.normalize("NFKD", text.translate(_TABLE))
    flat = "".join(sign for sign in parts if not unicodedata.combining(sign))
    return flat.encode("ascii", "backslashreplace").decode()


def guard(*streams: Any) -> None:
    """Let streams take any text: what one cannot encode becomes ASCII, on UTF-8 an escape."""
    for stream in streams:
        if stream is None or not hasattr(stream, "reconfigure"):
            continue
        if takes_signs(stream.encoding):
            stream.reconfigure(errors="backslashreplace")
        else:
            codecs.register_error(HANDLER, _replace)
            stream.reconfigure(errors=HANDLER)


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return ascii_text(error.object[error.start : error.end]), error.end
