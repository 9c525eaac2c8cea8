"""Kernel gradients of add_scalar_k128_v64_c64_betadt.

Spec: gate scalar rule additive beta dt value-dim 64
Plan: cut S+dS, target sm_90
Body: a626cd7baffa4118
"""

import triton
import triton.language as tl

from ..device import (
    SATURATION,
    batch_start,
    cumulative_gate,
    find_sequence,
    softplus,
    total_gate,
)

C = tl.constexpr(64)
K = tl.constexpr(128)
V = tl.constexpr(64)
BK = tl.constexpr(128)


@triton.jit(do_not_specialize=["v_sb", "dt", "dt_sb", "dt_sh", "q_sb", "k_sb", "cu_seqlens", "T", "N"])
def gradients(
    v,
    dt,
    dt_bias,
    A_log,
    q,
    k,
    dS,
    S,
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
    v_sb: tl.int64,
    v_st: tl.constexpr,
    v_sh,
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
    """All other gradients, chunk by chunk."""
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
    p_k = k + batch_start(i_b, k_sb, k_st) + first * k_st + i_h * k_sh
    p_q = q + batch_start(i_b, q_sb, q_st) + first * q_st + i_h * q_sh
    start = i_t * C
    m_i = o_c < tl.minimum(length - start, C).to(tl.int32)
    m_o = o_c < tl.minimum(rows - start, C).to(tl.int32)
    b_k = tl.load(p_k + start * k_st + (o_c[:, None] * k_st + o_k[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
    b_dk_KR = tl.zeros([C, BK], dtype=tl.float32)
    for i_r in tl.range(0, R):
        i_hv = i_h * R + i_r
        p_v = v + batch_start(i_b, v_sb, v_st) + first * v_st + i_hv * v_sh
        b_t2 = tl.zeros([C, BK], dtype=tl.float32)
        b_deL = 0.0
        p_dt = dt + i_b * dt_sb + first * dt_st + i_hv * dt_sh
        if dt_bias is not None:
            b_dt_bias = tl.load(dt_bias + i_hv).to(tl.float32)
        else:
            b_dt_bias = 0.0
        b_A_log = tl.load(A_log + i_hv).to(tl.float32)
        for i_v in tl.range(0, tl.cdiv(V, BV)):
            o_v = i_v * BV + tl.arange(0, BV)
            b_v = tl.load(p_v + start * v_st + (o_c[:, None] * v_st + o_v[None, :]), mask=m_i[:, None], other=0.0).to(
                DOT
            )
            p_dS = dS + (i_slot * HV + i_hv) * (K * V)
            b_dS = tl.load(p_dS + (o_k[:, None] * V + o_v[None, :]))
            # t2[i,k] = sum v: v[i,v] * dS[k,v]
            b_t2 = tl.dot(b_v, tl.trans(b_dS), b_t2, input_precision=PRECISION)
            p_S = S + (i_slot * HV + i_hv) * (K * V)
            b_S = tl.load(p_S + (o_k[:, None] * V + o_v[None, :]))
            # deL = sum k,v: S[k,v] * dS[k,v]
            b_deL += tl.sum(b_S.to(tl.float32) * b_dS.to(tl.float32))
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
        # eT[i] = decay.1i(g[i])
        b_g_c, b_g_f = cumulative_gate(b_g, 0)
        b_g_tc, b_g_tf = total_gate(b_g, 0)
        b_eT = tl.exp((b_g_tc - b_g_c) + (b_g_tf - b_g_f))
        # t16[i,k] = sp[i] * eT[i] * t2[i,k]
        b_t16 = (b_sp * b_eT)[:, None] * b_t2
        # dk_KR[i,k] = sum r: t16[i,k]
        b_dk_KR += b_t16
        # eG[i] = decay.i0(g[i])
        b_eG = tl.exp(b_g_c + b_g_f)
        # eL = decay.10(g[i])
        b_eL = tl.exp(b_g_tc + b_g_tf)
        p_t31 = t31 + (i_slot * HV + i_hv) * C
        b_t31 = tl.load(p_t31 + o_c)
        # t28[i] = sum k: k[i,k] * t2[i,k]
        b_t28 = tl.sum(b_k.to(tl.float32) * b_t2, 1)
        # t29[i] = eT[i] * t28[i]
        b_t29 = b_eT * b_t28
        p_dsp_r = dsp_r + (i_slot * HV + i_hv) * C
        b_dsp_r = tl.load(p_dsp_r + o_c)
        # dg_eL = eL * deL
        b_dg_eL = b_eL * b_deL
        # t32[i] = sp[i] * eT[i] * t28[i]
        b_t32 = b_sp * b_eT * b_t28
        # dg_eT[i] = cumsum.fwdexcl(t32[i])
        b_dg_eT = tl.sum(tl.where(o_c[:, None] < o_c[None, :], b_t32[:, None], 0.0), 0)
        # t34[i] = eG[i] * scale * t31[i]
        b_t34 = b_eG * scale * b_t31
        # dg_eG[i] = cumsum.revincl(t34[i])
        b_dg_eG = tl.cumsum(b_t34, 0, reverse=True)
        p_dg_E = dg_E + (i_slot * HV + i_hv) * C
        b_dg_E = tl.load(p_dg_E + o_c)
        # dg[i] = dg_eL + dg_eT[i] + dg_eG[i] + dg_E[i]
        b_dg = b_dg_eL + b_dg_eT + b_dg_eG + b_dg_E
        # t38[i] = valid(dg[i])
        b_t38 = tl.where(m_i, b_dg, 0.0)
        # t39[i] = t11 * t38[i]
        b_t39 = b_t11 * b_t38
        # t40_ = sum i: sp[i] * t38[i]
        b_t40_ = tl.sum((b_sp * b_t38)[None, :], 1)
        # t41 = t11 * t40_
        b_t41 = b_t11 * b_t40_
        # dA_log = -t41
        b_dA_log = -b_t41
        if dA_log is not None:
            tl.store(dA_log + (i_slot * HV + i_hv) + tl.arange(0, 1), b_dA_log)
        # dsp[i] = t29[i] + dsp_r[i] - t39[i]
        b_dsp = b_t29 + b_dsp_r - b_t39
        # t44[i] = within(t6[i], dt_min, dt_max)
        b_t44 = tl.where((b_t6 >= dt_min) & (b_t6 <= dt_max), 1.0, 0.0)
        # t45[i] = sigmoid(t5[i])
        b_t45 = tl.sigmoid(b_t5)
        # ddt[i] = dsp[i] * t44[i] * t45[i]
        b_ddt = b_dsp * b_t44 * b_t45
        if ddt is not None:
            p_ddt = ddt + ((i_b * T + first) * HV + i_hv)
            tl.store(p_ddt + start * HV + o_c * HV, tl.where(m_i, b_ddt, 0.0).to(ddt.dtype.element_ty), mask=m_o)
        # ddt_bias = sum i: ddt[i]
        b_ddt_bias = tl.sum((b_ddt)[None, :], 1)
        if ddt_bias is not None:
            tl.store(ddt_bias + (i_slot * HV + i_hv) + tl.arange(0, 1), b_ddt_bias)
    b_q = tl.load(p_q + start * q_st + (o_c[:, None] * q_st + o_k[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
    p_t40 = t40 + (i_slot * (HV // R) + i_h) * (C * C)
    b_t40 = tl.load(p_t40 + (o_c[:, None] * C + o_c[None, :]))
    # t27[i,k] = sum j: q[j,k] * t40[j,i]
    b_t27 = tl.dot(tl.trans(b_t40), b_q, input_precision=PRECISION)
    # dk[i,k] = t27[i,k] + dk_KR[i,k]
    b_dk = b_t27 + b_dk_KR
    if dk is not None:
        p_dk = dk + ((i_b * T + first) * (HV // R) + i_h) * K
        tl.store(
            p_dk + start * ((HV // R) * K) + (o_c[:, None] * ((HV // R) * K) + o_k[None, :]),
            tl.where(m_i[:, None], b_dk, 0.0).to(dk.dtype.element_ty),
            mask=m_o[:, None],
        )
