"""Kernel states of add_scalar_k128_v64_c64_betadt.

Spec: gate scalar rule additive beta dt value-dim 64
Plan: cut S+dS, target sm_90
Body: ff487b95eae6dc2c
"""

import triton
import triton.language as tl

from ..device import (
    load_tokens,
)


@triton.jit(do_not_specialize=["k_sb", "v_sb", "cu_seqlens", "T", "N"])
def states(
    k,
    v,
    h0,
    eL,
    sp,
    eT,
    S,
    cu_seqlens,
    k_sb: tl.int64,
    k_st: tl.constexpr,
    k_sh,
    v_sb: tl.int64,
    v_st: tl.constexpr,
    v_sh,
    T,
    N,
    HV: tl.constexpr,
    R: tl.constexpr,
    BV: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The state that enters each chunk, once more."""
    C: tl.constexpr = 64
    K: tl.constexpr = 128
    V: tl.constexpr = 64
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
    if h0 is not None:
        b_S = tl.load(h0 + i_nh.to(tl.int64) * (K * V) + (o_k[:, None] * V + o_v[None, :])).to(tl.float32)
    else:
        b_S = tl.zeros([BK, BV], dtype=tl.float32)
    for i_t in tl.range(i_from, i_to, num_stages=STAGES):
        start = i_t * C
        m_i = o_c < tl.minimum(length - start, C).to(tl.int32)
        p_S = S + ((i_slot + i_t) * HV + i_hv) * (K * V)
        tl.store(p_S + (o_k[:, None] * V + o_v[None, :]), b_S.to(S.dtype.element_ty))
        p_eL = eL + (i_slot + i_t) * HV + i_hv
        b_eL = tl.load(p_eL)
        # t2[k,v] = eL * S[k,v]
        b_t2 = b_eL * b_S
        b_k = load_tokens(k, i_b, first + start, i_h, 0, k_sb, k_st, k_sh, m_i, C, BK, K, cu_seqlens is not None).to(
            DOT
        )
        b_v = load_tokens(
            v, i_b, first + start, i_hv, i_v * BV, v_sb, v_st, v_sh, m_i, C, BV, V, cu_seqlens is not None
        ).to(DOT)
        p_sp = sp + ((i_slot + i_t) * HV + i_hv) * C
        b_sp = tl.load(p_sp + o_c)
        p_eT = eT + ((i_slot + i_t) * HV + i_hv) * C
        b_eT = tl.load(p_eT + o_c)
        # t7[i,v] = v[i,v] * sp[i] * eT[i]
        b_t7 = b_v.to(tl.float32) * (b_sp * b_eT)[:, None]
        # KR[k,v] = sum i: k[i,k] * t7[i,v]
        b_KR = tl.dot(tl.trans(b_k), b_t7.to(DOT), input_precision=PRECISION)
        # S_out[k,v] = t2[k,v] + KR[k,v]
        b_S_out = b_t2 + b_KR
        # carried to the next chunk
        b_S = b_S_out
