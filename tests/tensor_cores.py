"""What tensor cores make of 16-bit inputs, in Triton's interpreter.

The interpreter computes on the bits of bf16 as on integers, and multiplies in fp32 whatever precision is asked for; so
packages take their fp32 paths there.  Inside ``tensor_cores`` bf16 is held as fp32 that is rounded wherever bf16 is
made, operands of tf32 products lose the bits that tf32 lacks, and packages choose as on an H200.
"""

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

Array = np.ndarray[Any, np.dtype[Any]]
TF32_BITS = np.uint32(0xFFFFE000)  # of fp32

_np_dtype, _fits = interpreter._get_np_dtype, interpreter._validate_np_data_size
_load, _store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
_binary = InterpreterBuilder.binary_op


def is_bf16(dtype: Any) -> bool:
    return not isinstance(dtype, tl.pointer_type) and dtype.scalar == tl.bfloat16


def rounded(x: Array) -> Array:
    """fp32 to the nearest bf16, ties to even, as fp32; NaN and infinity as they are."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    nearest = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(x), nearest.view(np.float32), x).astype(np.float32)


def truncated(x: Array) -> Array:
    """fp32 to tf32 as matrix units read it."""
    return (np.ascontiguousarray(x).view(np.uint32) & TF32_BITS).view(np.float32)


def np_dtype(dtype: Any) -> Any:
    return np.dtype(np.float32) if is_bf16(dtype) else _np_dtype(dtype)


def fits(data: Array, dtype: Any) -> bool:
    return data.dtype == np.float32 if is_bf16(dtype) else _fits(data, dtype)


def cast(self: Any, source: Any, dtype: Any, rounding: Any = None) -> TensorHandle:
    with np.errstate(over="ignore", invalid="ignore"):
        data = source.data.astype(np_dtype(dtype))
    return TensorHandle(rounded(data) if is_bf16(dtype) else data, dtype.scalar)


def load(self: Any, pointers: Any, mask: Any, other: Any, *options: Any, **more: Any) -> TensorHandle:
    dtype = pointers.get_element_ty()
    if dtype != tl.bfloat16:
        return _load(self, pointers, mask, other, *options, **more)
    none = np.zeros(pointers.data.shape, np.uint16)
    bits = interpreter._interpreter.load(pointers.data, mask.data, none, np.dtype(np.uint16))
    data = (bits.astype(np.uint32) << 16).view(np.float32)
    return TensorHandle(data if other is None else np.where(mask.data, data, other.data).astype(np.float32), dtype)


def store(self: Any, pointers: Any, value: Any, mask: Any, *options: Any, **more: Any) -> Any:
    if not is_bf16(value.dtype):
        return _store(self, pointers, value, mask, *options, **more)
    bits = (rounded(value.data).view(np.uint32) >> 16).astype(np.uint16)
    return interpreter._interpreter.store(pointers.data, bits, mask.data)


def binary(self: Any, left: Any, right: Any, operation: Any) -> TensorHandle:
    result = _binary(self, left, right, operation)
    if is_bf16(result.dtype) and result.data.dtype == np.float32:
        result.data = rounded(result.data)
    return result


def dot(self: Any, a: Any, b: Any, c: Any, precision: Any, imprecise: Any) -> TensorHandle:
    x, y = a.data, b.data
    if a.dtype.scalar == tl.float32 and str(precision).endswith("TF32"):
        x, y = truncated(x), truncated(y)
    with np.errstate(over="ignore", invalid="ignore"):
        return TensorHandle((np.matmul(x, y, dtype=np.float32) + c.data).astype(c.data.dtype), c.dtype.scalar)


@contextmanager
def tensor_cores(package: ModuleType) -> Iterator[None]:
    """Inside, kernels of the package compute on 16-bit inputs as on an H200."""
    machine = importlib.import_module(f"{package.__name__}.machine")

    def machine_of(x: torch.Tensor) -> Any:
        there = machine._machine(None, x.dtype)
        exact = machine.FEW_CHANNELS or x.dtype == torch.float32
        return there if exact else there._replace(PRECISION="tf32")

    parts = {
        "cast_impl": cast, "create_fp_to_fp": cast, "create_masked_load": load, "create_masked_store": store,
        "binary_op": binary, "create_dot": dot,
    }  # fmt: skip
    launch = importlib.import_module(f"{package.__name__}.launch")
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(interpreter, "_get_np_dtype", np_dtype))
        stack.enter_context(mock.patch.object(interpreter, "_validate_np_data_size", fits))
        for name, part in parts.items():
            stack.enter_context(mock.patch.object(InterpreterBuilder, name, part))
        stack.enter_context(mock.patch.object(machine, "INTERPRETING", False))
        stack.enter_context(mock.patch.object(launch, "machine_of", machine_of))
        yield
