"""Device functions shared by the kernels of this package.

Shorthand inside kernels: i_ index, o_ offsets, m_ mask, p_ pointer, b_ block in registers.
"""

import triton
import triton.language as tl


@triton.jit
def find_sequence(cu_seqlens, i_slot, N, BT: tl.constexpr):
    """The packed sequence that a block belongs to: sequence n starts at slot cu[n] // BT + n."""
    i_low = 0
    i_high = N
    while i_high - i_low > 1:
        i_middle = (i_low + i_high) // 2
        if tl.load(cu_seqlens + i_middle).to(tl.int64) // BT + i_middle <= i_slot:
            i_low = i_middle
        else:
            i_high = i_middle
    return i_low
