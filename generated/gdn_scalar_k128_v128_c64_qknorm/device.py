"""Device functions shared by the kernels of this package.

Shorthand inside kernels: i_ index, o_ offsets, m_ mask, p_ pointer, b_ block in registers; C chunk length, BK and BV
tiles of the key and value dimension; DOT the dtype of matrix operands (fp32 for fp16 inputs, whose range is too small
for what is computed on the way), PRECISION how fp32 products are formed.
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
def cumulative_gate(b_g, AXIS: tl.constexpr):
    """Log decay from the start of the chunk to each token, as (coarse, fine)."""
    b_coarse, b_fine = split_gate(b_g)
    return tl.cumsum(b_coarse, AXIS), tl.cumsum(b_fine, AXIS)


@triton.jit
def total_gate(b_g, AXIS: tl.constexpr):
    """Log decay over the whole chunk, as (coarse, fine)."""
    b_coarse, b_fine = split_gate(b_g)
    return tl.sum(b_coarse, AXIS), tl.sum(b_fine, AXIS)


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
def decay_to_middle(b_g, level, TURNED: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr):
    """[token,channel]: exp of the log decay between a token and the middle of its block of 2 << level tokens.

    Over (middle, i] for i in the second half, over (j, middle] for j in the first.  Sums of gates and no differences:
    no exponent is positive, and nothing cancels.  TURNED: the result as [channel,token].
    """
    o_c = tl.arange(0, C)
    o_token = o_c[None, :] if TURNED else o_c[:, None]
    o_other = o_c[:, None] if TURNED else o_c[None, :]
    m_half = (o_token >> level) == (o_other >> level)
    m_second = ((o_token >> level) & 1) == 1
    b_between = tl.where(m_half & (m_second == (o_other <= o_token)), 1.0, 0.0)
    b_g = tl.where(b_g < LOWEST_GATE, LOWEST_GATE, b_g)
    b_g = tl.trans(b_g) if TURNED else b_g
    if PRECISION == "tf32":  # 16 bits of each gate: two exact products, as b_between is 0 and 1
        b_high = b_g.to(tl.bfloat16)
        b_low = (b_g - b_high.to(tl.float32)).to(tl.bfloat16)
        b_between = b_between.to(tl.bfloat16)
        if TURNED:
            return tl.exp(tl.dot(b_low, b_between, tl.dot(b_high, b_between)))
        else:
            return tl.exp(tl.dot(b_between, b_low, tl.dot(b_between, b_high)))
    else:
        if TURNED:
            return tl.exp(tl.dot(b_g, b_between, input_precision=PRECISION))
        else:
            return tl.exp(tl.dot(b_between, b_g, input_precision=PRECISION))


@triton.jit
def decayed_gram(b_x, b_y, b_g, TURNED: tl.constexpr, C: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """[i,j] = sum over channels of x[i,c] y[j,c] exp(log decay over (j, i]) for j <= i, else 0.  TURNED: as [j,i].

    For blocks of 2, 4, ... C tokens the pairs of second and first half: there the decay is one factor per row times
    one per column, neither above 1.
    """
    o_c = tl.arange(0, C)
    o_row = o_c[None, :] if TURNED else o_c[:, None]
    o_column = o_c[:, None] if TURNED else o_c[None, :]
    b_x = b_x.to(tl.float32)
    b_y = b_y.to(tl.float32)
    b_gram = tl.where(o_row == o_column, tl.sum(b_x * b_y, 1)[:, None], 0.0)
    b_first = b_y if TURNED else b_x
    b_second = tl.trans(b_x if TURNED else b_y)
    b_apart = tl.where(o_row > o_column, o_row ^ o_column, 0)  # its highest bit is the level at which a pair meets
    LEVELS: tl.constexpr = 4 if C == 16 else (5 if C == 32 else (6 if C == 64 else 7))
    for level in tl.range(0, LEVELS):
        b_one = (b_first * decay_to_middle(b_g, level, False, C, PRECISION)).to(DOT)
        b_two = (b_second * decay_to_middle(b_g, level, True, C, PRECISION)).to(DOT)
        b_gram += tl.where((b_apart >> level) == 1, tl.dot(b_one, b_two, input_precision=PRECISION), 0.0)
    return b_gram


@triton.jit
def decayed_sum(
    b_m,
    b_y,
    b_g,
    LATER: tl.constexpr,
    TURNED: tl.constexpr,
    C: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """[i,c] = sum over j <= i of m[i,j] y[j,c] exp(log decay over (j, i]).

    LATER: over j >= i, with the decay over (i, j].  TURNED: [c,i] from m[j,i] and y[c,j].  Blocks of tokens as in
    decayed_gram.
    """
    o_c = tl.arange(0, C)
    o_late = o_c[None, :] if LATER != TURNED else o_c[:, None]
    o_early = o_c[:, None] if LATER != TURNED else o_c[None, :]
    b_m = b_m.to(tl.float32)
    b_y = b_y.to(tl.float32)
    b_apart = tl.where(o_late > o_early, o_late ^ o_early, 0)
    b_own = tl.sum(tl.where(o_late == o_early, b_m, 0.0), 1)
    b_sum = (b_own[None, :] if TURNED else b_own[:, None]) * b_y
    LEVELS: tl.constexpr = 4 if C == 16 else (5 if C == 32 else (6 if C == 64 else 7))
    for level in tl.range(0, LEVELS):
        b_decay = decay_to_middle(b_g, level, TURNED, C, PRECISION)
        b_level = tl.where((b_apart >> level) == 1, b_m, 0.0).to(DOT)
        b_tile = (b_y * b_decay).to(DOT)
        b_first = b_tile if TURNED else b_level
        b_second = b_level if TURNED else b_tile
        b_sum += b_decay * tl.dot(b_first, b_second, input_precision=PRECISION)
    return b_sum


@triton.jit
def decayed_crossing(b_m, b_x, b_y, b_g, C: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """[t,c] = sum over i >= t > j of m[i,j] x[i,c] y[j,c] exp(log decay over (j, i]): the gradient of a log decay.

    A pair that meets at a level crosses the tokens up to i of the second half and those after j of the first: running
    sums inside the halves, in which every term holds the token's own decay.
    """
    o_c = tl.arange(0, C)
    b_m = b_m.to(tl.float32)
    b_x = b_x.to(tl.float32)
    b_y = b_y.to(tl.float32)
    b_xt = tl.trans(b_x)
    b_yt = tl.trans(b_y)
    b_apart = tl.where(o_c[:, None] > o_c[None, :], o_c[:, None] ^ o_c[None, :], 0)
    b_second = tl.zeros_like(b_x)
    b_first = tl.zeros_like(b_yt)
    LEVELS: tl.constexpr = 4 if C == 16 else (5 if C == 32 else (6 if C == 64 else 7))
    for level in tl.range(0, LEVELS):
        b_row = decay_to_middle(b_g, level, False, C, PRECISION)
        b_column = decay_to_middle(b_g, level, True, C, PRECISION)
        b_level = tl.where((b_apart >> level) == 1, b_m, 0.0).to(DOT)
        b_rows = tl.dot(b_level, (b_y * b_row).to(DOT), input_precision=PRECISION)
        b_columns = tl.dot((b_xt * b_column).to(DOT), b_level, input_precision=PRECISION)
        m_half = (o_c[:, None] >> level) == (o_c[None, :] >> level)
        b_from = tl.where(m_half & (o_c[:, None] <= o_c[None, :]), 1.0, 0.0)  # [t,i]
        b_after = tl.where(m_half & (o_c[:, None] < o_c[None, :]), 1.0, 0.0)  # [j,t]
        b_second += tl.dot(b_from, b_x * b_row * b_rows, input_precision=PRECISION)
        b_first += tl.dot(b_yt * b_column * b_columns, b_after, input_precision=PRECISION)
    return b_second + tl.trans(b_first)


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
def unit_lower_inverse(b_A, TURNED: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + strictly_lower(A))^-1.  TURNED: A and the result are held transposed, as [j,i].

    Inside 16 x 16 diagonal blocks, all at once: forward substitution in fp32; for 16-bit inputs (PRECISION tf32) merges
    of doubling blocks.  Then merges X - X L X over doubling blocks of the whole matrix.
    """
    NB: tl.constexpr = C // 16
    i_b = tl.arange(0, NB)
    m_same = i_b[:, None, None, None] == i_b[None, None, :, None]
    b_D = tl.sum(tl.where(m_same, tl.reshape(b_A, [NB, 16, NB, 16]), 0.0), 2)
    if PRECISION == "tf32":
        b_Y = merged_blocks(b_D, TURNED)
    else:
        b_Y = substituted_blocks(b_D, TURNED, NB)
    b_X = tl.reshape(tl.where(m_same, b_Y[:, :, None, :], 0.0), [C, C])
    o_c = tl.arange(0, C)
    o_row = o_c[None, :] if TURNED else o_c[:, None]
    o_column = o_c[:, None] if TURNED else o_c[None, :]
    LEVELS: tl.constexpr = 0 if C == 16 else (1 if C == 32 else (2 if C == 64 else 3))
    for level in tl.static_range(4, 4 + LEVELS):
        m_level = ((o_row >> (level + 1)) == (o_column >> (level + 1))) & ((o_row >> level) > (o_column >> level))
        b_XL = tl.dot(b_X, tl.where(m_level, -b_A, 0.0), input_precision=PRECISION)
        b_X = b_X + tl.dot(b_XL, b_X, input_precision=PRECISION)
    return b_X


