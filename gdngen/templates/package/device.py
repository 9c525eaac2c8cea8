"""Device functions shared by the kernels of this package.

Shorthand inside kernels: i_ index, o_ offsets, m_ mask, p_ pointer, b_ block in registers; C chunk length, BK and BV
tiles of the key and value dimension; DOT the dtype of matrix operands, HALF fp16 (fp32 for fp32 inputs), PRECISION how
fp32 products are formed.
"""

import triton
import triton.language as tl

# exp of this is exactly 0 in fp32.  Holding gates here keeps -inf out of differences; together with the exact coarse
# sums below nothing is lost by it.
LOWEST_GATE = tl.constexpr(-110.0)
COARSE = tl.constexpr(64.0)
SATURATION = tl.constexpr(80.0)


@triton.jit
def split_gate(b_g):
    """A log decay as a multiple of 1/64 and a rest: sums of the first part are exact in fp32."""
    b_g = tl.where(b_g < LOWEST_GATE, LOWEST_GATE, b_g)
    b_coarse = tl.floor(b_g * COARSE) / COARSE
    return b_coarse, b_g - b_coarse


@triton.jit
def cumulative_gate(b_g):
    """Log decay from the start of the chunk to each token, as (coarse, fine)."""
    b_coarse, b_fine = split_gate(b_g)
    return tl.cumsum(b_coarse, 0), tl.cumsum(b_fine, 0)


@triton.jit
def total_gate(b_g):
    """Log decay over the whole chunk, as (coarse, fine)."""
    b_coarse, b_fine = split_gate(b_g)
    return tl.sum(b_coarse, 0), tl.sum(b_fine, 0)


@triton.jit
def decay_between(b_c, b_f, C: tl.constexpr):
    """[i,j]: exp of the log decay over (j, i] for j <= i, else 0.  Masked before exp; no exponent is positive."""
    o_c = tl.arange(0, C)
    b_x = (b_c[:, None] - b_c[None, :]) + (b_f[:, None] - b_f[None, :])
    return tl.exp(tl.where(o_c[:, None] >= o_c[None, :], b_x, float("-inf")))


@triton.jit
def decay_between_turned(b_c, b_f, C: tl.constexpr):
    """[j,i]: the transpose of decay_between."""
    o_c = tl.arange(0, C)
    b_x = (b_c[None, :] - b_c[:, None]) + (b_f[None, :] - b_f[:, None])
    return tl.exp(tl.where(o_c[None, :] >= o_c[:, None], b_x, float("-inf")))


@triton.jit
def softplus(b_x):
    """log(1 + exp(x)), x for x > 20; log(u) x / (u - 1) is accurate where 1 + exp(x) rounds."""
    b_e = tl.exp(tl.minimum(b_x, 20.0))
    b_u = 1.0 + b_e
    b_log = tl.where(b_u == 1.0, b_e, tl.log(b_u) * (b_e / tl.where(b_u == 1.0, 1.0, b_u - 1.0)))
    return tl.where(b_x > 20.0, b_x, b_log)


@triton.jit
def elu1(b_x):
    """elu(x) + 1."""
    return tl.where(b_x > 0.0, b_x + 1.0, tl.exp(tl.minimum(b_x, 0.0)))


@triton.jit
def scaled_half(b_x, AXIS: tl.constexpr, HALF: tl.constexpr):
    """x = h * s with |h| < 2 in fp16 and s a power of two along what is left after reducing AXIS: safe at any range."""
    b_bits = tl.max(tl.abs(b_x), AXIS).to(tl.int32, bitcast=True) & 0x7F800000
    b_bits = tl.minimum(b_bits, 0x7E800000)
    b_inverse = (0x7F000000 - b_bits).to(tl.float32, bitcast=True)
    return (b_x * tl.expand_dims(b_inverse, AXIS)).to(HALF), b_bits.to(tl.float32, bitcast=True)


@triton.jit
def dot_half(b_h, b_hs, b_w, b_ws, PRECISION: tl.constexpr):
    """(h * hs) . (w * ws): the scales run along rows of h and columns of w."""
    return tl.dot(b_h, b_w, input_precision=PRECISION) * b_hs[:, None] * b_ws[None, :]


