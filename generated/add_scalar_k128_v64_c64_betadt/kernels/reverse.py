"""Kernel reverse of add_scalar_k128_v64_c64_betadt.

Spec: gate scalar rule additive beta dt value-dim 64
Plan: cut S+dS, target sm_90
Body: 04d7450f465ff73c
"""

import triton
import triton.language as tl

from ..device import (
    load_tokens,
)


@triton.jit(do_not_specialize=["q_sb", "do_sb", "cu_seqlens", "T", "N"])
def reverse(
    q,
    do,
    dht,
    eG,
    eL,
    dS,
    dh0,
    cu_seqlens,
    scale,
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
    if dht is not None:
        b_dS = tl.load(dht + i_nh.to(tl.int64) * (K * V) + (o_k[:, None] * V + o_v[None, :])).to(tl.float32)
    else:
        b_dS = tl.zeros([BK, BV], dtype=tl.float32)
    for i_s in tl.range(i_from, i_to, num_stages=STAGES):
        i_t = i_from + i_to - 1 - i_s
        start = i_t * C
        m_i = o_c < tl.minimum(length - start, C).to(tl.int32)
        p_dS = dS + ((i_slot + i_t) * HV + i_hv) * (K * V)
        tl.store(p_dS + (o_k[:, None] * V + o_v[None, :]), b_dS.to(dS.dtype.element_ty))
        b_q = load_tokens(q, i_b, first + start, i_h, 0, q_sb, q_st, q_sh, m_i, C, BK, K, cu_seqlens is not None).to(
            DOT
        )
        p_eG = eG + ((i_slot + i_t) * HV + i_hv) * C
        b_eG = tl.load(p_eG + o_c)
        b_do = load_tokens(
            do, i_b, first + start, i_hv, i_v * BV, do_sb, do_st, do_sh, m_i, C, BV, V, cu_seqlens is not None
        ).to(DOT)
        # t5[i,v] = scale * eG[i] * do[i,v]
        b_t5 = scale * b_do.to(tl.float32) * b_eG[:, None]
        # t6[k,v] = sum i: q[i,k] * t5[i,v]
        b_t6 = tl.dot(tl.trans(b_q), b_t5.to(DOT), input_precision=PRECISION)
        p_eL = eL + (i_slot + i_t) * HV + i_hv
        b_eL = tl.load(p_eL)
        # t8[k,v] = eL * dS[k,v]
        b_t8 = b_eL * b_dS
        # t9[k,v] = t6[k,v] + t8[k,v]
        b_t9 = b_t6 + b_t8
        # carried to the next chunk
        b_dS = b_t9
    if dh0 is not None:
        tl.store(dh0 + i_nh.to(tl.int64) * (K * V) + (o_k[:, None] * V + o_v[None, :]), b_dS)
