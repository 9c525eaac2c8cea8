"""Kernel update of PUT_package_PUT.

PUT_spec_PUT
"""

import triton
import triton.language as tl

#% if gates
from ..gates import PUT_gates_PUT
#% endif


@triton.jit(do_not_specialize=["T"])
def update(
    x,
    weight,
    bias,
    residual,
    h0,
    indices,
    o,
    x_sb,
    x_st,
    residual_sb,
    residual_st,
    h0_sn,
    h0_sv,
    h0_sw,
    T,
    D,
    S: tl.constexpr,
    BS: tl.constexpr,
    BV: tl.constexpr,
):
    """The next T tokens of each sequence; its window h0 [.., D, S] moves on in place.  Those of index < 0 rest."""
    W: tl.constexpr = PUT_width_PUT
    pid = tl.program_id(0)
    i_v = pid % tl.cdiv(D, BV)
    i_b = (pid // tl.cdiv(D, BV)).to(tl.int64)
    i_s = i_b
    if indices is not None:
        i_s = tl.load(indices + i_b).to(tl.int64)
    o_v = i_v * BV + tl.arange(0, BV)
    m_v = o_v < D
    m_live = i_s >= 0
    i_s = tl.maximum(i_s, 0)
    first = i_b * 0
    i_t = first
    rows = (first + T).to(tl.int32)
    left = tl.where(m_live, rows, 0)
    # The window as it will be: what stays of it, and the new tokens behind.
    o_w = tl.arange(0, BS)
    m_w = m_v[:, None] & (o_w < S)[None, :] & m_live
    p_w = h0 + i_s * h0_sn + (o_v[:, None] * h0_sv + o_w[None, :] * h0_sw)
    b_kept = tl.load(p_w + T * h0_sw, mask=m_w & (o_w + T < S)[None, :], other=0.0)
    p_new = x + i_b * x_sb + ((o_w[None, :] + T - S) * x_st + o_v[:, None])
    b_new = tl.load(p_new, mask=m_w & (o_w + T >= S)[None, :], other=0.0)
    b_window = tl.where((o_w + T < S)[None, :], b_kept, b_new.to(b_kept.dtype))
    #% for line in setup
    PUT_line_PUT
    #% endfor
    tl.debug_barrier()  # all of the old window is read before any of it is written
    tl.store(p_w, b_window, mask=m_w)
    for o_i in tl.range(0, rows):
        #% for line in body
        PUT_line_PUT
        #% endfor
        # one token on
        #% for line in shift
        PUT_line_PUT
        #% endfor
