"""Kernel queries of add_scalar_k128_v64_c64_betadt.

Spec: gate scalar rule additive beta dt value-dim 64
Plan: cut S+dS, target sm_90
Body: 277b0a0282ada5b2
"""

import triton
import triton.language as tl

from ..device import (
    SATURATION,
    batch_start,
    cumulative_gate,
    find_sequence,
    softplus,
)

C = tl.constexpr(64)
K = tl.constexpr(128)
V = tl.constexpr(64)
BK = tl.constexpr(128)


@triton.jit(do_not_specialize=["do_sb", "dt", "dt_sb", "dt_sh", "q_sb", "k_sb", "cu_seqlens", "T", "N"])
def queries(
    do,
    dt,
    dt_bias,
    A_log,
    q,
    k,
    S,
    t40,
    t31,
    dq,
    cu_seqlens,
    dt_min,
    dt_max,
    scale,
    do_sb: tl.int64,
    do_st: tl.constexpr,
    do_sh,
    dt_sb: tl.int64,
    dt_st: tl.constexpr,
    dt_sh,
    q_sb: tl.int64,
    q_st: tl.constexpr,
    q_sh,
    k_sb: tl.int64,
    k_st: tl.constexpr,
    k_sh,
    T,
    N,
    HV: tl.constexpr,
    R: tl.constexpr,
    BV: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradient of q, chunk by chunk."""
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
    m_o = o_c < tl.minimum(rows - start, C).to(tl.int32)
    b_q = tl.load(p_q + start * q_st + (o_c[:, None] * q_st + o_k[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
    b_t18 = tl.zeros([C, BK], dtype=tl.float32)
    for i_r in tl.range(0, R):
        i_hv = i_h * R + i_r
        p_do = do + batch_start(i_b, do_sb, do_st) + first * do_st + i_hv * do_sh
        b_t2 = tl.zeros([C, BK], dtype=tl.float32)
        p_dt = dt + i_b * dt_sb + first * dt_st + i_hv * dt_sh
        if dt_bias is not None:
            b_dt_bias = tl.load(dt_bias + i_hv).to(tl.float32)
        else:
            b_dt_bias = 0.0
        b_A_log = tl.load(A_log + i_hv).to(tl.float32)
        for i_v in tl.range(0, tl.cdiv(V, BV)):
            o_v = i_v * BV + tl.arange(0, BV)
            p_S = S + (i_slot * HV + i_hv) * (K * V)
            b_S = tl.load(p_S + (o_k[:, None] * V + o_v[None, :]))
            b_do = tl.load(
                p_do + start * do_st + (o_c[:, None] * do_st + o_v[None, :]), mask=m_i[:, None], other=0.0
            ).to(DOT)
            # t2[i,k] = sum v: S[k,v] * do[i,v]
            b_t2 = tl.dot(b_do, tl.trans(b_S), b_t2, input_precision=PRECISION)
        b_dt = tl.load(p_dt + start * dt_st + o_c * dt_st, mask=m_i, other=0.0).to(tl.float32)
        # t5[i] = dt[i] + dt_bias
        b_t5 = b_dt + b_dt_bias
        # t6[i] = softplus(t5[i])
        b_t6 = softplus(b_t5)
        # sp[i] = clamp(t6[i], dt_min, dt_max)
        b_sp = tl.minimum(tl.maximum(b_t6, dt_min), dt_max)
        # t11 = exp(A_log)
        b_t11 = tl.exp(tl.minimum(b_A_log, SATURATION))
        # t12[i] = sp[i] * t11
        b_t12 = b_sp * b_t11
        # t13[i] = -t12[i]
        b_t13 = -b_t12
        # g[i] = valid(t13[i])
        b_g = tl.where(m_i, b_t13, 0.0)
        # eG[i] = decay.i0(g[i])
        b_g_c, b_g_f = cumulative_gate(b_g, 0)
        b_eG = tl.exp(b_g_c + b_g_f)
        # t17[i,k] = eG[i] * scale * t2[i,k]
        b_t17 = b_eG[:, None] * scale * b_t2
        # t18[i,k] = sum r: t17[i,k]
        b_t18 += b_t17
        # t31[i] = sum k: q[i,k] * t2[i,k]
        b_t31 = tl.sum(b_q.to(tl.float32) * b_t2, 1)
        p_t31 = t31 + (i_slot * HV + i_hv) * C
        tl.store(p_t31 + o_c, b_t31.to(t31.dtype.element_ty))
    b_k = tl.load(p_k + start * k_st + (o_c[:, None] * k_st + o_k[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
    p_t40 = t40 + (i_slot * (HV // R) + i_h) * (C * C)
    b_t40 = tl.load(p_t40 + (o_c[:, None] * C + o_c[None, :]))
    # t23[i,k] = sum j: k[j,k] * t40[i,j]
    b_t23 = tl.dot(b_t40, b_k, input_precision=PRECISION)
    # dq[i,k] = t18[i,k] + t23[i,k]
    b_dq = b_t18 + b_t23
    if dq is not None:
        p_dq = dq + ((i_b * T + first) * (HV // R) + i_h) * K
        tl.store(
            p_dq + start * ((HV // R) * K) + (o_c[:, None] * ((HV // R) * K) + o_k[None, :]),
            tl.where(m_i[:, None], b_dq, 0.0).to(dq.dtype.element_ty),
            mask=m_o[:, None],
        )
