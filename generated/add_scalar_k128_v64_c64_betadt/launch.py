"""add_scalar_k128_v64_c64_betadt on a GPU.

Allocates, picks the launch choices, starts the kernels.
No host synchronisation, no autotuning; no file access after the first call of a kind; safe under CUDA graph capture.
"""

import torch

from .dispatch import LAUNCHES
from .kernels.combine import combine
from .kernels.gradients import gradients
from .kernels.pairs import pairs
from .kernels.prepare import prepare
from .kernels.prepare_backward import prepare_backward
from .kernels.queries import queries
from .kernels.recurrence import recurrence
from .kernels.reverse import reverse
from .kernels.scan import scan
from .kernels.states import states
from .machine import (
    Aside,
    cdiv,
    cotangent,
    machine_of,
    on_device,
    prepared,
    row,
    slots_of,
    summed,
    tiles_of,
    tokens_of,
)
from .segments import AS_IF, passes, segments_of
from .tuning import choice

C = 64
SPAN = 2048
K = 128
V = 64


@on_device
def chunk(call):
    """(o, final state) of a Call."""
    dtype = call.inputs["q"].dtype
    x = prepared(call.inputs)
    q = x["q"]
    k = x["k"]
    dt = x["dt"]
    dt_bias = x["dt_bias"]
    A_log = x["A_log"]
    v = x["v"]
    h0 = x["h0"]
    dt_max = call.dt_limit[1]
    dt_min = call.dt_limit[0]
    scale = call.scale
    B, T, H, HV, N = call.B, call.T, call.H, call.HV, call.N
    cu_seqlens = call.cu_seqlens
    at = machine_of(q)
    segments = segments_of(call, at, SPAN)  # 0: whole sequences, in one pass
    make = torch.empty if N > 0 else torch.zeros  # without a sequence there is no program that clears the rows
    o = make((B, T, HV, V), dtype=q.dtype, device=q.device)
    ht = torch.empty((N, HV, K, V), dtype=torch.float32, device=q.device) if call.output_final_state else None
    slots = slots_of(call, C)
    P = torch.empty((slots, HV, C, C), dtype=at.stored, device=q.device)
    sp = torch.empty((slots, HV, C), dtype=torch.float32, device=q.device)
    eG = torch.empty((slots, HV, C), dtype=torch.float32, device=q.device)
    eT = torch.empty((slots, HV, C), dtype=torch.float32, device=q.device)
    eL = torch.empty((slots, HV), dtype=torch.float32, device=q.device)
    tuned = choice("prepare", at, N * HV)
    programs = slots * H
    if programs > 0:
        LAUNCHES["prepare"] += 1
        prepare[(programs,)](
            q,
            k,
            dt,
            dt_bias,
            A_log,
            P,
            sp,
            eG,
            eT,
            eL,
            cu_seqlens,
            dt_min,
            dt_max,
            *q.stride()[:3],
            *k.stride()[:3],
            *dt.stride()[:3],
            T,
            N,
            HV,
            R=HV // H,
            DOT=at.DOT,
            PRECISION=at.PRECISION,
            num_warps=tuned.num_warps,
            num_stages=tuned.num_stages,
        )
    tuned = choice("scan", at, N * HV * (AS_IF if segments else 1))
    programs = N * HV * cdiv(V, tuned.BV)
    if programs > 0:
        for kind, state, maps, grid, stages in passes(combine, call, at, segments, SPAN, tuned, h0):
            LAUNCHES["scan"] += 1
            scan[(grid,)](
                tokens_of(q, (C, 128), tuned.descriptors),
                tokens_of(v, (C, tuned.BV), tuned.descriptors),
                tokens_of(k, (C, 128), tuned.descriptors),
                state,
                sp,
                tiles_of(P, (C, C), tuned.descriptors),
                eG,
                eL,
                eT,
                o,
                ht,
                maps,
                cu_seqlens,
                scale,
                *q.stride()[:3],
                *v.stride()[:3],
                *k.stride()[:3],
                T,
                N,
                HV,
                R=HV // H,
                BV=tuned.BV,
                DOT=at.DOT,
                PRECISION=at.PRECISION,
                STAGES=stages,
                PASS=kind,
                num_warps=tuned.num_warps,
                num_stages=stages,
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
    tuned = choice("recurrence", at, N * HV)
    programs = N * HV * cdiv(V, tuned.BV)
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
            ROW=row(q, k, v),
            num_warps=tuned.num_warps,
            num_stages=tuned.num_stages,
        )
    return o.to(dtype), ht


