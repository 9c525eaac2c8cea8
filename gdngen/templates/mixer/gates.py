"""Device functions of gates.  Sigmoids of x and of -x come from one exponential, in units that take no division."""

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


@triton.jit
def softplus(b_x):
    """max(x, 0) + log(1 + exp(-|x|)); log(u) e / (u - 1) is accurate where u = 1 + e rounds."""
    b_e = tl.exp(-tl.abs(b_x))
    b_u = 1.0 + b_e
    b_log = tl.where(b_u == 1.0, b_e, tl.log(b_u) * (b_e / tl.where(b_u == 1.0, 1.0, b_u - 1.0)))
    return tl.maximum(b_x, 0.0, propagate_nan=tl.PropagateNan.ALL) + b_log
