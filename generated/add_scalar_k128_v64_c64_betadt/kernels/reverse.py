"""Kernel reverse of add_scalar_k128_v64_c64_betadt.

Spec: gate scalar rule additive beta dt value-dim 64
Plan: cut S+dS, target sm_90
Body: 3e0df95e8ff366c2
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


@triton.jit(do_not_specialize=["q_sb", "dt", "dt_sb", "dt_sh", "do_sb", "cu_seqlens", "T", "N"])
def reverse(
    q,
    dt,
    dt_bias,
    A_log,
    do,
    dht,
    dS,
    dh0,
    cu_seqlens,
    dt_min,
    dt_max,
    scale,
    q_sb: tl.int64,
    q_st: tl.constexpr,
    q_sh,
    dt_sb: tl.int64,
    dt_st: tl.constexpr,
    dt_sh,
    do_sb: tl.int64,
    do_st: tl.constexpr,
    do_sh,
    T,
    N,
    HV: tl.constexpr,
    R: tl.constexpr,
    BV: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The state's gradient, from the last chunk to the first."""
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
    p_q = q + batch_start(i_b, q_sb, q_st) + first * q_st + i_h * q_sh
    p_dt = dt + i_b * dt_sb + first * dt_st + i_hv * dt_sh
    if dt_bias is not None:
        b_dt_bias = tl.load(dt_bias + i_hv).to(tl.float32)
    else:
        b_dt_bias = 0.0
    b_A_log = tl.load(A_log + i_hv).to(tl.float32)
    p_do = do + batch_start(i_b, do_sb, do_st) + first * do_st + i_hv * do_sh
    if dht is not None:
        b_dS = tl.load(dht + i_nh.to(tl.int64) * (K * V) + (o_k[:, None] * V + o_v[None, :])).to(tl.float32)
    else:
        b_dS = tl.zeros([BK, BV], dtype=tl.float32)
    last = tl.cdiv(rows, C) - 1
    for i_s in tl.range(0, last + 1, num_stages=STAGES):
        i_t = last - i_s
        start = i_t * C
        m_i = o_c < tl.minimum(length - start, C).to(tl.int32)
        b_q = tl.load(p_q + start * q_st + (o_c[:, None] * q_st + o_k[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
        b_dt = tl.load(p_dt + start * dt_st + o_c * dt_st, mask=m_i, other=0.0).to(tl.float32)
        # t3[i] = dt[i] + dt_bias
        b_t3 = b_dt + b_dt_bias
        # t4[i] = softplus(t3[i])
        b_t4 = softplus(b_t3)
        # sp[i] = clamp(t4[i], dt_min, dt_max)
        b_sp = tl.minimum(tl.maximum(b_t4, dt_min), dt_max)
        # t9 = exp(A_log)
        b_t9 = tl.exp(tl.minimum(b_A_log, SATURATION))
        # t10[i] = sp[i] * t9
        b_t10 = b_sp * b_t9
        # t11[i] = -t10[i]
        b_t11 = -b_t10
        # g[i] = valid(t11[i])
        b_g = tl.where(m_i, b_t11, 0.0)
        # eG[i] = decay.i0(g[i])
        b_g_c, b_g_f = cumulative_gate(b_g, 0)
        b_eG = tl.exp(b_g_c + b_g_f)
        # eL = decay.10(g[i])
        b_g_tc, b_g_tf = total_gate(b_g, 0)
        b_eL = tl.exp(b_g_tc + b_g_tf)
        b_do = tl.load(p_do + start * do_st + (o_c[:, None] * do_st + o_v[None, :]), mask=m_i[:, None], other=0.0).to(
            DOT
        )
        p_dS = dS + ((i_slot + i_t) * HV + i_hv) * (K * V)
        tl.store(p_dS + (o_k[:, None] * V + o_v[None, :]), b_dS.to(dS.dtype.element_ty))
        # t18[i,v] = eG[i] * do[i,v]
        b_t18 = b_eG[:, None] * b_do.to(tl.float32)
        # t19[k,v] = sum i: q[i,k] * t18[i,v]
        b_t19 = tl.dot(tl.trans(b_q), b_t18.to(DOT), input_precision=PRECISION)
        # t20[k,v] = scale * t19[k,v]
        b_t20 = scale * b_t19
        # t21[k,v] = eL * dS[k,v]
        b_t21 = b_eL * b_dS
        # t22[k,v] = t20[k,v] + t21[k,v]
        b_t22 = b_t20 + b_t21
        # carried to the next chunk
        b_dS = b_t22
    if dh0 is not None:
        tl.store(dh0 + i_nh.to(tl.int64) * (K * V) + (o_k[:, None] * V + o_v[None, :]), b_dS)
