"""Kernel queries of add_scalar_k128_v64_c64_betadt.

Spec: gate scalar rule additive beta dt value-dim 64
Plan: cut S+dS, target sm_90
Body: 3e1ea6ff1ea2fbee
"""

import triton
import triton.language as tl

from ..device import (
    batch_start,
    find_sequence,
)


@triton.jit(do_not_specialize=["do_sb", "q_sb", "k_sb", "cu_seqlens", "T", "N"])
def queries(
    do,
    q,
    k,
    S,
    eG,
    t40,
    t31,
    dq,
    cu_seqlens,
    scale,
    do_sb: tl.int64,
    do_st: tl.constexpr,
    do_sh,
    q_sb: tl.int64,
    q_st: tl.constexpr,
    q_sh,
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
    V: tl.constexpr = 64
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
    p_q = q + batch_start(i_b, q_sb, q_st) + first * q_st + i_h * q_sh
    p_k = k + batch_start(i_b, k_sb, k_st) + first * k_st + i_h * k_sh
    start = i_t * C
    m_i = o_c < tl.minimum(length - start, C).to(tl.int32)
    m_o = o_c < tl.minimum(rows - start, C).to(tl.int32)
    b_q = tl.load(p_q + start * q_st + (o_c[:, None] * q_st + o_k[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
    b_t6 = tl.zeros([C, BK], dtype=tl.float32)
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
        p_eG = eG + (i_slot * HV + i_hv) * C
        b_eG = tl.load(p_eG + o_c)
        # t5[i,k] = eG[i] * scale * t2[i,k]
        b_t5 = scale * b_t2 * b_eG[:, None]
        # t6[i,k] = sum r: t5[i,k]
        b_t6 += b_t5
        # t31[i] = sum k: q[i,k] * t2[i,k]
        b_t31 = tl.sum(b_q.to(tl.float32) * b_t2, 1)
        p_t31 = t31 + (i_slot * HV + i_hv) * C
        tl.store(p_t31 + o_c, b_t31.to(t31.dtype.element_ty))
    b_k = tl.load(p_k + start * k_st + (o_c[:, None] * k_st + o_k[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
    p_t40 = t40 + (i_slot * (HV // R) + i_h) * (C * C)
    b_t40 = tl.load(p_t40 + (o_c[:, None] * C + o_c[None, :]))
    # t11[i,k] = sum j: k[j,k] * t40[i,j]
    b_t11 = tl.dot(b_t40, b_k, input_precision=PRECISION)
    # dq[i,k] = t6[i,k] + t11[i,k]
    b_dq = b_t6 + b_t11
    if dq is not None:
        p_dq = dq + ((i_b * T + first) * (HV // R) + i_h) * K
        tl.store(
            p_dq + start * ((HV // R) * K) + (o_c[:, None] * ((HV // R) * K) + o_k[None, :]),
            tl.where(m_i[:, None], b_dq, 0.0).to(dq.dtype.element_ty),
            mask=m_o[:, None],
        )
