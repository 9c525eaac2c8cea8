"""Kernel pairs of gdn_key_k128_v128_c64_qknorm.

Spec: gate key qk-norm
Plan: cut S+X+e+r+P+dS+dy, target sm_90
Body: f372ebbd0c6976f7
"""

import triton
import triton.language as tl

from ..device import (
    decayed_crossing,
    decayed_sum,
    find_sequence,
)

C = tl.constexpr(64)
K = tl.constexpr(128)
V = tl.constexpr(128)
BK = tl.constexpr(32)


@triton.jit(do_not_specialize=["T", "N"])
def pairs(
    do,
    gk,
    beta,
    r,
    dy,
    kn,
    qn,
    t55,
    t73,
    dgk_Ek,
    t60,
    t92,
    cu_seqlens,
    scale,
    do_sb,
    do_st: tl.constexpr,
    do_sh,
    gk_sb,
    gk_st: tl.constexpr,
    gk_sh,
    gk_sc,
    beta_sb,
    beta_st: tl.constexpr,
    beta_sh,
    T,
    N,
    HV: tl.constexpr,
    R: tl.constexpr,
    BV: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What the gradients need of pairs of tokens, chunk by chunk."""
    pid = tl.program_id(0)
    i_ch = pid
    i_hv = (i_ch % HV).to(tl.int64)
    i_h = i_hv // R
    i_slot = (i_ch // HV).to(tl.int64)
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
    p_beta = beta + i_b * beta_sb + first * beta_st + i_hv * beta_sh
    p_do = do + i_b * do_sb + first * do_st + i_hv * do_sh
    p_gk = gk + i_b * gk_sb + first * gk_st + i_hv * gk_sh
    start = i_t * C
    m_i = o_c < tl.minimum(length - start, C).to(tl.int32)
    b_beta = tl.load(p_beta + start * beta_st + o_c * beta_st, mask=m_i, other=0.0).to(tl.float32)
    b_t2 = tl.zeros([C, C], dtype=tl.float32)
    for i_v in tl.range(0, tl.cdiv(V, BV)):
        o_v = i_v * BV + tl.arange(0, BV)
        p_r = r + (i_slot * HV + i_hv) * (C * V)
        b_r = tl.load(p_r + (o_c[:, None] * V + o_v[None, :]))
        b_do = tl.load(p_do + start * do_st + (o_c[:, None] * do_st + o_v[None, :]), mask=m_i[:, None], other=0.0).to(
            DOT
        )
        # t2[i,j] = sum v: r[j,v] * do[i,v]
        b_t2 = tl.dot(b_do, tl.trans(b_r), b_t2, input_precision=PRECISION)
    # t9[i,j] = t2[i,j] * strict[i,j]
    b_t9 = tl.where(o_c[:, None] > o_c[None, :], b_t2, 0.0)
    # t12[i] = sum j: t2[i,j] * same[i,j]
    b_t12 = tl.sum(tl.where(o_c[:, None] == o_c[None, :], b_t2, 0.0), 1)
    # t19[i] = sum j: t2[j,i] * same[j,i]
    b_t19 = tl.sum(tl.where(o_c[:, None] == o_c[None, :], b_t2, 0.0), 0)
    # dP[i,j] = scale * t2[i,j]
    b_dP = scale * b_t2
    b_t4 = tl.zeros([C, C], dtype=tl.float32)
    for i_v in tl.range(0, tl.cdiv(V, BV)):
        o_v = i_v * BV + tl.arange(0, BV)
        p_r = r + (i_slot * HV + i_hv) * (C * V)
        b_r = tl.load(p_r + (o_c[:, None] * V + o_v[None, :]))
        p_dy = dy + (i_slot * HV + i_hv) * (C * V)
        b_dy = tl.load(p_dy + (o_c[:, None] * V + o_v[None, :]))
        # t4[i,j] = sum v: r[j,v] * dy[i,v]
        b_t4 = tl.dot(b_dy, tl.trans(b_r), b_t4, input_precision=PRECISION)
    # t23[i,j] = strict[i,j] * t4[i,j]
    b_t23 = tl.where(o_c[:, None] > o_c[None, :], b_t4, 0.0)
    # t28[i,j] = beta[i] * strict[i,j] * t4[i,j]
    b_t28 = tl.where(o_c[:, None] > o_c[None, :], b_beta[:, None] * b_t4, 0.0)
    b_t73 = tl.zeros([C], dtype=tl.float32)
    for i_k in tl.range(0, tl.cdiv(K, BK)):
        o_k = i_k * BK + tl.arange(0, BK)
        p_kn = kn + (i_slot * (HV // R) + i_h) * (C * K)
        b_kn = tl.load(p_kn + (o_c[:, None] * K + o_k[None, :]))
        b_gk = tl.load(
            p_gk + start * gk_st + (o_c[:, None] * gk_st + o_k[None, :] * gk_sc), mask=m_i[:, None], other=0.0
        ).to(tl.float32)
        # t10[i,k] = sum j: kn[j,k] * Ek[i,j,k] * t9[i,j]
        b_t10 = decayed_sum(b_t9, b_kn, b_gk, False, False, C, DOT, PRECISION)
        # t13[i,k] = kn[i,k] * t12[i]
        b_t13 = b_t12[:, None] * b_kn.to(tl.float32)
        # t14[i,k] = t10[i,k] + t13[i,k]
        b_t14 = b_t10 + b_t13
        # t55[i,k] = scale * t14[i,k]
        b_t55 = scale * b_t14
        p_t55 = t55 + (i_slot * HV + i_hv) * (C * K)
        tl.store(p_t55 + (o_c[:, None] * K + o_k[None, :]), b_t55.to(t55.dtype.element_ty))
        p_qn = qn + (i_slot * (HV // R) + i_h) * (C * K)
        b_qn = tl.load(p_qn + (o_c[:, None] * K + o_k[None, :]))
        # gk again: not kept in registers across the product before
        b_gk = tl.load(
            p_gk + start * gk_st + (o_c[:, None] * gk_st + o_k[None, :] * gk_sc), mask=m_i[:, None], other=0.0
        ).to(tl.float32)
        # t18[i,k] = sum j: qn[j,k] * Ek[j,i,k] * t9[j,i]
        b_t18 = decayed_sum(b_t9, tl.trans(b_qn), b_gk, True, True, C, DOT, PRECISION)
        # t20[i,k] = qn[i,k] * t19[i]
        b_t20 = b_t19[:, None] * b_qn.to(tl.float32)
        # t21[i,k] = t18[i,k] + t20[i,k]
        b_t21 = tl.trans(b_t18) + b_t20
        # t60[i,k] = scale * t21[i,k]
        b_t60 = scale * b_t21
        p_t60 = t60 + (i_slot * HV + i_hv) * (C * K)
        tl.store(p_t60 + (o_c[:, None] * K + o_k[None, :]), b_t60.to(t60.dtype.element_ty))
        # gk again: not kept in registers across the product before
        b_gk = tl.load(
            p_gk + start * gk_st + (o_c[:, None] * gk_st + o_k[None, :] * gk_sc), mask=m_i[:, None], other=0.0
        ).to(tl.float32)
        # kn again: not kept in registers across the product before
        p_kn = kn + (i_slot * (HV // R) + i_h) * (C * K)
        b_kn = tl.load(p_kn + (o_c[:, None] * K + o_k[None, :]))
        # t24[i,k] = sum j: kn[j,k] * Ek[i,j,k] * t23[i,j]
        b_t24 = decayed_sum(b_t23, b_kn, b_gk, False, False, C, DOT, PRECISION)
        # t73[i] = sum k: kn[i,k] * t24[i,k]
        b_t73 += tl.sum(b_kn.to(tl.float32) * b_t24, 1)
        # t27[i,k] = beta[i] * t24[i,k]
        b_t27 = b_beta[:, None] * b_t24
        # gk again: not kept in registers across the product before
        b_gk = tl.load(
            p_gk + start * gk_st + (o_c[:, None] * gk_st + o_k[None, :] * gk_sc), mask=m_i[:, None], other=0.0
        ).to(tl.float32)
        # kn again: not kept in registers across the product before
        p_kn = kn + (i_slot * (HV // R) + i_h) * (C * K)
        b_kn = tl.load(p_kn + (o_c[:, None] * K + o_k[None, :]))
        # t29[i,k] = sum j: kn[j,k] * Ek[j,i,k] * t28[j,i]
        b_t29 = decayed_sum(b_t28, tl.trans(b_kn), b_gk, True, True, C, DOT, PRECISION)
        # t92[i,k] = -t27[i,k] - t29[i,k]
        b_t92 = -b_t27 - tl.trans(b_t29)
        p_t92 = t92 + (i_slot * HV + i_hv) * (C * K)
        tl.store(p_t92 + (o_c[:, None] * K + o_k[None, :]), b_t92.to(t92.dtype.element_ty))
        # gk again: not kept in registers across the product before
        b_gk = tl.load(
            p_gk + start * gk_st + (o_c[:, None] * gk_st + o_k[None, :] * gk_sc), mask=m_i[:, None], other=0.0
        ).to(tl.float32)
        # qn again: not kept in registers across the product before
        p_qn = qn + (i_slot * (HV // R) + i_h) * (C * K)
        b_qn = tl.load(p_qn + (o_c[:, None] * K + o_k[None, :]))
        # kn again: not kept in registers across the product before
        p_kn = kn + (i_slot * (HV // R) + i_h) * (C * K)
        b_kn = tl.load(p_kn + (o_c[:, None] * K + o_k[None, :]))
        # t32[i,k] = crossing(dP[i,j], qn[i,k], kn[j,k], gk[i,k])
        b_t32 = decayed_crossing(b_dP, b_qn, b_kn, b_gk, C, DOT, PRECISION)
        # t33[i,k] = kn[i,k] * beta[i]
        b_t33 = b_beta[:, None] * b_kn.to(tl.float32)
        # gk again: not kept in registers across the product before
        b_gk = tl.load(
            p_gk + start * gk_st + (o_c[:, None] * gk_st + o_k[None, :] * gk_sc), mask=m_i[:, None], other=0.0
        ).to(tl.float32)
        # kn again: not kept in registers across the product before
        p_kn = kn + (i_slot * (HV // R) + i_h) * (C * K)
        b_kn = tl.load(p_kn + (o_c[:, None] * K + o_k[None, :]))
        # t34[i,k] = crossing(t23[i,j], t33[i,k], kn[j,k], gk[i,k])
        b_t34 = decayed_crossing(b_t23, b_t33, b_kn, b_gk, C, DOT, PRECISION)
        # dgk_Ek[i,k] = t32[i,k] - t34[i,k]
        b_dgk_Ek = b_t32 - b_t34
        p_dgk_Ek = dgk_Ek + (i_slot * HV + i_hv) * (C * K)
        tl.store(p_dgk_Ek + (o_c[:, None] * K + o_k[None, :]), b_dgk_Ek.to(dgk_Ek.dtype.element_ty))
    p_t73 = t73 + (i_slot * HV + i_hv) * C
    tl.store(p_t73 + o_c, b_t73.to(t73.dtype.element_ty))