@triton.jit
def substituted_blocks(b_D, TURNED: tl.constexpr, NB: tl.constexpr):
    """(I + strictly_lower(D))^-1 of [NB,16,16] blocks by forward substitution, row i of every block at once."""
    o_s = tl.arange(0, 16)
    b_Y = tl.where(o_s[None, :, None] == o_s[None, None, :], 1.0, 0.0) + tl.zeros([NB, 16, 16], dtype=tl.float32)
    for i in tl.range(1, 16):
        if TURNED:
            m_here = o_s[None, None, :] == i
            b_row = tl.sum(tl.where(m_here & (o_s[None, :, None] < i), b_D, 0.0), 2)
            b_Y = tl.where(m_here, b_Y - tl.sum(b_Y * b_row[:, None, :], 2)[:, :, None], b_Y)
        else:
            m_here = o_s[None, :, None] == i
            b_row = tl.sum(tl.where(m_here & (o_s[None, None, :] < i), b_D, 0.0), 1)
            b_Y = tl.where(m_here, b_Y - tl.sum(b_row[:, :, None] * b_Y, 1)[:, None, :], b_Y)
    return b_Y


@triton.jit
def merged_blocks(b_D, TURNED: tl.constexpr):
    """(I + strictly_lower(D))^-1 of [NB,16,16] blocks by merges Y - Y L Y over blocks of 2, 4, 8; products in tf32."""
    o_s = tl.arange(0, 16)
    o_row = o_s[None, None, :] if TURNED else o_s[None, :, None]
    o_column = o_s[None, :, None] if TURNED else o_s[None, None, :]
    b_Y = tl.where(o_row == o_column, 1.0, tl.where((o_row // 2 == o_column // 2) & (o_row > o_column), -b_D, 0.0))
    for level in tl.static_range(1, 4):
        m_level = ((o_row >> (level + 1)) == (o_column >> (level + 1))) & ((o_row >> level) > (o_column >> level))
        b_YL = tl.dot(b_Y, tl.where(m_level, -b_D, 0.0), input_precision="tf32")
        b_Y = b_Y + tl.dot(b_YL, b_Y, input_precision="tf32")
    return b_Y


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
