"""Kernel decays of gdn_key_k128_v128_c64_qknorm.

Spec: gate key qk-norm
Plan: cut X+P, target sm_90
Body: f15d2c3544f94c91
"""

import triton
import triton.language as tl

from ..device import (
    batch_start,
    decay_from_start,
    decay_over_chunk,
    decay_to_end,
    find_sequence,
)


@triton.jit(do_not_specialize=["beta", "beta_sb", "beta_sh", "gk_sb", "q_sb", "k_sb", "cu_seqlens", "T", "N"])
def decays(
    beta,
    gk,
    q,
    k,
    qn,
    kn,
    eLk,
    beta_f,
    t21,
    t30,
    t36,
    cu_seqlens,
    beta_sb: tl.int64,
    beta_st: tl.constexpr,
    beta_sh,
    gk_sb: tl.int64,
    gk_st: tl.constexpr,
    gk_sh,
    gk_sc,
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
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Decays of gates per channel, and keys and queries multiplied with them, for the next kernels."""
    C: tl.constexpr = 64
    K: tl.constexpr = 128
    BK: tl.constexpr = 128
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
    o_k = tl.arange(0, BK)
    p_beta = beta + i_b * beta_sb + first * beta_st + i_hv * beta_sh
    p_gk = gk + batch_start(i_b, gk_sb, gk_st) + first * gk_st + i_hv * gk_sh
    p_q = q + batch_start(i_b, q_sb, q_st) + first * q_st + i_h * q_sh
    p_k = k + batch_start(i_b, k_sb, k_st) + first * k_st + i_h * k_sh
    start = i_t * C
    m_i = o_c < tl.minimum(length - start, C).to(tl.int32)
    b_beta = tl.load(p_beta + start * beta_st + o_c * beta_st, mask=m_i, other=0.0).to(tl.float32)
    p_beta_f = beta_f + (i_slot * HV + i_hv) * C
    tl.store(p_beta_f + o_c, b_beta.to(beta_f.dtype.element_ty))
    b_gk = tl.load(
        p_gk + start * gk_st + (o_c[:, None] * gk_st + o_k[None, :] * gk_sc), mask=m_i[:, None], other=0.0
    ).to(tl.float32)
    b_q = tl.load(p_q + start * q_st + (o_c[:, None] * q_st + o_k[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
    # eLk[k] = decay.10(gk[i,k])
    b_eLk = decay_over_chunk(b_gk, C, PRECISION)
    p_eLk = eLk + (i_slot * HV + i_hv) * K
    tl.store(p_eLk + o_k, b_eLk.to(eLk.dtype.element_ty))
    # t4[i] = sum k: q[i,k] * q[i,k]
    b_t4 = tl.sum(b_q.to(tl.float32) * b_q.to(tl.float32), 1)
    # t6[i] = t4[i] + 1e-06
    b_t6 = b_t4 + 1e-06
    # t7[i] = rsqrt(t6[i])
    b_t7 = tl.rsqrt(b_t6)
    # t8[i,k] = q[i,k] * t7[i]
    b_t8 = b_q.to(tl.float32) * b_t7[:, None]
    # qn[i,k] = cast(t8[i,k])
    b_qn = b_t8.to(DOT)
    p_qn = qn + (i_slot * (HV // R) + i_h) * (C * K)
    if i_hv % R == 0:
        tl.store(p_qn + (o_c[:, None] * K + o_k[None, :]), b_qn)
    # eGk[i,k] = decay.i0(gk[i,k])
    b_eGk = decay_from_start(b_gk, C, PRECISION)
    # t36[i,k] = qn[i,k] * eGk[i,k]
    b_t36 = b_qn.to(tl.float32) * b_eGk
    p_t36 = t36 + (i_slot * HV + i_hv) * (C * K)
    tl.store(p_t36 + (o_c[:, None] * K + o_k[None, :]), b_t36.to(t36.dtype.element_ty))
    b_k = tl.load(p_k + start * k_st + (o_c[:, None] * k_st + o_k[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
    # t13[i] = sum k: k[i,k] * k[i,k]
    b_t13 = tl.sum(b_k.to(tl.float32) * b_k.to(tl.float32), 1)
    # t14[i] = 1e-06 + t13[i]
    b_t14 = 1e-06 + b_t13
    # t15[i] = rsqrt(t14[i])
    b_t15 = tl.rsqrt(b_t14)
    # t16[i,k] = k[i,k] * t15[i]
    b_t16 = b_k.to(tl.float32) * b_t15[:, None]
    # kn[i,k] = cast(t16[i,k])
    b_kn = b_t16.to(DOT)
    p_kn = kn + (i_slot * (HV // R) + i_h) * (C * K)
    if i_hv % R == 0:
        tl.store(p_kn + (o_c[:, None] * K + o_k[None, :]), b_kn)
    # t21[i,k] = kn[i,k] * eGk[i,k]
    b_t21 = b_kn.to(tl.float32) * b_eGk
    p_t21 = t21 + (i_slot * HV + i_hv) * (C * K)
    tl.store(p_t21 + (o_c[:, None] * K + o_k[None, :]), b_t21.to(t21.dtype.element_ty))
    # eTk[i,k] = decay.1i(gk[i,k])
    b_eTk = decay_to_end(b_gk, C, PRECISION)
    # t30[i,k] = kn[i,k] * eTk[i,k]
    b_t30 = b_kn.to(tl.float32) * b_eTk
    p_t30 = t30 + (i_slot * HV + i_hv) * (C * K)
    tl.store(p_t30 + (o_c[:, None] * K + o_k[None, :]), b_t30.to(t30.dtype.element_ty))
