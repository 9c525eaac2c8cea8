"""The first call of a kind compiles its kernels side by side; Triton alone compiles each when it is launched.

The host code runs once with every launch taken as an order to compile: tensors are allocated and given back, nothing is
computed.  Where anything about that fails, the launches that follow compile what they need, as ever.
"""

import contextlib
import functools
import logging
import os
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from .dispatch import LAUNCHES

MANY = 32  # sequences times value heads: with as many no GPU splits sequences
LOG = logging.getLogger("gdngen")
_rehearsing: ContextVar[Counter[str] | None] = ContextVar("rehearsing", default=None)  # launches that were none
_done: set[tuple[Any, ...]] = set()
_lock = threading.Lock()


def rehearse(function: Any, call: Any, rest: tuple[Any, ...]) -> None:
    """Once for each function of launch.py, device, heads, and whatever else kernels are compiled for."""
    q, h0, offsets = call.inputs["q"], call.inputs["h0"], call.cu_seqlens
    states = (None if h0 is None else h0.dtype, call.output_final_state)
    layout = (None if offsets is None else offsets.dtype, min(call.N * call.HV, MANY))
    key = (function.__name__, call.device, q.dtype, call.H, call.HV, *states, *layout)
    if key in _done:
        return
    with _lock:
        if key not in _done:
            try:
                compile_together(function, call, rest)
            except Exception as error:  # not to be told from here: a launch will say it
                LOG.debug("%s: kernels are compiled one by one: %s: %s", __package__, type(error).__name__, error)
            _done.add(key)


def compile_together(function: Any, call: Any, rest: tuple[Any, ...]) -> list[Any]:
    """Compile what a function of launch.py would launch; the kernels that were not there yet.

    One that fails is left out: its launch compiles it again and says why.
    """
    from triton import AsyncCompileMode

    kernels = [kernel for kernel in function.__globals__.values() if isinstance(kernel, JITFunction)]
    if not kernels:
        return []
    with ThreadPoolExecutor(min(len(kernels), os.cpu_count() or 1)) as pool:
        with _orders(kernels), AsyncCompileMode(pool, ignore_errors=True) as mode:
            for one in variants(call, function):
                function(one, *(list(x) if isinstance(x, list) else x for x in rest))  # it may append to a list
        made = [future.kernel for future in mode.future_kernels.values() if future.kernel is not None]
        list(pool.map(lambda kernel: driver.active.launcher_cls(kernel.src, kernel.metadata), made))
    return made


def variants(call: Any, function: Any) -> list[Any]:
    """Calls that together launch all that this one may at any length: with few heads, chunk splits long sequences."""
    host = function.__globals__
    if function.__name__ == "chunk" and "SPAN" in host:
        long = replace(call, T=2 * host["SPAN"] + 1)
        if host["segments_of"](long, host["machine_of"](call.inputs["q"]), host["SPAN"]):
            return [replace(call, T=1), long]
    return [call]


@contextlib.contextmanager
def _orders(kernels: list[Any]) -> Iterator[None]:
    """Inside, launches of this thread compile and do not run; other threads launch as ever."""
    token = _rehearsing.set(Counter())
    for kernel in kernels:
        kernel.run = functools.partial(_run, kernel)
    try:
        yield
    finally:
        for kernel in kernels:
            del kernel.run
        for name, count in (_rehearsing.get() or {}).items():
            LAUNCHES[name] -= count
            if not LAUNCHES[name]:
                del LAUNCHES[name]
        _rehearsing.reset(token)


def _run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> Any:
    none = _rehearsing.get()
    if none is not None:
        none[kernel.__name__] += 1
    return JITFunction.run(kernel, *arguments, grid=grid, warmup=warmup or none is not None, **keywords)
