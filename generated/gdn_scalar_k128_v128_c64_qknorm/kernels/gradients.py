"""Kernel gradients of gdn_scalar_k128_v128_c64_qknorm.

Spec: gate scalar qk-norm
Plan: cut S+X+e+r+P+dS+dy, target sm_90
Body: a85a6042cf99d3c5
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
    # t15[i,k] = sum r: t14[i,k]
    # t14[i,k] = t10[i,k] - t13[i,k]
    b_t15 = tl.zeros([C, BK], dtype=tl.float32)
    p_kn = kn + (i_slot * (HV // R) + i_h) * (C * K)
    b_kn = tl.load(p_kn + (o_c[:, None] * K + o_k[None, :]))
    for i_r in tl.range(0, R, disable_licm=True):
        i_hv = i_h * R + i_r
        p_beta_f = beta_f + (i_slot * HV + i_hv) * C
        b_beta_f = tl.load(p_beta_f + o_c)
        b_t2 = tl.zeros([C, BK], dtype=tl.float32)
        b_deL = 0.0
        for i_v in tl.range(0, tl.cdiv(V, BV)):
            o_v = i_v * BV + tl.arange(0, BV)
            p_r = r + (i_slot * HV + i_hv) * (C * V)
            b_r = tl.load(p_r + (o_c[:, None] * V + o_v[None, :]))
            p_dS = dS + (i_slot * HV + i_hv) * (K * V)
            b_dS = tl.load(p_dS + (o_k[:, None] * V + o_v[None, :]))
            # t2[i,k] = sum v: r[i,v] * dS[k,v]
            b_t2 = tl.dot(b_r, tl.trans(b_dS), b_t2, input_precision=PRECISION)
            p_S = S + (i_slot * HV + i_hv) * (K * V)
            b_S = tl.load(p_S + (o_k[:, None] * V + o_v[None, :]))
            # deL = sum k,v: S[k,v] * dS[k,v]
            b_deL += tl.sum(b_S.to(tl.float32) * b_dS.to(tl.float32))
        p_eT = eT + (i_slot * HV + i_hv) * C
        b_eT = tl.load(p_eT + o_c)
        p_eL = eL + i_slot * HV + i_hv
        b_eL = tl.load(p_eL)
        # t10[i,k] = eT[i] * t2[i,k]
        b_t10 = b_t2 * b_eT[:, None]
        b_t15 += b_t10
        # deT[i] = sum k: kn[i,k] * t2[i,k]
        b_deT = tl.sum(b_kn.to(tl.float32) * b_t2, 1)
        # dg_eL = eL * deL
        b_dg_eL = b_eL * b_deL
        # t34[i] = eT[i] * deT[i]
        b_t34 = b_eT * b_deT
        # dg_eT[i] = cumsum.fwdexcl(t34[i])
        b_dg_eT = tl.sum(tl.where(o_c[:, None] < o_c[None, :], b_t34[:, None], 0.0), 0)
        b_dbeta_y = tl.zeros([C], dtype=tl.float32)
        b_t8 = tl.zeros([C, BK], dtype=tl.float32)
        for i_v in tl.range(0, tl.cdiv(V, BV)):
            o_v = i_v * BV + tl.arange(0, BV)
            p_S = S + (i_slot * HV + i_hv) * (K * V)
            b_S = tl.load(p_S + (o_k[:, None] * V + o_v[None, :]))
            p_e = e + (i_slot * HV + i_hv) * (C * V)
            b_e = tl.load(p_e + (o_c[:, None] * V + o_v[None, :]))
            p_dy = dy + (i_slot * HV + i_hv) * (C * V)
            b_dy = tl.load(p_dy + (o_c[:, None] * V + o_v[None, :]))
            # dbeta_y[i] = sum v: e[i,v] * dy[i,v]
            b_dbeta_y += tl.sum(b_e.to(tl.float32) * b_dy.to(tl.float32), 1)
            # t8[i,k] = sum v: S[k,v] * dy[i,v]
            b_t8 = tl.dot(b_dy, tl.trans(b_S), b_t8, input_precision=PRECISION)
            # de[i,v] = beta_f[i] * dy[i,v]
            b_de = b_dy.to(tl.float32) * b_beta_f[:, None]
            if dv is not None:
                p_dv = dv + ((i_b * T + first) * HV + i_hv) * V
                tl.store(
                    p_dv + start * (HV * V) + (o_c[:, None] * (HV * V) + o_v[None, :]),
                    tl.where(m_i[:, None], b_de, 0.0).to(dv.dtype.element_ty),
                    mask=m_o[:, None],
                )
        p_eG = eG + (i_slot * HV + i_hv) * C
        b_eG = tl.load(p_eG + o_c)
        p_deG_QS = deG_QS + (i_slot * HV + i_hv) * C
        b_deG_QS = tl.load(p_deG_QS + o_c)
        p_t70 = t70 + (i_slot * HV + i_hv) * C
        b_t70 = tl.load(p_t70 + o_c)
        # t13[i,k] = eG[i] * beta_f[i] * t8[i,k]
        b_t13 = b_t8 * (b_eG * b_beta_f)[:, None]
        b_t15 -= b_t13
        p_dg_E = dg_E + (i_slot * HV + i_hv) * C
        b_dg_E = tl.load(p_dg_E + o_c)
        # t31[i] = sum k: kn[i,k] * t8[i,k]
        b_t31 = tl.sum(b_kn.to(tl.float32) * b_t8, 1)
        # t32[i] = beta_f[i] * t31[i]
        b_t32 = b_beta_f * b_t31
        # deG[i] = deG_QS[i] - t32[i]
        b_deG = b_deG_QS - b_t32
        # t37[i] = eG[i] * deG[i]
        b_t37 = b_eG * b_deG
        # dg_eG[i] = cumsum.revincl(t37[i])
        b_dg_eG = tl.cumsum(b_t37, 0, reverse=True)
        # dg[i] = dg_eL + dg_eT[i] + dg_eG[i] + dg_E[i]
        b_dg = b_dg_eL + b_dg_eT + b_dg_eG + b_dg_E
        if dg is not None:
            p_dg = dg + ((i_b * T + first) * HV + i_hv)
            tl.store(p_dg + start * HV + o_c * HV, tl.where(m_i, b_dg, 0.0).to(dg.dtype.element_ty), mask=m_o)
        # dbeta[i] = dbeta_y[i] - t70[i]
        b_dbeta = b_dbeta_y - b_t70
        if dbeta is not None:
            p_dbeta = dbeta + ((i_b * T + first) * HV + i_hv)
            tl.store(p_dbeta + start * HV + o_c * HV, tl.where(m_i, b_dbeta, 0.0).to(dbeta.dtype.element_ty), mask=m_o)
    p_qn = qn + (i_slot * (HV // R) + i_h) * (C * K)
    b_qn = tl.load(p_qn + (o_c[:, None] * K + o_k[None, :]))
    b_k = tl.load(p_k + start * k_st + (o_c[:, None] * k_st + o_k[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
    p_t52 = t52 + (i_slot * (HV // R) + i_h) * (C * C)
    b_t52 = tl.load(p_t52 + (o_c[:, None] * C + o_c[None, :]))
    # t19[i] = sum k: k[i,k] * k[i,k]
    b_t19 = tl.sum(b_k.to(tl.float32) * b_k.to(tl.float32), 1)
    # t20[i] = 1e-06 + t19[i]
    b_t20 = 1e-06 + b_t19
    # t21[i] = rsqrt(t20[i])
    b_t21 = tl.rsqrt(b_t20)
    p_t73 = t73 + (i_slot * (HV // R) + i_h) * (C * C)
    b_t73 = tl.load(p_t73 + (o_c[:, None] * C + o_c[None, :]))
    # t26[i,k] = sum j: qn[j,k] * t52[j,i]
    b_t26 = tl.dot(tl.trans(b_t52), b_qn, input_precision=PRECISION)
    # t40[i,j] = t73[i,j] + t73[j,i]
    b_t40 = b_t73.to(tl.float32) + tl.trans(b_t73.to(tl.float32))
    # t41[i,k] = sum j: kn[j,k] * t40[i,j]
    b_t41 = tl.dot(b_t40.to(DOT), b_kn, input_precision=PRECISION)
    # dkn[i,k] = t26[i,k] + t15[i,k] + t41[i,k]
    b_dkn = b_t26 + b_t15 + b_t41
    # t43[i,k] = t21[i] * dkn[i,k]
    b_t43 = b_dkn * b_t21[:, None]
    # t44[i] = sum k: k[i,k] * dkn[i,k]
    b_t44 = tl.sum(b_k.to(tl.float32) * b_dkn, 1)
    # t45[i,k] = k[i,k] * t21[i] * t21[i] * t21[i] * t44[i]
    b_t45 = b_k.to(tl.float32) * (b_t21 * b_t21 * b_t21 * b_t44)[:, None]
    # dk[i,k] = t43[i,k] - t45[i,k]
    b_dk = b_t43 - b_t45
    if dk is not None:
        p_dk = dk + ((i_b * T + first) * (HV // R) + i_h) * K
        tl.store(
            p_dk + start * ((HV // R) * K) + (o_c[:, None] * ((HV // R) * K) + o_k[None, :]),
            tl.where(m_i[:, None], b_dk, 0.0).to(dk.dtype.element_ty),
            mask=m_o[:, None],
        )
