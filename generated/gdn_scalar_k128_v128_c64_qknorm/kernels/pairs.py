"""Kernel pairs of gdn_scalar_k128_v128_c64_qknorm.

Spec: gate scalar qk-norm
Plan: cut S+X+e+r+P+dS+dy, target sm_90
Body: 40ee40a5546ae4bc
"""

import triton
import triton.language as tl

from ..device import (
    batch_start,
    cumulative_gate,
    decay_between,
    find_sequence,
)


@triton.jit(do_not_specialize=["do_sb", "g", "g_sb", "g_sh", "cu_seqlens", "T", "N"])
def pairs(
    do,
    g,
    r,
    dy,
    beta_f,
    qn,
    kn,
    dg_E,
    t73,
    t52,
    t70,
    cu_seqlens,
    scale,
    do_sb: tl.int64,
    do_st: tl.constexpr,
    do_sh,
    g_sb: tl.int64,
    g_st: tl.constexpr,
    g_sh,
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
    start = i_t * C
    m_i = o_c < tl.minimum(length - start, C).to(tl.int32)
    p_qn = qn + (i_slot * (HV // R) + i_h) * (C * K)
    b_qn = tl.load(p_qn + (o_c[:, None] * K + o_k[None, :]))
    p_kn = kn + (i_slot * (HV // R) + i_h) * (C * K)
    b_kn = tl.load(p_kn + (o_c[:, None] * K + o_k[None, :]))
    # t17[i,j] = sum k: kn[i,k] * kn[j,k]
    b_t17 = tl.dot(b_kn, tl.trans(b_kn), input_precision=PRECISION)
    # t18[i,j] = sum k: qn[i,k] * kn[j,k]
    b_t18 = tl.dot(b_qn, tl.trans(b_kn), input_precision=PRECISION)
    b_t52 = tl.zeros([C, C], dtype=tl.float32)
    b_t73 = tl.zeros([C, C], dtype=tl.float32)
    for i_r in tl.range(0, R, disable_licm=True):
        i_hv = i_h * R + i_r
        p_do = do + batch_start(i_b, do_sb, do_st) + first * do_st + i_hv * do_sh
        b_t2 = tl.zeros([C, C], dtype=tl.float32)
        p_g = g + i_b * g_sb + first * g_st + i_hv * g_sh
        for i_v in tl.range(0, tl.cdiv(V, BV)):
            o_v = i_v * BV + tl.arange(0, BV)
            p_r = r + (i_slot * HV + i_hv) * (C * V)
            b_r = tl.load(p_r + (o_c[:, None] * V + o_v[None, :]))
            b_do = tl.load(
                p_do + start * do_st + (o_c[:, None] * do_st + o_v[None, :]), mask=m_i[:, None], other=0.0
            ).to(DOT)
            # t2[i,j] = sum v: r[j,v] * do[i,v]
            b_t2 = tl.dot(b_do, tl.trans(b_r), b_t2, input_precision=PRECISION)
        b_g = tl.load(p_g + start * g_st + o_c * g_st, mask=m_i, other=0.0).to(tl.float32)
        # E[i,j] = decay.ij(g[i])
        b_g_c, b_g_f = cumulative_gate(b_g)
        b_E = decay_between(b_g_c, b_g_f, C)
        # t6[i,j] = E[i,j] * scale * t2[i,j]
        b_t6 = b_E * scale * b_t2
        # t52[i,j] = sum r: t6[i,j]
        b_t52 += b_t6
        # dE_P[i,j] = t18[i,j] * scale * t2[i,j]
        b_dE_P = b_t18 * scale * b_t2
        b_t9 = tl.zeros([C, C], dtype=tl.float32)
        for i_v in tl.range(0, tl.cdiv(V, BV)):
            o_v = i_v * BV + tl.arange(0, BV)
            p_r = r + (i_slot * HV + i_hv) * (C * V)
            b_r = tl.load(p_r + (o_c[:, None] * V + o_v[None, :]))
            p_dy = dy + (i_slot * HV + i_hv) * (C * V)
            b_dy = tl.load(p_dy + (o_c[:, None] * V + o_v[None, :]))
            # t9[i,j] = sum v: r[j,v] * dy[i,v]
            b_t9 = tl.dot(b_dy, tl.trans(b_r), b_t9, input_precision=PRECISION)
        p_beta_f = beta_f + (i_slot * HV + i_hv) * C
        b_beta_f = tl.load(p_beta_f + o_c)
        # t12[i,j] = E[i,j] * beta_f[i] * strict[i,j] * t9[i,j]
        b_t12 = tl.where(o_c[:, None] > o_c[None, :], b_E * b_t9 * b_beta_f[:, None], 0.0)
        # t13[i,j] = -t12[i,j]
        b_t13 = -b_t12
        # t73[i,j] = sum r: t13[i,j]
        b_t73 += b_t13
        # t20[i,j] = beta_f[i] * t17[i,j] * strict[i,j] * t9[i,j]
        b_t20 = tl.where(o_c[:, None] > o_c[None, :], b_t17 * b_t9 * b_beta_f[:, None], 0.0)
        # t21[i,j] = E[i,j] * strict[i,j] * t9[i,j]
        b_t21 = tl.where(o_c[:, None] > o_c[None, :], b_E * b_t9, 0.0)
        # t70[i] = sum j: t17[i,j] * t21[i,j]
        b_t70 = tl.sum(b_t17 * b_t21, 1)
        p_t70 = t70 + (i_slot * HV + i_hv) * C
        tl.store(p_t70 + o_c, b_t70.to(t70.dtype.element_ty))
        # dE[i,j] = dE_P[i,j] - t20[i,j]
        b_dE = b_dE_P - b_t20
        # t24[i,j] = E[i,j] * strict[i,j] * dE[i,j]
        b_t24 = tl.where(o_c[:, None] > o_c[None, :], b_E * b_dE, 0.0)
        # t25[i,j] = cumsum.revincl(t24[i,j])
        b_t25 = tl.cumsum(b_t24, 0, reverse=True)
        # dg_E[i] = sum j: strict[i,j] * t25[i,j]
        b_dg_E = tl.sum(tl.where(o_c[:, None] > o_c[None, :], b_t25, 0.0), 1)
        p_dg_E = dg_E + (i_slot * HV + i_hv) * C
        tl.store(p_dg_E + o_c, b_dg_E.to(dg_E.dtype.element_ty))
    p_t52 = t52 + (i_slot * (HV // R) + i_h) * (C * C)
    tl.store(p_t52 + (o_c[:, None] * C + o_c[None, :]), b_t52.to(t52.dtype.element_ty))
    p_t73 = t73 + (i_slot * (HV // R) + i_h) * (C * C)
    tl.store(p_t73 + (o_c[:, None] * C + o_c[None, :]), b_t73.to(t73.dtype.element_ty))
