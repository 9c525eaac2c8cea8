"""Kernel final of PUT_package_PUT.

PUT_spec_PUT
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["cu_seqlens", "T"])
def final(
    x,
    h0,
    ht,
    x_sb,
    x_st,
    h0_sn,
    h0_sv,
    h0_sw,
    cu_seqlens,
    T,
    D,
    BV: tl.constexpr,
):
    """The window behind each sequence, ht [N, D, S]: its last tokens and, where it is too short, those before it."""
    S: tl.constexpr = PUT_columns_PUT
    pid = tl.program_id(0)
    i_v = pid % tl.cdiv(D, BV)
    i_n = (pid // tl.cdiv(D, BV)).to(tl.int64)
    o_v = i_v * BV + tl.arange(0, BV)
    m_v = o_v < D
    if cu_seqlens is not None:
        first = tl.load(cu_seqlens + i_n).to(tl.int64)
        length = tl.load(cu_seqlens + i_n + 1).to(tl.int64) - first
        p_x = x + first * x_st
    else:
        length = i_n * 0 + T
        p_x = x + i_n * x_sb
    for i_w in tl.static_range(0, S):
        i_x = length - S + i_w  # the token, before the sequence where it is negative
        b_x = tl.load(p_x + i_x * x_st + o_v, mask=m_v & (i_x >= 0), other=0.0)
        if h0 is not None:
            p_h = h0 + i_n * h0_sn + o_v * h0_sv + (i_x + S) * h0_sw
            b_h = tl.load(p_h, mask=m_v & (i_x < 0), other=0.0)
            b_x = tl.where(i_x >= 0, b_x, b_h.to(b_x.dtype))
        tl.store(ht + (i_n * D + o_v) * S + i_w, b_x.to(ht.dtype.element_ty), mask=m_v)
