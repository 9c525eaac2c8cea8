"""Times as benchmarks take them: CUDA-graph replay, medians, a cold L2; the machine's own ceilings.

On the CPU, where there is no GPU, perf_counter around single calls.  A GPU's settings are left alone.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

Call = Callable[[], object]


class Time(NamedTuple):
    """A median, its spread (interquartile range over median), how it was taken: "graph", "events" or "host"."""

    milliseconds: float
    spread: float
    how: str


def copies_for_cold_cache(bytes_per_call: int) -> int:
    """How many copies of a call's inputs to rotate through so that none of them is still in the GPU's L2 cache."""
    if not torch.cuda.is_available():
        return 1
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return 1 if bytes_per_call > 4 * cache else math.ceil(3 * cache / max(bytes_per_call, 1))


def timed(calls: Sequence[Call], least_ms: float = 100.0, graph: bool = True) -> Time:
    """The time of one call, of at least 10 rounds and ``least_ms`` of them, 3 rounds where they are long.

    The calls do the same work, each on its own copy of the inputs.  ``graph=False`` for what cannot be captured, such
    as autograd, which runs on streams of its own; where capture fails, events are taken as well.
    """
    for call in (calls[0], *calls):
        call()
    if not torch.cuda.is_available():
        return _median(lambda: _play(calls), _host_ms, len(calls), least_ms, "host")
    torch.cuda.synchronize()
    rounds, how = max(1, round(10 / max(_event_ms(lambda: _play(calls)), 1e-3))) if graph else 1, "events"
    once: Call = lambda: [_play(calls) for _ in range(rounds)]  # noqa: E731
    if graph:
        try:
            once, how = _capture(calls, rounds).replay, "graph"
        except RuntimeError:
            torch.cuda.synchronize()
    once()
    return _median(once, _event_ms, rounds * len(calls), least_ms, how)


def _median(once: Call, elapsed: Callable[[Call], float], count: int, least_ms: float, how: str) -> Time:
    times: list[float] = []
    while len(times) < (10 if sum(times) < 20 * least_ms else 3) or sum(times) < least_ms:
        times.append(elapsed(once))
    low, median, high = statistics.quantiles(times, n=4)
    return Time(median / count, (high - low) / median, how)


def host_us(call: Call, count: int = 200) -> float:
    """Wall-clock microseconds a call, for calls small enough that the host and not the GPU is what limits them."""
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count * 1e6


def cold_s(call: Call) -> float:
    """Seconds that the very first call of a shape takes, compilation and any tuning included."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return _host_ms(call) / 1e3


def ceilings() -> dict[str, float]:
    """What the GPU reaches today: an elementwise copy in GB/s, a bfloat16 matrix product in TFLOP/s."""
    return {"copy_GBps": _copy_rate(), "matmul_TFLOPs": _matmul_rate()}


def _copy_rate() -> float:
    x = torch.randn(1 << 29, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.nbytes / timed([lambda: torch.neg(x, out=y)]).milliseconds / 1e6


def _matmul_rate(size: int = 8192) -> float:
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / timed([lambda: a @ b]).milliseconds / 1e9


def _play(calls: Sequence[Call]) -> list[object]:
    """One call on each copy; the results live until the round ends, so that no output reuses a warm block."""
    return [call() for call in calls]


def _host_ms(call: Call) -> float:
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def _event_ms(call: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def _capture(calls: Sequence[Call], rounds: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            _play(calls)
    return graph
