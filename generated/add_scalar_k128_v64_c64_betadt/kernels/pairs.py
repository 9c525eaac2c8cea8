"""Kernel pairs of add_scalar_k128_v64_c64_betadt.

Spec: gate scalar rule additive beta dt value-dim 64
Plan: cut S+dS, target sm_90
Body: 41cbf35f602445d5
"""

import triton
import triton.language as tl

from ..device import (
    batch_start,
    cumulative_gate,
    decay_between_turned,
    find_sequence,
)


@triton.jit(do_not_specialize=["v_sb", "do_sb", "q_sb", "k_sb", "cu_seqlens", "T", "N"])
def pairs(
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
    v_sb: tl.int64,
    v_st: tl.constexpr,
    v_sh,
    do_sb: tl.int64,
    do_st: tl.constexpr,
    do_sh,
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
    """What the gradients need of pairs of tokens, chunk by chunk."""
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
    p_q = q + batch_start(i_b, q_sb, q_st) + first * q_st + i_h * q_sh
    p_k = k + batch_start(i_b, k_sb, k_st) + first * k_st + i_h * k_sh
    start = i_t * C
    m_i = o_c < tl.minimum(length - start, C).to(tl.int32)
    m_o = o_c < tl.minimum(rows - start, C).to(tl.int32)
    b_q = tl.load(p_q + start * q_st + (o_c[:, None] * q_st + o_k[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
    b_k = tl.load(p_k + start * k_st + (o_c[:, None] * k_st + o_k[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
    # t15[i,j] = sum k: q[i,k] * k[j,k]
    b_t15 = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
    b_t40 = tl.zeros([C, C], dtype=tl.float32)
    for i_r in tl.range(0, R, disable_licm=True):
        i_hv = i_h * R + i_r
        p_sp = sp + (i_slot * HV + i_hv) * C
        b_sp = tl.load(p_sp + o_c)
        b_A_log = tl.load(A_log + i_hv).to(tl.float32)
        # t5 = exp(A_log)
        b_t5 = tl.exp(tl.minimum(b_A_log, 80.0))
        # t6[i] = sp[i] * t5
        b_t6 = b_sp * b_t5
        # t7[i] = -t6[i]
        b_t7 = -b_t6
        # g[i] = valid(t7[i])
        b_g = tl.where(m_i, b_t7, 0.0)
        # E[i,j] = decay.ij(g[i])
        b_g_c, b_g_f = cumulative_gate(b_g)
        b_E = decay_between_turned(b_g_c, b_g_f, C)
        # P[i,j] = E[i,j] * t15[i,j]
        b_P = b_E * b_t15
        p_eT = eT + (i_slot * HV + i_hv) * C
        b_eT = tl.load(p_eT + o_c)
        p_v = v + batch_start(i_b, v_sb, v_st) + first * v_st + i_hv * v_sh
        p_do = do + batch_start(i_b, do_sb, do_st) + first * do_st + i_hv * do_sh
        b_t2 = tl.zeros([C, C], dtype=tl.float32)
        b_t18 = tl.zeros([C], dtype=tl.float32)
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
            # t17[i,v] = sum j: P[j,i] * do[j,v]
            b_t17 = tl.dot(b_P.to(DOT), b_do, input_precision=PRECISION)
            # t18[i] = sum v: v[i,v] * t17[i,v]
            b_t18 += tl.sum(b_v.to(tl.float32) * b_t17, 1)
            p_dS = dS + (i_slot * HV + i_hv) * (K * V)
            b_dS = tl.load(p_dS + (o_k[:, None] * V + o_v[None, :]))
            # t21[i,v] = sum k: k[i,k] * dS[k,v]
            b_t21 = tl.dot(b_k, b_dS, input_precision=PRECISION)
            # t22[i,v] = sp[i] * eT[i] * t21[i,v]
            b_t22 = b_t21 * (b_sp * b_eT)[:, None]
            # dv_r[i,v] = sp[i] * scale * t17[i,v]
            b_dv_r = scale * b_t17 * b_sp[:, None]
            # dv[i,v] = t22[i,v] + dv_r[i,v]
            b_dv = b_t22 + b_dv_r
            if dv is not None:
                p_dv = dv + ((i_b * T + first) * HV + i_hv) * V
                tl.store(
                    p_dv + start * (HV * V) + (o_c[:, None] * (HV * V) + o_v[None, :]),
                    tl.where(m_i[:, None], b_dv, 0.0).to(dv.dtype.element_ty),
                    mask=m_o[:, None],
                )
        # t11[i,j] = sp[j] * E[i,j] * scale * t2[i,j]
        b_t11 = b_E * scale * b_t2 * b_sp[:, None]
        # t40[i,j] = sum r: t11[i,j]
        b_t40 += b_t11
        # dsp_r[i] = scale * t18[i]
        b_dsp_r = scale * b_t18
        p_dsp_r = dsp_r + (i_slot * HV + i_hv) * C
        tl.store(p_dsp_r + o_c, b_dsp_r.to(dsp_r.dtype.element_ty))
        # t26[i,j] = sp[j] * E[i,j] * t15[i,j] * scale * t2[i,j] * strict[i,j]
        b_t26 = tl.where(o_c[None, :] > o_c[:, None], b_E * b_t15 * scale * b_t2 * b_sp[:, None], 0.0)
        # t27[i,j] = cumsum.revincl(t26[i,j])
        b_t27 = tl.cumsum(b_t26, 1, reverse=True)
        # dg_E[i] = sum j: strict[i,j] * t27[i,j]
        b_dg_E = tl.sum(tl.where(o_c[None, :] > o_c[:, None], b_t27, 0.0), 0)
        p_dg_E = dg_E + (i_slot * HV + i_hv) * C
        tl.store(p_dg_E + o_c, b_dg_E.to(dg_E.dtype.element_ty))
    p_t40 = t40 + (i_slot * (HV // R) + i_h) * (C * C)
    tl.store(p_t40 + (o_c[:, None] + o_c[None, :] * C), b_t40.to(t40.dtype.element_ty))
