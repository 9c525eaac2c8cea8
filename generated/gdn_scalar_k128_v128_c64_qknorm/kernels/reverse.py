"""Kernel reverse of gdn_scalar_k128_v128_c64_qknorm.

Spec: gate scalar qk-norm
Plan: cut S+X+e+r+P+dS+dy, target sm_90
Body: b1133cd67ff73ec4
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
    kn,
    X,
    P,
    eT,
    eG,
    beta_f,
    qn,
    eL,
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
        b_kn = load_tile(kn, (i_slot + i_t) * (HV // R) + i_h, 0, 0, C, BK, C, K)
        p_dS = dS + ((i_slot + i_t) * HV + i_hv) * (K * V)
        tl.store(p_dS + (o_v[:, None] + o_k[None, :] * V), b_dS.to(dS.dtype.element_ty))
        # t2[i,v] = sum k: kn[i,k] * dS[k,v]
        b_t2 = tl.dot(b_dS.to(DOT), tl.trans(b_kn), input_precision=PRECISION)
        b_X = load_tile(X, (i_slot + i_t) * HV + i_hv, 0, 0, C, C, C, C)
        b_P = load_tile(P, (i_slot + i_t) * HV + i_hv, 0, 0, C, C, C, C)
        b_do = load_tokens(
            do, i_b, first + start, i_hv, i_v * BV, do_sb, do_st, do_sh, m_i, C, BV, V, cu_seqlens is not None
        ).to(DOT)
        # t7[i,v] = sum j: P[j,i] * do[j,v]
        b_t7 = tl.dot(tl.trans(b_do), b_P, input_precision=PRECISION)
        # dr_PR[i,v] = scale * t7[i,v]
        b_dr_PR = scale * b_t7
        p_eT = eT + ((i_slot + i_t) * HV + i_hv) * C
        b_eT = tl.load(p_eT + o_c)
        # t10[i,v] = eT[i] * t2[i,v]
        b_t10 = b_t2 * b_eT[None, :]
        # dr[i,v] = dr_PR[i,v] + t10[i,v]
        b_dr = b_dr_PR + b_t10
        # dy[i,v] = sum j: X[j,i] * dr[j,v]
        b_dy = tl.dot(b_dr, b_X, input_precision=PRECISION)
        p_dy = dy + ((i_slot + i_t) * HV + i_hv) * (C * V)
        tl.store(p_dy + (o_v[:, None] + o_c[None, :] * V), b_dy.to(dy.dtype.element_ty))
        p_eG = eG + ((i_slot + i_t) * HV + i_hv) * C
        b_eG = tl.load(p_eG + o_c)
        p_beta_f = beta_f + ((i_slot + i_t) * HV + i_hv) * C
        b_beta_f = tl.load(p_beta_f + o_c)
        # t15[i,v] = -eG[i] * beta_f[i] * dy[i,v]
        b_t15 = -b_dy * (b_eG * b_beta_f)[None, :]
        # t16[k,v] = sum i: kn[i,k] * t15[i,v]
        b_t16 = tl.dot(b_t15.to(DOT), b_kn, input_precision=PRECISION)
        b_qn = load_tile(qn, (i_slot + i_t) * (HV // R) + i_h, 0, 0, C, BK, C, K)
        # t18[i,v] = scale * eG[i] * do[i,v]
        b_t18 = scale * b_do.to(tl.float32) * b_eG[:, None]
        # t19[k,v] = sum i: qn[i,k] * t18[i,v]
        b_t19 = tl.dot(tl.trans(b_t18.to(DOT)), b_qn, input_precision=PRECISION)
        p_eL = eL + (i_slot + i_t) * HV + i_hv
        b_eL = tl.load(p_eL)
        # t21[k,v] = eL * dS[k,v]
        b_t21 = b_eL * b_dS
        # t22[k,v] = t19[k,v] + t21[k,v] + t16[k,v]
        b_t22 = b_t19 + b_t21 + b_t16
        # carried to the next chunk
        b_dS = b_t22
    if dh0 is not None:
        tl.store(dh0 + i_nh.to(tl.int64) * (K * V) + (o_v[:, None] + o_k[None, :] * V), b_dS)
