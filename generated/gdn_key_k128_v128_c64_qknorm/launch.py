"""gdn_key_k128_v128_c64_qknorm on a GPU.

Allocates, picks the launch choices, starts the kernels.
No host synchronisation, no file access, no autotuning; safe under CUDA graph capture.
"""

import torch
import triton

from .dispatch import LAUNCHES
from .kernels.recurrence import recurrence
from .machine import (
    machine_of,
    on_device,
    prepared,
)
from .tuning import choice

K = 128
V = 128


@on_device
def recurrent(call):
    """(o, final state) of a Call."""
    dtype = call.inputs["q"].dtype
    x = prepared(call.inputs)
    q = x["q"]
    k = x["k"]
    v = x["v"]
    gk = x["gk"]
    beta = x["beta"]
    h0 = x["h0"]
    scale = call.scale
    B, T, H, HV, N = call.B, call.T, call.H, call.HV, call.N
    cu_seqlens = call.cu_seqlens
    at = machine_of(q)
    make = torch.empty if N > 0 else torch.zeros  # without a sequence there is no program that clears the rows
    o = make((B, T, HV, V), dtype=q.dtype, device=q.device)
    ht = torch.empty((N, HV, K, V), dtype=torch.float32, device=q.device) if call.output_final_state else None
    tuned = choice("recurrence", at)
    programs = N * HV * triton.cdiv(V, tuned.BV)
    if programs > 0:
        LAUNCHES["recurrence"] += 1
        recurrence[(programs,)](
            q,
            k,
            v,
            gk,
            beta,
            h0,
            o,
            ht,
            cu_seqlens,
            scale,
            *q.stride()[:3],
            *k.stride()[:3],
            *v.stride()[:3],
            *gk.stride()[:4],
            *beta.stride()[:3],
            T,
            N,
            HV,
            R=HV // H,
            BV=tuned.BV,
            num_warps=tuned.num_warps,
            num_stages=tuned.num_stages,
        )
    return o.to(dtype), ht
