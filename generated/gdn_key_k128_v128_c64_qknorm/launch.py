"""gdn_key_k128_v128_c64_qknorm on a GPU.

Allocates, picks the launch choices, starts the kernels.
No host synchronisation, no autotuning; no file access after the first call of a kind; safe under CUDA graph capture.
"""

import torch

from .dispatch import LAUNCHES
from .kernels.combine import combine
from .kernels.decays import decays
from .kernels.decays_backward import decays_backward
from .kernels.gates import gates
from .kernels.gradients import gradients
from .kernels.pairs import pairs
from .kernels.prepare import prepare
from .kernels.prepare_backward import prepare_backward
from .kernels.products import products
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
def chunk(call, kept=None):
    """(o, final state) of a Call; appends to ``kept`` what backward would compute again."""
    dtype = call.inputs["q"].dtype
    x = prepared(call.inputs)
    q = x["q"]
    beta = x["beta"]
    gk = x["gk"]
    k = x["k"]
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
    fresh = torch.empty if kept is None else torch.zeros  # no slot that is kept stays unwritten
    X = fresh((slots, HV, C, C), dtype=torch.float32, device=q.device)
    P = fresh((slots, HV, C, C), dtype=at.stored, device=q.device)
    qn = torch.empty((slots, H, C, K), dtype=at.stored, device=q.device)
    kn = torch.empty((slots, H, C, K), dtype=at.stored, device=q.device)
    eLk = torch.empty((slots, HV, K), dtype=torch.float32, device=q.device)
    beta_f = torch.empty((slots, HV, C), dtype=torch.float32, device=q.device)
    t21 = torch.empty((slots, HV, C, K), dtype=at.stored, device=q.device)
    t30 = torch.empty((slots, HV, C, K), dtype=at.stored, device=q.device)
    t36 = torch.empty((slots, HV, C, K), dtype=at.stored, device=q.device)
    tuned = choice("decays", at, N * HV)
    programs = slots * HV
    if programs > 0:
        LAUNCHES["decays"] += 1
        decays[(programs,)](
            beta,
            gk,
            q,
            k,
            qn,
            kn,
            eLk,
            beta_f,
            t21,
            t30,
            t36,
            cu_seqlens,
            *beta.stride()[:3],
            *gk.stride()[:4],
            *q.stride()[:3],
            *k.stride()[:3],
            T,
            N,
            HV,
            R=HV // H,
            DOT=at.DOT,
            PRECISION=at.PRECISION,
            num_warps=tuned.num_warps,
            num_stages=tuned.num_stages,
        )
    tuned = choice("prepare", at, N * HV)
    programs = slots * HV
    if programs > 0:
        LAUNCHES["prepare"] += 1
        prepare[(programs,)](
            gk,
            kn,
            qn,
            beta_f,
            X,
            P,
            cu_seqlens,
            *gk.stride()[:4],
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
                tiles_of(t21, (C, 128), tuned.descriptors),
                tiles_of(t36, (C, 128), tuned.descriptors),
                tiles_of(X, (C, C), tuned.descriptors),
                beta_f,
                tiles_of(t30, (C, 128), tuned.descriptors),
                tiles_of(P, (C, C), tuned.descriptors),
                eLk,
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
    if kept is not None:
        kept += [X, P]
    return o.to(dtype), ht


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
    tuned = choice("recurrence", at, N * HV)
    programs = N * HV * cdiv(V, tuned.BV)
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
            ROW=row(q, k, v, gk),
            num_warps=tuned.num_warps,
            num_stages=tuned.num_stages,
        )
    return o.to(dtype), ht


def kept_tensors(call):
    """X, P: zeros, one slot per chunk (a torch op must not return what was never written)."""
    HV = call.HV
    q = prepared({"q": call.inputs["q"]})["q"]
    at = machine_of(q)
    slots = slots_of(call, C)
    return [
        torch.zeros((slots, HV, C, C), dtype=torch.float32, device=q.device),
        torch.zeros((slots, HV, C, C), dtype=at.stored, device=q.device),
    ]


