"""Kernel output of add_nogate_k128_v128_c64_betanone.

Spec: gate none rule additive beta none
Plan: cut S+KR, target sm_90
Body: f445d53a9e54322f
"""

import triton
import triton.language as tl

from ..device import (
    find_sequence,
)

C = tl.constexpr(64)
K = tl.constexpr(128)
V = tl.constexpr(128)
BK = tl.constexpr(128)


@triton.jit(do_not_specialize=["T", "N"])
def output(
    q,
    k,
    v,
    S,
    o,
    cu_seqlens,
    scale,
    q_sb,
    q_st: tl.constexpr,
    q_sh,
    k_sb,
    k_st: tl.constexpr,
    k_sh,
    v_sb,
    v_st: tl.constexpr,
    v_sh,
    T,
    N,
    HV: tl.constexpr,
    R: tl.constexpr,
    BV: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What is read from the stored states, chunk by chunk."""
    pid = tl.program_id(0)
    i_v = pid % tl.cdiv(V, BV)
    i_ch = pid // tl.cdiv(V, BV)
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
    o_v = i_v * BV + tl.arange(0, BV)
    p_q = q + i_b * q_sb + first * q_st + i_h * q_sh
    p_k = k + i_b * k_sb + first * k_st + i_h * k_sh
    p_v = v + i_b * v_sb + first * v_st + i_hv * v_sh
    p_o = o + ((i_b * T + first) * HV + i_hv) * V
    start = i_t * C
    m_i = o_c < tl.minimum(length - start, C).to(tl.int32)
    b_q = tl.load(p_q + start * q_st + (o_c[:, None] * q_st + o_k[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
    b_k = tl.load(p_k + start * k_st + (o_c[:, None] * k_st + o_k[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
    # t2[i,j] = sum k: q[i,k] * k[j,k]
    b_t2 = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    p_S = S + (i_slot * HV + i_hv) * (K * V)
    b_S = tl.load(p_S + (o_k[:, None] * V + o_v[None, :]))
    # QS[i,v] = sum k: q[i,k] * S[k,v]
    b_QS = tl.dot(b_q, b_S, input_precision=PRECISION)
    b_v = tl.load(p_v + start * v_st + (o_c[:, None] * v_st + o_v[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
    # P[i,j] = causal[i,j] * t2[i,j]
    b_P = tl.where(o_c[:, None] >= o_c[None, :], b_t2, 0.0)
    # PR[i,v] = sum j: v[j,v] * P[i,j]
    b_PR = tl.dot(b_P.to(DOT), b_v, input_precision=PRECISION)
    # t9[i,v] = PR[i,v] + QS[i,v]
    b_t9 = b_PR + b_QS
    # o[i,v] = t9[i,v] * scale
    b_o = b_t9 * scale
    m_o = o_c < tl.minimum(rows - start, C).to(tl.int32)
    tl.store(
        p_o + start * (HV * V) + (o_c[:, None] * (HV * V) + o_v[None, :]),
        tl.where(m_i[:, None], b_o, 0.0).to(o.dtype.element_ty),
        mask=m_o[:, None],
    )
