"""Kernel combine: the states that enter the segments of a sequence, from what each of them does to a state."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["cu_seqlens", "T", "N"])
def combine(
    maps,
    initial,
    states,
    cu_seqlens,
    T,
    N,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    SPAN: tl.constexpr,
    M_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    V_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """S_next[k,v] = sum l: M[k,l] * S[l,v] + w[k,v], segment by segment.

    maps: ROWS rows of K for each segment and head, from row 0 on w by v, from row M_ROW on M by l.
    states: what enters each segment.
    """
    pid = tl.program_id(0)
    i_nh = pid // tl.cdiv(V, BV)
    i_n = i_nh // HV
    if cu_seqlens is not None:
        first = tl.load(cu_seqlens + i_n).to(tl.int64)
        length = tl.load(cu_seqlens + i_n + 1).to(tl.int64) - first
        i_segment = first // SPAN + i_n
    else:
        length = T
        i_segment = i_n.to(tl.int64) * tl.cdiv(T, SPAN)
    o_v = pid % tl.cdiv(V, BV) * BV + tl.arange(0, BV)
    o_k = tl.arange(0, BK)
    m_v, m_k = o_v[:, None] < V, o_k[None, :] < K
    o_S = o_v[:, None] * K + o_k[None, :] if V_FIRST else o_v[:, None] + o_k[None, :] * V
    if initial is not None:
        b_S = tl.load(initial + i_nh.to(tl.int64) * (K * V) + o_S, mask=m_v & m_k, other=0.0).to(tl.float32)
    else:
        b_S = tl.zeros([BV, BK], dtype=tl.float32)
    i_map = i_segment * HV + i_nh % HV
    for _ in tl.range(1, tl.cdiv(length, SPAN), num_stages=2):
        tl.store(states + i_map * (K * V) + o_S, b_S, mask=m_v & m_k)
        p_map = maps + i_map * (ROWS * K) + o_k[None, :]
        b_w = tl.load(p_map + o_v[:, None] * K, mask=m_v & m_k, other=0.0)
        b_M = tl.load(p_map + (M_ROW + o_k[:, None]) * K, mask=(o_k[:, None] < K) & m_k, other=0.0)
        b_S = tl.dot(b_S, b_M, input_precision=PRECISION) + b_w
        i_map += HV
    tl.store(states + i_map * (K * V) + o_S, b_S, mask=m_v & m_k)
