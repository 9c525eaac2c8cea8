"""Kernel prepare of add_scalar_k128_v64_c64_betadt.

Spec: gate scalar rule additive beta dt value-dim 64
Plan: cut P, target sm_90
Body: 437568bc7f199c87
"""

import triton
import triton.language as tl

from ..device import (
    batch_start,
    cumulative_gate,
    decay_between,
    decay_of,
    find_sequence,
    softplus,
    total_gate,
)


@triton.jit(do_not_specialize=["q_sb", "k_sb", "dt", "dt_sb", "dt_sh", "cu_seqlens", "T", "N"])
def prepare(
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
    q_sb: tl.int64,
    q_st: tl.constexpr,
    q_sh,
    k_sb: tl.int64,
    k_st: tl.constexpr,
    k_sh,
    dt_sb: tl.int64,
    dt_st: tl.constexpr,
    dt_sh,
    T,
    N,
    HV: tl.constexpr,
    R: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What does not depend on the state, chunk by chunk."""
    C: tl.constexpr = 64
    BK: tl.constexpr = 128
    pid = tl.program_id(0)
    i_ch = pid
    i_h = (i_ch % (HV // R)).to(tl.int64)
    i_slot = (i_ch // (HV // R)).to(tl.int64)
    # This chunk's sequence; the last packed one also covers the rows past the offsets.
    if cu_seqlens is not None:
        i_n = find_sequence(cu_seqlens, i_slot, N, C)
        i_b = 0
        first = tl.load(cu_seqlens + i_n).to(tl.int64)
        length = tl.load(cu_seqlens + i_n + 1).to(tl.int64) - first
        rows = tl.where(i_n == N - 1, T - first, length)
        i_t = i_slot - (first // C + i_n)
        if i_t * C >= rows:
            return
    else:
        i_b = i_slot // tl.cdiv(T, C)
        first = i_b * 0  # 64 bits wide, as the offsets of packed sequences
        length = first + T
        rows = length
        i_t = i_slot % tl.cdiv(T, C)
    o_c = tl.arange(0, C)
    o_k = tl.arange(0, BK)
    p_q = q + batch_start(i_b, q_sb, q_st) + first * q_st + i_h * q_sh
    p_k = k + batch_start(i_b, k_sb, k_st) + first * k_st + i_h * k_sh
    start = i_t * C
    m_i = o_c < tl.minimum(length - start, C).to(tl.int32)
    b_q = tl.load(p_q + start * q_st + (o_c[:, None] * q_st + o_k[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
    b_k = tl.load(p_k + start * k_st + (o_c[:, None] * k_st + o_k[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
    # t2[i,j] = sum k: q[i,k] * k[j,k]
    b_t2 = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    for i_r in tl.range(0, R, disable_licm=True):
        i_hv = i_h * R + i_r
        p_dt = dt + i_b * dt_sb + first * dt_st + i_hv * dt_sh
        b_dt = tl.load(p_dt + start * dt_st + o_c * dt_st, mask=m_i, other=0.0).to(tl.float32)
        if dt_bias is not None:
            b_dt_bias = tl.load(dt_bias + i_hv).to(tl.float32)
        else:
            b_dt_bias = 0.0
        b_A_log = tl.load(A_log + i_hv).to(tl.float32)
        # t5[i] = dt[i] + dt_bias
        b_t5 = b_dt + b_dt_bias
        # t6[i] = softplus(t5[i])
        b_t6 = softplus(b_t5)
        # sp[i] = clamp(t6[i], dt_min, dt_max)
        b_sp = tl.minimum(tl.maximum(b_t6, dt_min), dt_max)
        p_sp = sp + (i_slot * HV + i_hv) * C
        tl.store(p_sp + o_c, b_sp.to(sp.dtype.element_ty))
        # t11 = exp(A_log)
        b_t11 = tl.exp(tl.minimum(b_A_log, 80.0))
        # t12[i] = sp[i] * t11
        b_t12 = b_sp * b_t11
        # t13[i] = -t12[i]
        b_t13 = -b_t12
        # g[i] = valid(t13[i])
        b_g = tl.where(m_i, b_t13, 0.0)
        # E[i,j] = decay.ij(g[i])
        b_g_c, b_g_f = cumulative_gate(b_g)
        b_E = decay_between(b_g_c, b_g_f, C)
        # P[i,j] = E[i,j] * t2[i,j]
        b_P = b_E * b_t2
        p_P = P + (i_slot * HV + i_hv) * (C * C)
        tl.store(p_P + (o_c[:, None] * C + o_c[None, :]), b_P.to(P.dtype.element_ty))
        # eL = decay.10(g[i])
        b_g_tc, b_g_tf = total_gate(b_g)
        b_eL = decay_of(b_g_tc + b_g_tf)
        p_eL = eL + i_slot * HV + i_hv
        tl.store(p_eL, b_eL.to(eL.dtype.element_ty))
        # eG[i] = decay.i0(g[i])
        b_eG = decay_of(b_g_c + b_g_f)
        p_eG = eG + (i_slot * HV + i_hv) * C
        tl.store(p_eG + o_c, b_eG.to(eG.dtype.element_ty))
        # eT[i] = decay.1i(g[i])
        b_eT = decay_of((b_g_tc - b_g_c) + (b_g_tf - b_g_f))
        p_eT = eT + (i_slot * HV + i_hv) * C
        tl.store(p_eT + o_c, b_eT.to(eT.dtype.element_ty))
