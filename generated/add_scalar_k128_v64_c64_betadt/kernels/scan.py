"""Kernel scan of add_scalar_k128_v64_c64_betadt.

Spec: gate scalar rule additive beta dt value-dim 64
Plan: cut P, target sm_90
Body: 277b1308db6390d6
"""

import triton
import triton.language as tl

from ..device import (
    batch_start,
    softplus,
)

C = tl.constexpr(64)
K = tl.constexpr(128)
V = tl.constexpr(64)
BK = tl.constexpr(128)


@triton.jit(do_not_specialize=["q_sb", "k_sb", "v_sb", "dt", "dt_sb", "dt_sh", "cu_seqlens", "T", "N"])
def scan(
    q,
    k,
    v,
    dt,
    dt_bias,
    h0,
    eG,
    eT,
    eL,
    P,
    o,
    ht,
    cu_seqlens,
    dt_min,
    dt_max,
    scale,
    q_sb: tl.int64,
    q_st: tl.constexpr,
    q_sh,
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
    """The state from chunk to chunk, and what is read from it."""
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
    if h0 is not None:
        b_S = tl.load(h0 + i_nh.to(tl.int64) * (K * V) + (o_v[:, None] + o_k[None, :] * V)).to(tl.float32)
    else:
        b_S = tl.zeros([BV, BK], dtype=tl.float32)
    p_k = k + batch_start(i_b, k_sb, k_st) + first * k_st + i_h * k_sh
    p_v = v + batch_start(i_b, v_sb, v_st) + first * v_st + i_hv * v_sh
    p_dt = dt + i_b * dt_sb + first * dt_st + i_hv * dt_sh
    if dt_bias is not None:
        b_dt_bias = tl.load(dt_bias + i_hv).to(tl.float32)
    else:
        b_dt_bias = 0.0
    p_o = o + ((i_b * T + first) * HV + i_hv) * V
    for i_t in tl.range(0, tl.cdiv(rows, C), num_stages=STAGES):
        start = i_t * C
        m_i = o_c < tl.minimum(length - start, C).to(tl.int32)
        m_o = o_c < tl.minimum(rows - start, C).to(tl.int32)
        b_q = tl.load(p_q + start * q_st + (o_c[:, None] * q_st + o_k[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
        # t2[i,v] = sum k: q[i,k] * S[k,v]
        b_t2 = tl.dot(b_S.to(DOT), tl.trans(b_q), input_precision=PRECISION)
        b_k = tl.load(p_k + start * k_st + (o_c[:, None] * k_st + o_k[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
        b_v = tl.load(p_v + start * v_st + (o_c[:, None] * v_st + o_v[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
        b_dt = tl.load(p_dt + start * dt_st + o_c * dt_st, mask=m_i, other=0.0).to(tl.float32)
        # t7[i] = dt[i] + dt_bias
        b_t7 = b_dt + b_dt_bias
        # t8[i] = softplus(t7[i])
        b_t8 = softplus(b_t7)
        # sp[i] = clamp(t8[i], dt_min, dt_max)
        b_sp = tl.minimum(tl.maximum(b_t8, dt_min), dt_max)
        p_eG = eG + ((i_slot + i_t) * HV + i_hv) * C
        b_eG = tl.load(p_eG + o_c)
        p_eT = eT + ((i_slot + i_t) * HV + i_hv) * C
        b_eT = tl.load(p_eT + o_c)
        p_eL = eL + (i_slot + i_t) * HV + i_hv
        b_eL = tl.load(p_eL)
        # r[i,v] = v[i,v] * sp[i]
        b_r = b_sp[:, None] * b_v.to(tl.float32)
        # t16[k,v] = eL * S[k,v]
        b_t16 = b_eL * b_S
        # t17[i,v] = v[i,v] * sp[i] * eT[i]
        b_t17 = (b_sp * b_eT)[:, None] * b_v.to(tl.float32)
        # KR[k,v] = sum i: k[i,k] * t17[i,v]
        b_KR = tl.dot(tl.trans(b_t17.to(DOT)), b_k, input_precision=PRECISION)
        # S_out[k,v] = t16[k,v] + KR[k,v]
        b_S_out = b_t16 + b_KR
        p_P = P + ((i_slot + i_t) * HV + i_hv) * (C * C)
        b_P = tl.load(p_P + (o_c[:, None] * C + o_c[None, :]))
        # PR[i,v] = sum j: r[j,v] * P[i,j]
        b_PR = tl.dot(tl.trans(b_r.to(DOT)), tl.trans(b_P), input_precision=PRECISION)
        # QS[i,v] = eG[i] * t2[i,v]
        b_QS = b_eG[None, :] * b_t2
        # t24[i,v] = PR[i,v] + QS[i,v]
        b_t24 = b_PR + b_QS
        # o[i,v] = t24[i,v] * scale
        b_o = b_t24 * scale
        tl.store(
            p_o + start * (HV * V) + (o_v[:, None] + o_c[None, :] * (HV * V)),
            tl.where(m_i[None, :], b_o, 0.0).to(o.dtype.element_ty),
            mask=m_o[None, :],
        )
        # carried to the next chunk
        b_S = b_S_out
    if ht is not None:
        tl.store(ht + i_nh.to(tl.int64) * (K * V) + (o_v[:, None] + o_k[None, :] * V), b_S)
