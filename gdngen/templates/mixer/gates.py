"""Device functions of sigmoids: of x and of -x from one exponential, in units that take no division."""

import triton
import triton.language as tl


@triton.jit
def odds_against(b_x):
    """exp(-x), not beyond 2^126: its product with the sigmoid below stays finite."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    return tl.exp2(tl.minimum(b_x * -LOG2_E, 126.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def share(b_odds):
    """1 / (1 + odds), the sigmoid; odds * share is that of -x.  A square root's reciprocal is one instruction."""
    b_root = tl.rsqrt(1.0 + b_odds)
    return b_root * b_root
