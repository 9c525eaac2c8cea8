"""Kernel prepare of gdn_nogate_k128_v128_c64.

Spec: gate none
Plan: cut X+P, target sm_90
Body: 7dd93b4948be8c21
"""

import triton
import triton.language as tl

from ..device import (
    batch_start,
    find_sequence,
    unit_lower_inverse,
)


@triton.jit(do_not_specialize=["k_sb", "q_sb", "beta", "beta_sb", "beta_sh", "cu_seqlens", "T", "N"])
def prepare(
    k,
    q,
    beta,
    X,
    P,
    beta_f,
    cu_seqlens,
    k_sb: tl.int64,
    k_st: tl.constexpr,
    k_sh,
    q_sb: tl.int64,
    q_st: tl.constexpr,
    q_sh,
    beta_sb: tl.int64,
    beta_st: tl.constexpr,
    beta_sh,
    T,
    N,
    HV: tl.constexpr,
    R: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What does not depend on the state, chunk by chunk."""
    C: tl.constexpr = 64
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
    p_q = q + batch_start(i_b, q_sb, q_st) + first * q_st + i_h * q_sh
    start = i_t * C
    m_i = o_c < tl.minimum(length - start, C).to(tl.int32)
    b_k = tl.load(p_k + start * k_st + (o_c[:, None] * k_st + o_k[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
    b_q = tl.load(p_q + start * q_st + (o_c[:, None] * q_st + o_k[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
    # t1[i,j] = sum k: k[i,k] * k[j,k]
    b_t1 = tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
    # t3[i,j] = sum k: q[i,k] * k[j,k]
    b_t3 = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    # P[i,j] = causal[i,j] * t3[i,j]
    b_P = tl.where(o_c[:, None] >= o_c[None, :], b_t3, 0.0)
    p_P = P + (i_slot * (HV // R) + i_h) * (C * C)
    tl.store(p_P + (o_c[:, None] * C + o_c[None, :]), b_P.to(P.dtype.element_ty))
    for i_r in tl.range(0, R, disable_licm=True):
        i_hv = i_h * R + i_r
        p_beta = beta + i_b * beta_sb + first * beta_st + i_hv * beta_sh
        b_beta = tl.load(p_beta + start * beta_st + o_c * beta_st, mask=m_i, other=0.0).to(tl.float32)
        p_beta_f = beta_f + (i_slot * HV + i_hv) * C
        tl.store(p_beta_f + o_c, b_beta.to(beta_f.dtype.element_ty))
        # A[i,j] = beta[i] * t1[i,j]
        b_A = b_t1 * b_beta[:, None]
        # X[i,j] = uli(A[i,j])
        b_X = unit_lower_inverse(b_A, None, False, True, C, PRECISION)
        p_X = X + (i_slot * HV + i_hv) * (C * C)
        tl.store(p_X + (o_c[:, None] * C + o_c[None, :]), b_X.to(X.dtype.element_ty))
