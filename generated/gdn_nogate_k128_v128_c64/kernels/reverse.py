"""Kernel reverse of gdn_nogate_k128_v128_c64.

Spec: gate none
Plan: cut S+X+e+r+dS+dr_PR+dy, target sm_90
Body: 7b4f8cd6890ac721
"""

import triton
import triton.language as tl

from ..device import (
    load_tile,
    load_tokens,
)


@triton.jit(do_not_specialize=["k_sb", "q_sb", "do_sb", "cu_seqlens", "T", "N"])
def reverse(
    k,
    q,
    do,
    dht,
    X,
    dr_PR,
    beta_f,
    dS,
    dy,
    dh0,
    cu_seqlens,
    scale,
    k_sb: tl.int64,
    k_st: tl.constexpr,
    k_sh,
    q_sb: tl.int64,
    q_st: tl.constexpr,
    q_sh,
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
    STAGES: tl.constexpr,
):
    """The state's gradient, from the last chunk to the first."""
    C: tl.constexpr = 64
    K: tl.constexpr = 128
    V: tl.constexpr = 128
    BK: tl.constexpr = 128
    pid = tl.program_id(0)
    i_v = pid % tl.cdiv(V, BV)
    i_nh = pid // tl.cdiv(V, BV)
    i_n = i_nh // HV
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
    o_c = tl.arange(0, C)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    if dht is not None:
        b_dS = tl.load(dht + i_nh.to(tl.int64) * (K * V) + (o_v[:, None] + o_k[None, :] * V)).to(tl.float32)
    else:
        b_dS = tl.zeros([BV, BK], dtype=tl.float32)
    for i_s in tl.range(i_from, i_to, num_stages=STAGES):
        i_t = i_from + i_to - 1 - i_s
        start = i_t * C
        m_i = o_c < tl.minimum(length - start, C).to(tl.int32)
        b_k = load_tokens(k, i_b, first + start, i_h, 0, k_sb, k_st, k_sh, m_i, C, BK, K, cu_seqlens is not None).to(
            DOT
        )
        p_dS = dS + ((i_slot + i_t) * HV + i_hv) * (K * V)
        tl.store(p_dS + (o_v[:, None] + o_k[None, :] * V), b_dS.to(dS.dtype.element_ty))
        # dr_KR[i,v] = sum k: k[i,k] * dS[k,v]
        b_dr_KR = tl.dot(b_dS.to(DOT), tl.trans(b_k), input_precision=PRECISION)
        b_X = load_tile(X, (i_slot + i_t) * HV + i_hv, 0, 0, C, C, C, C)
        b_dr_PR = load_tile(dr_PR, (i_slot + i_t) * HV + i_hv, 0, i_v * BV, C, BV, C, V)
        # dr[i,v] = dr_PR[i,v] + dr_KR[i,v]
        b_dr = tl.trans(b_dr_PR.to(tl.float32)) + b_dr_KR
        # dy[i,v] = sum j: X[j,i] * dr[j,v]
        b_dy = tl.dot(b_dr, b_X, input_precision=PRECISION)
        p_dy = dy + ((i_slot + i_t) * HV + i_hv) * (C * V)
        tl.store(p_dy + (o_v[:, None] + o_c[None, :] * V), b_dy.to(dy.dtype.element_ty))
        p_beta_f = beta_f + ((i_slot + i_t) * HV + i_hv) * C
        b_beta_f = tl.load(p_beta_f + o_c)
        # t8[i,v] = -beta_f[i] * dy[i,v]
        b_t8 = -b_dy * b_beta_f[None, :]
        # t9[k,v] = sum i: k[i,k] * t8[i,v]
        b_t9 = tl.dot(b_t8.to(DOT), b_k, input_precision=PRECISION)
        b_q = load_tokens(q, i_b, first + start, i_h, 0, q_sb, q_st, q_sh, m_i, C, BK, K, cu_seqlens is not None).to(
            DOT
        )
        b_do = load_tokens(
            do, i_b, first + start, i_hv, i_v * BV, do_sb, do_st, do_sh, m_i, C, BV, V, cu_seqlens is not None
        ).to(DOT)
        # t13[k,v] = sum i: q[i,k] * do[i,v]
        b_t13 = tl.dot(tl.trans(b_do), b_q, input_precision=PRECISION)
        # dS_QS[k,v] = scale * t13[k,v]
        b_dS_QS = scale * b_t13
        # t15[k,v] = dS[k,v] + dS_QS[k,v] + t9[k,v]
        b_t15 = b_dS + b_dS_QS + b_t9
        # carried to the next chunk
        b_dS = b_t15
    if dh0 is not None:
        tl.store(dh0 + i_nh.to(tl.int64) * (K * V) + (o_v[:, None] + o_k[None, :] * V), b_dS)
