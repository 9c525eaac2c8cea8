"""Kernel gates of gdn_key_k128_v128_c64_qknorm.

Spec: gate key qk-norm
Plan: cut S+X+e+r+P+dS+dy, target sm_90
Body: 8840a7dbb9d56470
"""

import triton
import triton.language as tl

from ..device import (
    batch_start,
    find_sequence,
)


@triton.jit(do_not_specialize=["do_sb", "cu_seqlens", "T", "N"])
def gates(
    do,
    S,
    r,
    dS,
    dy,
    qn,
    kn,
    eGk,
    eTk,
    eLk,
    beta_f,
    dgk_Ek,
    dgk,
    cu_seqlens,
    scale,
    do_sb: tl.int64,
    do_st: tl.constexpr,
    do_sh,
    T,
    N,
    HV: tl.constexpr,
    R: tl.constexpr,
    BV: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradients of gates per channel, chunk by chunk."""
    C: tl.constexpr = 64
    K: tl.constexpr = 128
    V: tl.constexpr = 128
    BK: tl.constexpr = 128
    pid = tl.program_id(0)
    i_ch = pid
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
    p_do = do + batch_start(i_b, do_sb, do_st) + first * do_st + i_hv * do_sh
    start = i_t * C
    m_i = o_c < tl.minimum(length - start, C).to(tl.int32)
    m_o = o_c < tl.minimum(rows - start, C).to(tl.int32)
    b_t8 = tl.zeros([C, BK], dtype=tl.float32)
    for i_v in tl.range(0, tl.cdiv(V, BV)):
        o_v = i_v * BV + tl.arange(0, BV)
        p_S = S + (i_slot * HV + i_hv) * (K * V)
        b_S = tl.load(p_S + (o_k[:, None] * V + o_v[None, :]))
        p_dy = dy + (i_slot * HV + i_hv) * (C * V)
        b_dy = tl.load(p_dy + (o_c[:, None] * V + o_v[None, :]))
        # t8[i,k] = sum v: S[k,v] * dy[i,v]
        b_t8 = tl.dot(b_dy, tl.trans(b_S), b_t8, input_precision=PRECISION)
    p_kn = kn + (i_slot * (HV // R) + i_h) * (C * K)
    b_kn = tl.load(p_kn + (o_c[:, None] * K + o_k[None, :]))
    p_beta_f = beta_f + (i_slot * HV + i_hv) * C
    b_beta_f = tl.load(p_beta_f + o_c)
    # t17[i,k] = kn[i,k] * beta_f[i] * t8[i,k]
    b_t17 = b_kn.to(tl.float32) * b_t8 * b_beta_f[:, None]
    b_t2 = tl.zeros([C, BK], dtype=tl.float32)
    b_deLk = tl.zeros([BK], dtype=tl.float32)
    for i_v in tl.range(0, tl.cdiv(V, BV)):
        o_v = i_v * BV + tl.arange(0, BV)
        p_S = S + (i_slot * HV + i_hv) * (K * V)
        b_S = tl.load(p_S + (o_k[:, None] * V + o_v[None, :]))
        b_do = tl.load(p_do + start * do_st + (o_c[:, None] * do_st + o_v[None, :]), mask=m_i[:, None], other=0.0).to(
            DOT
        )
        # t2[i,k] = sum v: S[k,v] * do[i,v]
        b_t2 = tl.dot(b_do, tl.trans(b_S), b_t2, input_precision=PRECISION)
        p_dS = dS + (i_slot * HV + i_hv) * (K * V)
        b_dS = tl.load(p_dS + (o_k[:, None] * V + o_v[None, :]))
        # deLk[k] = sum v: S[k,v] * dS[k,v]
        b_deLk += tl.sum(b_S.to(tl.float32) * b_dS.to(tl.float32), 1)
    p_qn = qn + (i_slot * (HV // R) + i_h) * (C * K)
    b_qn = tl.load(p_qn + (o_c[:, None] * K + o_k[None, :]))
    p_eGk = eGk + (i_slot * HV + i_hv) * (C * K)
    b_eGk = tl.load(p_eGk + (o_c[:, None] * K + o_k[None, :]))
    p_eLk = eLk + (i_slot * HV + i_hv) * K
    b_eLk = tl.load(p_eLk + o_k)
    # t16[i,k] = qn[i,k] * scale * t2[i,k]
    b_t16 = b_qn.to(tl.float32) * scale * b_t2
    # dgk_eLk[k] = eLk[k] * deLk[k]
    b_dgk_eLk = b_eLk * b_deLk
    # deGk[i,k] = t16[i,k] - t17[i,k]
    b_deGk = b_t16 - b_t17
    # t22[i,k] = eGk[i,k] * deGk[i,k]
    b_t22 = b_eGk.to(tl.float32) * b_deGk
    # dgk_eGk[i,k] = cumsum.revincl(t22[i,k])
    b_dgk_eGk = tl.cumsum(b_t22, 0, reverse=True)
    b_t5 = tl.zeros([C, BK], dtype=tl.float32)
    for i_v in tl.range(0, tl.cdiv(V, BV)):
        o_v = i_v * BV + tl.arange(0, BV)
        p_r = r + (i_slot * HV + i_hv) * (C * V)
        b_r = tl.load(p_r + (o_c[:, None] * V + o_v[None, :]))
        p_dS = dS + (i_slot * HV + i_hv) * (K * V)
        b_dS = tl.load(p_dS + (o_k[:, None] * V + o_v[None, :]))
        # t5[i,k] = sum v: r[i,v] * dS[k,v]
        b_t5 = tl.dot(b_r, tl.trans(b_dS), b_t5, input_precision=PRECISION)
    p_eTk = eTk + (i_slot * HV + i_hv) * (C * K)
    b_eTk = tl.load(p_eTk + (o_c[:, None] * K + o_k[None, :]))
    p_dgk_Ek = dgk_Ek + (i_slot * HV + i_hv) * (C * K)
    b_dgk_Ek = tl.load(p_dgk_Ek + (o_c[:, None] * K + o_k[None, :]))
    # t19[i,k] = kn[i,k] * eTk[i,k] * t5[i,k]
    b_t19 = b_kn.to(tl.float32) * b_eTk.to(tl.float32) * b_t5
    # dgk_eTk[i,k] = cumsum.fwdexcl(t19[i,k])
    b_dgk_eTk = tl.dot(tl.where(o_c[None, :] < o_c[:, None], 1.0, 0.0), b_t19, input_precision=PRECISION)
    # dgk[i,k] = dgk_eLk[k] + dgk_eTk[i,k] + dgk_eGk[i,k] + dgk_Ek[i,k]
    b_dgk = b_dgk_eLk[None, :] + b_dgk_eTk + b_dgk_eGk + b_dgk_Ek.to(tl.float32)
    if dgk is not None:
        p_dgk = dgk + ((i_b * T + first) * HV + i_hv) * K
        tl.store(
            p_dgk + start * (HV * K) + (o_c[:, None] * (HV * K) + o_k[None, :]),
            tl.where(m_i[:, None], b_dgk, 0.0).to(dgk.dtype.element_ty),
            mask=m_o[:, None],
        )
