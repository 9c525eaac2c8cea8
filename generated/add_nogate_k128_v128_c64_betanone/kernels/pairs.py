"""Kernel pairs of add_nogate_k128_v128_c64_betanone.

Spec: gate none rule additive beta none
Plan: cut S+dS, target sm_90
Body: ddaed7cb5beaf86a
"""

import triton
import triton.language as tl

from ..device import (
    batch_start,
    find_sequence,
)


@triton.jit(do_not_specialize=["v_sb", "do_sb", "q_sb", "k_sb", "cu_seqlens", "T", "N"])
def pairs(
    v,
    do,
    q,
    k,
    dS,
    dP,
    dv,
    cu_seqlens,
    scale,
    v_sb: tl.int64,
    v_st: tl.constexpr,
    v_sh,
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
    """What the gradients need of pairs of tokens, chunk by chunk."""
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
    p_k = k + batch_start(i_b, k_sb, k_st) + first * k_st + i_h * k_sh
    start = i_t * C
    m_i = o_c < tl.minimum(length - start, C).to(tl.int32)
    m_o = o_c < tl.minimum(rows - start, C).to(tl.int32)
    b_q = tl.load(p_q + start * q_st + (o_c[:, None] * q_st + o_k[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
    b_k = tl.load(p_k + start * k_st + (o_c[:, None] * k_st + o_k[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
    # t9[i,j] = sum k: q[i,k] * k[j,k]
    b_t9 = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
    # P[i,j] = causal[i,j] * t9[i,j]
    b_P = tl.where(o_c[None, :] >= o_c[:, None], b_t9, 0.0)
    b_dP = tl.zeros([C, C], dtype=tl.float32)
    for i_r in tl.range(0, R, disable_licm=True):
        i_hv = i_h * R + i_r
        p_v = v + batch_start(i_b, v_sb, v_st) + first * v_st + i_hv * v_sh
        p_do = do + batch_start(i_b, do_sb, do_st) + first * do_st + i_hv * do_sh
        b_t2 = tl.zeros([C, C], dtype=tl.float32)
        for i_v in tl.range(0, tl.cdiv(V, BV)):
            o_v = i_v * BV + tl.arange(0, BV)
            b_v = tl.load(p_v + start * v_st + (o_c[:, None] * v_st + o_v[None, :]), mask=m_i[:, None], other=0.0).to(
                DOT
            )
            b_do = tl.load(
                p_do + start * do_st + (o_c[:, None] * do_st + o_v[None, :]), mask=m_i[:, None], other=0.0
            ).to(DOT)
            # t2[i,j] = sum v: v[j,v] * do[i,v]
            b_t2 = tl.dot(b_do, tl.trans(b_v), b_t2, input_precision=PRECISION)
            p_dS = dS + (i_slot * HV + i_hv) * (K * V)
            b_dS = tl.load(p_dS + (o_k[:, None] * V + o_v[None, :]))
            # t12[i,v] = sum j: P[j,i] * do[j,v]
            b_t12 = tl.dot(b_P.to(DOT), b_do, input_precision=PRECISION)
            # dv_PR[i,v] = scale * t12[i,v]
            b_dv_PR = scale * b_t12
            # dv_KR[i,v] = sum k: k[i,k] * dS[k,v]
            b_dv_KR = tl.dot(b_k, b_dS, input_precision=PRECISION)
            # dv[i,v] = dv_PR[i,v] + dv_KR[i,v]
            b_dv = b_dv_PR + b_dv_KR
            if dv is not None:
                p_dv = dv + ((i_b * T + first) * HV + i_hv) * V
                tl.store(
                    p_dv + start * (HV * V) + (o_c[:, None] * (HV * V) + o_v[None, :]),
                    tl.where(m_i[:, None], b_dv, 0.0).to(dv.dtype.element_ty),
                    mask=m_o[:, None],
                )
        # t4[i,j] = scale * t2[i,j]
        b_t4 = scale * b_t2
        # dP[i,j] = sum r: t4[i,j]
        b_dP += b_t4
    p_dP = dP + (i_slot * (HV // R) + i_h) * (C * C)
    tl.store(p_dP + (o_c[:, None] * C + o_c[None, :]), b_dP.to(dP.dtype.element_ty))
