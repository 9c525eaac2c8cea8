"""Kernel gradients of add_nogate_k128_v128_c64_betanone.

Spec: gate none rule additive beta none
Plan: cut S+dS, target sm_90
Body: fb5b2d69aa4e9465
"""

import triton
import triton.language as tl

from ..device import (
    batch_start,
    find_sequence,
)


@triton.jit(do_not_specialize=["v_sb", "q_sb", "cu_seqlens", "T", "N"])
def gradients(
    v,
    q,
    dS,
    dP,
    dk,
    cu_seqlens,
    v_sb: tl.int64,
    v_st: tl.constexpr,
    v_sh,
    q_sb: tl.int64,
    q_st: tl.constexpr,
    q_sh,
    T,
    N,
    HV: tl.constexpr,
    R: tl.constexpr,
    BV: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """All other gradients, chunk by chunk."""
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
    p_q = q + batch_start(i_b, q_sb, q_st) + first * q_st + i_h * q_sh
    start = i_t * C
    m_i = o_c < tl.minimum(length - start, C).to(tl.int32)
    m_o = o_c < tl.minimum(rows - start, C).to(tl.int32)
    b_dk_KR = tl.zeros([C, BK], dtype=tl.float32)
    for i_r in tl.range(0, R, disable_licm=True):
        i_hv = i_h * R + i_r
        p_v = v + batch_start(i_b, v_sb, v_st) + first * v_st + i_hv * v_sh
        b_t2 = tl.zeros([C, BK], dtype=tl.float32)
        for i_v in tl.range(0, tl.cdiv(V, BV)):
            o_v = i_v * BV + tl.arange(0, BV)
            b_v = tl.load(p_v + start * v_st + (o_c[:, None] * v_st + o_v[None, :]), mask=m_i[:, None], other=0.0).to(
                DOT
            )
            p_dS = dS + (i_slot * HV + i_hv) * (K * V)
            b_dS = tl.load(p_dS + (o_k[:, None] * V + o_v[None, :]))
            # t2[i,k] = sum v: v[i,v] * dS[k,v]
            b_t2 = tl.dot(b_v, tl.trans(b_dS), b_t2, input_precision=PRECISION)
        # dk_KR[i,k] = sum r: t2[i,k]
        b_dk_KR += b_t2
    b_q = tl.load(p_q + start * q_st + (o_c[:, None] * q_st + o_k[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
    p_dP = dP + (i_slot * (HV // R) + i_h) * (C * C)
    b_dP = tl.load(p_dP + (o_c[:, None] * C + o_c[None, :]))
    # t7[i,j] = causal[i,j] * dP[i,j]
    b_t7 = tl.where(o_c[:, None] >= o_c[None, :], b_dP.to(tl.float32), 0.0)
    # t8[i,k] = sum j: q[j,k] * t7[j,i]
    b_t8 = tl.dot(tl.trans(b_t7.to(DOT)), b_q, input_precision=PRECISION)
    # dk[i,k] = t8[i,k] + dk_KR[i,k]
    b_dk = b_t8 + b_dk_KR
    if dk is not None:
        p_dk = dk + ((i_b * T + first) * (HV // R) + i_h) * K
        tl.store(
            p_dk + start * ((HV // R) * K) + (o_c[:, None] * ((HV // R) * K) + o_k[None, :]),
            tl.where(m_i[:, None], b_dk, 0.0).to(dk.dtype.element_ty),
            mask=m_o[:, None],
        )
