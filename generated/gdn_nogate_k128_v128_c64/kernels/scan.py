"""Kernel scan of gdn_nogate_k128_v128_c64.

Spec: gate none
Plan: cut X+P, target sm_90
Body: 0d5dac17454ef1a3
"""

import triton
import triton.language as tl

from ..device import (
    batch_start,
)

C = tl.constexpr(64)
K = tl.constexpr(128)
V = tl.constexpr(128)
BK = tl.constexpr(128)


@triton.jit(do_not_specialize=["k_sb", "q_sb", "beta", "beta_sb", "beta_sh", "v_sb", "cu_seqlens", "T", "N"])
def scan(
    k,
    q,
    beta,
    v,
    h0,
    X,
    P,
    o,
    ht,
    cu_seqlens,
    scale,
    k_sb: tl.int64,
    k_st: tl.constexpr,
    k_sh,
    q_sb: tl.int64,
    q_st: tl.constexpr,
    q_sh,
    beta_sb: tl.int64,
    beta_st: tl.constexpr,
    beta_sh,
    v_sb: tl.int64,
    v_st: tl.constexpr,
    v_sh,
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
    p_k = k + batch_start(i_b, k_sb, k_st) + first * k_st + i_h * k_sh
    if h0 is not None:
        b_S = tl.load(h0 + i_nh.to(tl.int64) * (K * V) + (o_v[:, None] + o_k[None, :] * V)).to(tl.float32)
    else:
        b_S = tl.zeros([BV, BK], dtype=tl.float32)
    p_q = q + batch_start(i_b, q_sb, q_st) + first * q_st + i_h * q_sh
    p_beta = beta + i_b * beta_sb + first * beta_st + i_hv * beta_sh
    p_v = v + batch_start(i_b, v_sb, v_st) + first * v_st + i_hv * v_sh
    p_o = o + ((i_b * T + first) * HV + i_hv) * V
    for i_t in tl.range(0, tl.cdiv(rows, C), num_stages=STAGES):
        start = i_t * C
        m_i = o_c < tl.minimum(length - start, C).to(tl.int32)
        m_o = o_c < tl.minimum(rows - start, C).to(tl.int32)
        b_k = tl.load(p_k + start * k_st + (o_c[:, None] * k_st + o_k[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
        # KS[i,v] = sum k: k[i,k] * S[k,v]
        b_KS = tl.dot(b_S.to(DOT), tl.trans(b_k), input_precision=PRECISION)
        b_q = tl.load(p_q + start * q_st + (o_c[:, None] * q_st + o_k[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
        # QS[i,v] = sum k: q[i,k] * S[k,v]
        b_QS = tl.dot(b_S.to(DOT), tl.trans(b_q), input_precision=PRECISION)
        p_X = X + ((i_slot + i_t) * HV + i_hv) * (C * C)
        b_X = tl.load(p_X + (o_c[:, None] * C + o_c[None, :]))
        b_beta = tl.load(p_beta + start * beta_st + o_c * beta_st, mask=m_i, other=0.0).to(tl.float32)
        b_v = tl.load(p_v + start * v_st + (o_c[:, None] * v_st + o_v[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
        # e[i,v] = v[i,v] - KS[i,v]
        b_e = tl.trans(b_v.to(tl.float32)) - b_KS
        # y[i,v] = beta[i] * e[i,v]
        b_y = b_beta[None, :] * b_e
        # r[i,v] = sum j: X[i,j] * y[j,v]
        b_r = tl.dot(b_y, tl.trans(b_X), input_precision=PRECISION)
        # KR[k,v] = sum i: k[i,k] * r[i,v]
        b_KR = tl.dot(b_r.to(DOT), b_k, input_precision=PRECISION)
        p_P = P + ((i_slot + i_t) * (HV // R) + i_h) * (C * C)
        b_P = tl.load(p_P + (o_c[:, None] * C + o_c[None, :]))
        # PR[i,v] = sum j: r[j,v] * P[i,j]
        b_PR = tl.dot(b_r.to(DOT), tl.trans(b_P), input_precision=PRECISION)
        # S_out[k,v] = S[k,v] + KR[k,v]
        b_S_out = b_S + b_KR
        # t16[i,v] = PR[i,v] + QS[i,v]
        b_t16 = b_PR + b_QS
        # o[i,v] = t16[i,v] * scale
        b_o = b_t16 * scale
        tl.store(
            p_o + start * (HV * V) + (o_v[:, None] + o_c[None, :] * (HV * V)),
            tl.where(m_i[None, :], b_o, 0.0).to(o.dtype.element_ty),
            mask=m_o[None, :],
        )
        # carried to the next chunk
        b_S = b_S_out
    if ht is not None:
        tl.store(ht + i_nh.to(tl.int64) * (K * V) + (o_v[:, None] + o_k[None, :] * V), b_S)
