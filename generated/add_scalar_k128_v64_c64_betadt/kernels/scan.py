"""Kernel scan of add_scalar_k128_v64_c64_betadt.

Spec: gate scalar rule additive beta dt value-dim 64
Plan: cut KR+PR, target sm_90
Body: db01ee3862a2c7db
"""

import triton
import triton.language as tl

C = tl.constexpr(64)
K = tl.constexpr(128)
V = tl.constexpr(64)
BK = tl.constexpr(128)


@triton.jit(do_not_specialize=["T", "N"])
def scan(
    q,
    h0,
    eG,
    eL,
    KR,
    PR,
    o,
    ht,
    cu_seqlens,
    scale,
    q_sb,
    q_st: tl.constexpr,
    q_sh,
    T,
    N,
    HV: tl.constexpr,
    R: tl.constexpr,
    BV: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The state from chunk to chunk, and what is read from it."""
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
        i_slot = first // C + i_n
    else:
        i_b = i_n.to(tl.int64)
        first = i_b * 0  # 64 bits wide, as the offsets of packed sequences
        length = first + T
        rows = length
        i_slot = i_b * tl.cdiv(T, C)
    o_c = tl.arange(0, C)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    p_q = q + i_b * q_sb + first * q_st + i_h * q_sh
    if h0 is not None:
        b_S = tl.load(h0 + i_nh.to(tl.int64) * (K * V) + (o_v[:, None] + o_k[None, :] * V)).to(tl.float32)
    else:
        b_S = tl.zeros([BV, BK], dtype=tl.float32)
    p_o = o + ((i_b * T + first) * HV + i_hv) * V
    for i_t in tl.range(0, tl.cdiv(rows, C), num_stages=STAGES):
        start = i_t * C
        m_i = o_c < tl.minimum(length - start, C).to(tl.int32)
        b_q = tl.load(p_q + start * q_st + (o_c[:, None] * q_st + o_k[None, :]), mask=m_i[:, None], other=0.0).to(DOT)
        # t2[i,v] = sum k: q[i,k] * S[k,v]
        b_t2 = tl.dot(b_S.to(DOT), tl.trans(b_q), input_precision=PRECISION)
        p_eG = eG + ((i_slot + i_t) * HV + i_hv) * C
        b_eG = tl.load(p_eG + o_c)
        p_eL = eL + (i_slot + i_t) * HV + i_hv
        b_eL = tl.load(p_eL)
        # t5[k,v] = eL * S[k,v]
        b_t5 = b_eL * b_S
        p_KR = KR + ((i_slot + i_t) * HV + i_hv) * (K * V)
        b_KR = tl.load(p_KR + (o_k[:, None] * V + o_v[None, :]))
        # S_out[k,v] = t5[k,v] + KR[k,v]
        b_S_out = b_t5 + tl.trans(b_KR)
        p_PR = PR + ((i_slot + i_t) * HV + i_hv) * (C * V)
        b_PR = tl.load(p_PR + (o_c[:, None] * V + o_v[None, :]))
        # QS[i,v] = eG[i] * t2[i,v]
        b_QS = b_eG[None, :] * b_t2
        # t11[i,v] = PR[i,v] + QS[i,v]
        b_t11 = tl.trans(b_PR) + b_QS
        # o[i,v] = t11[i,v] * scale
        b_o = b_t11 * scale
        m_o = o_c < tl.minimum(rows - start, C).to(tl.int32)
        tl.store(
            p_o + start * (HV * V) + (o_v[:, None] + o_c[None, :] * (HV * V)),
            tl.where(m_i[None, :], b_o, 0.0).to(o.dtype.element_ty),
            mask=m_o[None, :],
        )
        # carried to the next chunk
        b_S = b_S_out
    if ht is not None:
        tl.store(ht + i_nh.to(tl.int64) * (K * V) + (o_v[:, None] + o_k[None, :] * V), b_S)