@on_device
def chunk_backward(call, needs, do, dht, kept=None):
    """Gradients by input name of a Call, of the inputs named in ``needs``; a cotangent may be None.

    ``kept``: what the forward call appended; without it, it is computed again.
    """
    x = prepared(call.inputs)
    needs = set(needs)
    do = cotangent(do, call)
    q = x["q"]
    beta = x["beta"]
    gk = x["gk"]
    k = x["k"]
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
    e = torch.empty((slots, HV, C, V), dtype=at.stored, device=q.device)
    r = torch.empty((slots, HV, C, V), dtype=at.stored, device=q.device)
    dS = torch.empty((slots, HV, K, V), dtype=at.stored, device=q.device)
    dy = torch.empty((slots, HV, C, V), dtype=at.stored, device=q.device)
    qn = torch.empty((slots, H, C, K), dtype=at.stored, device=q.device)
    kn = torch.empty((slots, H, C, K), dtype=at.stored, device=q.device)
    eGk = torch.empty((slots, HV, C, K), dtype=at.stored, device=q.device)
    eTk = torch.empty((slots, HV, C, K), dtype=at.stored, device=q.device)
    eLk = torch.empty((slots, HV, K), dtype=torch.float32, device=q.device)
    beta_f = torch.empty((slots, HV, C), dtype=torch.float32, device=q.device)
    t21 = torch.empty((slots, HV, C, K), dtype=at.stored, device=q.device)
    t30 = torch.empty((slots, HV, C, K), dtype=at.stored, device=q.device)
    t35 = torch.empty((slots, HV, C, K), dtype=at.stored, device=q.device)
    t55 = torch.empty((slots, HV, C, K), dtype=at.stored, device=q.device)
    t73 = torch.empty((slots, HV, C), dtype=torch.float32, device=q.device)
    dgk_Ek = torch.empty((slots, HV, C, K), dtype=at.stored, device=q.device)
    t60 = torch.empty((slots, HV, C, K), dtype=at.stored, device=q.device)
    t92 = torch.empty((slots, HV, C, K), dtype=at.stored, device=q.device)
    t68 = torch.empty((slots, HV, C, C), dtype=at.stored, device=q.device)
    t46 = torch.empty((slots, HV, C, C), dtype=at.stored, device=q.device)
    [X, P] = kept or kept_tensors(call)
    dq = gradient("q")
    dgk = gradient("gk")
    dk = gradient("k")
    dv = gradient("v")
    dbeta = gradient("beta")
    dh0 = gradient("h0")
    aside = Aside(q, at)
    tuned = choice("decays_backward", at, N * HV)
    programs = slots * HV
    if programs > 0 and not needs.isdisjoint(("beta", "gk", "h0", "k", "q", "v")):
        LAUNCHES["decays_backward"] += 1
        decays_backward[(programs,)](
            beta,
            gk,
            q,
            k,
            qn,
            kn,
            eGk,
            eTk,
            eLk,
            beta_f,
            t21,
            t30,
            t35,
            cu_seqlens,
            *beta.stride()[:3],
            *gk.stride()[:4],
            *q.stride()[:3],
            *k.stride()[:3],
            T,
            N,
            HV,
            R=HV // H,
            DOT=at.DOT,
            PRECISION=at.PRECISION,
            num_warps=tuned.num_warps,
            num_stages=tuned.num_stages,
        )
    tuned = choice("prepare_backward", at, N * HV)
    programs = slots * HV
    if programs > 0 and not kept and not needs.isdisjoint(("beta", "gk", "h0", "k", "q", "v")):
        LAUNCHES["prepare_backward"] += 1
        prepare_backward[(programs,)](
            gk,
            kn,
            qn,
            beta_f,
            X,
            P,
            cu_seqlens,
            *gk.stride()[:4],
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
        if programs > 0 and not needs.isdisjoint(("beta", "gk", "k", "q")):
            LAUNCHES["states"] += 1
            states[(programs,)](
                tokens_of(v, (C, tuned.BV), tuned.descriptors),
                h0,
                tiles_of(t21, (C, 128), tuned.descriptors),
                tiles_of(X, (C, C), tuned.descriptors),
                beta_f,
                tiles_of(t30, (C, 128), tuned.descriptors),
                eLk,
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
    if programs > 0 and not needs.isdisjoint(("beta", "gk", "h0", "k", "v")):
        LAUNCHES["reverse"] += 1
        reverse[(programs,)](
            tokens_of(do, (C, tuned.BV), tuned.descriptors),
            dht,
            tiles_of(t30, (C, 128), tuned.descriptors),
            tiles_of(X, (C, C), tuned.descriptors),
            tiles_of(P, (C, C), tuned.descriptors),
            tiles_of(t21, (C, 128), tuned.descriptors),
            beta_f,
            tiles_of(t35, (C, 128), tuned.descriptors),
            eLk,
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
    tuned = choice("products", at, N * HV)
    programs = slots * HV
    if programs > 0 and not needs.isdisjoint(("beta", "gk", "k", "q")):
        LAUNCHES["products"] += 1
        products[(programs,)](
            do,
            r,
            dy,
            t68,
            t46,
            cu_seqlens,
            *do.stride()[:3],
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
    tuned = choice("pairs", at, N * HV)
    programs = slots * HV
    if programs > 0 and not needs.isdisjoint(("beta", "gk", "k", "q")):
        LAUNCHES["pairs"] += 1
        pairs[(programs,)](
            gk,
            kn,
            t46,
            qn,
            t68,
            beta_f,
            t55,
            t73,
            dgk_Ek,
            t60,
            t92,
            cu_seqlens,
            scale,
            *gk.stride()[:4],
            T,
            N,
            HV,
            R=HV // H,
            DOT=at.DOT,
            PRECISION=at.PRECISION,
            num_warps=tuned.num_warps,
            num_stages=tuned.num_stages,
        )
    tuned = choice("queries", at, N * HV)
    programs = slots * H
    if programs > 0 and not needs.isdisjoint(("q",)):
        LAUNCHES["queries"] += 1
        queries[(programs,)](
            do,
            q,
            S,
            eGk,
            t55,
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
    tuned = choice("gates", at, N * HV)
    programs = slots * HV
    if programs > 0 and not needs.isdisjoint(("gk",)):
        LAUNCHES["gates"] += 1
        gates[(programs,)](
            do,
            S,
            r,
            dS,
            dy,
            qn,
            kn,
            eGk,
            eTk,
            eLk,
            beta_f,
            dgk_Ek,
            dgk,
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
            num_warps=tuned.num_warps,
            num_stages=tuned.num_stages,
        )
    tuned = choice("gradients", at, N * HV)
    programs = slots * H
    if programs > 0 and not needs.isdisjoint(("beta", "k", "v")):
        LAUNCHES["gradients"] += 1
        gradients[(programs,)](
            k,
            r,
            dS,
            e,
            dy,
            S,
            t92,
            eGk,
            beta_f,
            t60,
            eTk,
            t73,
            dk,
            dv,
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
        "gk": dgk,
        "k": dk,
        "v": dv,
        "beta": dbeta,
        "h0": dh0,
    }
    return {name: summed(found[name], call.inputs[name]) for name in needs}
