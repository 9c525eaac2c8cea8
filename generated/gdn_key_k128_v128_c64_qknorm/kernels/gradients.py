"""Kernel gradients of gdn_key_k128_v128_c64_qknorm.

Spec: gate key qk-norm
Plan: cut S+X+e+r+P+dS+dy, target sm_90
Body: 5f24f66d203a055a
"""

import triton
import triton.language as tl

from ..device import (
    batch_start,
    find_sequence,
)


@triton.jit(do_not_specialize=["k_sb", "cu_seqlens", "T", "N"])
def gradients(
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
    p_k = k + batch_start(i_b, k_sb, k_st) + first * k_st + i_h * k_sh
    start = i_t * C
    m_i = o_c < tl.minimum(length - start, C).to(tl.int32)
    m_o = o_c < tl.minimum(rows - start, C).to(tl.int32)
    # dkn[i,k] = sum r: t17[i,k]
    # t17[i,k] = t92[i,k] + t16[i,k]
    b_dkn = tl.zeros([C, BK], dtype=tl.float32)
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
        p_t60 = t60 + (i_slot * HV + i_hv) * (C * K)
        b_t60 = tl.load(p_t60 + (o_c[:, None] * K + o_k[None, :]))
        p_eTk = eTk + (i_slot * HV + i_hv) * (C * K)
        b_eTk = tl.load(p_eTk + (o_c[:, None] * K + o_k[None, :]))
        # t14[i,k] = eTk[i,k] * t2[i,k]
        b_t14 = b_eTk.to(tl.float32) * b_t2
        # t15[i,k] = t60[i,k] + t14[i,k]
        b_t15 = b_t60.to(tl.float32) + b_t14
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
        p_t92 = t92 + (i_slot * HV + i_hv) * (C * K)
        b_t92 = tl.load(p_t92 + (o_c[:, None] * K + o_k[None, :]))
        b_dkn += b_t92.to(tl.float32)
        p_eGk = eGk + (i_slot * HV + i_hv) * (C * K)
        b_eGk = tl.load(p_eGk + (o_c[:, None] * K + o_k[None, :]))
        p_t73 = t73 + (i_slot * HV + i_hv) * C
        b_t73 = tl.load(p_t73 + o_c)
        # t11[i,k] = eGk[i,k] * beta_f[i] * t7[i,k]
        b_t11 = b_eGk.to(tl.float32) * b_t7 * b_beta_f[:, None]
        # t16[i,k] = -t11[i,k] + t15[i,k]
        b_t16 = b_t15 - b_t11
        b_dkn += b_t16
        # dbeta[i] = dbeta_y[i] - t73[i]
        b_dbeta = b_dbeta_y - b_t73
        if dbeta is not None:
            p_dbeta = dbeta + ((i_b * T + first) * HV + i_hv)
            tl.store(p_dbeta + start * HV + o_c * HV, tl.where(m_i, b_dbeta, 0.0).to(dbeta.dtype.element_ty), mask=m_o)
    b_k = tl.load(p_k + start * k_st + (o_c[:, None] * k_st + o_k[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
    # t21[i] = sum k: k[i,k] * k[i,k]
    b_t21 = tl.sum(b_k.to(tl.float32) * b_k.to(tl.float32), 1)
    # t22[i] = 1e-06 + t21[i]
    b_t22 = 1e-06 + b_t21
    # t23[i] = rsqrt(t22[i])
    b_t23 = tl.rsqrt(b_t22)
    # t26[i,k] = t23[i] * dkn[i,k]
    b_t26 = b_dkn * b_t23[:, None]
    # t27[i] = sum k: k[i,k] * dkn[i,k]
    b_t27 = tl.sum(b_k.to(tl.float32) * b_dkn, 1)
    # t28[i,k] = k[i,k] * t23[i] * t23[i] * t23[i] * t27[i]
    b_t28 = b_k.to(tl.float32) * (b_t23 * b_t23 * b_t23 * b_t27)[:, None]
    # dk[i,k] = t26[i,k] - t28[i,k]
    b_dk = b_t26 - b_t28
    if dk is not None:
        p_dk = dk + ((i_b * T + first) * (HV // R) + i_h) * K
        tl.store(
            p_dk + start * ((HV // R) * K) + (o_c[:, None] * ((HV // R) * K) + o_k[None, :]),
            tl.where(m_i[:, None], b_dk, 0.0).to(dk.dtype.element_ty),
            mask=m_o[:, None],
        )
