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
from typing import Any

from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from .dispatch import LAUNCHES

LOG = logging.getLogger("gdngen")
_rehearsing: ContextVar[bool] = ContextVar("rehearsing", default=False)
_done: set[tuple[Any, ...]] = set()
_lock = threading.Lock()


def rehearse(function: Any, call: Any, rest: tuple[Any, ...]) -> None:
    """Once for each function of launch.py, device, dtype, heads and layout."""
    key = (function.__name__, call.device, call.inputs["q"].dtype, call.H, call.HV, call.cu_seqlens is None)
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
    """Compile what a function of launch.py would launch; the kernels that were not there yet."""
    from triton import AsyncCompileMode

    kernels = [kernel for kernel in function.__globals__.values() if isinstance(kernel, JITFunction)]
    with ThreadPoolExecutor(min(len(kernels), os.cpu_count() or 1)) as pool:
        with _orders(kernels), AsyncCompileMode(pool) as mode:
            function(call, *rest)
        made = [future.kernel for future in mode.future_kernels.values()]
        list(pool.map(lambda kernel: driver.active.launcher_cls(kernel.src, kernel.metadata), made))
    return made


@contextlib.contextmanager
def _orders(kernels: list[Any]) -> Iterator[None]:
    """Inside, launches of this thread compile and do not run; other threads launch as ever."""
    launches, token = Counter(LAUNCHES), _rehearsing.set(True)
    for kernel in kernels:
        kernel.run = functools.partial(_run, kernel)
    try:
        yield
    finally:
        for kernel in kernels:
            del kernel.run
        _rehearsing.reset(token)
        LAUNCHES.clear()
        LAUNCHES.update(launches)


def _run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> Any:
    warmup = warmup or _rehearsing.get()
    return JITFunction.run(kernel, *arguments, grid=grid, warmup=warmup, **keywords)
