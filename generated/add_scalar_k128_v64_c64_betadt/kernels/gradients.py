"""Kernel gradients of add_scalar_k128_v64_c64_betadt.

Spec: gate scalar rule additive beta dt value-dim 64
Plan: cut S+dS, target sm_90
Body: 6c68a31b8c549a05
"""

import triton
import triton.language as tl

from ..device import (
    batch_start,
    find_sequence,
    softplus,
)


@triton.jit(do_not_specialize=["v_sb", "q_sb", "k_sb", "dt", "dt_sb", "dt_sh", "cu_seqlens", "T", "N"])
def gradients(
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
    v_sb: tl.int64,
    v_st: tl.constexpr,
    v_sh,
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
    BV: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """All other gradients, chunk by chunk."""
    C: tl.constexpr = 64
    K: tl.constexpr = 128
    V: tl.constexpr = 64
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
    p_k = k + batch_start(i_b, k_sb, k_st) + first * k_st + i_h * k_sh
    p_q = q + batch_start(i_b, q_sb, q_st) + first * q_st + i_h * q_sh
    start = i_t * C
    m_i = o_c < tl.minimum(length - start, C).to(tl.int32)
    m_o = o_c < tl.minimum(rows - start, C).to(tl.int32)
    b_k = tl.load(p_k + start * k_st + (o_c[:, None] * k_st + o_k[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
    b_dk_KR = tl.zeros([C, BK], dtype=tl.float32)
    for i_r in tl.range(0, R, disable_licm=True):
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
        p_sp = sp + (i_slot * HV + i_hv) * C
        b_sp = tl.load(p_sp + o_c)
        p_eT = eT + (i_slot * HV + i_hv) * C
        b_eT = tl.load(p_eT + o_c)
        b_dt = tl.load(p_dt + start * dt_st + o_c * dt_st, mask=m_i, other=0.0).to(tl.float32)
        # t5[i,k] = sp[i] * eT[i] * t2[i,k]
        b_t5 = b_t2 * (b_sp * b_eT)[:, None]
        # dk_KR[i,k] = sum r: t5[i,k]
        b_dk_KR += b_t5
        # t13[i] = dt[i] + dt_bias
        b_t13 = b_dt + b_dt_bias
        # t14[i] = softplus(t13[i])
        b_t14 = softplus(b_t13)
        p_eG = eG + (i_slot * HV + i_hv) * C
        b_eG = tl.load(p_eG + o_c)
        p_eL = eL + i_slot * HV + i_hv
        b_eL = tl.load(p_eL)
        p_t31 = t31 + (i_slot * HV + i_hv) * C
        b_t31 = tl.load(p_t31 + o_c)
        # t18 = exp(A_log)
        b_t18 = tl.exp(tl.minimum(b_A_log, 80.0))
        p_dsp_r = dsp_r + (i_slot * HV + i_hv) * C
        b_dsp_r = tl.load(p_dsp_r + o_c)
        # t25[i] = sum k: k[i,k] * t2[i,k]
        b_t25 = tl.sum(b_k.to(tl.float32) * b_t2, 1)
        # t26[i] = eT[i] * t25[i]
        b_t26 = b_eT * b_t25
        p_dg_E = dg_E + (i_slot * HV + i_hv) * C
        b_dg_E = tl.load(p_dg_E + o_c)
        # dg_eL = eL * deL
        b_dg_eL = b_eL * b_deL
        # t29[i] = sp[i] * eT[i] * t25[i]
        b_t29 = b_sp * b_eT * b_t25
        # dg_eT[i] = cumsum.fwdexcl(t29[i])
        b_dg_eT = tl.sum(tl.where(o_c[:, None] < o_c[None, :], b_t29[:, None], 0.0), 0)
        # t31_[i] = eG[i] * scale * t31[i]
        b_t31_ = b_eG * scale * b_t31
        # dg_eG[i] = cumsum.revincl(t31_[i])
        b_dg_eG = tl.cumsum(b_t31_, 0, reverse=True)
        # dg[i] = dg_eL + dg_eT[i] + dg_eG[i] + dg_E[i]
        b_dg = b_dg_eL + b_dg_eT + b_dg_eG + b_dg_E
        # t35[i] = valid(dg[i])
        b_t35 = tl.where(m_i, b_dg, 0.0)
        # t36[i] = t18 * t35[i]
        b_t36 = b_t18 * b_t35
        # t37 = sum i: sp[i] * t35[i]
        b_t37 = tl.sum((b_sp * b_t35)[None, :], 1)
        # t38 = t18 * t37
        b_t38 = b_t18 * b_t37
        # dA_log = -t38
        b_dA_log = -b_t38
        if dA_log is not None:
            tl.store(dA_log + (i_slot * HV + i_hv) + tl.arange(0, 1), b_dA_log)
        # dsp[i] = t26[i] + dsp_r[i] - t36[i]
        b_dsp = b_t26 + b_dsp_r - b_t36
        # t41[i] = within(t14[i], dt_min, dt_max)
        b_t41 = tl.where((b_t14 >= dt_min) & (b_t14 <= dt_max), 1.0, 0.0)
        # t42[i] = sigmoid(t13[i])
        b_t42 = tl.sigmoid(b_t13)
        # ddt[i] = dsp[i] * t41[i] * t42[i]
        b_ddt = b_dsp * b_t41 * b_t42
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
    # t24[i,k] = sum j: q[j,k] * t40[j,i]
    b_t24 = tl.dot(tl.trans(b_t40), b_q, input_precision=PRECISION)
    # dk[i,k] = t24[i,k] + dk_KR[i,k]
    b_dk = b_t24 + b_dk_KR
    if dk is not None:
        p_dk = dk + ((i_b * T + first) * (HV // R) + i_h) * K
        tl.store(
            p_dk + start * ((HV // R) * K) + (o_c[:, None] * ((HV // R) * K) + o_k[None, :]),
            tl.where(m_i[:, None], b_dk, 0.0).to(dk.dtype.element_ty),
            mask=m_o[:, None],
        )
