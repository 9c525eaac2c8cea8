"""Kernel PUT_kernel_PUT of PUT_package_PUT.

PUT_spec_PUT
"""

import triton
import triton.language as tl

#% if gates
from ..gates import PUT_gates_PUT
#% endif


@triton.jit(do_not_specialize=["R", "blocks"])
def PUT_kernel_PUT(
    #% for name in parameters
    PUT_name_PUT,
    #% endfor
    R,
    blocks,
    D: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Rows of D channels, BR at a time; a program goes over ``blocks`` times so many, one after the other."""
    pid = tl.program_id(0)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    #% for line in setup
    PUT_line_PUT
    #% endfor
    for i_block in tl.range(blocks, num_stages=STAGES):
        o_r = (pid.to(tl.int64) * blocks + i_block) * BR + tl.arange(0, BR)
        m_rd = (o_r < R)[:, None] & m_d[None, :]
        #% for line in body
        PUT_line_PUT
        #% endfor
    #% for line in finish
    PUT_line_PUT
    #% endfor
