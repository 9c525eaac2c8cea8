"""add_scalar_k128_v64_c64_betadt on a GPU.

Allocates, picks the launch choices, starts the kernels.
No host synchronisation, no file access, no autotuning; safe under CUDA graph capture.
"""

import torch
import triton

from .dispatch import LAUNCHES
from .kernels.prepare import prepare
from .kernels.recurrence import recurrence
from .kernels.scan import scan
from .machine import machine_of, on_device, prepared
from .tuning import choice

C = 64
K = 128
V = 64


@on_device
def chunk(call):
    """(o, final state) of a Call."""
    dtype = call.inputs["q"].dtype
    x = prepared(call.inputs)
    q = x["q"]
    k = x["k"]
    v = x["v"]
    dt = x["dt"]
    dt_bias = x["dt_bias"]
    A_log = x["A_log"]
    h0 = x["h0"]
    dt_max = call.dt_limit[1]
    dt_min = call.dt_limit[0]
    scale = call.scale
    B, T, H, HV, N = call.B, call.T, call.H, call.HV, call.N
    cu_seqlens = call.cu_seqlens
    at = machine_of(q)
    make = torch.empty if N > 0 else torch.zeros  # without a sequence there is no program that clears the rows
    o = make((B, T, HV, V), dtype=q.dtype, device=q.device)
    ht = torch.empty((N, HV, K, V), dtype=torch.float32, device=q.device) if call.output_final_state else None
    # one slot per chunk; packed sequence n starts at slot cu_seqlens[n] // C + n
    slots = T // C + N if cu_seqlens is not None else B * triton.cdiv(T, C)
    KR = torch.empty((slots, HV, K, V), dtype=torch.float32, device=q.device)
    PR = torch.empty((slots, HV, C, V), dtype=torch.float32, device=q.device)
    eG = torch.empty((slots, HV, C), dtype=torch.float32, device=q.device)
    eL = torch.empty((slots, HV), dtype=torch.float32, device=q.device)
    tuned = choice("prepare", at)
    programs = slots * HV
    if programs > 0:
        LAUNCHES["prepare"] += 1
        prepare[(programs,)](
            k,
            v,
            dt,
            dt_bias,
            A_log,
            q,
            KR,
            PR,
            eG,
            eL,
            cu_seqlens,
            dt_min,
            dt_max,
            *k.stride()[:3],
            *v.stride()[:3],
            *dt.stride()[:3],
            *q.stride()[:3],
            T,
            N,
            HV,
            R=HV // H,
            BV=tuned.BV,
            DOT=at.DOT,
            PRECISION=at.PRECISION,
            num_warps=tuned.num_warps,
            num_stages=tuned.num_stages,
        )
    tuned = choice("scan", at, N * HV)
    programs = N * HV * triton.cdiv(V, tuned.BV)
    if programs > 0:
        LAUNCHES["scan"] += 1
        scan[(programs,)](
            q,
            h0,
            eG,
            eL,
            KR,
            PR,
            o,
            ht,
            cu_seqlens,
            scale,
            *q.stride()[:3],
            T,
            N,
            HV,
            R=HV // H,
            BV=tuned.BV,
            DOT=at.DOT,
            PRECISION=at.PRECISION,
            STAGES=tuned.num_stages,
            num_warps=tuned.num_warps,
            num_stages=tuned.num_stages,
        )
    return o.to(dtype), ht


@on_device
def recurrent(call):
    """(o, final state) of a Call."""
    dtype = call.inputs["q"].dtype
    x = prepared(call.inputs)
    q = x["q"]
    k = x["k"]
    v = x["v"]
    dt = x["dt"]
    dt_bias = x["dt_bias"]
    A_log = x["A_log"]
    h0 = x["h0"]
    dt_max = call.dt_limit[1]
    dt_min = call.dt_limit[0]
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
            dt,
            dt_bias,
            A_log,
            h0,
            o,
            ht,
            cu_seqlens,
            dt_min,
            dt_max,
            scale,
            *q.stride()[:3],
            *k.stride()[:3],
            *v.stride()[:3],
            *dt.stride()[:3],
            T,
            N,
            HV,
            R=HV // H,
            BV=tuned.BV,
            num_warps=tuned.num_warps,
            num_stages=tuned.num_stages,
        )
    return o.to(dtype), ht