@on_device
def chunk_backward(call, needs, do, dht):
    """Gradients by input name of a Call, of the inputs named in ``needs``; a cotangent may be None."""
    x = prepared(call.inputs)
    needs = set(needs)
    do = cotangent(do, call)
    q = x["q"]
    dt = x["dt"]
    dt_bias = x["dt_bias"]
    A_log = x["A_log"]
    k = x["k"]
    v = x["v"]
    h0 = x["h0"]
    dt_max = call.dt_limit[1]
    dt_min = call.dt_limit[0]
    scale = call.scale
    T, H, HV, N = call.T, call.H, call.HV, call.N
    cu_seqlens = call.cu_seqlens
    at = machine_of(q)
    make = torch.empty if N > 0 else torch.zeros  # without a sequence there is no program that clears the rows

    def gradient(name):
        like = x[name]
        return make(like.shape, dtype=like.dtype, device=like.device) if name in needs else None

    def partial(name, shape):
        # one term per chunk: unused slots of packed sequences stay 0
        return torch.zeros(shape, dtype=torch.float32, device=q.device) if name in needs else None

    slots = slots_of(call, C)
    S = torch.empty((slots, HV, K, V), dtype=at.stored, device=q.device)
    dS = torch.empty((slots, HV, K, V), dtype=at.stored, device=q.device)
    sp = torch.empty((slots, HV, C), dtype=torch.float32, device=q.device)
    eG = torch.empty((slots, HV, C), dtype=torch.float32, device=q.device)
    eT = torch.empty((slots, HV, C), dtype=torch.float32, device=q.device)
    eL = torch.empty((slots, HV), dtype=torch.float32, device=q.device)
    t40 = torch.empty((slots, H, C, C), dtype=at.stored, device=q.device)
    dsp_r = torch.empty((slots, HV, C), dtype=torch.float32, device=q.device)
    dg_E = torch.empty((slots, HV, C), dtype=torch.float32, device=q.device)
    t31 = torch.empty((slots, HV, C), dtype=torch.float32, device=q.device)
    dv = gradient("v")
    dq = gradient("q")
    dk = gradient("k")
    ddt = gradient("dt")
    ddt_bias = partial("dt_bias", (slots, HV))
    dA_log = partial("A_log", (slots, HV))
    dh0 = gradient("h0")
    aside = Aside(q, at)
    tuned = choice("prepare_backward", at, N * HV)
    programs = slots * HV
    if programs > 0 and not needs.isdisjoint(("A_log", "dt", "dt_bias", "h0", "k", "q", "v")):
        LAUNCHES["prepare_backward"] += 1
        prepare_backward[(programs,)](
            dt,
            dt_bias,
            A_log,
            sp,
            eG,
            eT,
            eL,
            cu_seqlens,
            dt_min,
            dt_max,
            *dt.stride()[:3],
            T,
            N,
            HV,
            R=HV // H,
            num_warps=tuned.num_warps,
            num_stages=tuned.num_stages,
        )
    # the two scans do not read each other
    tuned = choice("states", at, N * HV, scans=2)
    programs = N * HV * cdiv(V, tuned.BV)
    with aside.enter(programs):
        if programs > 0 and not needs.isdisjoint(("A_log", "dt", "dt_bias", "q")):
            LAUNCHES["states"] += 1
            states[(programs,)](
                tokens_of(k, (C, 128), tuned.descriptors),
                tokens_of(v, (C, tuned.BV), tuned.descriptors),
                h0,
                eL,
                sp,
                eT,
                S,
                cu_seqlens,
                *k.stride()[:3],
                *v.stride()[:3],
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
    tuned = choice("reverse", at, N * HV, scans=2)
    programs = N * HV * cdiv(V, tuned.BV)
    if programs > 0 and not needs.isdisjoint(("A_log", "dt", "dt_bias", "h0", "k", "v")):
        LAUNCHES["reverse"] += 1
        reverse[(programs,)](
            tokens_of(q, (C, 128), tuned.descriptors),
            tokens_of(do, (C, tuned.BV), tuned.descriptors),
            dht,
            eG,
            eL,
            dS,
            dh0,
            cu_seqlens,
            scale,
            *q.stride()[:3],
            *do.stride()[:3],
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
    aside.join()
    tuned = choice("pairs", at, N * HV)
    programs = slots * H
    if programs > 0 and not needs.isdisjoint(("A_log", "dt", "dt_bias", "k", "q", "v")):
        LAUNCHES["pairs"] += 1
        pairs[(programs,)](
            v,
            do,
            A_log,
            q,
            k,
            sp,
            eT,
            dS,
            t40,
            dsp_r,
            dg_E,
            dv,
            cu_seqlens,
            scale,
            *v.stride()[:3],
            *do.stride()[:3],
            *q.stride()[:3],
            *k.stride()[:3],
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
    tuned = choice("queries", at, N * HV)
    programs = slots * H
    if programs > 0 and not needs.isdisjoint(("A_log", "dt", "dt_bias", "q")):
        LAUNCHES["queries"] += 1
        queries[(programs,)](
            do,
            q,
            k,
            S,
            eG,
            t40,
            t31,
            dq,
            cu_seqlens,
            scale,
            *do.stride()[:3],
            *q.stride()[:3],
            *k.stride()[:3],
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
    tuned = choice("gradients", at, N * HV)
    programs = slots * H
    if programs > 0 and not needs.isdisjoint(("A_log", "dt", "dt_bias", "k")):
        LAUNCHES["gradients"] += 1
        gradients[(programs,)](
            v,
            q,
            k,
            dt,
            dt_bias,
            A_log,
            dS,
            sp,
            eT,
            S,
            eG,
            eL,
            t31,
            t40,
            dsp_r,
            dg_E,
            dk,
            ddt,
            ddt_bias,
            dA_log,
            cu_seqlens,
            dt_min,
            dt_max,
            scale,
            *v.stride()[:3],
            *q.stride()[:3],
            *k.stride()[:3],
            *dt.stride()[:3],
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
    found = {
        "v": dv,
        "q": dq,
        "k": dk,
        "dt": ddt,
        "dt_bias": ddt_bias,
        "A_log": dA_log,
        "h0": dh0,
    }
    return {name: summed(found[name], call.inputs[name]) for name in needs}
