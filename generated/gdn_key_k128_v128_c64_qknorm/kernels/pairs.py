"""Kernel pairs of gdn_key_k128_v128_c64_qknorm.

Spec: gate key qk-norm
Plan: cut S+X+e+r+P+dS+dy, target sm_90
Body: f3854bf37c6f6e87
"""

import triton
import triton.language as tl

from ..device import (
    batch_start,
    block_product,
    decay_to_middle,
    diagonal_blocks,
    find_sequence,
    meeting,
    out_of_product,
    running_sum,
)


@triton.jit(do_not_specialize=["gk_sb", "cu_seqlens", "T", "N"])
def pairs(
    gk,
    kn,
    t46,
    qn,
    t68,
    beta_f,
    t55,
    t73,
    dgk_Ek,
    t60,
    t92,
    cu_seqlens,
    scale,
    gk_sb: tl.int64,
    gk_st: tl.constexpr,
    gk_sh,
    gk_sc,
    T,
    N,
    HV: tl.constexpr,
    R: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What the gradients need of pairs of tokens, chunk by chunk."""
    C: tl.constexpr = 64
    K: tl.constexpr = 128
    BK: tl.constexpr = 16
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
    p_gk = gk + batch_start(i_b, gk_sb, gk_st) + first * gk_st + i_hv * gk_sh
    start = i_t * C
    m_i = o_c < tl.minimum(length - start, C).to(tl.int32)
    p_t46 = t46 + (i_slot * HV + i_hv) * (C * C)
    b_t46 = tl.load(p_t46 + (o_c[:, None] * C + o_c[None, :]))
    # t8[i] = sum j: t46[i,j] * same[i,j]
    b_t8 = tl.sum(tl.where(o_c[:, None] == o_c[None, :], b_t46.to(tl.float32), 0.0), 1)
    # t15[i] = sum j: t46[j,i] * same[j,i]
    b_t15 = tl.sum(tl.where(o_c[:, None] == o_c[None, :], b_t46.to(tl.float32), 0.0), 0)
    p_t68 = t68 + (i_slot * HV + i_hv) * (C * C)
    b_t68 = tl.load(p_t68 + (o_c[:, None] * C + o_c[None, :]))
    p_beta_f = beta_f + (i_slot * HV + i_hv) * C
    b_beta_f = tl.load(p_beta_f + o_c)
    p_kn = kn + (i_slot * (HV // R) + i_h) * (C * K)
    p_qn = qn + (i_slot * (HV // R) + i_h) * (C * K)
    b_t73 = tl.zeros([C], dtype=tl.float32)
    o_next = tl.arange(0, BK)
    b_kn_next = tl.load(p_kn + (o_c[:, None] * K + o_next[None, :]))
    b_gk_next = tl.load(
        p_gk + start * gk_st + (o_c[:, None] * gk_st + o_next[None, :] * gk_sc), mask=m_i[:, None], other=0.0
    )
    b_qn_next = tl.load(p_qn + (o_c[:, None] * K + o_next[None, :]))
    for i_k in tl.range(0, tl.cdiv(K, BK)):
        o_k = i_k * BK + tl.arange(0, BK)
        b_kn = b_kn_next
        b_gk = b_gk_next.to(tl.float32)
        b_qn = b_qn_next
        # the next slice, loaded while this one is worked on
        o_next = tl.minimum(i_k + 1, tl.cdiv(K, BK) - 1) * BK + tl.arange(0, BK)
        b_kn_next = tl.load(p_kn + (o_c[:, None] * K + o_next[None, :]))
        b_gk_next = tl.load(
            p_gk + start * gk_st + (o_c[:, None] * gk_st + o_next[None, :] * gk_sc), mask=m_i[:, None], other=0.0
        )
        b_qn_next = tl.load(p_qn + (o_c[:, None] * K + o_next[None, :]))
        # t5[i,j] = t46[i,j] * strict[i,j]
        # t6[i,k] = sum j: kn[j,k] * Ek[i,j,k] * t5[i,j]
        # t14[i,k] = sum j: qn[j,k] * Ek[j,i,k] * t5[j,i]
        # t20[i,j] = strict[i,j] * t68[i,j]
        # t21[i,k] = sum j: kn[j,k] * Ek[i,j,k] * t20[i,j]
        # t25[i,j] = beta_f[i] * strict[i,j] * t68[i,j]
        # t26[i,k] = sum j: kn[j,k] * Ek[j,i,k] * t25[j,i]
        # dP[i,j] = scale * t46[i,j]
        # t29[i,k] = crossing(dP[i,j], qn[i,k], kn[j,k], gk[i,k])
        # t30[i,k] = kn[i,k] * beta_f[i]
        # t31[i,k] = crossing(t20[i,j], t30[i,k], kn[j,k], gk[i,k])
        # dgk_Ek[i,k] = t29[i,k] - t31[i,k]
        b_gk_16 = tl.reshape(b_gk, [C // 16, 16, BK])
        b_t6_16 = tl.zeros([C // 16, 16, BK], dtype=tl.float32)
        b_t14_16 = tl.zeros([C // 16, 16, BK], dtype=tl.float32)
        b_t21_16 = tl.zeros([C // 16, 16, BK], dtype=tl.float32)
        b_t26_16 = tl.zeros([C // 16, 16, BK], dtype=tl.float32)
        b_dgk_Ek_16 = tl.zeros([C // 16, 16, BK], dtype=tl.float32)
        b_qn_16 = tl.reshape(b_qn, [C // 16, 16, BK])
        b_kn_16 = tl.reshape(b_kn, [C // 16, 16, BK])
        b_beta_f_16 = tl.reshape(b_beta_f, [C // 16, 16, 1])
        b_t46_out = out_of_product(b_t46, C)
        b_t46_16 = diagonal_blocks(b_t46_out, C)
        b_t68_out = out_of_product(b_t68, C)
        b_t68_16 = diagonal_blocks(b_t68_out, C)
        for level in tl.range(0, 4):
            b_decay = decay_to_middle(b_gk_16, level, False, C, PRECISION)
            m_late = meeting(level, True, 16)
            b_at2 = tl.where(m_late[None, :, :], b_t46_16, 0.0).to(DOT)
            b_at3 = (b_decay * b_kn_16.to(tl.float32)).to(DOT)
            b_at4 = block_product(b_at2, b_at3, C, PRECISION)
            b_t6_16 += b_decay * b_at4
            b_dgk_Ek_now = b_at4 * b_qn_16.to(tl.float32) * scale
            b_at5 = (b_decay * b_qn_16.to(tl.float32)).to(DOT)
            b_at6 = block_product(tl.trans(b_at2, (0, 2, 1)), b_at5, C, PRECISION)
            b_t14_16 += b_decay * b_at6
            b_dgk_Ek_now += b_at6 * b_kn_16.to(tl.float32) * scale
            b_at7 = tl.where(m_late[None, :, :], b_t68_16, 0.0).to(DOT)
            b_at8 = block_product(b_at7, b_at3, C, PRECISION)
            b_t21_16 += b_decay * b_at8
            b_dgk_Ek_now -= b_at8 * b_kn_16.to(tl.float32) * b_beta_f_16
            b_at9 = (b_decay * b_kn_16.to(tl.float32) * b_beta_f_16).to(DOT)
            b_at10 = block_product(tl.trans(b_at7, (0, 2, 1)), b_at9, C, PRECISION)
            b_t26_16 += b_decay * b_at10
            b_dgk_Ek_now -= b_at10 * b_kn_16.to(tl.float32)
            b_dgk_Ek_16 += running_sum(b_decay * b_dgk_Ek_now, level, False, C, DOT, PRECISION)
        for level in tl.range(4, 6):
            b_decay = decay_to_middle(b_gk_16, level, True, C, PRECISION)
            m_late = meeting(level, True, C)
            b_at2 = tl.where(m_late, b_t46_out, 0.0).to(DOT)
            b_at3 = (b_decay * b_kn_16.to(tl.float32)).to(DOT)
            b_at4 = block_product(tl.reshape(b_at2, [C // 16, 16, C]), b_at3, C, PRECISION)
            b_t6_16 += b_decay * b_at4
            b_dgk_Ek_now = b_at4 * b_qn_16.to(tl.float32) * scale
            b_at5 = (b_decay * b_qn_16.to(tl.float32)).to(DOT)
            b_at6 = block_product(tl.reshape(tl.trans(b_at2), [C // 16, 16, C]), b_at5, C, PRECISION)
            b_t14_16 += b_decay * b_at6
            b_dgk_Ek_now += b_at6 * b_kn_16.to(tl.float32) * scale
            b_at7 = tl.where(m_late, b_t68_out, 0.0).to(DOT)
            b_at8 = block_product(tl.reshape(b_at7, [C // 16, 16, C]), b_at3, C, PRECISION)
            b_t21_16 += b_decay * b_at8
            b_dgk_Ek_now -= b_at8 * b_kn_16.to(tl.float32) * b_beta_f_16
            b_at9 = (b_decay * b_kn_16.to(tl.float32) * b_beta_f_16).to(DOT)
            b_at10 = block_product(tl.reshape(tl.trans(b_at7), [C // 16, 16, C]), b_at9, C, PRECISION)
            b_t26_16 += b_decay * b_at10
            b_dgk_Ek_now -= b_at10 * b_kn_16.to(tl.float32)
            b_dgk_Ek_16 += running_sum(b_decay * b_dgk_Ek_now, level, True, C, DOT, PRECISION)
        b_t6 = tl.reshape(b_t6_16, [C, BK])
        b_t14 = tl.reshape(b_t14_16, [C, BK])
        b_t21 = tl.reshape(b_t21_16, [C, BK])
        b_t26 = tl.reshape(b_t26_16, [C, BK])
        b_dgk_Ek = tl.reshape(b_dgk_Ek_16, [C, BK])
        p_dgk_Ek = dgk_Ek + (i_slot * HV + i_hv) * (C * K)
        tl.store(p_dgk_Ek + (o_c[:, None] * K + o_k[None, :]), b_dgk_Ek.to(dgk_Ek.dtype.element_ty))
        # t9[i,k] = kn[i,k] * t8[i]
        b_t9 = b_kn.to(tl.float32) * b_t8[:, None]
        # t10[i,k] = t6[i,k] + t9[i,k]
        b_t10 = b_t6 + b_t9
        # t55[i,k] = scale * t10[i,k]
        b_t55 = scale * b_t10
        p_t55 = t55 + (i_slot * HV + i_hv) * (C * K)
        tl.store(p_t55 + (o_c[:, None] * K + o_k[None, :]), b_t55.to(t55.dtype.element_ty))
        # t16[i,k] = qn[i,k] * t15[i]
        b_t16 = b_qn.to(tl.float32) * b_t15[:, None]
        # t17[i,k] = t14[i,k] + t16[i,k]
        b_t17 = b_t14 + b_t16
        # t60[i,k] = scale * t17[i,k]
        b_t60 = scale * b_t17
        p_t60 = t60 + (i_slot * HV + i_hv) * (C * K)
        tl.store(p_t60 + (o_c[:, None] * K + o_k[None, :]), b_t60.to(t60.dtype.element_ty))
        # t73[i] = sum k: kn[i,k] * t21[i,k]
        b_t73 += tl.sum(b_kn.to(tl.float32) * b_t21, 1)
        # t24[i,k] = beta_f[i] * t21[i,k]
        b_t24 = b_t21 * b_beta_f[:, None]
        # t92[i,k] = -t24[i,k] - t26[i,k]
        b_t92 = -b_t24 - b_t26
        p_t92 = t92 + (i_slot * HV + i_hv) * (C * K)
        tl.store(p_t92 + (o_c[:, None] * K + o_k[None, :]), b_t92.to(t92.dtype.element_ty))
    p_t73 = t73 + (i_slot * HV + i_hv) * C
    tl.store(p_t73 + o_c, b_t73.to(t73.dtype.element_ty))
