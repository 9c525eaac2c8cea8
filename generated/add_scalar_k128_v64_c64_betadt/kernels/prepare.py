"""Kernel prepare of add_scalar_k128_v64_c64_betadt.

Spec: gate scalar rule additive beta dt value-dim 64
Plan: cut KR+PR, target sm_90
Body: e4f3e4482836aa8d
"""

import triton
import triton.language as tl

from ..device import (
    SATURATION,
    cumulative_gate,
    decay_between,
    find_sequence,
    softplus,
    total_gate,
)

C = tl.constexpr(64)
K = tl.constexpr(128)
V = tl.constexpr(64)
BK = tl.constexpr(128)


@triton.jit(do_not_specialize=["T", "N"])
def prepare(
    k,
    v,
    dt,
    dt_bias,
    A_log,
    q,
    KR,
    PR,
    eG,
    eL,
    cu_seqlens,
    dt_min,
    dt_max,
    k_sb,
    k_st: tl.constexpr,
    k_sh,
    v_sb,
    v_st: tl.constexpr,
    v_sh,
    dt_sb,
    dt_st: tl.constexpr,
    dt_sh,
    q_sb,
    q_st: tl.constexpr,
    q_sh,
    T,
    N,
    HV: tl.constexpr,
    R: tl.constexpr,
    BV: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What does not depend on the state, chunk by chunk."""
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
    o_v = tl.arange(0, BV)
    p_k = k + i_b * k_sb + first * k_st + i_h * k_sh
    p_v = v + i_b * v_sb + first * v_st + i_hv * v_sh
    p_dt = dt + i_b * dt_sb + first * dt_st + i_hv * dt_sh
    if dt_bias is not None:
        b_dt_bias = tl.load(dt_bias + i_hv).to(tl.float32)
    else:
        b_dt_bias = 0.0
    b_A_log = tl.load(A_log + i_hv).to(tl.float32)
    p_q = q + i_b * q_sb + first * q_st + i_h * q_sh
    start = i_t * C
    m_i = o_c < tl.minimum(length - start, C).to(tl.int32)
    b_k = tl.load(p_k + start * k_st + (o_c[:, None] * k_st + o_k[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
    b_v = tl.load(p_v + start * v_st + (o_c[:, None] * v_st + o_v[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
    b_dt = tl.load(p_dt + start * dt_st + o_c * dt_st, mask=m_i, other=0.0).to(tl.float32)
    # t4[i] = dt[i] + dt_bias
    b_t4 = b_dt + b_dt_bias
    # t5[i] = softplus(t4[i])
    b_t5 = softplus(b_t4)
    # sp[i] = clamp(t5[i], dt_min, dt_max)
    b_sp = tl.minimum(tl.maximum(b_t5, dt_min), dt_max)
    # t10 = exp(A_log)
    b_t10 = tl.exp(tl.minimum(b_A_log, SATURATION))
    # t11[i] = sp[i] * t10
    b_t11 = b_sp * b_t10
    # t12[i] = -t11[i]
    b_t12 = -b_t11
    # g[i] = valid(t12[i])
    b_g = tl.where(m_i, b_t12, 0.0)
    # eT[i] = decay.1i(g[i])
    b_g_c, b_g_f = cumulative_gate(b_g)
    b_g_tc, b_g_tf = total_gate(b_g)
    b_eT = tl.exp((b_g_tc - b_g_c) + (b_g_tf - b_g_f))
    # t15[i,v] = v[i,v] * sp[i] * eT[i]
    b_t15 = (b_sp * b_eT)[:, None] * b_v.to(tl.float32)
    # KR[k,v] = sum i: k[i,k] * t15[i,v]
    b_KR = tl.dot(tl.trans(b_k), b_t15.to(DOT), input_precision=PRECISION)
    p_KR = KR + (i_slot * HV + i_hv) * (K * V)
    tl.store(p_KR + (o_k[:, None] * V + o_v[None, :]), b_KR.to(KR.dtype.element_ty))
    b_q = tl.load(p_q + start * q_st + (o_c[:, None] * q_st + o_k[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
    # t18[i,j] = sum k: q[i,k] * k[j,k]
    b_t18 = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    # r[i,v] = v[i,v] * sp[i]
    b_r = b_sp[:, None] * b_v.to(tl.float32)
    # E[i,j] = decay.ij(g[i])
    b_E = decay_between(b_g_c, b_g_f, C)
    # P[i,j] = E[i,j] * t18[i,j]
    b_P = b_E * b_t18
    # PR[i,v] = sum j: r[j,v] * P[i,j]
    b_PR = tl.dot(b_P.to(DOT), b_r.to(DOT), input_precision=PRECISION)
    p_PR = PR + (i_slot * HV + i_hv) * (C * V)
    tl.store(p_PR + (o_c[:, None] * V + o_v[None, :]), b_PR.to(PR.dtype.element_ty))
    # eG[i] = decay.i0(g[i])
    b_eG = tl.exp(b_g_c + b_g_f)
    p_eG = eG + (i_slot * HV + i_hv) * C
    tl.store(p_eG + o_c, b_eG.to(eG.dtype.element_ty))
    # eL = decay.10(g[i])
    b_eL = tl.exp(b_g_tc + b_g_tf)
    p_eL = eL + i_slot * HV + i_hv
    tl.store(p_eL, b_eL.to(eL.dtype.element_ty))
