"""The first call of a kind compiles its kernels side by side; Triton alone compiles each when it is launched.

The host code runs once with every launch taken as an order to compile: tensors are allocated and given back, nothing is
computed.  What turns out not to fit the GPU, or to be compiled wrongly, is replaced by a smaller choice there and then:
nothing is launched before all kernels of a call fit.  Where anything else fails, the launches that follow compile what
they need, as ever.
"""

import contextlib
import functools
import logging
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from triton.runtime.driver import driver
from triton.runtime.errors import PTXASError
from triton.runtime.jit import JITFunction

from . import tuning
from .arguments import ArgumentError
from .compilers import leaks_a_lane
from .dispatch import LAUNCHES

MANY = 32  # sequences times value heads: with as many no GPU splits sequences
TENSOR_MEMORY = 512  # columns of a processor of sm_100
LOG = logging.getLogger("gdngen")
_done: set[tuple[Any, ...]] = set()
_lock = threading.Lock()


def rehearse(function: Any, call: Any, rest: tuple[Any, ...]) -> None:
    """Once for each function of launch.py, device, heads, and whatever else kernels are compiled for."""
    q, h0, offsets = call.inputs["q"], call.inputs["h0"], call.cu_seqlens
    states = (None if h0 is None else h0.dtype, call.output_final_state)
    layout = (None if offsets is None else offsets.dtype, min(call.N * call.HV, MANY))
    key = (function.__name__, call.device, q.dtype, call.H, call.HV, *states, *layout, *_strides(function, call, rest))
    if key in _done:
        return
    with _lock:
        if key not in _done:
            try:
                while unfit := compile_together(function, call, rest)[1]:
                    _take_smaller(unfit, function, call)
            except ArgumentError:
                raise
            except Exception as error:  # not to be told from here: a launch will say it
                LOG.debug("%s: kernels are compiled one by one: %s: %s", __package__, type(error).__name__, error)
            _done.add(key)


def _strides(function: Any, call: Any, rest: tuple[Any, ...]) -> tuple[int, ...]:
    """From token to token, which chunk kernels are compiled for."""
    given = () if function.__name__.startswith("recurrent") else (*call.inputs.values(), *rest)
    return tuple(x.stride(1) for x in given if isinstance(x, torch.Tensor) and x.ndim > 2)


class Unfit(NamedTuple):
    """A kernel that does not fit the GPU with a launch choice, and why."""

    kernel: str
    tuned: Any
    reason: str
    too_many_warps: bool = False


def _take_smaller(unfit: list[Unfit], function: Any, call: Any) -> None:
    at = function.__globals__["machine_of"](call.inputs["q"])
    for kernel, tuned, reason, too_many_warps in unfit:
        LOG.debug("%s: kernel %s does not fit with %s: %s", __package__, kernel, tuned, reason)
        if not tuning.refuse(kernel, at, tuned, too_many_warps):
            dtype = str(call.inputs["q"].dtype).removeprefix("torch.")
            raise ArgumentError(
                f"q: {dtype} inputs of {call.K} key and {call.V} value channels do not fit on {at.gpu or at.key}: "
                f"kernel {kernel} with its smallest tiles {reason}. Use bfloat16 inputs, smaller head dims or chunks."
            )


def compile_together(function: Any, call: Any, rest: tuple[Any, ...]) -> tuple[list[Any], list[Unfit]]:
    """Compile what a function of launch.py would launch: the kernels that were not there yet; what does not fit.

    A kernel that fails otherwise is left out: its launch compiles it again and says why.
    """
    from triton import AsyncCompileMode

    kernels = [kernel for kernel in function.__globals__.values() if isinstance(kernel, JITFunction)]
    if not kernels:
        return [], []

    with ThreadPoolExecutor(min(len(kernels), os.cpu_count() or 1)) as pool:
        with _orders(kernels, function.__globals__) as orders, AsyncCompileMode(pool, ignore_errors=True) as mode:
            for one in variants(call, function):
                function(one, *(list(x) if isinstance(x, list) else x for x in rest))  # it may append to a list
        made = [future.kernel for future in mode.future_kernels.values() if future.kernel is not None]
        unfit = [found for given in orders.given if (found := _unfit(*given))]
        if not unfit:
            list(pool.map(lambda kernel: driver.active.launcher_cls(kernel.src, kernel.metadata), made))
    return made, list(dict.fromkeys(unfit))


