"""Kernel pairs of gdn_nogate_k128_v128_c64.

Spec: gate none
Plan: cut S+X+e+r+dS+dr_PR+dy, target sm_90
Body: 4740f49e4b9cb1ba
"""

import triton
import triton.language as tl

from ..device import (
    batch_start,
    find_sequence,
)


@triton.jit(do_not_specialize=["do_sb", "k_sb", "cu_seqlens", "T", "N"])
def pairs(
    do,
    k,
    r,
    dy,
    beta_f,
    t43,
    t46,
    dP,
    cu_seqlens,
    scale,
    do_sb: tl.int64,
    do_st: tl.constexpr,
    do_sh,
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
    b_k = tl.load(p_k + start * k_st + (o_c[:, None] * k_st + o_k[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
    # t14[i,j] = sum k: k[i,k] * k[j,k]
    b_t14 = tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
    b_dP = tl.zeros([C, C], dtype=tl.float32)
    b_t46 = tl.zeros([C, C], dtype=tl.float32)
    for i_r in tl.range(0, R, disable_licm=True):
        i_hv = i_h * R + i_r
        p_do = do + batch_start(i_b, do_sb, do_st) + first * do_st + i_hv * do_sh
        b_t2 = tl.zeros([C, C], dtype=tl.float32)
        for i_v in tl.range(0, tl.cdiv(V, BV)):
            o_v = i_v * BV + tl.arange(0, BV)
            p_r = r + (i_slot * HV + i_hv) * (C * V)
            b_r = tl.load(p_r + (o_c[:, None] * V + o_v[None, :]))
            b_do = tl.load(
                p_do + start * do_st + (o_c[:, None] * do_st + o_v[None, :]), mask=m_i[:, None], other=0.0
            ).to(DOT)
            # t2[i,j] = sum v: r[j,v] * do[i,v]
            b_t2 = tl.dot(b_do, tl.trans(b_r), b_t2, input_precision=PRECISION)
        # t4[i,j] = scale * t2[i,j]
        b_t4 = scale * b_t2
        # dP[i,j] = sum r: t4[i,j]
        b_dP += b_t4
        b_t7 = tl.zeros([C, C], dtype=tl.float32)
        for i_v in tl.range(0, tl.cdiv(V, BV)):
            o_v = i_v * BV + tl.arange(0, BV)
            p_r = r + (i_slot * HV + i_hv) * (C * V)
            b_r = tl.load(p_r + (o_c[:, None] * V + o_v[None, :]))
            p_dy = dy + (i_slot * HV + i_hv) * (C * V)
            b_dy = tl.load(p_dy + (o_c[:, None] * V + o_v[None, :]))
            # t7[i,j] = sum v: r[j,v] * dy[i,v]
            b_t7 = tl.dot(b_dy, tl.trans(b_r), b_t7, input_precision=PRECISION)
        p_beta_f = beta_f + (i_slot * HV + i_hv) * C
        b_beta_f = tl.load(p_beta_f + o_c)
        # t10[i,j] = beta_f[i] * strict[i,j] * t7[i,j]
        b_t10 = tl.where(o_c[:, None] > o_c[None, :], b_t7 * b_beta_f[:, None], 0.0)
        # t11[i,j] = -t10[i,j]
        b_t11 = -b_t10
        # t46[i,j] = sum r: t11[i,j]
        b_t46 += b_t11
        # t15[i,j] = strict[i,j] * t7[i,j]
        b_t15 = tl.where(o_c[:, None] > o_c[None, :], b_t7, 0.0)
        # t43[i] = sum j: t14[i,j] * t15[i,j]
        b_t43 = tl.sum(b_t14 * b_t15, 1)
        p_t43 = t43 + (i_slot * HV + i_hv) * C
        tl.store(p_t43 + o_c, b_t43.to(t43.dtype.element_ty))
    p_dP = dP + (i_slot * (HV // R) + i_h) * (C * C)
    tl.store(p_dP + (o_c[:, None] * C + o_c[None, :]), b_dP.to(dP.dtype.element_ty))
    p_t46 = t46 + (i_slot * (HV // R) + i_h) * (C * C)
    tl.store(p_t46 + (o_c[:, None] * C + o_c[None, :]), b_t46.to(t46.dtype.element_ty))
