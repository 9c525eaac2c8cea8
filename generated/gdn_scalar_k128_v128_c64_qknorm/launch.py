"""gdn_scalar_k128_v128_c64_qknorm on a GPU.

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
V = 128


@on_device
def chunk(call):
    """(o, final state) of a Call."""
    dtype = call.inputs["q"].dtype
    x = prepared(call.inputs)
    q = x["q"]
    k = x["k"]
    g = x["g"]
    beta = x["beta"]
    v = x["v"]
    h0 = x["h0"]
    scale = call.scale
    B, T, H, HV, N = call.B, call.T, call.H, call.HV, call.N
    cu_seqlens = call.cu_seqlens
    at = machine_of(q)
    segments = segments_of(call, at, SPAN)  # 0: whole sequences, in one pass
    make = torch.empty if N > 0 else torch.zeros  # without a sequence there is no program that clears the rows
    o = make((B, T, HV, V), dtype=q.dtype, device=q.device)
    ht = torch.empty((N, HV, K, V), dtype=torch.float32, device=q.device) if call.output_final_state else None
    slots = slots_of(call, C)
    X = torch.empty((slots, HV, C, C), dtype=torch.float32, device=q.device)
    P = torch.empty((slots, HV, C, C), dtype=at.stored, device=q.device)
    qn = torch.empty((slots, H, C, K), dtype=at.stored, device=q.device)
    kn = torch.empty((slots, H, C, K), dtype=at.stored, device=q.device)
    eG = torch.empty((slots, HV, C), dtype=torch.float32, device=q.device)
    eT = torch.empty((slots, HV, C), dtype=torch.float32, device=q.device)
    eL = torch.empty((slots, HV), dtype=torch.float32, device=q.device)
    beta_f = torch.empty((slots, HV, C), dtype=torch.float32, device=q.device)
    tuned = choice("prepare", at, N * HV)
    programs = slots * H
    if programs > 0:
        LAUNCHES["prepare"] += 1
        prepare[(programs,)](
            k,
            q,
            g,
            beta,
            X,
            P,
            qn,
            kn,
            eG,
            eT,
            eL,
            beta_f,
            cu_seqlens,
            *k.stride()[:3],
            *q.stride()[:3],
            *g.stride()[:3],
            *beta.stride()[:3],
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
                tokens_of(v, (C, tuned.BV), tuned.descriptors),
                state,
                tiles_of(kn, (C, 128), tuned.descriptors),
                tiles_of(qn, (C, 128), tuned.descriptors),
                tiles_of(X, (C, C), tuned.descriptors),
                beta_f,
                eG,
                eT,
                tiles_of(P, (C, C), tuned.descriptors),
                eL,
                o,
                ht,
                maps,
                cu_seqlens,
                scale,
                *v.stride()[:3],
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
    g = x["g"]
    beta = x["beta"]
    h0 = x["h0"]
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
            g,
            beta,
            h0,
            o,
            ht,
            cu_seqlens,
            scale,
            *q.stride()[:3],
            *k.stride()[:3],
            *v.stride()[:3],
            *g.stride()[:3],
            *beta.stride()[:3],
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
    k = x["k"]
    g = x["g"]
    beta = x["beta"]
    v = x["v"]
    h0 = x["h0"]
    scale = call.scale
    T, H, HV, N = call.T, call.H, call.HV, call.N
    cu_seqlens = call.cu_seqlens
    at = machine_of(q)
    make = torch.empty if N > 0 else torch.zeros  # without a sequence there is no program that clears the rows

    def gradient(name):
        like = x[name]
        return make(like.shape, dtype=like.dtype, device=like.device) if name in needs else None

    slots = slots_of(call, C)
    S = torch.empty((slots, HV, K, V), dtype=at.stored, device=q.device)
    X = torch.empty((slots, HV, C, C), dtype=torch.float32, device=q.device)
    e = torch.empty((slots, HV, C, V), dtype=at.stored, device=q.device)
    r = torch.empty((slots, HV, C, V), dtype=at.stored, device=q.device)
    P = torch.empty((slots, HV, C, C), dtype=at.stored, device=q.device)
    dS = torch.empty((slots, HV, K, V), dtype=at.stored, device=q.device)
    dy = torch.empty((slots, HV, C, V), dtype=at.stored, device=q.device)
    qn = torch.empty((slots, H, C, K), dtype=at.stored, device=q.device)
    kn = torch.empty((slots, H, C, K), dtype=at.stored, device=q.device)
    eG = torch.empty((slots, HV, C), dtype=torch.float32, device=q.device)
    eT = torch.empty((slots, HV, C), dtype=torch.float32, device=q.device)
    eL = torch.empty((slots, HV), dtype=torch.float32, device=q.device)
    beta_f = torch.empty((slots, HV, C), dtype=torch.float32, device=q.device)
    dg_E = torch.empty((slots, HV, C), dtype=torch.float32, device=q.device)
    t73 = torch.empty((slots, H, C, C), dtype=at.stored, device=q.device)
    t52 = torch.empty((slots, H, C, C), dtype=at.stored, device=q.device)
    t70 = torch.empty((slots, HV, C), dtype=torch.float32, device=q.device)
    deG_QS = torch.empty((slots, HV, C), dtype=torch.float32, device=q.device)
    dq = gradient("q")
    dk = gradient("k")
    dv = gradient("v")
    dg = gradient("g")
    dbeta = gradient("beta")
    dh0 = gradient("h0")
    aside = Aside(q, at)
    tuned = choice("prepare_backward", at, N * HV)
    programs = slots * H
    if programs > 0 and not needs.isdisjoint(("beta", "g", "h0", "k", "q", "v")):
        LAUNCHES["prepare_backward"] += 1
        prepare_backward[(programs,)](
            k,
            q,
            g,
            beta,
            X,
            P,
            qn,
            kn,
            eG,
            eT,
            eL,
            beta_f,
            cu_seqlens,
            *k.stride()[:3],
            *q.stride()[:3],
            *g.stride()[:3],
            *beta.stride()[:3],
            T,
            N,
            HV,
            R=HV // H,
            DOT=at.DOT,
            PRECISION=at.PRECISION,
            num_warps=tuned.num_warps,
            num_stages=tuned.num_stages,
        )
    # the two scans do not read each other
    tuned = choice("states", at, N * HV, scans=2)
    programs = N * HV * cdiv(V, tuned.BV)
    with aside.enter(programs):
        if programs > 0 and not needs.isdisjoint(("beta", "g", "k", "q")):
            LAUNCHES["states"] += 1
            states[(programs,)](
                tokens_of(v, (C, tuned.BV), tuned.descriptors),
                h0,
                tiles_of(kn, (C, 128), tuned.descriptors),
                tiles_of(X, (C, C), tuned.descriptors),
                beta_f,
                eG,
                eT,
                eL,
                S,
                e,
                r,
                cu_seqlens,
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
    if programs > 0 and not needs.isdisjoint(("beta", "g", "h0", "k", "v")):
        LAUNCHES["reverse"] += 1
        reverse[(programs,)](
            tokens_of(do, (C, tuned.BV), tuned.descriptors),
            dht,
            tiles_of(kn, (C, 128), tuned.descriptors),
            tiles_of(X, (C, C), tuned.descriptors),
            tiles_of(P, (C, C), tuned.descriptors),
            eT,
            eG,
            beta_f,
            tiles_of(qn, (C, 128), tuned.descriptors),
            eL,
            dS,
            dy,
            dh0,
            cu_seqlens,
            scale,
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
    if programs > 0 and not needs.isdisjoint(("beta", "g", "k", "q")):
        LAUNCHES["pairs"] += 1
        pairs[(programs,)](
            do,
            g,
            r,
            dy,
            beta_f,
            qn,
            kn,
            dg_E,
            t73,
            t52,
            t70,
            cu_seqlens,
            scale,
            *do.stride()[:3],
            *g.stride()[:3],
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
    if programs > 0 and not needs.isdisjoint(("g", "q")):
        LAUNCHES["queries"] += 1
        queries[(programs,)](
            do,
            q,
            S,
            eG,
            qn,
            kn,
            t52,
            deG_QS,
            dq,
            cu_seqlens,
            scale,
            *do.stride()[:3],
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
    tuned = choice("gradients", at, N * HV)
    programs = slots * H
    if programs > 0 and not needs.isdisjoint(("beta", "g", "k", "v")):
        LAUNCHES["gradients"] += 1
        gradients[(programs,)](
            k,
            r,
            dS,
            S,
            e,
            dy,
            eT,
            eG,
            beta_f,
            qn,
            kn,
            eL,
            deG_QS,
            t52,
            t70,
            t73,
            dg_E,
            dk,
            dv,
            dg,
            dbeta,
            cu_seqlens,
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
    found = {
        "q": dq,
        "k": dk,
        "v": dv,
        "g": dg,
        "beta": dbeta,
        "h0": dh0,
    }
    return {name: summed(found[name], call.inputs[name]) for name in needs}
