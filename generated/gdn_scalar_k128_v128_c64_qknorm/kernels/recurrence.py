"""Kernel recurrence of gdn_scalar_k128_v128_c64_qknorm.

Spec: gate scalar qk-norm
Plan: cut none, target sm_90
Body: e1921309892ac3ee
"""

import triton
import triton.language as tl

from ..device import (
    batch_start,
)

VARYING = [
    "q_sb",
    "k_sb",
    "v_sb",
    "g",
    "g_st",
    "g_sb",
    "g_sh",
    "beta",
    "beta_st",
    "beta_sb",
    "beta_sh",
    "cu_seqlens",
    "T",
    "N",
]


@triton.jit(do_not_specialize=VARYING)
def recurrence(
    q,
    k,
    v,
    g,
    beta,
    h0,
    o,
    ht,
    cu_seqlens,
    scale,
    q_sb: tl.int64,
    q_st,
    q_sh,
    k_sb: tl.int64,
    k_st,
    k_sh,
    v_sb: tl.int64,
    v_st,
    v_sh,
    g_sb: tl.int64,
    g_st,
    g_sh,
    beta_sb: tl.int64,
    beta_st,
    beta_sh,
    T,
    N,
    HV: tl.constexpr,
    R: tl.constexpr,
    BV: tl.constexpr,
    ROW: tl.constexpr,
):
    """The state from token to token, and what is read from it."""
    K: tl.constexpr = 128
    V: tl.constexpr = 128
    BK: tl.constexpr = 128
    pid = tl.program_id(0)
    i_v = pid % tl.cdiv(V, BV)
    i_nh = pid // tl.cdiv(V, BV)
    i_n = i_nh // HV
    i_hv = (i_nh % HV).to(tl.int64)
    i_h = i_hv // R
    # Tokens first .. first + length of the sequence; the last packed one also clears the rows past the offsets.
    if cu_seqlens is not None:
        i_b = 0
        first = tl.load(cu_seqlens + i_n).to(tl.int64)
        length = tl.load(cu_seqlens + i_n + 1).to(tl.int64) - first
        rows = tl.where(i_n == N - 1, T - first, length)
    else:
        i_b = i_n.to(tl.int64)
        first = i_b * 0  # 64 bits wide, as the offsets of packed sequences
        length = first + T
        rows = length
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    p_q = q + batch_start(i_b, q_sb, ROW) + first * q_st + i_h * q_sh
    p_k = k + batch_start(i_b, k_sb, ROW) + first * k_st + i_h * k_sh
    p_v = v + batch_start(i_b, v_sb, ROW) + first * v_st + i_hv * v_sh
    p_g = g + i_b * g_sb + first * g_st + i_hv * g_sh
    p_beta = beta + i_b * beta_sb + first * beta_st + i_hv * beta_sh
    if h0 is not None:
        b_S = tl.load(h0 + i_nh.to(tl.int64) * (K * V) + (o_k[:, None] * V + o_v[None, :])).to(tl.float32)
    else:
        b_S = tl.zeros([BK, BV], dtype=tl.float32)
    p_o = o + ((i_b * T + first) * HV + i_hv) * V
    for o_i in tl.range(0, rows):
        m_i = tl.where(o_i < length, True, False)  # a bare comparison is int64 in the interpreter of Triton 3.9
        b_q = tl.load(p_q + o_i * q_st + o_k, mask=m_i, other=0.0)
        # t1 = sum k: q[k] * q[k]
        b_t1 = tl.sum(b_q.to(tl.float32) * b_q.to(tl.float32), 0)
        # t3 = t1 + 1e-06
        b_t3 = b_t1 + 1e-06
        # t4 = rsqrt(t3)
        b_t4 = tl.rsqrt(b_t3)
        # t5[k] = q[k] * t4
        b_t5 = b_q.to(tl.float32) * b_t4
        # qn[k] = cast(t5[k])
        b_qn = b_t5
        b_k = tl.load(p_k + o_i * k_st + o_k, mask=m_i, other=0.0)
        # t8 = sum k: k[k] * k[k]
        b_t8 = tl.sum(b_k.to(tl.float32) * b_k.to(tl.float32), 0)
        # t9 = 1e-06 + t8
        b_t9 = 1e-06 + b_t8
        # t10 = rsqrt(t9)
        b_t10 = tl.rsqrt(b_t9)
        # t11[k] = k[k] * t10
        b_t11 = b_k.to(tl.float32) * b_t10
        # kn[k] = cast(t11[k])
        b_kn = b_t11
        b_v = tl.load(p_v + o_i * v_st + o_v, mask=m_i, other=0.0)
        b_g = tl.load(p_g + o_i * g_st, mask=m_i, other=0.0).to(tl.float32)
        # eG = exp(g)
        b_eG = tl.exp(tl.minimum(b_g, 80.0))
        b_beta = tl.load(p_beta + o_i * beta_st, mask=m_i, other=0.0).to(tl.float32)
        # t18[v] = sum k: kn[k] * S[k,v]
        b_t18 = tl.sum(b_S * b_kn[:, None], 0)
        # KS[v] = eG * t18[v]
        b_KS = b_eG * b_t18
        # e[v] = v[v] - KS[v]
        b_e = b_v.to(tl.float32) - b_KS
        # t21[k,v] = eG * S[k,v]
        b_t21 = b_eG * b_S
        # KR[k,v] = kn[k] * beta * e[v]
        b_KR = b_beta * b_kn[:, None] * b_e[None, :]
        # S_out[k,v] = t21[k,v] + KR[k,v]
        b_S_out = b_t21 + b_KR
        # t25[v] = sum k: qn[k] * S_out[k,v]
        b_t25 = tl.sum(b_S_out * b_qn[:, None], 0)
        # o[v] = t25[v] * scale
        b_o = b_t25 * scale
        tl.store(p_o + o_i * (HV * V) + o_v, tl.where(m_i, b_o, 0.0).to(o.dtype.element_ty))
        # carried to the next token
        b_S = b_S_out
    if ht is not None:
        tl.store(ht + i_nh.to(tl.int64) * (K * V) + (o_k[:, None] * V + o_v[None, :]), b_S)
