"""Kernel prepare_backward of add_scalar_k128_v64_c64_betadt.

Spec: gate scalar rule additive beta dt value-dim 64
Plan: cut S+dS, target sm_90
Body: 476c60fc0c5cb434
"""

import triton
import triton.language as tl

from ..device import (
    cumulative_gate,
    decay_of,
    find_sequence,
    softplus,
    total_gate,
)


@triton.jit(do_not_specialize=["dt", "dt_sb", "dt_sh", "cu_seqlens", "T", "N"])
def prepare_backward(
    dt,
    dt_bias,
    A_log,
    sp,
    eG,
    eT,
    eL,
    cu_seqlens,
    dt_min,
    dt_max,
    dt_sb: tl.int64,
    dt_st: tl.constexpr,
    dt_sh,
    T,
    N,
    HV: tl.constexpr,
    R: tl.constexpr,
):
    """What gradients need and does not depend on any state, chunk by chunk."""
    C: tl.constexpr = 64
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
    p_dt = dt + i_b * dt_sb + first * dt_st + i_hv * dt_sh
    if dt_bias is not None:
        b_dt_bias = tl.load(dt_bias + i_hv).to(tl.float32)
    else:
        b_dt_bias = 0.0
    b_A_log = tl.load(A_log + i_hv).to(tl.float32)
    start = i_t * C
    m_i = o_c < tl.minimum(length - start, C).to(tl.int32)
    b_dt = tl.load(p_dt + start * dt_st + o_c * dt_st, mask=m_i, other=0.0).to(tl.float32)
    # t2[i] = dt[i] + dt_bias
    b_t2 = b_dt + b_dt_bias
    # t3[i] = softplus(t2[i])
    b_t3 = softplus(b_t2)
    # sp[i] = clamp(t3[i], dt_min, dt_max)
    b_sp = tl.minimum(tl.maximum(b_t3, dt_min), dt_max)
    p_sp = sp + (i_slot * HV + i_hv) * C
    tl.store(p_sp + o_c, b_sp.to(sp.dtype.element_ty))
    # t8 = exp(A_log)
    b_t8 = tl.exp(tl.minimum(b_A_log, 80.0))
    # t9[i] = sp[i] * t8
    b_t9 = b_sp * b_t8
    # t10[i] = -t9[i]
    b_t10 = -b_t9
    # g[i] = valid(t10[i])
    b_g = tl.where(m_i, b_t10, 0.0)
    # eL = decay.10(g[i])
    b_g_tc, b_g_tf = total_gate(b_g)
    b_eL = decay_of(b_g_tc + b_g_tf)
    p_eL = eL + i_slot * HV + i_hv
    tl.store(p_eL, b_eL.to(eL.dtype.element_ty))
    # eG[i] = decay.i0(g[i])
    b_g_c, b_g_f = cumulative_gate(b_g)
    b_eG = decay_of(b_g_c + b_g_f)
    p_eG = eG + (i_slot * HV + i_hv) * C
    tl.store(p_eG + o_c, b_eG.to(eG.dtype.element_ty))
    # eT[i] = decay.1i(g[i])
    b_eT = decay_of((b_g_tc - b_g_c) + (b_g_tf - b_g_f))
    p_eT = eT + (i_slot * HV + i_hv) * C
    tl.store(p_eT + o_c, b_eT.to(eT.dtype.element_ty))
