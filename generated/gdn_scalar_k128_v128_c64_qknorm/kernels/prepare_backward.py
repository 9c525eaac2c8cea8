"""Kernel prepare_backward of gdn_scalar_k128_v128_c64_qknorm.

Spec: gate scalar qk-norm
Plan: cut S+X+e+r+P+dS+dy, target sm_90
Body: 377b511b2ec2b0eb
"""

import triton
import triton.language as tl

from ..device import (
    batch_start,
    cumulative_gate,
    decay_between,
    decay_of,
    find_sequence,
    total_gate,
    unit_lower_inverse,
)


@triton.jit(
    do_not_specialize=["k_sb", "q_sb", "g", "g_sb", "g_sh", "beta", "beta_sb", "beta_sh", "cu_seqlens", "T", "N"]
)
def prepare_backward(
    k,
    q,
    g,
    beta,
    X,
    P,
    qn,
    kn,
    eG,
    eT,
    eL,
    beta_f,
    cu_seqlens,
    k_sb: tl.int64,
    k_st: tl.constexpr,
    k_sh,
    q_sb: tl.int64,
    q_st: tl.constexpr,
    q_sh,
    g_sb: tl.int64,
    g_st: tl.constexpr,
    g_sh,
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
    """What gradients need and does not depend on any state, chunk by chunk."""
    C: tl.constexpr = 64
    K: tl.constexpr = 128
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
    # t2[i] = sum k: k[i,k] * k[i,k]
    b_t2 = tl.sum(b_k.to(tl.float32) * b_k.to(tl.float32), 1)
    # t3[i] = 1e-06 + t2[i]
    b_t3 = 1e-06 + b_t2
    # t4[i] = rsqrt(t3[i])
    b_t4 = tl.rsqrt(b_t3)
    # t5[i,k] = k[i,k] * t4[i]
    b_t5 = b_k.to(tl.float32) * b_t4[:, None]
    # kn[i,k] = cast(t5[i,k])
    b_kn = b_t5.to(DOT)
    p_kn = kn + (i_slot * (HV // R) + i_h) * (C * K)
    tl.store(p_kn + (o_c[:, None] * K + o_k[None, :]), b_kn)
    # t7[i,j] = sum k: kn[i,k] * kn[j,k]
    b_t7 = tl.dot(b_kn, tl.trans(b_kn), input_precision=PRECISION)
    # t9[i] = sum k: q[i,k] * q[i,k]
    b_t9 = tl.sum(b_q.to(tl.float32) * b_q.to(tl.float32), 1)
    # t10[i] = t9[i] + 1e-06
    b_t10 = b_t9 + 1e-06
    # t11[i] = rsqrt(t10[i])
    b_t11 = tl.rsqrt(b_t10)
    # t12[i,k] = q[i,k] * t11[i]
    b_t12 = b_q.to(tl.float32) * b_t11[:, None]
    # qn[i,k] = cast(t12[i,k])
    b_qn = b_t12.to(DOT)
    p_qn = qn + (i_slot * (HV // R) + i_h) * (C * K)
    tl.store(p_qn + (o_c[:, None] * K + o_k[None, :]), b_qn)
    # t14[i,j] = sum k: qn[i,k] * kn[j,k]
    b_t14 = tl.dot(b_qn, tl.trans(b_kn), input_precision=PRECISION)
    for i_r in tl.range(0, R, disable_licm=True):
        i_hv = i_h * R + i_r
        p_g = g + i_b * g_sb + first * g_st + i_hv * g_sh
        b_g = tl.load(p_g + start * g_st + o_c * g_st, mask=m_i, other=0.0).to(tl.float32)
        p_beta = beta + i_b * beta_sb + first * beta_st + i_hv * beta_sh
        b_beta = tl.load(p_beta + start * beta_st + o_c * beta_st, mask=m_i, other=0.0).to(tl.float32)
        p_beta_f = beta_f + (i_slot * HV + i_hv) * C
        tl.store(p_beta_f + o_c, b_beta.to(beta_f.dtype.element_ty))
        # E[i,j] = decay.ij(g[i])
        b_g_c, b_g_f = cumulative_gate(b_g)
        b_E = decay_between(b_g_c, b_g_f, C)
        # P[i,j] = E[i,j] * t14[i,j]
        b_P = b_E * b_t14
        p_P = P + (i_slot * HV + i_hv) * (C * C)
        tl.store(p_P + (o_c[:, None] * C + o_c[None, :]), b_P.to(P.dtype.element_ty))
        # eL = decay.10(g[i])
        b_g_tc, b_g_tf = total_gate(b_g)
        b_eL = decay_of(b_g_tc + b_g_tf)
        p_eL = eL + i_slot * HV + i_hv
        tl.store(p_eL, b_eL.to(eL.dtype.element_ty))
        # eG[i] = decay.i0(g[i])
        b_eG = decay_of(b_g_c + b_g_f)
        p_eG = eG + (i_slot * HV + i_hv) * C
        tl.store(p_eG + o_c, b_eG.to(eG.dtype.element_ty))
        # eT[i] = decay.1i(g[i])
        b_eT = decay_of((b_g_tc - b_g_c) + (b_g_tf - b_g_f))
        p_eT = eT + (i_slot * HV + i_hv) * C
        tl.store(p_eT + o_c, b_eT.to(eT.dtype.element_ty))
        # A[i,j] = E[i,j] * beta[i] * t7[i,j]
        # X[i,j] = uli(A[i,j])
        b_X = unit_lower_inverse(b_t7 * b_beta[:, None], b_E, False, True, C, PRECISION)
        p_X = X + (i_slot * HV + i_hv) * (C * C)
        tl.store(p_X + (o_c[:, None] * C + o_c[None, :]), b_X.to(X.dtype.element_ty))
