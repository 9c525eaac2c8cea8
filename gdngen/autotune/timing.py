"""Times of one launch or one operator: a cold L2 cache, CUDA graph replay, the median of many and their spread."""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

LEAST, MOST = 20, 200  # samples on a GPU
ENOUGH_MS = 60.0
INTERPRETED = 3  # samples without a GPU
FLUSHED = 4  # caches that are written over before each sample


class Time(NamedTuple):
    """``spread``: interquartile range over median."""

    microseconds: float
    spread: float


def measured(work: Callable[[], object], device: str) -> Time:
    """The time of ``work``, which may be repeated; on the CPU (Triton's interpreter) by the clock on the wall."""
    return summary(_on_gpu(work) if device == "cuda" else [_seconds(work) * 1e6 for _ in range(INTERPRETED)])


def summary(samples: list[float]) -> Time:
    """Of samples in microseconds."""
    middle = statistics.median(samples)
    first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
    return Time(middle, (third - first) / middle if middle > 0 else 0.0)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _on_gpu(work: Callable[[], object]) -> list[float]:
    """Samples in microseconds.  Writing over the cache takes the GPU longer than the host needs for the next replay."""
    work()
    torch.cuda.synchronize()
    once, cache = _captured(work), torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    dirt = torch.empty(max(FLUSHED * cache, 1 << 26) // 4, dtype=torch.int32, device="cuda")
    samples: list[float] = []
    total = 0.0
    while len(samples) < LEAST or (total < ENOUGH_MS and len(samples) < MOST):
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(LEAST)]
        for start, end in events:
            dirt.zero_()
            start.record()
            once()
            end.record()
        torch.cuda.synchronize()
        found = [start.elapsed_time(end) for start, end in events]
        samples += [1e3 * milliseconds for milliseconds in found]
        total += sum(found)
    return samples


def _captured(work: Callable[[], object]) -> Callable[[], object]:
    """Replay of a CUDA graph, or the work itself where it cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            work()
    except RuntimeError:
        torch.cuda.synchronize()
        return work
    graph.replay()
    return graph.replay
