"""The machine a call runs on: which tuning applies, how fp32 products are formed, what Triton's interpreter needs."""

import contextlib
import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .compiled import install
from .compilers import mend_interpreter
from .rehearsal import rehearse
from .spec import SPEC
from .tuning import FP32_PRODUCTS

WIDEST_STRIDE = 2**31 // 128  # elements from token to token; a chunk has 128 tokens at most
# Errors of bf16 keys and states average out over key channels; with few of them keys point the same way, and the delta
# rule, which subtracts what it predicts, would be off by more than 5e-3: by 1e-2 with one channel even in tf32.
FEW_CHANNELS = SPEC["rule"] == "delta" and SPEC["key_dim"] < 64
INTERPRETING = triton.knobs.runtime.interpret
if INTERPRETING:
    mend_interpreter()


class Machine(NamedTuple):
    """Launch facts of a device and dtype: key into TUNING, processors, operand dtypes, how fp32 products are formed,
    the device's name, under which decisions are kept ("": no GPU).
    """

    key: str
    processors: int
    DOT: Any
    stored: torch.dtype
    PRECISION: str
    gpu: str = ""


@functools.cache
def _machine(index: int | None, dtype: torch.dtype) -> Machine:
    """fp16 inputs are computed on in fp32 and multiplied in tf32, which has fp16's mantissa and fp32's range; inputs of
    few key channels as fp32 ones."""
    narrow = dtype == torch.bfloat16 and not FEW_CHANNELS
    width = 2 if narrow else 4
    operands = (tl.bfloat16, torch.bfloat16) if narrow else (tl.float32, torch.float32)
    if index is None:
        return Machine(f"sm_90/{width}", 1, *operands, "ieee")
    properties = torch.cuda.get_device_properties(index)
    processors, gpu = properties.multi_processor_count, properties.name
    if torch.version.hip:
        return Machine(f"gfx942/{width}", processors, *operands, "ieee", gpu=gpu)
    major, minor = torch.cuda.get_device_capability(index)
    install(10 * major + minor)
    arch = max((known for known in (80, 90, 100, 120) if known <= 10 * major + minor), default=80)
    exact = "ieee" if arch == 120 else FP32_PRODUCTS  # tf32x3 holds its operands twice, more than the 99 KiB there
    precision = exact if FEW_CHANNELS or dtype == torch.float32 else "tf32"
    return Machine(f"sm_{arch}/{width}", processors, *operands, precision, gpu)


def machine_of(tensor: torch.Tensor) -> Machine:
    """Looked up once per device and dtype."""
    return _machine(tensor.device.index if tensor.is_cuda else None, tensor.dtype)


def prepared(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs as kernels take them: copied where strides are none that the kernels were compiled for.

    Under Triton's interpreter bf16 comes as fp32, because it computes bf16 wrongly.
    """
    return {name: None if x is None else _prepared(x) for name, x in inputs.items()}


def _prepared(x: torch.Tensor) -> torch.Tensor:
    if x.ndim > 2 and not _is_regular(x.shape[0], x.stride()):
        x = x.clone(memory_format=torch.contiguous_format)  # contiguous() keeps strides of size-1 dims
    return x.float() if INTERPRETING and x.dtype == torch.bfloat16 else x


def _is_regular(batches: int, strides: tuple[int, ...]) -> bool:
    """Token strides fit 32-bit offsets inside a chunk; channels lie side by side; batches start at whole rows of 16.

    Only then do kernels not depend on the length, which other layouts have in the strides of channels or batches.
    """
    token = strides[1]
    if token >= WIDEST_STRIDE:
        return False
    return len(strides) < 4 or (strides[3] <= 1 and (batches == 1 or strides[0] % _factor(token) == 0))


def _factor(stride: int) -> int:
    """The power of two, 16 at most, that divides a stride."""
    return (stride | 16) & -(stride | 16)


def cdiv(count: int, size: int) -> int:
    """Parts of a size that hold so many; triton.cdiv takes 2 us of each launch."""
    return -(-count // size)


def slots_of(call: Any, chunk: int) -> int:
    """One slot per chunk; packed sequence n starts at slot cu_seqlens[n] // chunk + n.

    None without a sequence, however many rows there are: programs would read an offset behind the only one.
    """
    if call.cu_seqlens is None:
        return call.B * cdiv(call.T, chunk)
    return call.T // chunk + call.N if call.N > 0 else 0


def row(*inputs: torch.Tensor) -> int:
    """What divides the token strides of the inputs: 16, 8 or less."""
    return _factor(math.gcd(*[x.stride(1) for x in inputs]))


def tiles_of(x: torch.Tensor, block: tuple[int, ...], described: int) -> Any:
    """Stored tiles [slots, heads, *size], as a descriptor of blocks of them if they are to be described."""
    if not described:
        return x
    return _described(x, (x.shape[0] * x.shape[1], *x.shape[2:]), x.stride()[1:], (1, *block))


def tokens_of(x: torch.Tensor, block: tuple[int, int], described: int) -> Any:
    """An input [batch, tokens, heads, channels], as a descriptor of blocks of one head if it is to be described."""
    if not described:
        return x
    return _described(x, x.shape, x.stride(), (1, block[0], 1, block[1]))


def _described(x: torch.Tensor, shape: Any, strides: Any, block: tuple[int, ...]) -> Any:
    """The tensor itself where no descriptor can be made: that takes elements at multiples of 16 bytes, and blocks of
    whole 128 bytes, as the buffers they are loaded into lie next to each other and have to start at such.
    """
    size = math.prod(block) * x.element_size()
    apart = [stride * x.element_size() for stride in strides[:-1]]
    if x.numel() == 0 or size % 128 or x.data_ptr() % 16 or any(n == 0 or n % 16 for n in apart):
        return x
    return TensorDescriptor(x, list(shape), list(strides), list(block))


def cotangent(do: torch.Tensor | None, call: Any) -> torch.Tensor:
    """The gradient that arrives for o, as kernels take it; zeros where none does."""
    like = call.inputs["v"]
    if do is None:
        do = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    return _prepared(do if do.stride(-1) == 1 else do.contiguous())


def summed(gradient: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A gradient in the dtype of its input; for a parameter, [HV] or [HV, channels], the sum of a term per chunk."""
    return (gradient if like.ndim > 2 else gradient.sum(0)).to(like.dtype)


@functools.cache
def _second_stream(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)


class Aside:
    """A second stream for a kernel that the next one does not wait for; used where it alone leaves processors idle.

    Tensors stay safe: all of them are made before ``enter``, and the current stream waits in ``join``.
    """

    def __init__(self, tensor: torch.Tensor, at: Machine) -> None:
        self.index, self.processors, self.used = tensor.device.index, at.processors, False

    def enter(self, programs: int) -> Any:
        self.used = self.index is not None and programs <= self.processors
        if not self.used:
            return contextlib.nullcontext()
        stream = _second_stream(self.index)
        stream.wait_stream(torch.cuda.current_stream(self.index))
        return torch.cuda.stream(stream)

    def join(self) -> None:
        if self.used:
            torch.cuda.current_stream(self.index).wait_stream(_second_stream(self.index))


def on_device(function: Any) -> Any:
    """Launch on the inputs' device, which need not be the current one; compile first what was never launched."""

    @functools.wraps(function)
    def launch(call: Any, *rest: Any) -> Any:
        device = call.device
        if device.type != "cuda":
            return function(call, *rest)
        with contextlib.nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device):
            # A graph that is captured would keep what host code does beside its launches.
            if not (torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing()):
                rehearse(function, call, rest)
            return function(call, *rest)

    return launch