@triton.jit
def dot_left(b_x, b_w, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """x . w with a computed x brought to the operand dtype; fp16 gets a power-of-two scale per row to keep its range."""
    if DOT == tl.float16:
        b_h, b_s = scaled_half(b_x, 1, tl.float16)
        return tl.dot(b_h, b_w) * b_s[:, None]
    else:
        return tl.dot(b_x.to(DOT), b_w, input_precision=PRECISION)


@triton.jit
def dot_right(b_w, b_x, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """w . x with a computed x, as dot_left."""
    if DOT == tl.float16:
        b_h, b_s = scaled_half(b_x, 0, tl.float16)
        return tl.dot(b_w, b_h) * b_s[None, :]
    else:
        return tl.dot(b_w, b_x.to(DOT), input_precision=PRECISION)


@triton.jit
def dot_both(b_x, b_y, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """x . y, both computed, as dot_left."""
    if DOT == tl.float16:
        b_h, b_hs = scaled_half(b_x, 1, tl.float16)
        b_w, b_ws = scaled_half(b_y, 0, tl.float16)
        return tl.dot(b_h, b_w) * b_hs[:, None] * b_ws[None, :]
    else:
        return tl.dot(b_x.to(DOT), b_y.to(DOT), input_precision=PRECISION)


@triton.jit
def unit_lower_inverse(b_A, TURNED: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + strictly_lower(A))^-1 in fp32.  TURNED: A and the result are held transposed, as [j,i].

    Forward substitution inside 16 x 16 diagonal blocks, all at once, then merges X - X L X over doubling blocks.
    """
    NB: tl.constexpr = C // 16
    i_b = tl.arange(0, NB)
    o_s = tl.arange(0, 16)
    m_same = i_b[:, None, None, None] == i_b[None, None, :, None]
    b_D = tl.sum(tl.where(m_same, tl.reshape(b_A, [NB, 16, NB, 16]), 0.0), 2)
    b_I = tl.where(o_s[None, :, None] == o_s[None, None, :], 1.0, 0.0) + tl.zeros([NB, 16, 16], dtype=tl.float32)
    b_Y = b_I
    for i in tl.range(1, 16):
        if TURNED:
            m_here = o_s[None, None, :] == i
            b_row = tl.sum(tl.where(m_here & (o_s[None, :, None] < i), b_D, 0.0), 2)
            b_Y = tl.where(m_here, b_Y - tl.sum(b_Y * b_row[:, None, :], 2)[:, :, None], b_Y)
        else:
            m_here = o_s[None, :, None] == i
            b_row = tl.sum(tl.where(m_here & (o_s[None, None, :] < i), b_D, 0.0), 1)
            b_Y = tl.where(m_here, b_Y - tl.sum(b_row[:, :, None] * b_Y, 1)[:, None, :], b_Y)
    b_X = tl.reshape(tl.where(m_same, b_Y[:, :, None, :], 0.0), [C, C])
    o_c = tl.arange(0, C)
    LEVELS: tl.constexpr = 0 if C == 16 else (1 if C == 32 else (2 if C == 64 else 3))
    for level in tl.static_range(0, LEVELS):
        i_small = o_c // (16 << level)
        i_large = o_c // (32 << level)
        m_level = i_large[:, None] == i_large[None, :]
        if TURNED:
            m_level = m_level & (i_small[:, None] < i_small[None, :])
        else:
            m_level = m_level & (i_small[:, None] > i_small[None, :])
        b_L = tl.dot(b_X, tl.where(m_level, -b_A, 0.0), input_precision=PRECISION)
        b_X = b_X + tl.dot(b_L, b_X, input_precision=PRECISION)
    return b_X


@triton.jit
def find_sequence(cu_seqlens, i_slot, N, C: tl.constexpr):
    """The packed sequence that chunk slot ``i_slot`` belongs to: sequence n starts at slot cu[n] // C + n."""
    i_low = 0
    i_high = N
    while i_high - i_low > 1:
        i_middle = (i_low + i_high) // 2
        if tl.load(cu_seqlens + i_middle).to(tl.int64) // C + i_middle <= i_slot:
            i_low = i_middle
        else:
            i_high = i_middle
    return i_low
