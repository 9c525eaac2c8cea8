"""Kernel combine: the states that enter the segments of a sequence, from what each of them does to a state."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["cu_seqlens", "T", "N"])
def combine(
    maps,
    start,
    states,
    cu_seqlens,
    T,
    N,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    SPAN: tl.constexpr,
    FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    V_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """S_next[k,v] = sum l: M[k,l] * S[l,v] + w[k,v], segment by segment.

    maps: for each segment and head ROWS rows of K: w by v, from row FIRST on M by l.
    """
    pid = tl.program_id(0)
    i_nh = pid // tl.cdiv(V, BV)
    i_n = i_nh // HV
    if cu_seqlens is not None:
        first = tl.load(cu_seqlens + i_n).to(tl.int64)
        length = tl.load(cu_seqlens + i_n + 1).to(tl.int64) - first
        i_slot = first // SPAN + i_n
    else:
        length = T
        i_slot = i_n.to(tl.int64) * tl.cdiv(T, SPAN)
    o_v = pid % tl.cdiv(V, BV) * BV + tl.arange(0, BV)
    o_k = tl.arange(0, BK)
    m_v, m_k = o_v[:, None] < V, o_k[None, :] < K
    p_S = o_v[:, None] * K + o_k[None, :] if V_FIRST else o_v[:, None] + o_k[None, :] * V
    if start is not None:
        b_S = tl.load(start + i_nh.to(tl.int64) * (K * V) + p_S, mask=m_v & m_k, other=0.0).to(tl.float32)
    else:
        b_S = tl.zeros([BV, BK], dtype=tl.float32)
    count = tl.maximum(tl.cdiv(length, SPAN), 1)
    i_tile = i_slot * HV + i_nh % HV
    for _ in tl.range(1, count, num_stages=2):
        tl.store(states + i_tile * (K * V) + p_S, b_S, mask=m_v & m_k)
        p_m = maps + i_tile * (ROWS * K) + o_k[None, :]
        b_w = tl.load(p_m + o_v[:, None] * K, mask=m_v & m_k, other=0.0)
        b_M = tl.load(p_m + (FIRST + o_k[:, None]) * K, mask=(o_k[:, None] < K) & m_k, other=0.0)
        b_S = tl.dot(b_S, b_M, input_precision=PRECISION) + b_w
        i_tile += HV
    tl.store(states + i_tile * (K * V) + p_S, b_S, mask=m_v & m_k)
