"""Kernel recurrence of add_nogate_k128_v128_c64_betanone.

Spec: gate none rule additive beta none
Plan: cut none, target sm_90
Body: 6581ee356931ed0d
"""

import triton
import triton.language as tl

from ..device import (
    batch_start,
)


@triton.jit(do_not_specialize=["q_sb", "k_sb", "v_sb", "cu_seqlens", "T", "N"])
def recurrence(
    q,
    k,
    v,
    h0,
    o,
    ht,
    cu_seqlens,
    scale,
    q_sb: tl.int64,
    q_st,
    q_sh,
    k_sb: tl.int64,
    k_st,
    k_sh,
    v_sb: tl.int64,
    v_st,
    v_sh,
    T,
    N,
    HV: tl.constexpr,
    R: tl.constexpr,
    BV: tl.constexpr,
    ROW: tl.constexpr,
):
    """The state from token to token, and what is read from it."""
    K: tl.constexpr = 128
    V: tl.constexpr = 128
    BK: tl.constexpr = 128
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
    else:
        i_b = i_n.to(tl.int64)
        first = i_b * 0  # 64 bits wide, as the offsets of packed sequences
        length = first + T
        rows = length
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    p_q = q + batch_start(i_b, q_sb, ROW) + first * q_st + i_h * q_sh
    p_k = k + batch_start(i_b, k_sb, ROW) + first * k_st + i_h * k_sh
    p_v = v + batch_start(i_b, v_sb, ROW) + first * v_st + i_hv * v_sh
    if h0 is not None:
        b_S = tl.load(h0 + i_nh.to(tl.int64) * (K * V) + (o_k[:, None] * V + o_v[None, :])).to(tl.float32)
    else:
        b_S = tl.zeros([BK, BV], dtype=tl.float32)
    p_o = o + ((i_b * T + first) * HV + i_hv) * V
    for o_i in tl.range(0, rows):
        m_i = tl.where(o_i < length, True, False)  # a bare comparison is int64 in the interpreter of Triton 3.9
        b_q = tl.load(p_q + o_i * q_st + o_k, mask=m_i, other=0.0)
        b_k = tl.load(p_k + o_i * k_st + o_k, mask=m_i, other=0.0)
        b_v = tl.load(p_v + o_i * v_st + o_v, mask=m_i, other=0.0)
        # KR[k,v] = k[k] * v[v]
        b_KR = b_k.to(tl.float32)[:, None] * b_v.to(tl.float32)[None, :]
        # S_out[k,v] = S[k,v] + KR[k,v]
        b_S_out = b_S + b_KR
        # t7[v] = sum k: q[k] * S_out[k,v]
        b_t7 = tl.sum(b_S_out * b_q.to(tl.float32)[:, None], 0)
        # o[v] = t7[v] * scale
        b_o = b_t7 * scale
        tl.store(p_o + o_i * (HV * V) + o_v, tl.where(m_i, b_o, 0.0).to(o.dtype.element_ty))
        # carried to the next token
        b_S = b_S_out
    if ht is not None:
        tl.store(ht + i_nh.to(tl.int64) * (K * V) + (o_k[:, None] * V + o_v[None, :]), b_S)
