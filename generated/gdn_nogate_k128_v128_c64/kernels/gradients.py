"""Kernel gradients of gdn_nogate_k128_v128_c64.

Spec: gate none
Plan: cut S+X+e+r+dS+dr_PR+dy, target sm_90
Body: c32b0da0b40b53ce
"""

import triton
import triton.language as tl

from ..device import (
    batch_start,
    find_sequence,
)


@triton.jit(do_not_specialize=["q_sb", "k_sb", "cu_seqlens", "T", "N"])
def gradients(
    q,
    k,
    r,
    dS,
    e,
    dy,
    S,
    beta_f,
    dP,
    t43,
    t46,
    dk,
    dv,
    dbeta,
    cu_seqlens,
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
    C: tl.constexpr = 64
    K: tl.constexpr = 128
    V: tl.constexpr = 128
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
    # t11[i,k] = sum r: t10[i,k]
    # t10[i,k] = t2[i,k] - t9[i,k]
    b_t11 = tl.zeros([C, BK], dtype=tl.float32)
    for i_r in tl.range(0, R, disable_licm=True):
        i_hv = i_h * R + i_r
        p_beta_f = beta_f + (i_slot * HV + i_hv) * C
        b_beta_f = tl.load(p_beta_f + o_c)
        b_t2 = tl.zeros([C, BK], dtype=tl.float32)
        for i_v in tl.range(0, tl.cdiv(V, BV)):
            o_v = i_v * BV + tl.arange(0, BV)
            p_r = r + (i_slot * HV + i_hv) * (C * V)
            b_r = tl.load(p_r + (o_c[:, None] * V + o_v[None, :]))
            p_dS = dS + (i_slot * HV + i_hv) * (K * V)
            b_dS = tl.load(p_dS + (o_k[:, None] * V + o_v[None, :]))
            # t2[i,k] = sum v: r[i,v] * dS[k,v]
            b_t2 = tl.dot(b_r, tl.trans(b_dS), b_t2, input_precision=PRECISION)
        b_t11 += b_t2
        b_dbeta_y = tl.zeros([C], dtype=tl.float32)
        b_t7 = tl.zeros([C, BK], dtype=tl.float32)
        for i_v in tl.range(0, tl.cdiv(V, BV)):
            o_v = i_v * BV + tl.arange(0, BV)
            p_e = e + (i_slot * HV + i_hv) * (C * V)
            b_e = tl.load(p_e + (o_c[:, None] * V + o_v[None, :]))
            p_dy = dy + (i_slot * HV + i_hv) * (C * V)
            b_dy = tl.load(p_dy + (o_c[:, None] * V + o_v[None, :]))
            # dbeta_y[i] = sum v: e[i,v] * dy[i,v]
            b_dbeta_y += tl.sum(b_e.to(tl.float32) * b_dy.to(tl.float32), 1)
            p_S = S + (i_slot * HV + i_hv) * (K * V)
            b_S = tl.load(p_S + (o_k[:, None] * V + o_v[None, :]))
            # t7[i,k] = sum v: S[k,v] * dy[i,v]
            b_t7 = tl.dot(b_dy, tl.trans(b_S), b_t7, input_precision=PRECISION)
            # de[i,v] = beta_f[i] * dy[i,v]
            b_de = b_dy.to(tl.float32) * b_beta_f[:, None]
            if dv is not None:
                p_dv = dv + ((i_b * T + first) * HV + i_hv) * V
                tl.store(
                    p_dv + start * (HV * V) + (o_c[:, None] * (HV * V) + o_v[None, :]),
                    tl.where(m_i[:, None], b_de, 0.0).to(dv.dtype.element_ty),
                    mask=m_o[:, None],
                )
        p_t43 = t43 + (i_slot * HV + i_hv) * C
        b_t43 = tl.load(p_t43 + o_c)
        # t9[i,k] = beta_f[i] * t7[i,k]
        b_t9 = b_t7 * b_beta_f[:, None]
        b_t11 -= b_t9
        # dbeta[i] = dbeta_y[i] - t43[i]
        b_dbeta = b_dbeta_y - b_t43
        if dbeta is not None:
            p_dbeta = dbeta + ((i_b * T + first) * HV + i_hv)
            tl.store(p_dbeta + start * HV + o_c * HV, tl.where(m_i, b_dbeta, 0.0).to(dbeta.dtype.element_ty), mask=m_o)
    b_q = tl.load(p_q + start * q_st + (o_c[:, None] * q_st + o_k[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
    b_k = tl.load(p_k + start * k_st + (o_c[:, None] * k_st + o_k[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
    p_dP = dP + (i_slot * (HV // R) + i_h) * (C * C)
    b_dP = tl.load(p_dP + (o_c[:, None] * C + o_c[None, :]))
    p_t46 = t46 + (i_slot * (HV // R) + i_h) * (C * C)
    b_t46 = tl.load(p_t46 + (o_c[:, None] * C + o_c[None, :]))
    # t16[i,j] = causal[i,j] * dP[i,j]
    b_t16 = tl.where(o_c[:, None] >= o_c[None, :], b_dP.to(tl.float32), 0.0)
    # t17[i,k] = sum j: q[j,k] * t16[j,i]
    b_t17 = tl.dot(tl.trans(b_t16.to(DOT)), b_q, input_precision=PRECISION)
    # t21[i,j] = t46[i,j] + t46[j,i]
    b_t21 = b_t46.to(tl.float32) + tl.trans(b_t46.to(tl.float32))
    # t22[i,k] = sum j: k[j,k] * t21[i,j]
    b_t22 = tl.dot(b_t21.to(DOT), b_k, input_precision=PRECISION)
    # dk[i,k] = t17[i,k] + t11[i,k] + t22[i,k]
    b_dk = b_t17 + b_t11 + b_t22
    if dk is not None:
        p_dk = dk + ((i_b * T + first) * (HV // R) + i_h) * K
        tl.store(
            p_dk + start * ((HV // R) * K) + (o_c[:, None] * ((HV // R) * K) + o_k[None, :]),
            tl.where(m_i[:, None], b_dk, 0.0).to(dk.dtype.element_ty),
            mask=m_o[:, None],
        )
