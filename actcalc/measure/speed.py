"""How fast a device really is: matrix products, attention, copies, collectives, timed.

Every function takes the ``torch`` module and a device of it, and works on any: what runs on a GPU
is what the tests run on the CPU.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Kind = Literal[
    "product", "product_fp8", "product_sustained", "attention_forward", "attention_backward",
    "copy", "all_gather", "all_reduce",
]  # fmt: skip
"""What a sample is of."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One timed kernel or collective."""

    kind: Kind
    """What was timed."""
    shape: tuple[int, ...]
    """m, n, k of a product; batch, heads, sequence, head width of attention; bytes else."""
    seconds: float
    """Of one call, the median."""
    rate: float
    """FLOP/s, or bytes per second: moved in memory, or on the bus of each device."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The shapes that are tried: large, so that each fills the device."""

    products: tuple[tuple[int, int, int], ...]
    """m, n, k."""
    attention: tuple[tuple[int, int, int, int], ...]
    """Batch, heads, sequence, head width."""
    copies: tuple[int, ...]
    """Bytes of the tensor that is copied."""
    collectives: tuple[int, ...]
    """Bytes of the whole tensor that ranks share."""
    sustained_seconds: float
    """How long the best product runs without a pause."""
    settling_seconds: float = 0.0
    """How long products run before anything is timed: an idle GPU's clocks are low."""
    calls: int = 10
    """Calls in a row, timed together."""
    repeats: int = 7
    """How often that is repeated; the median counts."""


LARGE = Sizes(
    products=tuple(
        (m, n, k)
        for m in (2048, 4096, 8192, 16384)
        for n in (4096, 8192, 16384)
        for k in (2048, 4096, 8192)
    ),
    attention=((8, 32, 2048, 128), (4, 32, 4096, 128), (1, 32, 16384, 128), (4, 64, 4096, 64)),
    copies=(2**28, 2**30),
    collectives=(2**27, 2**29, 2**30),
    sustained_seconds=10.0,
    settling_seconds=2.0,
)
"""What a GPU is measured with; less where its memory is small."""


Span = Callable[[Callable[[], object], int], float]
"""Seconds that a call takes, of so many in a row."""


