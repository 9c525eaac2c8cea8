"""Kernel reverse of gdn_key_k128_v128_c64_qknorm.

Spec: gate key qk-norm
Plan: cut S+X+e+r+P+dS+dy, target sm_90
Body: f44c8cc0712b3c63
"""

import triton
import triton.language as tl

from ..device import (
    load_tile,
    load_tokens,
)


@triton.jit(do_not_specialize=["do_sb", "cu_seqlens", "T", "N"])
def reverse(
    do,
    dht,
    t30,
    X,
    P,
    t21,
    beta_f,
    t35,
    eLk,
    dS,
    dy,
    dh0,
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
        b_t30 = load_tile(t30, (i_slot + i_t) * HV + i_hv, 0, 0, C, BK, C, K)
        p_dS = dS + ((i_slot + i_t) * HV + i_hv) * (K * V)
        tl.store(p_dS + (o_v[:, None] + o_k[None, :] * V), b_dS.to(dS.dtype.element_ty))
        # dr_KR[i,v] = sum k: t30[i,k] * dS[k,v]
        b_dr_KR = tl.dot(b_dS.to(DOT), tl.trans(b_t30), input_precision=PRECISION)
        b_X = load_tile(X, (i_slot + i_t) * HV + i_hv, 0, 0, C, C, C, C)
        b_P = load_tile(P, (i_slot + i_t) * HV + i_hv, 0, 0, C, C, C, C)
        b_do = load_tokens(
            do, i_b, first + start, i_hv, i_v * BV, do_sb, do_st, do_sh, m_i, C, BV, V, cu_seqlens is not None
        ).to(DOT)
        # t7[i,v] = sum j: P[j,i] * do[j,v]
        b_t7 = tl.dot(tl.trans(b_do), b_P, input_precision=PRECISION)
        # dr_PR[i,v] = scale * t7[i,v]
        b_dr_PR = scale * b_t7
        # dr[i,v] = dr_PR[i,v] + dr_KR[i,v]
        b_dr = b_dr_PR + b_dr_KR
        # dy[i,v] = sum j: X[j,i] * dr[j,v]
        b_dy = tl.dot(b_dr, b_X, input_precision=PRECISION)
        p_dy = dy + ((i_slot + i_t) * HV + i_hv) * (C * V)
        tl.store(p_dy + (o_v[:, None] + o_c[None, :] * V), b_dy.to(dy.dtype.element_ty))
        b_t21 = load_tile(t21, (i_slot + i_t) * HV + i_hv, 0, 0, C, BK, C, K)
        p_beta_f = beta_f + ((i_slot + i_t) * HV + i_hv) * C
        b_beta_f = tl.load(p_beta_f + o_c)
        # t13[i,v] = -beta_f[i] * dy[i,v]
        b_t13 = -b_dy * b_beta_f[None, :]
        # t14[k,v] = sum i: t21[i,k] * t13[i,v]
        b_t14 = tl.dot(b_t13.to(DOT), b_t21, input_precision=PRECISION)
        b_t35 = load_tile(t35, (i_slot + i_t) * HV + i_hv, 0, 0, C, BK, C, K)
        # t16[k,v] = sum i: t35[i,k] * do[i,v]
        b_t16 = tl.dot(tl.trans(b_do), b_t35, input_precision=PRECISION)
        # dS_QS[k,v] = scale * t16[k,v]
        b_dS_QS = scale * b_t16
        p_eLk = eLk + ((i_slot + i_t) * HV + i_hv) * K
        b_eLk = tl.load(p_eLk + o_k)
        # t19[k,v] = eLk[k] * dS[k,v]
        b_t19 = b_dS * b_eLk[None, :]
        # t20[k,v] = dS_QS[k,v] + t19[k,v] + t14[k,v]
        b_t20 = b_dS_QS + b_t19 + b_t14
        # carried to the next chunk
        b_dS = b_t20
    if dh0 is not None:
        tl.store(dh0 + i_nh.to(tl.int64) * (K * V) + (o_v[:, None] + o_k[None, :] * V), b_dS)
