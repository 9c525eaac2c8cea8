"""Kernel queries of gdn_scalar_k128_v128_c64_qknorm.

Spec: gate scalar qk-norm
Plan: cut S+X+e+r+P+dS+dy, target sm_90
Body: c6066d8b5bde5835
"""

import triton
import triton.language as tl

from ..device import (
    batch_start,
    find_sequence,
)


@triton.jit(do_not_specialize=["do_sb", "q_sb", "cu_seqlens", "T", "N"])
def queries(
    do,
    q,
    S,
    eG,
    qn,
    kn,
    t52,
    deG_QS,
    dq,
    cu_seqlens,
    scale,
    do_sb: tl.int64,
    do_st: tl.constexpr,
    do_sh,
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
    p_q = q + batch_start(i_b, q_sb, q_st) + first * q_st + i_h * q_sh
    start = i_t * C
    m_i = o_c < tl.minimum(length - start, C).to(tl.int32)
    m_o = o_c < tl.minimum(rows - start, C).to(tl.int32)
    p_qn = qn + (i_slot * (HV // R) + i_h) * (C * K)
    b_qn = tl.load(p_qn + (o_c[:, None] * K + o_k[None, :]))
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
        # t14[i] = sum k: qn[i,k] * t2[i,k]
        b_t14 = tl.sum(b_qn.to(tl.float32) * b_t2, 1)
        # deG_QS[i] = scale * t14[i]
        b_deG_QS = scale * b_t14
        p_deG_QS = deG_QS + (i_slot * HV + i_hv) * C
        tl.store(p_deG_QS + o_c, b_deG_QS.to(deG_QS.dtype.element_ty))
    b_q = tl.load(p_q + start * q_st + (o_c[:, None] * q_st + o_k[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
    p_kn = kn + (i_slot * (HV // R) + i_h) * (C * K)
    b_kn = tl.load(p_kn + (o_c[:, None] * K + o_k[None, :]))
    p_t52 = t52 + (i_slot * (HV // R) + i_h) * (C * C)
    b_t52 = tl.load(p_t52 + (o_c[:, None] * C + o_c[None, :]))
    # t8[i] = sum k: q[i,k] * q[i,k]
    b_t8 = tl.sum(b_q.to(tl.float32) * b_q.to(tl.float32), 1)
    # t10[i] = t8[i] + 1e-06
    b_t10 = b_t8 + 1e-06
    # t11[i] = rsqrt(t10[i])
    b_t11 = tl.rsqrt(b_t10)
    # t17[i,k] = sum j: kn[j,k] * t52[i,j]
    b_t17 = tl.dot(b_t52, b_kn, input_precision=PRECISION)
    # dqn[i,k] = t6[i,k] + t17[i,k]
    b_dqn = b_t6 + b_t17
    # t19[i,k] = t11[i] * dqn[i,k]
    b_t19 = b_dqn * b_t11[:, None]
    # t20[i] = sum k: q[i,k] * dqn[i,k]
    b_t20 = tl.sum(b_q.to(tl.float32) * b_dqn, 1)
    # t21[i,k] = q[i,k] * t11[i] * t11[i] * t11[i] * t20[i]
    b_t21 = b_q.to(tl.float32) * (b_t11 * b_t11 * b_t11 * b_t20)[:, None]
    # dq[i,k] = t19[i,k] - t21[i,k]
    b_dq = b_t19 - b_t21
    if dq is not None:
        p_dq = dq + ((i_b * T + first) * (HV // R) + i_h) * K
        tl.store(
            p_dq + start * ((HV // R) * K) + (o_c[:, None] * ((HV // R) * K) + o_k[None, :]),
            tl.where(m_i[:, None], b_dq, 0.0).to(dq.dtype.element_ty),
            mask=m_o[:, None],
        )
