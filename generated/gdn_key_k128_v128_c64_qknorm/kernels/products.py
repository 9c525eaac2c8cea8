"""Kernel products of gdn_key_k128_v128_c64_qknorm.

Spec: gate key qk-norm
Plan: cut S+X+e+r+P+dS+dy, target sm_90
Body: 6cd79196f8d73f67
"""

import triton
import triton.language as tl

from ..device import (
    batch_start,
    find_sequence,
)


@triton.jit(do_not_specialize=["do_sb", "cu_seqlens", "T", "N"])
def products(
    do,
    r,
    dy,
    t68,
    t46,
    cu_seqlens,
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
    """Matrices that gradients with decays per channel need, and dv, chunk by chunk."""
    C: tl.constexpr = 64
    V: tl.constexpr = 128
    pid = tl.program_id(0)
    i_ch = pid
    i_hv = (i_ch % HV).to(tl.int64)
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
    p_do = do + batch_start(i_b, do_sb, do_st) + first * do_st + i_hv * do_sh
    start = i_t * C
    m_i = o_c < tl.minimum(length - start, C).to(tl.int32)
    b_t46 = tl.zeros([C, C], dtype=tl.float32)
    for i_v in tl.range(0, tl.cdiv(V, BV)):
        o_v = i_v * BV + tl.arange(0, BV)
        p_r = r + (i_slot * HV + i_hv) * (C * V)
        b_r = tl.load(p_r + (o_c[:, None] * V + o_v[None, :]))
        b_do = tl.load(p_do + start * do_st + (o_c[:, None] * do_st + o_v[None, :]), mask=m_i[:, None], other=0.0).to(
            DOT
        )
        # t46[i,j] = sum v: r[j,v] * do[i,v]
        b_t46 = tl.dot(b_do, tl.trans(b_r), b_t46, input_precision=PRECISION)
    p_t46 = t46 + (i_slot * HV + i_hv) * (C * C)
    tl.store(p_t46 + (o_c[:, None] * C + o_c[None, :]), b_t46.to(t46.dtype.element_ty))
    b_t68 = tl.zeros([C, C], dtype=tl.float32)
    for i_v in tl.range(0, tl.cdiv(V, BV)):
        o_v = i_v * BV + tl.arange(0, BV)
        p_r = r + (i_slot * HV + i_hv) * (C * V)
        b_r = tl.load(p_r + (o_c[:, None] * V + o_v[None, :]))
        p_dy = dy + (i_slot * HV + i_hv) * (C * V)
        b_dy = tl.load(p_dy + (o_c[:, None] * V + o_v[None, :]))
        # t68[i,j] = sum v: r[j,v] * dy[i,v]
        b_t68 = tl.dot(b_dy, tl.trans(b_r), b_t68, input_precision=PRECISION)
    p_t68 = t68 + (i_slot * HV + i_hv) * (C * C)
    tl.store(p_t68 + (o_c[:, None] * C + o_c[None, :]), b_t68.to(t68.dtype.element_ty))
