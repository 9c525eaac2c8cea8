"""Kernel scan of add_scalar_k128_v64_c64_betadt.

Spec: gate scalar rule additive beta dt value-dim 64
Plan: cut P, target sm_90
Body: c0549dfc6d113af8
"""

import triton
import triton.language as tl

from ..device import (
    load_tile,
    load_tokens,
    segment_of,
)


@triton.jit(do_not_specialize=["q_sb", "v_sb", "k_sb", "cu_seqlens", "T", "N"])
def scan(
    q,
    v,
    k,
    h0,
    sp,
    P,
    eG,
    eL,
    eT,
    o,
    ht,
    maps,
    cu_seqlens,
    scale,
    q_sb: tl.int64,
    q_st: tl.constexpr,
    q_sh,
    v_sb: tl.int64,
    v_st: tl.constexpr,
    v_sh,
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
    STAGES: tl.constexpr,
    PASS: tl.constexpr,
):
    """The state from chunk to chunk, and what is read from it."""
    C: tl.constexpr = 64
    SPAN: tl.constexpr = 2048
    K: tl.constexpr = 128
    V: tl.constexpr = 64
    BK: tl.constexpr = 128
    pid = tl.program_id(0)
    # A program: one tile of v of a sequence, or of a segment.  Pass "maps" has more of them: after those of w (from 0,
    # with what is written) tiles of M (from the unit matrix, without).
    tiles = tl.cdiv(V, BV) + (tl.cdiv(K, BV) if PASS == "maps" else 0)
    i_tile = pid % tiles
    is_w = i_tile < tl.cdiv(V, BV)
    i_v = i_tile % tl.cdiv(V, BV)  # of M any will do: what is read of v is left out
    i_nh = pid // tiles
    i_n, i_segment = i_nh // HV, 0
    if PASS != "whole":  # i_nh counts the segments of all sequences
        i_n, i_segment = segment_of(i_nh // HV, cu_seqlens, T, N, SPAN)
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
    i_from, i_to = 0, tl.cdiv(rows, C)
    if PASS != "whole":
        i_from, i_to = i_segment * (SPAN // C), tl.minimum((i_segment + 1) * (SPAN // C), i_to)
    if PASS == "maps":
        if (i_segment + 1) * SPAN >= length:  # no state goes on from here
            return
    o_c = tl.arange(0, C)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    o_map = i_tile * BV + tl.arange(0, BV)
    if h0 is not None:
        b_S = tl.load(h0 + i_nh.to(tl.int64) * (K * V) + (o_v[:, None] + o_k[None, :] * V)).to(tl.float32)
    else:
        b_S = tl.zeros([BV, BK], dtype=tl.float32)
    if PASS == "maps":
        b_S = tl.where(o_map[:, None] - tl.cdiv(V, BV) * BV == o_k[None, :], 1.0, 0.0)
    p_o = o + ((i_b * T + first) * HV + i_hv) * V
    for i_t in tl.range(i_from, i_to, num_stages=STAGES):
        start = i_t * C
        m_i = o_c < tl.minimum(length - start, C).to(tl.int32)
        b_q = load_tokens(q, i_b, first + start, i_h, 0, q_sb, q_st, q_sh, m_i, C, BK, K, cu_seqlens is not None).to(
            DOT
        )
        # t2[i,v] = sum k: q[i,k] * S[k,v]
        b_t2 = tl.dot(b_S.to(DOT), tl.trans(b_q), input_precision=PRECISION)
        b_v = load_tokens(
            v, i_b, first + start, i_hv, i_v * BV, v_sb, v_st, v_sh, m_i, C, BV, V, cu_seqlens is not None
        ).to(DOT)
        if PASS == "maps":
            b_v = tl.where(is_w, b_v, 0.0)
        p_sp = sp + ((i_slot + i_t) * HV + i_hv) * C
        b_sp = tl.load(p_sp + o_c)
        # r[i,v] = v[i,v] * sp[i]
        b_r = b_v.to(tl.float32) * b_sp[:, None]
        b_P = load_tile(P, (i_slot + i_t) * HV + i_hv, 0, 0, C, C, C, C)
        # PR[i,v] = sum j: r[j,v] * P[i,j]
        b_PR = tl.dot(tl.trans(b_r.to(DOT)), tl.trans(b_P), input_precision=PRECISION)
        p_eG = eG + ((i_slot + i_t) * HV + i_hv) * C
        b_eG = tl.load(p_eG + o_c)
        # QS[i,v] = eG[i] * t2[i,v]
        b_QS = b_t2 * b_eG[None, :]
        # t10[i,v] = PR[i,v] + QS[i,v]
        b_t10 = b_PR + b_QS
        # o[i,v] = t10[i,v] * scale
        b_o = b_t10 * scale
        if PASS != "maps":
            tl.store(
                p_o + start * (HV * V) + (o_v[:, None] + o_c[None, :] * (HV * V)),
                b_o.to(o.dtype.element_ty),
                mask=m_i[None, :],
            )
        p_eL = eL + (i_slot + i_t) * HV + i_hv
        b_eL = tl.load(p_eL)
        # t14[k,v] = eL * S[k,v]
        b_t14 = b_eL * b_S
        b_k = load_tokens(k, i_b, first + start, i_h, 0, k_sb, k_st, k_sh, m_i, C, BK, K, cu_seqlens is not None).to(
            DOT
        )
        p_eT = eT + ((i_slot + i_t) * HV + i_hv) * C
        b_eT = tl.load(p_eT + o_c)
        # t17[i,v] = v[i,v] * sp[i] * eT[i]
        b_t17 = b_v.to(tl.float32) * (b_sp * b_eT)[:, None]
        # KR[k,v] = sum i: k[i,k] * t17[i,v]
        b_KR = tl.dot(tl.trans(b_t17.to(DOT)), b_k, input_precision=PRECISION)
        # S_out[k,v] = t14[k,v] + KR[k,v]
        b_S_out = b_t14 + b_KR
        # carried to the next chunk
        b_S = b_S_out
    if PASS != "maps":
        if cu_seqlens is not None:  # rows past the last sequence
            for i_t in tl.range(tl.maximum(length // C, i_from), i_to):
                start = i_t * C
                m_past = (o_c >= length - start) & (o_c < rows - start)
                tl.store(p_o + start * (HV * V) + (o_v[:, None] + o_c[None, :] * (HV * V)), 0.0, mask=m_past[None, :])
    if PASS == "maps":
        tl.store(maps + i_nh.to(tl.int64) * (tiles * BV * K) + (o_map[:, None] * K + o_k[None, :]), b_S)
    if PASS == "segments":  # the final state is that of the last segment
        if i_segment != tl.maximum(tl.cdiv(length, SPAN), 1) - 1:
            return
        i_nh = i_n * HV + i_hv  # by sequence again
    if ht is not None and PASS != "maps":
        tl.store(ht + i_nh.to(tl.int64) * (K * V) + (o_v[:, None] + o_k[None, :] * V), b_S)
