"""PUT_package_PUT on a GPU.

Allocates, picks the launch choices, starts the kernels.
No host synchronisation, no autotuning; no file access after the first call of a kind; safe under CUDA graph capture.
"""

import torch

from .dispatch import LAUNCHES
#% for kernel in kernel_names
from .kernels.PUT_kernel_PUT import PUT_kernel_PUT
#% endfor
from .machine import (
    #% if aside
    Aside,
    #% endif
    #% if cdiv
    cdiv,
    #% endif
    #% if backward
    cotangent,
    #% endif
    machine_of,
    on_device,
    prepared,
    row,
    #% if slots
    slots_of,
    #% endif
    #% if backward
    summed,
    #% endif
    #% for name in described
    PUT_name_PUT,
    #% endfor
)
#% if span
from .segments import AS_IF, passes, segments_of
#% endif
from .tuning import PUT_names_PUT

#% if chunked and not varying
C = PUT_chunk_PUT
#% endif
#% if span
SPAN = PUT_span_PUT
#% endif
K = PUT_key_dim_PUT
V = PUT_value_dim_PUT
#% for function, inputs, allocations, launches, finals in operators


@on_device
#% if kept and function == "chunk"
def chunk(call, kept=None):
    """(o, final state) of a Call; appends to ``kept`` what backward would compute again."""
#% else
def PUT_function_PUT(call):
    """(o, final state) of a Call."""
#% endif
    dtype = call.inputs["q"].dtype
    x = prepared(call.inputs)
    #% for line in inputs
    PUT_line_PUT
    #% endfor
    B, T, H, HV, N = call.B, call.T, call.H, call.HV, call.N
    cu_seqlens = call.cu_seqlens
    at = machine_of(q)
    #% if varying and function == "chunk"
    C = chunk_of(at, "chunk")
    #% endif
    #% if span and function == "chunk"
    segments = segments_of(call, at, SPAN)  # 0: whole sequences, in one pass
    #% endif
    make = torch.empty if N > 0 else torch.zeros  # without a sequence there is no program that clears the rows
    o = make((B, T, HV, V), dtype=q.dtype, device=q.device)
    #% for line in allocations
    PUT_line_PUT
    #% endfor
    #% for line in launches
    PUT_line_PUT
    #% endfor
    #% if kept and function == "chunk"
    if kept is not None:
        kept += [PUT_kept_PUT]
    #% endif
    return o.to(dtype), PUT_finals_PUT
#% endfor
#% if kept


#% if varying
def kept_tensors(call, operator="chunk"):
    """PUT_kept_PUT: zeros, one slot per chunk (a torch op must not return what was never written)."""
#% else
def kept_tensors(call):
    """PUT_kept_PUT: zeros, one slot per chunk (a torch op must not return what was never written)."""
#% endif
    #% for heads in kept_heads
    PUT_heads_PUT = call.PUT_heads_PUT
    #% endfor
    q = prepared({"q": call.inputs["q"]})["q"]
    at = machine_of(q)
    #% if varying
    C = chunk_of(at, operator)
    #% endif
    slots = slots_of(call, C)
    return [
        #% for shape in kept_shapes
        PUT_shape_PUT,
        #% endfor
    ]
#% endif
#% for function, cotangents, inputs, allocations, launches, results, totals, beside in backward


@on_device
#% if kept
def PUT_function_PUT(call, needs, PUT_cotangents_PUT, kept=None):
    """Gradients by input name of a Call, of the inputs named in ``needs``; a cotangent may be None.

    ``kept``: what the forward call appended; without it, it is computed again.
    """
#% else
def PUT_function_PUT(call, needs, PUT_cotangents_PUT):
    """Gradients by input name of a Call, of the inputs named in ``needs``; a cotangent may be None."""
#% endif
    x = prepared(call.inputs)
    needs = set(needs)
    do = cotangent(do, call)
    #% for line in inputs
    PUT_line_PUT
    #% endfor
    T, H, HV, N = call.T, call.H, call.HV, call.N
    cu_seqlens = call.cu_seqlens
    at = machine_of(q)
    #% if varying
    C = chunk_of(at, "chunk_backward")
    #% endif
    make = torch.empty if N > 0 else torch.zeros  # without a sequence there is no program that clears the rows

    def gradient(name):
        like = x[name]
        return make(like.shape, dtype=like.dtype, device=like.device) if name in needs else None

    #% if totals
    def partial(name, shape):
        # one term per chunk: unused slots of packed sequences stay 0
        return torch.zeros(shape, dtype=torch.float32, device=q.device) if name in needs else None

    #% endif
    #% for line in allocations
    PUT_line_PUT
    #% endfor
    #% if beside
    aside = Aside(q, at)
    #% endif
    #% for line in launches
    PUT_line_PUT
    #% endfor
    found = {
        #% for line in results
        PUT_line_PUT
        #% endfor
    }
    return {name: summed(found[name], call.inputs[name]) for name in needs}
#% endfor
