"""PUT_package_PUT on a GPU.

Allocates, picks the launch choices, starts the kernels.
No host synchronisation, no file access, no autotuning; safe under CUDA graph capture.
"""

import torch
import triton

from .dispatch import LAUNCHES
#% for kernel in kernel_names
from .kernels.PUT_kernel_PUT import PUT_kernel_PUT
#% endfor
from .machine import machine_of, on_device, prepared
from .tuning import choice

#% if chunked
C = PUT_chunk_PUT
#% endif
K = PUT_key_dim_PUT
V = PUT_value_dim_PUT
#% for function, inputs, allocations, launches, finals in operators


@on_device
def PUT_function_PUT(call):
    """(o, final state) of a Call."""
    dtype = call.inputs["q"].dtype
    x = prepared(call.inputs)
    #% for line in inputs
    PUT_line_PUT
    #% endfor
    B, T, H, HV, N = call.B, call.T, call.H, call.HV, call.N
    cu_seqlens = call.cu_seqlens
    at = machine_of(q)
    make = torch.empty if N > 0 else torch.zeros  # without a sequence there is no program that clears the rows
    o = make((B, T, HV, V), dtype=q.dtype, device=q.device)
    #% for line in allocations
    PUT_line_PUT
    #% endfor
    #% for line in launches
    PUT_line_PUT
    #% endfor
    return o.to(dtype), PUT_finals_PUT
#% endfor
