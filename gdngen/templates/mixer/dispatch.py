"""Who computes a call: the Triton kernels or the PyTorch version."""

import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .arguments import ArgumentError, is_traced, is_transformed
from .spec import NAME

LAUNCHES: Counter[str] = Counter()  # kernel launches by kernel name


@dataclass(slots=True)
class Call:
    """One checked call: ``inputs`` by the names of spec.py; ``number``: epsilon of a norm, bound of a gate; the dtype
    of the output; ``final``: the window behind each sequence is wanted too."""

    inputs: dict[str, Tensor | None]
    number: float = 0.0
    cu_seqlens: Tensor | None = None
    dtype: torch.dtype | None = None
    final: bool = False


def run(call: Call) -> Any:
    """The outputs of spec.py as a tuple, None for one that is not wanted."""
    tensors = [x for x in call.inputs.values() if x is not None]
    without_contents = type(tensors[0]) not in (torch.Tensor, torch.nn.Parameter)
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if are_kernels_for(tensors[0]):
        if forward_ad._current_level >= 0:
            refuse_tangents(call)
        if differentiated or is_traced() or is_transformed() or without_contents:
            from . import registration

            return registration.run(call)
        from . import launch

        return launch.forward(call)
    if tensors[0].device.type != "cpu":
        raise ArgumentError(
            f"x: got a tensor on {tensors[0].device}, expected one on a CUDA or ROCm GPU or on the CPU. "
            "Move the inputs there; the kernels of this package run on no other device."
        )
    if call.cu_seqlens is not None and (is_traced() or without_contents):  # how far it goes, only the offsets say
        from . import registration

        return registration.run(call)
    from . import reference

    return reference.forward(call)


def update(x, state, weight, bias, residual, indices):
    """o of the next tokens of a convolution, whose window is moved on in place."""
    tensors = [y for y in (x, state, weight, bias, residual, indices) if y is not None]
    if are_kernels_for(x):
        if is_traced() or is_transformed() or any(type(y) not in (torch.Tensor, torch.nn.Parameter) for y in tensors):
            from .in_place import update_op

            return update_op(x, state, weight, bias, residual, indices)
        from .launch import update as compute
    else:
        from .reference import update as compute
    return compute(x, state, weight, bias, residual, indices)


def are_kernels_for(x: Tensor) -> bool:
    """Whether kernels compute a call; CPU tensors are for the PyTorch version, unless Triton interprets."""
    return x.device.type == "cuda" or (x.device.type == "cpu" and _interpreting())


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on")


def refuse_tangents(call: Call) -> None:
    for name, tensor in call.inputs.items():
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise ArgumentError(
                f"{name}: got a tensor with a tangent (forward-mode differentiation), expected one without: the "
                f"kernels of {NAME} have gradients in reverse mode alone. Use torch.func.vjp or jacrev, or CPU "
                "tensors, whose PyTorch version has both."
            )
