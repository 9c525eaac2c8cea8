"""Kernel states of add_scalar_k128_v64_c64_betadt.

Spec: gate scalar rule additive beta dt value-dim 64
Plan: cut S+dS, target sm_90
Body: a3224b05774b1fd0
"""

import triton
import triton.language as tl

from ..device import (
    SATURATION,
    batch_start,
    cumulative_gate,
    softplus,
    total_gate,
)

C = tl.constexpr(64)
K = tl.constexpr(128)
V = tl.constexpr(64)
BK = tl.constexpr(128)


@triton.jit(do_not_specialize=["k_sb", "v_sb", "dt", "dt_sb", "dt_sh", "cu_seqlens", "T", "N"])
def states(
    k,
    v,
    dt,
    dt_bias,
    A_log,
    h0,
    S,
    cu_seqlens,
    dt_min,
    dt_max,
    k_sb: tl.int64,
    k_st: tl.constexpr,
    k_sh,
    v_sb: tl.int64,
    v_st: tl.constexpr,
    v_sh,
    dt_sb: tl.int64,
    dt_st: tl.constexpr,
    dt_sh,
    T,
    N,
    HV: tl.constexpr,
    R: tl.constexpr,
    BV: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The state that enters each chunk, once more."""
    pid = tl.program_id(0)
    i_v = pid % tl.cdiv(V, BV)
    i_nh = pid // tl.cdiv(V, BV)
    i_n = i_nh // HV
    i_hv = (i_nh % HV).to(tl.int64)
    i_h = i_hv // R
    # Tokens first .. first + length of the sequence; the last packed one also clears the rows past the offsets.
    if cu_seqlens is not None:
        i_b = 0
        first = tl.load(cu_seqlens + i_n).to(tl.int64)
        length = tl.load(cu_seqlens + i_n + 1).to(tl.int64) - first
        rows = tl.where(i_n == N - 1, T - first, length)
        i_slot = first // C + i_n
    else:
        i_b = i_n.to(tl.int64)
        first = i_b * 0  # 64 bits wide, as the offsets of packed sequences
        length = first + T
        rows = length
        i_slot = i_b * tl.cdiv(T, C)
    o_c = tl.arange(0, C)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    p_k = k + batch_start(i_b, k_sb, k_st) + first * k_st + i_h * k_sh
    p_v = v + batch_start(i_b, v_sb, v_st) + first * v_st + i_hv * v_sh
    p_dt = dt + i_b * dt_sb + first * dt_st + i_hv * dt_sh
    if dt_bias is not None:
        b_dt_bias = tl.load(dt_bias + i_hv).to(tl.float32)
    else:
        b_dt_bias = 0.0
    b_A_log = tl.load(A_log + i_hv).to(tl.float32)
    if h0 is not None:
        b_S = tl.load(h0 + i_nh.to(tl.int64) * (K * V) + (o_k[:, None] * V + o_v[None, :])).to(tl.float32)
    else:
        b_S = tl.zeros([BK, BV], dtype=tl.float32)
    for i_t in tl.range(0, tl.cdiv(rows, C), num_stages=STAGES):
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
        b_g_c, b_g_f = cumulative_gate(b_g, 0)
        b_g_tc, b_g_tf = total_gate(b_g, 0)
        b_eT = tl.exp((b_g_tc - b_g_c) + (b_g_tf - b_g_f))
        # eL = decay.10(g[i])
        b_eL = tl.exp(b_g_tc + b_g_tf)
        p_S = S + ((i_slot + i_t) * HV + i_hv) * (K * V)
        tl.store(p_S + (o_k[:, None] * V + o_v[None, :]), b_S.to(S.dtype.element_ty))
        # t17[k,v] = eL * S[k,v]
        b_t17 = b_eL * b_S
        # t18[i,v] = v[i,v] * sp[i] * eT[i]
        b_t18 = (b_sp * b_eT)[:, None] * b_v.to(tl.float32)
        # KR[k,v] = sum i: k[i,k] * t18[i,v]
        b_KR = tl.dot(tl.trans(b_k), b_t18.to(DOT), input_precision=PRECISION)
        # S_out[k,v] = t17[k,v] + KR[k,v]
        b_S_out = b_t17 + b_KR
        # carried to the next chunk
        b_S = b_S_out
