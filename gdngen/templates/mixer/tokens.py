"""Kernel PUT_kernel_PUT of PUT_package_PUT.

PUT_spec_PUT
"""

import triton
import triton.language as tl

from ..device import find_sequence
#% if gates
from ..gates import PUT_gates_PUT
#% endif


@triton.jit(do_not_specialize=["cu_seqlens", "T", "N"])
def PUT_kernel_PUT(
    #% for name in parameters
    PUT_name_PUT,
    #% endfor
    cu_seqlens,
    T,
    N,
    D,
    BT: tl.constexpr,
    BV: tl.constexpr,
):
    """Blocks of BT tokens and BV channels; what was read or computed at earlier tokens stays in registers.

    b_x_2 is what b_x was two steps ago.  A step computes for its own token o_i and, where a value waits for later
    tokens, for an earlier one.
    """
    W: tl.constexpr = PUT_width_PUT
    S: tl.constexpr = PUT_columns_PUT
    pid = tl.program_id(0)
    i_v = pid % tl.cdiv(D, BV)
    i_slot = pid // tl.cdiv(D, BV)
    o_v = i_v * BV + tl.arange(0, BV)
    m_v = o_v < D
    # Packed sequence n has its blocks from slot cu[n] // BT + n on; the last one also clears the rows past the offsets.
    if cu_seqlens is not None:
        i_s = find_sequence(cu_seqlens, i_slot, N, BT).to(tl.int64)
        i_b = i_s * 0
        first = tl.load(cu_seqlens + i_s).to(tl.int64)
        length = tl.load(cu_seqlens + i_s + 1).to(tl.int64) - first
        rows = tl.where(i_s == N - 1, T - first, length)
        i_t = (i_slot - (first // BT + i_s)) * BT
    else:
        slots = tl.maximum(tl.cdiv(T, BT), 1)
        i_s = (i_slot // slots).to(tl.int64)
        i_b = i_s
        first = i_s * 0
        length = first + T
        rows = length
        i_t = (i_slot % slots).to(tl.int64) * BT
    left = (length - i_t).to(tl.int32)  # tokens of the sequence from here on
    rows = tl.maximum(tl.minimum(rows - i_t, BT), 0).to(tl.int32)
    #% for line in setup
    PUT_line_PUT
    #% endfor
    for o_i in tl.range(0, PUT_steps_PUT, loop_unroll_factor=PUT_unroll_PUT):
        #% for line in body
        PUT_line_PUT
        #% endfor
        # one token on
        #% for line in shift
        PUT_line_PUT
        #% endfor
    #% for line in finish
    PUT_line_PUT
    #% endfor