def _unfit(name: str, tuned: Any, kernel: Any) -> Unfit | None:
    """Why a compiled kernel cannot be launched on this GPU; None if it can, or if its launch will say it."""
    if hasattr(kernel, "result"):  # compiled in another thread
        try:
            kernel = kernel.result()
        except PTXASError as error:
            said = re.findall(r"ptxas (?:fatal|error)\s*: (.*)", str(error))
            return Unfit(name, tuned, "cannot be assembled: " + "; ".join(said[:1]))
        except Exception:
            return None
    if kernel is None:
        return None
    if leaks_a_lane(kernel.asm.get("ptx", "")):
        return Unfit(name, tuned, "is compiled to wrong addresses", too_many_warps=True)
    reason = _lacking(kernel)
    return Unfit(name, tuned, reason) if reason else None


def _lacking(kernel: Any) -> str:
    """What a compiled kernel lacks on this GPU, or an empty text."""
    device = driver.active.get_current_device()
    limit = driver.active.utils.get_device_properties(device)["max_shared_mem"]
    if kernel.metadata.shared > limit:
        return f"needs {kernel.metadata.shared} bytes of shared memory of {limit}"
    columns = getattr(kernel.metadata, "tmem_size", None) or 0
    return f"needs {columns} columns of tensor memory of {TENSOR_MEMORY}" if columns > TENSOR_MEMORY else ""


def variants(call: Any, function: Any) -> list[Any]:
    """Calls that together launch all that this one may at any length: with few heads, chunk splits long sequences."""
    host = function.__globals__
    if function.__name__ == "chunk" and "SPAN" in host:
        long = replace(call, T=2 * host["SPAN"] + 1)
        if host["segments_of"](long, host["machine_of"](call.inputs["q"]), host["SPAN"]):
            return [replace(call, T=1), long]
    return [call]


@dataclass
class Orders:
    """Launches that were taken as orders to compile: how many by kernel; kernel, choice and what was compiled."""

    counts: Counter[str] = field(default_factory=Counter)
    chosen: dict[str, Any] = field(default_factory=dict)  # kernel -> the latest launch choice
    given: list[tuple[str, Any, Any]] = field(default_factory=list)


_orders_of_thread: ContextVar[Orders | None] = ContextVar("orders", default=None)


@contextlib.contextmanager
def _orders(kernels: list[Any], host: dict[str, Any]) -> Iterator[Orders]:
    """Inside, launches of this thread compile and do not run; other threads launch as ever."""
    orders, choice = Orders(), host["choice"]
    token = _orders_of_thread.set(orders)
    for kernel in kernels:
        kernel.run = functools.partial(_run, kernel)
    host["choice"] = functools.partial(_choose, choice)
    try:
        yield orders
    finally:
        host["choice"] = choice
        for kernel in kernels:
            del kernel.run
        for name, count in orders.counts.items():
            LAUNCHES[name] -= count
            if not LAUNCHES[name]:
                del LAUNCHES[name]
        _orders_of_thread.reset(token)


def _choose(choice: Any, kernel: str, *rest: Any, **more: Any) -> Any:
    tuned, orders = choice(kernel, *rest, **more), _orders_of_thread.get()
    if orders is not None:
        orders.chosen[kernel] = tuned
    return tuned


def _run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> Any:
    orders, name = _orders_of_thread.get(), kernel.__name__
    if orders is None:
        return JITFunction.run(kernel, *arguments, grid=grid, warmup=warmup, **keywords)
    orders.counts[name] += 1
    made = JITFunction.run(kernel, *arguments, grid=grid, warmup=True, **keywords)
    if name in orders.chosen:  # combine has no choice
        orders.given.append((name, orders.chosen[name], made))
    return made