def span_of(torch: Any, device: str, clock: Callable[[], float] = time.perf_counter) -> Span:
    """How calls in a row are timed on ``device``.

    On a GPU between two events on its stream, which leaves out what the host needs to launch the
    first call and to learn of the last; on the CPU, where nothing runs behind one's back, by the
    host's ``clock``.
    """

    def on_gpu(call: Callable[[], object], calls: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / calls

    def on_host(call: Callable[[], object], calls: int) -> float:
        begin = clock()
        for _ in range(calls):
            call()
        return (clock() - begin) / calls

    return on_gpu if device.startswith("cuda") else on_host


def seconds_of(call: Callable[[], object], span: Span, *, calls: int, repeats: int) -> float:
    """Seconds of one ``call``: the median of ``repeats`` timings of ``calls`` in a row.

    As many calls go before, untimed: the first of a shape loads kernels and picks among them.
    """
    span(call, calls)
    return statistics.median(span(call, calls) for _ in range(repeats))


def settle(torch: Any, device: str, dtype: Any, sizes: Sizes) -> None:
    """Run products until clocks are those of a busy device (``sizes.settling_seconds``)."""
    m, n, k = max(sizes.products, key=_operands)
    left = torch.randn(m, k, device=device, dtype=dtype)
    right = torch.randn(k, n, device=device, dtype=dtype)
    span, end = span_of(torch, device), time.perf_counter() + sizes.settling_seconds
    while time.perf_counter() < end:
        span(lambda: torch.matmul(left, right), sizes.calls)


def fitting(sizes: Sizes, memory_bytes: int) -> Sizes:
    """``sizes`` without what needs more than half of a device's memory."""
    room = memory_bytes // 2
    return Sizes(
        # two operands, the result and their fp8 copies; q, k, v, out and their gradients
        products=tuple(s for s in sizes.products if 4 * _operands(s) <= room),
        attention=tuple(s for s in sizes.attention if 32 * s[0] * s[1] * s[2] * s[3] <= room),
        copies=tuple(size for size in sizes.copies if 2 * size <= room),
        collectives=tuple(size for size in sizes.collectives if 3 * size <= room),
        sustained_seconds=sizes.sustained_seconds,
        settling_seconds=sizes.settling_seconds,
        calls=sizes.calls,
        repeats=sizes.repeats,
    )


def _operands(shape: tuple[int, int, int]) -> int:
    m, n, k = shape
    return m * k + k * n + m * n


def products(torch: Any, device: str, dtype: Any, sizes: Sizes) -> tuple[Sample, ...]:
    """Matrix products of ``sizes`` in ``dtype``, of normal random numbers."""
    span = span_of(torch, device)
    samples = []
    for m, n, k in sizes.products:
        left = torch.randn(m, k, device=device, dtype=dtype)
        right = torch.randn(k, n, device=device, dtype=dtype)
        out = torch.empty(m, n, device=device, dtype=dtype)
        spent = seconds_of(
            lambda left=left, right=right, out=out: torch.matmul(left, right, out=out),  # type: ignore[misc]
            span,
            calls=sizes.calls,
            repeats=sizes.repeats,
        )
        samples.append(_product("product", (m, n, k), spent))
    return tuple(samples)


def products_fp8(torch: Any, device: str, sizes: Sizes) -> tuple[Sample, ...]:
    """Matrix products in fp8 (e4m3) with one scale per tensor, results in bf16."""
    span = span_of(torch, device)
    one = torch.ones((), device=device)
    samples = []
    for m, n, k in sizes.products:
        left = torch.randn(m, k, device=device).to(torch.float8_e4m3fn)
        right = torch.randn(n, k, device=device).to(torch.float8_e4m3fn).t()
        spent = seconds_of(
            lambda left=left, right=right: torch._scaled_mm(  # type: ignore[misc]
                left, right, one, one, out_dtype=torch.bfloat16
            ),
            span,
            calls=sizes.calls,
            repeats=sizes.repeats,
        )
        samples.append(_product("product_fp8", (m, n, k), spent))
    return tuple(samples)


def sustained_product(
    torch: Any, device: str, dtype: Any, shape: tuple[int, int, int], sizes: Sizes
) -> Sample:
    """One product run without a pause for ``sizes.sustained_seconds``: its rate in the later half,
    when heat and power have pulled the clock down."""
    m, n, k = shape
    left = torch.randn(m, k, device=device, dtype=dtype)
    right = torch.randn(k, n, device=device, dtype=dtype)
    out = torch.empty(m, n, device=device, dtype=dtype)
    span = span_of(torch, device)
    begin = time.perf_counter()
    spent: list[float] = []
    while not spent or time.perf_counter() - begin < sizes.sustained_seconds:
        spent.append(span(lambda: torch.matmul(left, right, out=out), sizes.calls))
    later = spent[len(spent) // 2 :]
    return _product("product_sustained", shape, statistics.median(later))


def _product(kind: Kind, shape: tuple[int, int, int], seconds: float) -> Sample:
    m, n, k = shape
    return Sample(kind=kind, shape=shape, seconds=seconds, rate=2 * m * n * k / seconds)


def attention(torch: Any, device: str, dtype: Any, sizes: Sizes) -> tuple[Sample, ...]:
    """Causal fused attention (``scaled_dot_product_attention``), forward and backward apart.

    FLOPs are of the products that it really does: half of the scores, and in backward two and a
    half times forward's (FlashAttention-2, Dao 2023).
    """
    span = span_of(torch, device)
    samples = []
    for batch, heads, seq, width in sizes.attention:
        q, k, v = (
            torch.randn(batch, heads, seq, width, device=device, dtype=dtype, requires_grad=True)
            for _ in range(3)
        )
        above = torch.randn(batch, heads, seq, width, device=device, dtype=dtype)

        def forward(q: Any = q, k: Any = k, v: Any = v) -> Any:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        out = forward()
        times = {
            "attention_forward": seconds_of(
                forward, span, calls=sizes.calls, repeats=sizes.repeats
            ),
            "attention_backward": seconds_of(
                lambda out=out, q=q, k=k, v=v, above=above: torch.autograd.grad(  # type: ignore[misc]
                    out, (q, k, v), above, retain_graph=True
                ),
                span,
                calls=sizes.calls,
                repeats=sizes.repeats,
            ),
        }
        flops = {"attention_forward": 2 * batch * heads * seq * seq * width}
        flops["attention_backward"] = flops["attention_forward"] * 5 // 2
        shape = (batch, heads, seq, width)
        samples += [
            Sample(kind=kind, shape=shape, seconds=times[kind], rate=flops[kind] / times[kind])
            for kind in ("attention_forward", "attention_backward")
        ]
    return tuple(samples)


def copies(torch: Any, device: str, sizes: Sizes) -> tuple[Sample, ...]:
    """Copies inside the device's memory; every byte is read and written."""
    span = span_of(torch, device)
    samples = []
    for size in sizes.copies:
        source = torch.ones(size // 2, device=device, dtype=torch.bfloat16)
        target = torch.empty_like(source)
        spent = seconds_of(
            lambda target=target, source=source: target.copy_(source),  # type: ignore[misc]
            span,
            calls=sizes.calls,
            repeats=sizes.repeats,
        )
        samples.append(Sample(kind="copy", shape=(size,), seconds=spent, rate=2 * size / spent))
    return tuple(samples)


def collectives(torch: Any, device: str, ranks: int, sizes: Sizes) -> tuple[Sample, ...]:
    """All-gather and all-reduce over ``ranks`` devices of this machine, one process each.

    Rates are bus bandwidths as nccl-tests defines them: what each device sends in a ring.
    """
    if not sizes.collectives:
        return ()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()  # the first rank is another process on this GPU
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(
            _one_rank, args=(device, ranks, folder, sizes), nprocs=ranks, join=True
        )
        found = torch.load(Path(folder) / "times.pt")
    return tuple(
        Sample(
            kind=kind,
            shape=(size,),
            seconds=spent,
            rate=bus_bytes(kind, size, ranks) / spent,
        )
        for kind, size, spent in found
    )


def bus_bytes(kind: Kind, size: int, ranks: int) -> float:
    """Bytes that each of ``ranks`` devices sends in a ring, for a tensor of ``size`` bytes."""
    return (2 if kind == "all_reduce" else 1) * size * (ranks - 1) / ranks


def _one_rank(rank: int, device: str, ranks: int, folder: str, sizes: Sizes) -> None:
    """One process of :func:`collectives`; the first writes the times."""
    import torch

    gpu = device.startswith("cuda")
    where = f"cuda:{rank}" if gpu else device
    if gpu:
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "nccl" if gpu else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    span = span_of(torch, where)
    times: list[tuple[str, int, float]] = []
    for size in sizes.collectives:
        part = torch.ones(size // 2 // ranks, device=where, dtype=torch.bfloat16)
        whole = torch.ones(size // 2 // ranks * ranks, device=where, dtype=torch.bfloat16)
        calls: Iterable[tuple[str, Callable[[], object]]] = (
            (
                "all_gather",
                lambda whole=whole, part=part: torch.distributed.all_gather_into_tensor(  # type: ignore[misc]
                    whole, part
                ),
            ),
            ("all_reduce", lambda whole=whole: torch.distributed.all_reduce(whole)),  # type: ignore[misc]
        )
        for kind, call in calls:
            spent = seconds_of(call, span, calls=sizes.calls, repeats=sizes.repeats)
            times.append((kind, size, spent))
    if rank == 0:
        torch.save(times, Path(folder) / "times.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
