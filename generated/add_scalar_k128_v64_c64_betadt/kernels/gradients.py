"""Kernel gradients of add_scalar_k128_v64_c64_betadt.

Spec: gate scalar rule additive beta dt value-dim 64
Plan: cut S+dS, target sm_90
Body: c8aed8e97930160c
"""

import triton
import triton.language as tl

from ..device import (
    SATURATION,
    cumulative_gate,
    decay_between_turned,
    find_sequence,
    softplus,
    total_gate,
)

C = tl.constexpr(64)
K = tl.constexpr(128)
V = tl.constexpr(64)
BK = tl.constexpr(128)


@triton.jit(do_not_specialize=["T", "N"])
def gradients(
    v,
    do,
    dt,
    dt_bias,
    A_log,
    q,
    k,
    dS,
    S,
    t31,
    dk,
    dv,
    ddt,
    ddt_bias,
    dA_log,
    cu_seqlens,
    dt_min,
    dt_max,
    scale,
    v_sb,
    v_st: tl.constexpr,
    v_sh,
    do_sb,
    do_st: tl.constexpr,
    do_sh,
    dt_sb,
    dt_st: tl.constexpr,
    dt_sh,
    q_sb,
    q_st: tl.constexpr,
    q_sh,
    k_sb,
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
    p_q = q + i_b * q_sb + first * q_st + i_h * q_sh
    p_k = k + i_b * k_sb + first * k_st + i_h * k_sh
    start = i_t * C
    m_i = o_c < tl.minimum(length - start, C).to(tl.int32)
    m_o = o_c < tl.minimum(rows - start, C).to(tl.int32)
    b_q = tl.load(p_q + start * q_st + (o_c[:, None] * q_st + o_k[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
    b_k = tl.load(p_k + start * k_st + (o_c[:, None] * k_st + o_k[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
    # t28[i,j] = sum k: q[i,k] * k[j,k]
    b_t28 = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
    b_dk_KR = tl.zeros([C, BK], dtype=tl.float32)
    b_t18 = tl.zeros([C, C], dtype=tl.float32)
    for i_r in tl.range(0, R):
        i_hv = i_h * R + i_r
        p_dt = dt + i_b * dt_sb + first * dt_st + i_hv * dt_sh
        b_dt = tl.load(p_dt + start * dt_st + o_c * dt_st, mask=m_i, other=0.0).to(tl.float32)
        if dt_bias is not None:
            b_dt_bias = tl.load(dt_bias + i_hv).to(tl.float32)
        else:
            b_dt_bias = 0.0
        # t5[i] = dt[i] + dt_bias
        b_t5 = b_dt + b_dt_bias
        # t6[i] = softplus(t5[i])
        b_t6 = softplus(b_t5)
        # sp[i] = clamp(t6[i], dt_min, dt_max)
        b_sp = tl.minimum(tl.maximum(b_t6, dt_min), dt_max)
        b_A_log = tl.load(A_log + i_hv).to(tl.float32)
        # t11 = exp(A_log)
        b_t11 = tl.exp(tl.minimum(b_A_log, SATURATION))
        # t12[i] = sp[i] * t11
        b_t12 = b_sp * b_t11
        # t13[i] = -t12[i]
        b_t13 = -b_t12
        # g[i] = valid(t13[i])
        b_g = tl.where(m_i, b_t13, 0.0)
        # E[i,j] = decay.ij(g[i])
        b_g_c, b_g_f = cumulative_gate(b_g)
        b_E = decay_between_turned(b_g_c, b_g_f, C)
        # eT[i] = decay.1i(g[i])
        b_g_tc, b_g_tf = total_gate(b_g)
        b_eT = tl.exp((b_g_tc - b_g_c) + (b_g_tf - b_g_f))
        # P[i,j] = E[i,j] * t28[i,j]
        b_P = b_E * b_t28
        # eG[i] = decay.i0(g[i])
        b_eG = tl.exp(b_g_c + b_g_f)
        # eL = decay.10(g[i])
        b_eL = tl.exp(b_g_tc + b_g_tf)
        p_t31 = t31 + (i_slot * HV + i_hv) * C
        b_t31 = tl.load(p_t31 + o_c)
        # t45[i] = eG[i] * scale * t31[i]
        b_t45 = b_eG * scale * b_t31
        # t63[i] = within(t6[i], dt_min, dt_max)
        b_t63 = tl.where((b_t6 >= dt_min) & (b_t6 <= dt_max), 1.0, 0.0)
        # t64[i] = sigmoid(t5[i])
        b_t64 = tl.sigmoid(b_t5)
        p_v = v + i_b * v_sb + first * v_st + i_hv * v_sh
        b_t20 = tl.zeros([C, BK], dtype=tl.float32)
        b_deL = 0.0
        p_do = do + i_b * do_sb + first * do_st + i_hv * do_sh
        for i_v in tl.range(0, tl.cdiv(V, BV)):
            o_v = i_v * BV + tl.arange(0, BV)
            b_v = tl.load(p_v + start * v_st + (o_c[:, None] * v_st + o_v[None, :]), mask=m_i[:, None], other=0.0).to(
                DOT
            )
            p_dS = dS + (i_slot * HV + i_hv) * (K * V)
            b_dS = tl.load(p_dS + (o_k[:, None] * V + o_v[None, :]))
            # t20[i,k] = sum v: v[i,v] * dS[k,v]
            b_t20 = tl.dot(b_v, tl.trans(b_dS), b_t20, input_precision=PRECISION)
            p_S = S + (i_slot * HV + i_hv) * (K * V)
            b_S = tl.load(p_S + (o_k[:, None] * V + o_v[None, :]))
            # deL = sum k,v: S[k,v] * dS[k,v]
            b_deL += tl.sum(b_S.to(tl.float32) * b_dS.to(tl.float32))
        # t22[i,k] = sp[i] * eT[i] * t20[i,k]
        b_t22 = (b_sp * b_eT)[:, None] * b_t20
        # dk_KR[i,k] = sum r: t22[i,k]
        b_dk_KR += b_t22
        # t38[i] = sum k: k[i,k] * t20[i,k]
        b_t38 = tl.sum(b_k.to(tl.float32) * b_t20, 1)
        # t39[i] = eT[i] * t38[i]
        b_t39 = b_eT * b_t38
        # dg_eL = eL * deL
        b_dg_eL = b_eL * b_deL
        # t43[i] = sp[i] * eT[i] * t38[i]
        b_t43 = b_sp * b_eT * b_t38
        # dg_eT[i] = cumsum.fwdexcl(t43[i])
        b_dg_eT = tl.sum(tl.where(o_c[:, None] < o_c[None, :], b_t43[:, None], 0.0), 0)
        b_t2 = tl.zeros([C, C], dtype=tl.float32)
        b_t31_ = tl.zeros([C], dtype=tl.float32)
        for i_v in tl.range(0, tl.cdiv(V, BV)):
            o_v = i_v * BV + tl.arange(0, BV)
            b_v = tl.load(p_v + start * v_st + (o_c[:, None] * v_st + o_v[None, :]), mask=m_i[:, None], other=0.0).to(
                DOT
            )
            b_do = tl.load(
                p_do + start * do_st + (o_c[:, None] * do_st + o_v[None, :]), mask=m_i[:, None], other=0.0
            ).to(DOT)
            # t2[i,j] = sum v: v[j,v] * do[i,v]
            b_t2 = tl.dot(b_v, tl.trans(b_do), b_t2, input_precision=PRECISION)
            p_dS = dS + (i_slot * HV + i_hv) * (K * V)
            b_dS = tl.load(p_dS + (o_k[:, None] * V + o_v[None, :]))
            # t30[i,v] = sum j: P[j,i] * do[j,v]
            b_t30 = tl.dot(b_P.to(DOT), b_do, input_precision=PRECISION)
            # t31_[i] = sum v: v[i,v] * t30[i,v]
            b_t31_ += tl.sum(b_v.to(tl.float32) * b_t30, 1)
            # t36[i,v] = sum k: k[i,k] * dS[k,v]
            b_t36 = tl.dot(b_k, b_dS, input_precision=PRECISION)
            # t37[i,v] = sp[i] * eT[i] * t36[i,v]
            b_t37 = (b_sp * b_eT)[:, None] * b_t36
            # dv_r[i,v] = sp[i] * scale * t30[i,v]
            b_dv_r = b_sp[:, None] * scale * b_t30
            # dv[i,v] = t37[i,v] + dv_r[i,v]
            b_dv = b_t37 + b_dv_r
            if dv is not None:
                p_dv = dv + ((i_b * T + first) * HV + i_hv) * V
                tl.store(
                    p_dv + start * (HV * V) + (o_c[:, None] * (HV * V) + o_v[None, :]),
                    tl.where(m_i[:, None], b_dv, 0.0).to(dv.dtype.element_ty),
                    mask=m_o[:, None],
                )
        # t17[i,j] = sp[j] * E[i,j] * scale * t2[i,j]
        b_t17 = b_sp[:, None] * b_E * scale * b_t2
        # t18[i,j] = sum r: t17[i,j]
        b_t18 += b_t17
        # dsp_r[i] = scale * t31_[i]
        b_dsp_r = scale * b_t31_
        # t47[i,j] = sp[j] * t2[i,j] * strict[i,j]
        b_t47 = tl.where(o_c[None, :] > o_c[:, None], b_sp[:, None] * b_t2, 0.0)
        # t48[i] = sum j: P[i,j] * t47[i,j]
        b_t48 = tl.sum(b_P * b_t47, 0)
        # t49[i] = scale * t48[i]
        b_t49 = scale * b_t48
        # t50[i,j] = E[i,j] * t28[i,j] * t2[i,j]
        b_t50 = b_E * b_t28 * b_t2
        # t51[i] = sum j: strict[j,i] * t50[j,i]
        b_t51 = tl.sum(tl.where(o_c[None, :] > o_c[:, None], b_t50, 0.0), 1)
        # t52[i] = sp[i] * scale * t51[i]
        b_t52 = b_sp * scale * b_t51
        # t53[i] = t49[i] - t52[i]
        b_t53 = b_t49 - b_t52
        # t54[i] = t45[i] + t53[i]
        b_t54 = b_t45 + b_t53
        # t55[i] = cumsum.revincl(t54[i])
        b_t55 = tl.cumsum(b_t54, 0, reverse=True)
        # dg[i] = dg_eL + dg_eT[i] + t55[i]
        b_dg = b_dg_eL + b_dg_eT + b_t55
        # t57[i] = valid(dg[i])
        b_t57 = tl.where(m_i, b_dg, 0.0)
        # t58[i] = t11 * t57[i]
        b_t58 = b_t11 * b_t57
        # t59 = sum i: sp[i] * t57[i]
        b_t59 = tl.sum((b_sp * b_t57)[None, :], 1)
        # t60 = t11 * t59
        b_t60 = b_t11 * b_t59
        # t61 = -t60
        b_t61 = -b_t60
        if dA_log is not None:
            tl.store(dA_log + (i_slot * HV + i_hv) + tl.arange(0, 1), b_t61)
        # dsp[i] = t39[i] + dsp_r[i] - t58[i]
        b_dsp = b_t39 + b_dsp_r - b_t58
        # ddt[i] = dsp[i] * t63[i] * t64[i]
        b_ddt = b_dsp * b_t63 * b_t64
        if ddt is not None:
            p_ddt = ddt + ((i_b * T + first) * HV + i_hv)
            tl.store(p_ddt + start * HV + o_c * HV, tl.where(m_i, b_ddt, 0.0).to(ddt.dtype.element_ty), mask=m_o)
        # t66 = sum i: ddt[i]
        b_t66 = tl.sum((b_ddt)[None, :], 1)
        if ddt_bias is not None:
            tl.store(ddt_bias + (i_slot * HV + i_hv) + tl.arange(0, 1), b_t66)
    # t35[i,k] = sum j: q[j,k] * t18[j,i]
    b_t35 = tl.dot(b_t18.to(DOT), b_q, input_precision=PRECISION)
    # dk[i,k] = t35[i,k] + dk_KR[i,k]
    b_dk = b_t35 + b_dk_KR
    if dk is not None:
        p_dk = dk + ((i_b * T + first) * (HV // R) + i_h) * K
        tl.store(
            p_dk + start * ((HV // R) * K) + (o_c[:, None] * ((HV // R) * K) + o_k[None, :]),
            tl.where(m_i[:, None], b_dk, 0.0).to(dk.dtype.element_ty),
            mask=m_o[:, None],
        )
