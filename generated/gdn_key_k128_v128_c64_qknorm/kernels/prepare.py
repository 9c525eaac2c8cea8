"""Kernel prepare of gdn_key_k128_v128_c64_qknorm.

Spec: gate key qk-norm
Plan: cut X+P, target sm_90
Body: a9c3c12a5f7648b2
"""

import triton
import triton.language as tl

from ..device import (
    batch_start,
    decay_to_middle,
    decay_to_middle_turned,
    find_sequence,
    meeting,
    on_diagonal,
    unit_lower_inverse,
)


@triton.jit(do_not_specialize=["gk_sb", "cu_seqlens", "T", "N"])
def prepare(
    gk,
    kn,
    qn,
    beta_f,
    X,
    P,
    cu_seqlens,
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
    """What does not depend on the state, chunk by chunk."""
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
    p_beta_f = beta_f + (i_slot * HV + i_hv) * C
    b_beta_f = tl.load(p_beta_f + o_c)
    p_kn = kn + (i_slot * (HV // R) + i_h) * (C * K)
    p_qn = qn + (i_slot * (HV // R) + i_h) * (C * K)
    b_t3_16 = tl.zeros([C // 16, 16, 16], dtype=tl.float32)
    b_t3_wide = tl.zeros([C // 16, 16, C], dtype=tl.float32)
    b_t3_own = tl.zeros([C], dtype=tl.float32)
    b_P_16 = tl.zeros([C // 16, 16, 16], dtype=tl.float32)
    b_P_wide = tl.zeros([C // 16, 16, C], dtype=tl.float32)
    b_P_own = tl.zeros([C], dtype=tl.float32)
    o_next = tl.arange(0, BK)
    b_kn_next = tl.load(p_kn + (o_c[:, None] * K + o_next[None, :]))
    b_gk_next = tl.load(
        p_gk + start * gk_st + (o_c[:, None] * gk_st + o_next[None, :] * gk_sc), mask=m_i[:, None], other=0.0
    )
    b_qn_next = tl.load(p_qn + (o_c[:, None] * K + o_next[None, :]))
    for i_k in tl.range(0, tl.cdiv(K, BK)):
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
        # t3[i,j] = sum k: kn[i,k] * kn[j,k] * Ek[i,j,k]
        # P[i,j] = sum k: qn[i,k] * kn[j,k] * Ek[i,j,k]
        b_gk_16 = tl.reshape(b_gk, [C // 16, 16, BK])
        b_kn_16 = tl.reshape(b_kn, [C // 16, 16, BK])
        b_t3_own += tl.sum(b_kn.to(tl.float32) * b_kn.to(tl.float32), 1)
        b_qn_16 = tl.reshape(b_qn, [C // 16, 16, BK])
        b_P_own += tl.sum(b_kn.to(tl.float32) * b_qn.to(tl.float32), 1)
        for level in tl.range(0, 4):
            b_decay = decay_to_middle(b_gk_16, level, False, C, PRECISION)
            b_at1 = (b_decay * b_kn_16.to(tl.float32)).to(DOT)
            b_decay_turned = decay_to_middle_turned(b_gk_16, level, False, C, PRECISION)
            b_at3 = (b_decay_turned * tl.trans(b_kn_16.to(tl.float32), (0, 2, 1))).to(DOT)
            m_late = meeting(level, True, 16)
            b_at5 = tl.dot(b_at1, b_at3, input_precision=PRECISION)
            b_at6 = tl.broadcast_to(m_late[None, :, :], [C // 16, 16, 16])
            b_t3_16 += tl.where(b_at6, b_at5, 0.0)
            b_at7 = (b_decay * b_qn_16.to(tl.float32)).to(DOT)
            b_at8 = tl.dot(b_at7, b_at3, input_precision=PRECISION)
            b_P_16 += tl.where(b_at6, b_at8, 0.0)
        for level in tl.range(4, 6):
            b_decay = decay_to_middle(b_gk_16, level, True, C, PRECISION)
            b_at1 = (b_decay * b_kn_16.to(tl.float32)).to(DOT)
            b_decay_turned = decay_to_middle_turned(b_gk_16, level, True, C, PRECISION)
            b_at3 = (b_decay_turned * tl.trans(b_kn.to(tl.float32))).to(DOT)
            m_late = meeting(level, True, C)
            b_at5 = tl.broadcast_to(b_at3[None, :, :], [C // 16, BK, C])
            b_at6 = tl.dot(b_at1, b_at5, input_precision=PRECISION)
            b_at7 = tl.reshape(m_late, [C // 16, 16, C])
            b_t3_wide += tl.where(b_at7, b_at6, 0.0)
            b_at8 = (b_decay * b_qn_16.to(tl.float32)).to(DOT)
            b_at9 = tl.dot(b_at8, b_at5, input_precision=PRECISION)
            b_P_wide += tl.where(b_at7, b_at9, 0.0)
    b_t3 = on_diagonal(b_t3_16, C)
    b_t3 += tl.reshape(b_t3_wide, [C, C])
    b_t3 += tl.where(o_c[:, None] == o_c[None, :], b_t3_own[:, None], 0.0)
    b_P = on_diagonal(b_P_16, C)
    b_P += tl.reshape(b_P_wide, [C, C])
    b_P += tl.where(o_c[:, None] == o_c[None, :], b_P_own[:, None], 0.0)
    p_P = P + (i_slot * HV + i_hv) * (C * C)
    tl.store(p_P + (o_c[:, None] * C + o_c[None, :]), b_P.to(P.dtype.element_ty))
    # A[i,j] = beta_f[i] * t3[i,j]
    b_A = b_t3 * b_beta_f[:, None]
    # X[i,j] = uli(A[i,j])
    b_X = unit_lower_inverse(b_A, None, False, False, C, PRECISION)
    p_X = X + (i_slot * HV + i_hv) * (C * C)
    tl.store(p_X + (o_c[:, None] * C + o_c[None, :]), b_X.to(X.dtype.element_ty))
