"""What launchers share: sizes, the machine, what Triton's interpreter needs."""

import contextlib
import functools

import torch
import triton

from .compilers import mend_interpreter
from .dispatch import LAUNCHES

INTERPRETING = triton.knobs.runtime.interpret
if INTERPRETING:
    mend_interpreter()


def cdiv(count, size):
    return -(-count // size)


def power_of_2(count):
    return 1 << max(count - 1, 0).bit_length()


@functools.cache
def processors(device):
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def on_device(x):
    """Kernels start on the current device: the one where x is."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def readable(x):
    """Channels side by side; in fp32 where Triton's interpreter would compute bf16 wrongly."""
    if x is None:
        return None
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    return x.float() if INTERPRETING and x.dtype == torch.bfloat16 else x


def made(x, shape, dtype):
    """An empty tensor for a kernel to fill."""
    dtype = torch.float32 if INTERPRETING and dtype == torch.bfloat16 else dtype
    return torch.empty(shape, dtype=dtype, device=x.device)


def start(kernel, name, programs, **arguments):
    if programs > 0:
        LAUNCHES[name] += 1
        kernel[(programs,)](**arguments)
