"""Kernel prepare of add_nogate_k128_v128_c64_betanone.

Spec: gate none rule additive beta none
Plan: cut P, target sm_90
Body: 149f4dbf74aec7a7
"""

import triton
import triton.language as tl

from ..device import (
    batch_start,
    find_sequence,
)


@triton.jit(do_not_specialize=["q_sb", "k_sb", "cu_seqlens", "T", "N"])
def prepare(
    q,
    k,
    P,
    cu_seqlens,
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
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What does not depend on the state, chunk by chunk."""
    C: tl.constexpr = 64
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
    p_q = q + batch_start(i_b, q_sb, q_st) + first * q_st + i_h * q_sh
    p_k = k + batch_start(i_b, k_sb, k_st) + first * k_st + i_h * k_sh
    start = i_t * C
    m_i = o_c < tl.minimum(length - start, C).to(tl.int32)
    b_q = tl.load(p_q + start * q_st + (o_c[:, None] * q_st + o_k[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
    b_k = tl.load(p_k + start * k_st + (o_c[:, None] * k_st + o_k[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
    # t2[i,j] = sum k: q[i,k] * k[j,k]
    b_t2 = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    # P[i,j] = causal[i,j] * t2[i,j]
    b_P = tl.where(o_c[:, None] >= o_c[None, :], b_t2, 0.0)
    p_P = P + (i_slot * (HV // R) + i_h) * (C * C)
    if i_hv % R == 0:
        tl.store(p_P + (o_c[:, None] * C + o_c[None, :]), b_P.to(P.dtype.element_ty))
