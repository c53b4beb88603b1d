"""Megatron-LM's recompute options as a policy."""

from __future__ import annotations

from actcalc.errors import SpecError
from actcalc.io.megatron.options import Options
from actcalc.specs.recompute import MODULES


def policies(o: Options) -> tuple[str, ...]:
    """The policy (transformer_config.py recompute_granularity and others).

    Raises ``SpecError`` for what ``transformer_config.py`` and ``training/arguments.py`` refuse.
    """
    granularity = o.text("recompute-granularity")
    if o.flag("recompute-activations") and not granularity:
        granularity = "selective"
    method, count = o.text("recompute-method"), o.number("recompute-num-layers", 1)
    if granularity not in ("", "selective", "full"):
        raise SpecError(f"recompute-granularity is {granularity!r}", "use selective or full")
    if method not in ("", "uniform", "block"):
        raise SpecError(f"recompute-method is {method!r}", "use uniform or block")
    if granularity == "selective":
        if method:
            raise SpecError(
                f"recompute-granularity selective goes with no recompute-method, here {method}: "
                "Megatron refuses it",
                "drop recompute-method, or use recompute-granularity full",
            )
        ours = {row.megatron: name for name, row in MODULES.items()}
        modules = o.words("recompute-modules") or ("core_attn",)
        return ("+".join(ours.get(name, name) for name in modules),)
    if granularity == "full":
        if o.flag("distribute-saved-activations"):
            return ("full-sharded",)
        if method != "block":
            return ("full",) if count == 1 else (f"uniform:{count}",)
        return (f"block:{count}",)
    return ("none",)
