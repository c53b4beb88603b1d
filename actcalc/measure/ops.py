"""Record the ATen ops of a forward pass: what each reads, makes and changes, and its FLOPs.

A dispatch mode sees every op below autograd, where PyTorch's selective checkpoint decides too, so
an op recorded here is an op that such a policy can keep or run again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from actcalc.measure.fake_cuda import require_torch
from actcalc.measure.layer import OpRun

ORDER_DEPENDENT = frozenset({"topk", "sort", "kthvalue", "msort"})
"""Ops that may break ties differently when they run again, which sends a token elsewhere
(torchtitan keeps ``topk`` for that reason: distributed/activation_checkpoint.py)."""

_BATCH_NORM = "batch_norm"
"""Ops named so move the model's running statistics, which most of their schemas do not say."""

_RATES = ("dropout_p", "p")
"""Arguments that are the rate of a dropout inside a kernel: at 0 it draws nothing."""


@dataclass(frozen=True, slots=True)
class LoggedOp:
    """One op of the run, its storages by key."""

    op: str
    path: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    writes: tuple[int, ...]
    forward_flops: int
    random: bool


@dataclass(slots=True)
class OpLog:
    """The ops of one forward pass, in order.

    It holds every storage that it names, so that no key is used twice; :meth:`clear` lets go.
    """

    where: Callable[[], str]
    """Path of the module that is running."""
    entries: list[LoggedOp] = field(default_factory=list)
    views: dict[int, Any] = field(default_factory=dict)
    """For each storage the tensor it was first seen as, without its graph."""
    last_save: dict[str, int] = field(default_factory=dict)
    """For each module path, how many ops had run at its last save for backward."""

    def saved(self, path: str) -> None:
        """Note that the module at ``path`` saves a tensor now."""
        self.last_save[path] = len(self.entries)

    @contextlib.contextmanager
    def logging(self) -> Iterator[None]:
        """Log every op of the block."""
        torch = require_torch()
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves

        log = self

        def keys(value: Any) -> tuple[int, ...]:
            found: dict[int, None] = {}
            for leaf in tree_leaves(value):
                if isinstance(leaf, torch.Tensor):
                    key = int(leaf.untyped_storage()._cdata)
                    log.views.setdefault(key, leaf.detach())
                    found[key] = None
            return tuple(found)

        class Log(TorchDispatchMode):  # type: ignore[misc]
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                kwargs = kwargs or {}
                result = func(*args, **kwargs)
                path = log.where()
                with torch.utils._python_dispatch._disable_current_modes():
                    read = keys((args, kwargs))
                    changed = keys(written(func, args, kwargs))
                    made = tuple(dict.fromkeys((*keys(result), *changed)))
                if set(made) - set(read) or changed:
                    outputs = tuple(key for key in made if key not in read or key in changed)
                    log.entries.append(
                        LoggedOp(
                            op=str(func),
                            path=path,
                            inputs=read,
                            outputs=outputs,
                            writes=tuple(key for key in changed if key in read),
                            forward_flops=flops_of(func, args, kwargs, result),
                            random=draws(func, args, kwargs),
                        )
                    )
                return result

        with Log():
            yield

    def clear(self) -> None:
        """Let go of every storage."""
        self.entries.clear()
        self.views.clear()


def _arguments(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """The schema's arguments that were given, each with its value (higher-order ops have none)."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return
    for index, argument in enumerate(schema.arguments):
        if index < len(args):
            yield argument, args[index]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that the op changes in place."""
    return [
        value
        for argument, value in _arguments(func, args, kwargs)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def draws(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether the op draws random numbers with these arguments."""
    torch = require_torch()
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    rates = [v for a, v in _arguments(func, args, kwargs) if a.name in _RATES]
    if not rates and any(a.name in _RATES for a in func._schema.arguments):
        return False  # a rate that is left out is 0
    return not (rates and isinstance(rates[0], int | float) and rates[0] == 0)


def flops_of(func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> int:
    """Forward FLOPs by PyTorch's own formulas; 0 for an op that has none."""
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(getattr(func, "_overloadpacket", func))
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def ops_below(
    log: OpLog,
    inside: Callable[[str], bool],
    ids: Mapping[int, int],
    excluded: Collection[int],
    relative: Callable[[str], str],
) -> tuple[tuple[OpRun, ...], int]:
    """The ops of the modules that ``inside`` accepts, and how many ran before their last save.

    Args:
        log: of the forward pass.
        inside: says whether a module's path belongs to the layer.
        ids: number of each storage of the layer.
        excluded: storages that exist anyway (parameters, buffers, the batch).
        relative: a module's path inside the layer.
    """
    last = max((count for path, count in log.last_save.items() if inside(path)), default=0)
    found: list[OpRun] = []
    before = 0
    for index, entry in enumerate(log.entries):
        if not inside(entry.path):
            continue
        outputs = tuple(ids[key] for key in entry.outputs if key not in excluded)
        changes_model = any(key in excluded for key in entry.writes)
        if not outputs and not changes_model:
            continue
        name = entry.op.split(".")[1] if "." in entry.op else entry.op
        found.append(
            OpRun(
                op=entry.op,
                module=relative(entry.path),
                inputs=tuple(ids[key] for key in entry.inputs if key not in excluded),
                outputs=outputs,
                writes=tuple(ids[key] for key in entry.writes if key not in excluded),
                forward_flops=entry.forward_flops,
                random=entry.random,
                rerunnable=not (changes_model or name in ORDER_DEPENDENT or _BATCH_NORM in name),
            )
        )
        before += index < last
    return tuple(found), before
