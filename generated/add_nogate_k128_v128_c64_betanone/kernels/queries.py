"""Kernel queries of add_nogate_k128_v128_c64_betanone.

Spec: gate none rule additive beta none
Plan: cut S+dS, target sm_90
Body: bd41d5f9be59c49c
"""

import triton
import triton.language as tl

from ..device import (
    batch_start,
    find_sequence,
)


@triton.jit(do_not_specialize=["do_sb", "k_sb", "cu_seqlens", "T", "N"])
def queries(
    do,
    k,
    S,
    dP,
    dq,
    cu_seqlens,
    scale,
    do_sb: tl.int64,
    do_st: tl.constexpr,
    do_sh,
    k_sb: tl.int64,
    k_st: tl.constexpr,
    k_sh,
    T,
    N,
    HV: tl.constexpr,
    R: tl.constexpr,
    BV: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradient of q, chunk by chunk."""
    C: tl.constexpr = 64
    K: tl.constexpr = 128
    V: tl.constexpr = 128
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
    start = i_t * C
    m_i = o_c < tl.minimum(length - start, C).to(tl.int32)
    m_o = o_c < tl.minimum(rows - start, C).to(tl.int32)
    b_dq_QS = tl.zeros([C, BK], dtype=tl.float32)
    for i_r in tl.range(0, R, disable_licm=True):
        i_hv = i_h * R + i_r
        p_do = do + batch_start(i_b, do_sb, do_st) + first * do_st + i_hv * do_sh
        b_t2 = tl.zeros([C, BK], dtype=tl.float32)
        for i_v in tl.range(0, tl.cdiv(V, BV)):
            o_v = i_v * BV + tl.arange(0, BV)
            p_S = S + (i_slot * HV + i_hv) * (K * V)
            b_S = tl.load(p_S + (o_k[:, None] * V + o_v[None, :]))
            b_do = tl.load(
                p_do + start * do_st + (o_c[:, None] * do_st + o_v[None, :]), mask=m_i[:, None], other=0.0
            ).to(DOT)
            # t2[i,k] = sum v: S[k,v] * do[i,v]
            b_t2 = tl.dot(b_do, tl.trans(b_S), b_t2, input_precision=PRECISION)
        # t4[i,k] = scale * t2[i,k]
        b_t4 = scale * b_t2
        # dq_QS[i,k] = sum r: t4[i,k]
        b_dq_QS += b_t4
    b_k = tl.load(p_k + start * k_st + (o_c[:, None] * k_st + o_k[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
    p_dP = dP + (i_slot * (HV // R) + i_h) * (C * C)
    b_dP = tl.load(p_dP + (o_c[:, None] * C + o_c[None, :]))
    # t9[i,j] = causal[i,j] * dP[i,j]
    b_t9 = tl.where(o_c[:, None] >= o_c[None, :], b_dP.to(tl.float32), 0.0)
    # t10[i,k] = sum j: k[j,k] * t9[i,j]
    b_t10 = tl.dot(b_t9.to(DOT), b_k, input_precision=PRECISION)
    # dq[i,k] = dq_QS[i,k] + t10[i,k]
    b_dq = b_dq_QS + b_t10
    if dq is not None:
        p_dq = dq + ((i_b * T + first) * (HV // R) + i_h) * K
        tl.store(
            p_dq + start * ((HV // R) * K) + (o_c[:, None] * ((HV // R) * K) + o_k[None, :]),
            tl.where(m_i[:, None], b_dq, 0.0).to(dq.dtype.element_ty),
            mask=m_o[:, None],
        )
