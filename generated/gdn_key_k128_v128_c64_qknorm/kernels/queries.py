"""Kernel queries of gdn_key_k128_v128_c64_qknorm.

Spec: gate key qk-norm
Plan: cut S+X+e+r+P+dS+dy, target sm_90
Body: 7258d654f1b64187
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
    eGk,
    t55,
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
    # dqn[i,k] = sum r: t7[i,k]
    # t7[i,k] = t5[i,k] + t55[i,k]
    b_dqn = tl.zeros([C, BK], dtype=tl.float32)
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
        p_eGk = eGk + (i_slot * HV + i_hv) * (C * K)
        b_eGk = tl.load(p_eGk + (o_c[:, None] * K + o_k[None, :]))
        p_t55 = t55 + (i_slot * HV + i_hv) * (C * K)
        b_t55 = tl.load(p_t55 + (o_c[:, None] * K + o_k[None, :]))
        b_dqn += b_t55.to(tl.float32)
        # t5[i,k] = eGk[i,k] * scale * t2[i,k]
        b_t5 = b_eGk.to(tl.float32) * scale * b_t2
        b_dqn += b_t5
    b_q = tl.load(p_q + start * q_st + (o_c[:, None] * q_st + o_k[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
    # t10[i] = sum k: q[i,k] * q[i,k]
    b_t10 = tl.sum(b_q.to(tl.float32) * b_q.to(tl.float32), 1)
    # t12[i] = t10[i] + 1e-06
    b_t12 = b_t10 + 1e-06
    # t13[i] = rsqrt(t12[i])
    b_t13 = tl.rsqrt(b_t12)
    # t14[i,k] = t13[i] * dqn[i,k]
    b_t14 = b_dqn * b_t13[:, None]
    # t15[i] = sum k: q[i,k] * dqn[i,k]
    b_t15 = tl.sum(b_q.to(tl.float32) * b_dqn, 1)
    # t16[i,k] = q[i,k] * t13[i] * t13[i] * t13[i] * t15[i]
    b_t16 = b_q.to(tl.float32) * (b_t13 * b_t13 * b_t13 * b_t15)[:, None]
    # dq[i,k] = t14[i,k] - t16[i,k]
    b_dq = b_t14 - b_t16
    if dq is not None:
        p_dq = dq + ((i_b * T + first) * (HV // R) + i_h) * K
        tl.store(
            p_dq + start * ((HV // R) * K) + (o_c[:, None] * ((HV // R) * K) + o_k[None, :]),
            tl.where(m_i[:, None], b_dq, 0.0).to(dq.dtype.element_ty),
            mask=m_o[:, None],
        )
