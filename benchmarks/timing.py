"""How the benchmarks measure: CUDA-graph replay, medians, a cold L2, and the machine's own ceilings.

Every function here expects a GPU and leaves its settings alone.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]


def copies_for_cold_cache(bytes_per_call: int) -> int:
    """How many copies of a call's inputs to rotate through so that none of them is still in the L2 cache."""
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return 1 if bytes_per_call > 4 * cache else math.ceil(3 * cache / bytes_per_call)


def median_ms(calls: Sequence[Call], least_ms: float = 100.0) -> tuple[float, str]:
    """The median time of one call and how it was taken: "graph", or "events" where capture is not possible.

    The calls do the same work, each on its own copy of the inputs.
    """
    for call in (calls[0], *calls):
        call()
    rounds = max(1, round(10 / max(_elapsed(lambda: _play(calls)), 1e-3)))
    try:
        graph, how = _capture(calls, rounds), "graph"
    except RuntimeError:
        torch.cuda.synchronize()
        graph, how = None, "events"
    once = graph.replay if graph is not None else lambda: [_play(calls) for _ in range(rounds)]
    once()
    times: list[float] = []
    while len(times) < 10 or sum(times) < least_ms:
        times.append(_elapsed(once))
    return statistics.median(times) / (rounds * len(calls)), how


def median_by_events_ms(call: Call, least_ms: float = 200.0) -> float:
    """The median time of one call without graph capture, for what autograd runs on streams of its own."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    times: list[float] = []
    while len(times) < 10 or sum(times) < least_ms:
        times.append(_elapsed(call))
    return statistics.median(times)


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
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def ceilings() -> dict[str, float]:
    """What the machine reaches today: an elementwise copy in GB/s, a bfloat16 matrix product in TFLOP/s."""
    return {"copy_GBps": _copy_rate(), "matmul_TFLOPs": _matmul_rate()}


def _copy_rate() -> float:
    x = torch.randn(1 << 29, device="cuda")
    y = torch.empty_like(x)
    milliseconds, _ = median_ms([lambda: torch.neg(x, out=y)])
    return 2 * x.nbytes / milliseconds / 1e6


def _matmul_rate(size: int = 8192) -> float:
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    milliseconds, _ = median_ms([lambda: a @ b])
    return 2 * size**3 / milliseconds / 1e9


def _play(calls: Sequence[Call]) -> list[object]:
    """One call on each copy; the results live until the round ends, so that no output reuses a warm block."""
    return [call() for call in calls]


def _elapsed(call: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _capture(calls: Sequence[Call], rounds: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            _play(calls)
    return graph
