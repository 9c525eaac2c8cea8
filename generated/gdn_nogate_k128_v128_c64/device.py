"""Device functions shared by the kernels of this package.

Shorthand inside kernels: i_ index, o_ offsets, m_ mask, p_ pointer, b_ block in registers; C chunk length, BK and BV
tiles of the key and value dimension; DOT the dtype of matrix operands (fp32 for fp16 inputs, whose range is too small
for what is computed on the way), PRECISION how fp32 products are formed.
"""

import triton
import triton.language as tl


@triton.jit
def batch_start(i_b, stride, ROW: tl.constexpr):
    """Elements before a batch.

    Its stride varies with the length and is not compiled in.  Wide loads need to know that it is a multiple of 16, or
    8, where the token stride ROW is: machine.py sees to that.
    """
    return tl.multiple_of(i_b * stride, 16 if ROW % 16 == 0 else 8 if ROW % 8 == 0 else 1)


@triton.jit
def decay_of(b_x):
    """exp of a log decay, as a power of two: the instruction for that may flush what is below 2^-126, and needs no
    scaling around it."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    return tl.exp2(b_x * LOG2_E)


@triton.jit
def held_gate(b_g):
    """A log decay, not below one whose exp is 0 in fp32: no -inf in differences, and exact sums lose nothing by it."""
    LOWEST: tl.constexpr = -110.0
    return tl.where(b_g < LOWEST, LOWEST, b_g)


@triton.jit
def split_gate(b_g):
    """A log decay as a multiple of 1/64 and a rest: sums of the first part are exact in fp32."""
    COARSE: tl.constexpr = 64.0
    b_g = held_gate(b_g)
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
def halves(b_x):
    """Two bf16 that sum to the first 16 bits of x."""
    b_high = b_x.to(tl.bfloat16)
    return b_high, (b_x - b_high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def weighted_gates(b_weights, b_g):
    """Sums of gates in two exact products: weights are 0 and 1, and of each gate there are 16 bits."""
    b_high, b_low = halves(b_g)
    b_weights = b_weights.to(tl.bfloat16)
    return tl.dot(b_weights, b_low, tl.dot(b_weights, b_high))


@triton.jit
def gates_summed(b_g, AFTER: tl.constexpr, C: tl.constexpr):
    """[token,channel]: sum of the gates up to each token, or AFTER it."""
    o_c = tl.arange(0, C)
    m_summed = (o_c[None, :] > o_c[:, None]) if AFTER else (o_c[None, :] <= o_c[:, None])
    return weighted_gates(tl.where(m_summed, 1.0, 0.0), held_gate(b_g))


@triton.jit
def decay_from_start(b_g, C: tl.constexpr, PRECISION: tl.constexpr):
    """[token,channel]: exp of the log decay from the start of the chunk to each token, the token's own included."""
    if PRECISION == "tf32":
        return decay_of(gates_summed(b_g, False, C))
    else:
        b_c, b_f = cumulative_gate(b_g)
        return decay_of(b_c + b_f)


@triton.jit
def decay_to_end(b_g, C: tl.constexpr, PRECISION: tl.constexpr):
    """[token,channel]: exp of the log decay from behind each token to the end of the chunk."""
    if PRECISION == "tf32":
        return decay_of(gates_summed(b_g, True, C))
    else:
        b_c, b_f = cumulative_gate(b_g)
        b_tc, b_tf = total_gate(b_g)
        return decay_of((b_tc[None, :] - b_c) + (b_tf[None, :] - b_f))


@triton.jit
def decay_over_chunk(b_g, C: tl.constexpr, PRECISION: tl.constexpr):
    """[channel]: exp of the log decay over the whole chunk.  A sum over tokens would go from warp to warp."""
    if PRECISION == "tf32":
        b_all = tl.zeros([16, C], dtype=tl.float32) + 1.0  # 16 rows, the fewest a product has
        return decay_of(tl.max(weighted_gates(b_all, held_gate(b_g)), 0))
    else:
        b_tc, b_tf = total_gate(b_g)
        return decay_of(b_tc + b_tf)


@triton.jit
def decay_between(b_c, b_f, C: tl.constexpr):
    """[i,j]: exp of the log decay over (j, i] for j <= i, else 0.  Masked before exp; no exponent is positive."""
    o_c = tl.arange(0, C)
    b_x = (b_c[:, None] - b_c[None, :]) + (b_f[:, None] - b_f[None, :])
    return decay_of(tl.where(o_c[:, None] >= o_c[None, :], b_x, float("-inf")))


@triton.jit
def decay_between_turned(b_c, b_f, C: tl.constexpr):
    """[j,i]: the transpose of decay_between."""
    o_c = tl.arange(0, C)
    b_x = (b_c[None, :] - b_c[:, None]) + (b_f[None, :] - b_f[:, None])
    return decay_of(tl.where(o_c[None, :] >= o_c[:, None], b_x, float("-inf")))


@triton.jit
def beside_middle(level, OUTWARDS: tl.constexpr, TURNED: tl.constexpr, WIDE: tl.constexpr, C: tl.constexpr):
    """[block,token,other], blocks of 16 tokens: 1 where the other lies in the token's half of a block of 2 << level
    tokens and between the token and the middle, else 0.

    With the token itself in the second half, without it in the first; OUTWARDS: between it and the half's outer end,
    with and without it in the same way.  TURNED: [block,other,token].  WIDE: level >= 4, where halves are whole blocks
    and beside_blocks has the rest.
    """
    o_s = tl.arange(0, 16)  # what depends on the level is made of rows and columns: matrices would stay in registers
    if WIDE:
        o_token = o_s[None, None, :] if TURNED else o_s[None, :, None]
        o_other = o_s[None, :, None] if TURNED else o_s[None, None, :]
        m_before = (o_other < o_token) if OUTWARDS else (o_other <= o_token)
        i_half = (tl.arange(0, C // 16) >> (level - 4)) & 1
        m_beside = m_before ^ (i_half == (1 if OUTWARDS else 0))[:, None, None]
    else:
        o_half = (o_s >> level) << level
        m_second = ((o_s >> level) & 1) == 1
        if OUTWARDS:
            o_from = tl.where(m_second, o_s, o_half)
            o_to = tl.where(m_second, o_half + (1 << level), o_s)
        else:
            o_from = tl.where(m_second, o_half, o_s + 1)
            o_to = tl.where(m_second, o_s + 1, o_half + (1 << level))
        if TURNED:
            m_beside = (o_s[:, None] >= o_from[None, :]) & (o_s[:, None] < o_to[None, :])
        else:
            m_beside = (o_s[None, :] >= o_from[:, None]) & (o_s[None, :] < o_to[:, None])
        m_beside = tl.broadcast_to(m_beside[None, :, :], [C // 16, 16, 16])
    return tl.where(m_beside, 1.0, 0.0)


@triton.jit
def beside_blocks(b_total, level, OUTWARDS: tl.constexpr, C: tl.constexpr):
    """[block,channel]: sums of blocks' totals over the blocks between a block and the middle (OUTWARDS: the outer end)
    of its half of a block of 2 << level tokens; level >= 4."""
    o_b = tl.arange(0, C // 16)
    o_half = (o_b >> (level - 4)) << (level - 4)
    o_end = o_half + (1 << (level - 4))
    m_up = (((o_b >> (level - 4)) & 1) == 1) == OUTWARDS
    o_from = tl.where(m_up, o_b + 1, o_half)
    o_to = tl.where(m_up, o_end, o_b)
    m_beside = (o_b[None, :] >= o_from[:, None]) & (o_b[None, :] < o_to[:, None])
    return tl.sum(tl.where(m_beside[:, :, None], b_total[None, :, :], 0.0), 1)


@triton.jit
def meeting(level, LATE: tl.constexpr, S: tl.constexpr):
    """[row,column] of S tokens: pairs in the two halves of a block of 2 << level; LATE: the row's is the later one."""
    i_half = tl.arange(0, S) >> level
    i_partner = tl.where((i_half & 1) == 0, i_half + 1, -1)
    return i_half[:, None] == i_partner[None, :] if LATE else i_partner[:, None] == i_half[None, :]


@triton.jit
def block_product(b_m, b_x, C: tl.constexpr, PRECISION: tl.constexpr):
    """[block,token,channel]: m [block,16,S] times x [block,16,channel] of the same block (S 16) or of all (S C)."""
    if b_m.shape[2] != 16:
        D: tl.constexpr = b_x.shape[2]
        b_x = tl.broadcast_to(tl.reshape(b_x, [1, C, D]), [C // 16, C, D])
    return tl.dot(b_m, b_x, input_precision=PRECISION)


@triton.jit
def synchronous_product(b_x, b_y, PRECISION: tl.constexpr):
    """x y by instructions that read registers, not descriptors: in blocks of 16 rows where there are 64 of them."""
    M: tl.constexpr = b_x.shape[0]
    if len(b_x.shape) == 2 and M % 64 == 0:
        b_rows = tl.reshape(b_x, [M // 16, 16, b_x.shape[1]])
        b_columns = tl.broadcast_to(b_y[None, :, :], [M // 16, b_y.shape[0], b_y.shape[1]])
        return tl.reshape(tl.dot(b_rows, b_columns, input_precision=PRECISION), [M, b_y.shape[1]])
    else:
        return tl.dot(b_x, b_y, input_precision=PRECISION)


@triton.jit
def diagonal_blocks(b_m, C: tl.constexpr):
    """[block,16,16] of a matrix [C,C]: the pairs inside blocks of 16 tokens."""
    i_b = tl.arange(0, C // 16)
    m_same = i_b[:, None, None, None] == i_b[None, None, :, None]
    return tl.sum(tl.where(m_same, tl.reshape(b_m, [C // 16, 16, C // 16, 16]).to(tl.float32), 0.0), 2)


@triton.jit
def out_of_product(b_m, C: tl.constexpr):
    """A matrix [C,C] of finite entries times 1, exactly: laid out as what comes out of products, which the next ones
    read from registers.  Loaded, it would go through shared memory, where all rows of a block meet in one bank.
    """
    if b_m.dtype == tl.bfloat16:
        o_s = tl.arange(0, 16)
        b_one = tl.broadcast_to(tl.where(o_s[:, None] == o_s[None, :], 1.0, 0.0)[None, :, :], [C // 16, 16, 16])
        return tl.reshape(tl.dot(b_one.to(tl.bfloat16), tl.reshape(b_m, [C // 16, 16, C])).to(tl.bfloat16), [C, C])
    else:
        return b_m


@triton.jit
def on_diagonal(b_blocks, C: tl.constexpr):
    """[C,C] with the given [block,16,16] on its diagonal."""
    i_b = tl.arange(0, C // 16)
    m_same = i_b[:, None, None, None] == i_b[None, None, :, None]
    return tl.reshape(tl.where(m_same, b_blocks[:, :, None, :], 0.0), [C, C])


@triton.jit
def decay_to_middle(b_g, level, WIDE: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr):
    """[block,token,channel]: exp of the log decay between a token and the middle of its block of 2 << level tokens.

    Over (middle, i] for i in the second half, over (j, middle] for j in the first.  Sums of gates and no differences:
    no exponent is positive, and nothing cancels.  WIDE: level >= 4.
    """
    b_between = beside_middle(level, False, False, WIDE, C)
    b_g = held_gate(b_g)
    if PRECISION == "tf32":
        b_sum = weighted_gates(b_between, b_g)
    else:
        b_sum = tl.dot(b_between, b_g, input_precision=PRECISION)
    if WIDE:
        b_sum += beside_blocks(tl.sum(b_g, 1), level, False, C)[:, None, :]
    return decay_of(b_sum)


@triton.jit
def decay_to_middle_turned(b_g, level, WIDE: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr):
    """The same as [block,channel,token], or WIDE of all tokens as [channel,token]."""
    b_between = beside_middle(level, False, True, WIDE, C)
    b_g = held_gate(b_g)
    b_turned = tl.trans(b_g, (0, 2, 1))
    if PRECISION == "tf32":
        b_high, b_low = halves(b_turned)
        b_between = b_between.to(tl.bfloat16)
        b_sum = tl.dot(b_low, b_between, tl.dot(b_high, b_between))
    else:
        b_sum = tl.dot(b_turned, b_between, input_precision=PRECISION)
    if WIDE:
        b_sum += beside_blocks(tl.sum(b_g, 1), level, False, C)[:, :, None]
        b_sum = tl.reshape(tl.trans(b_sum, (1, 0, 2)), [b_g.shape[2], C])
    return decay_of(b_sum)


@triton.jit
def running_sum(b_x, level, WIDE: tl.constexpr, C: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """[block,token,channel]: sums inside the halves of blocks of 2 << level tokens, away from the block's middle.

    In the second half from the token on, in the first half before the token.  WIDE: level >= 4.
    """
    b_summed = beside_middle(level, True, False, WIDE, C).to(DOT)
    b_sum = tl.dot(b_summed, b_x.to(DOT), input_precision=PRECISION)
    if WIDE:
        b_sum += beside_blocks(tl.sum(b_x, 1), level, True, C)[:, None, :]
    return b_sum


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
def unit_lower_inverse(b_A, b_E, TURNED: tl.constexpr, NARROW: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + strictly_lower(E A))^-1 for decays E between tokens, or None; equal to E (I + strictly_lower(A))^-1.

    TURNED: all are held transposed, as [j,i].  NARROW, where A itself holds no decays: for 16-bit inputs (PRECISION
    tf32) in fp16 products, as precise as tf32 for entries above 6e-5 and half as long; a larger one than fp16 holds
    comes out as infinity or NaN, and the whole is done again by forward substitution in fp32.
    """
    if NARROW and PRECISION == "tf32":
        b_X = inverse_in_fp16(b_A, TURNED, C)
        m_lost = tl.sum(b_X - b_X) != 0.0
        if b_E is not None:
            b_X = b_X * b_E
        if m_lost:
            b_gated = tl.reshape(b_A if b_E is None else b_A * b_E, [1, C, C])
            b_X = tl.reshape(substituted_blocks(b_gated, TURNED, 1, C), [C, C])
        return b_X
    else:
        return inverse_in_fp32(b_A if b_E is None else b_A * b_E, TURNED, C, PRECISION)


@triton.jit
def inverse_in_fp32(b_A, TURNED: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + strictly_lower(A))^-1: inside 16 x 16 diagonal blocks, all at once, by forward substitution or (PRECISION
    tf32) by merges of doubling blocks; then merges X - X L X over doubling blocks of the whole matrix.
    """
    b_D = diagonal_blocks(b_A, C)
    if PRECISION == "tf32":
        b_Y = merged_blocks(b_D, TURNED)
    else:
        b_Y = substituted_blocks(b_D, TURNED, C // 16, 16)
    b_X = on_diagonal(b_Y, C)
    LEVELS: tl.constexpr = 0 if C == 16 else (1 if C == 32 else (2 if C == 64 else 3))
    for level in tl.static_range(4, 4 + LEVELS):
        b_XL = tl.dot(b_X, tl.where(meeting(level, not TURNED, C), -b_A, 0.0), input_precision=PRECISION)
        b_X = b_X + tl.dot(b_XL, b_X, input_precision=PRECISION)
    return b_X


@triton.jit
def inverse_in_fp16(b_A, TURNED: tl.constexpr, C: tl.constexpr):
    """The same by merges X + X M X of doubling blocks, M = -A, in fp16 products that are summed in fp32.

    Blocks of 16 tokens, one a warp where there are as many warps, never leave registers: 0/1 products pick them out and
    put them back, and what came out of a product is the next one's left operand as it is and its right operand
    transposed.  So each is held both ways round, X and T = X^T.
    """
    o_c = tl.arange(0, C)
    o_s = tl.arange(0, 16)
    i_block = tl.arange(0, C // 16)[:, None, None] * 16
    b_pick = tl.where(i_block + o_s[None, None, :] == o_c[None, :, None], 1.0, 0.0).to(tl.float16)
    b_place = tl.where(i_block + o_s[None, :, None] == o_c[None, None, :], 1.0, 0.0).to(tl.float16)
    b_M = (-b_A).to(tl.float16)
    b_rows = tl.reshape(b_M, [C // 16, 16, C])
    b_D = tl.dot(b_rows, b_pick).to(tl.float16)
    b_X = with_unit_diagonal(b_D, TURNED)
    b_T = with_unit_diagonal(tl.dot(b_place, turned_bits(b_rows)).to(tl.float16), not TURNED)
    for level in tl.static_range(1, 4):
        b_half = b_X.to(tl.float16)
        b_level = tl.where(meeting(level, not TURNED, 16)[None, :, :], b_D, 0.0).to(tl.float16)
        b_MX_turned = tl.dot(b_T.to(tl.float16), turned_bits(b_level)).to(tl.float16)
        b_X = tl.dot(b_half, turned_bits(b_MX_turned), b_X)
        b_T = tl.dot(b_MX_turned, turned_bits(b_half), b_T)
    b_X = tl.reshape(tl.dot(b_X.to(tl.float16), b_place), [C, C])
    LEVELS: tl.constexpr = 0 if C == 16 else (1 if C == 32 else (2 if C == 64 else 3))
    for level in tl.static_range(4, 4 + LEVELS):
        b_half = b_X.to(tl.float16)
        b_MX = tl.dot(tl.where(meeting(level, not TURNED, C), b_M, 0.0).to(tl.float16), b_half).to(tl.float16)
        b_X = tl.dot(b_half, b_MX, b_X)
    return b_X


@triton.jit
def with_unit_diagonal(b_D, TURNED: tl.constexpr):
    """[block,16,16] in fp32: 1 on the diagonal, and of D the pairs in blocks of 2 tokens."""
    o_s = tl.arange(0, 16)
    b_pairs = tl.where(meeting(0, not TURNED, 16)[None, :, :], b_D.to(tl.float32), 0.0)
    return tl.where(o_s[None, :, None] == o_s[None, None, :], 1.0, b_pairs)


@triton.jit
def turned_bits(b_x):
    """[block,j,i] of fp16 [block,i,j]; as bits, which Triton leaves in registers where that is all it takes."""
    return tl.trans(b_x.to(tl.int16, bitcast=True), (0, 2, 1)).to(tl.float16, bitcast=True)


@triton.jit
def substituted_blocks(b_D, TURNED: tl.constexpr, NB: tl.constexpr, S: tl.constexpr):
    """(I + strictly_lower(D))^-1 of [NB,S,S] blocks by forward substitution, row i of every block at once."""
    o_s = tl.arange(0, S)
    b_Y = tl.where(o_s[None, :, None] == o_s[None, None, :], 1.0, 0.0) + tl.zeros([NB, S, S], dtype=tl.float32)
    for i in tl.range(1, S):
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
    b_Y = with_unit_diagonal(-b_D, TURNED)
    for level in tl.static_range(1, 4):
        b_YL = tl.dot(b_Y, tl.where(meeting(level, not TURNED, 16)[None, :, :], -b_D, 0.0), input_precision="tf32")
        b_Y = b_Y + tl.dot(b_YL, b_Y, input_precision="tf32")
    return b_Y


@triton.jit
def load_tile(
    x,
    i_tile,
    row,
    column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """[ROWS,COLUMNS] of a tile [HEIGHT,WIDTH] that another kernel stored, from row and column on; zeros outside of it.

    x: tiles one after the other in memory, or their descriptor.
    """
    if isinstance(x, tl.tensor_descriptor):
        return tl.reshape(x.load([i_tile.to(tl.int32), row, column]), [ROWS, COLUMNS])
    else:
        o_r = row + tl.arange(0, ROWS)
        o_c = column + tl.arange(0, COLUMNS)
        p_x = x + i_tile * (HEIGHT * WIDTH) + (o_r[:, None] * WIDTH + o_c[None, :])
        if HEIGHT % ROWS == 0 and WIDTH % COLUMNS == 0:
            return tl.load(p_x)
        else:
            return tl.load(p_x, mask=(o_r[:, None] < HEIGHT) & (o_c[None, :] < WIDTH), other=0.0)


@triton.jit
def load_tokens(
    x,
    i_b,
    token,
    head,
    column,
    x_sb,
    x_st,
    x_sh,
    m_i,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    PACKED: tl.constexpr,
):
    """[ROWS,COLUMNS] of an input [batch,token,head,WIDTH] from token and column on; zeros past the sequence and WIDTH.

    x: the tensor, with its strides, or its descriptor, which ends with the batch's last token.
    """
    if isinstance(x, tl.tensor_descriptor):
        place = [tl.cast(i_b, tl.int32), token.to(tl.int32), head.to(tl.int32), column]
        b_x = tl.reshape(x.load(place), [ROWS, COLUMNS])
        return tl.where(m_i[:, None], b_x, 0.0) if PACKED else b_x
    else:
        o_r = tl.arange(0, ROWS)
        o_c = column + tl.arange(0, COLUMNS)
        p_x = x + batch_start(i_b, x_sb, x_st) + token * x_st + head * x_sh + (o_r[:, None] * x_st + o_c[None, :])
        if WIDTH % COLUMNS == 0:
            return tl.load(p_x, mask=m_i[:, None], other=0.0)
        else:
            return tl.load(p_x, mask=m_i[:, None] & (o_c[None, :] < WIDTH), other=0.0)


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


@triton.jit
def segment_of(i_segment, cu_seqlens, T, N, SPAN: tl.constexpr):
    """(sequence, segment within it) of a segment: packed sequence n starts at segment cu[n] // SPAN + n."""
    if cu_seqlens is not None:
        i_n = find_sequence(cu_seqlens, i_segment, N, SPAN)
        return i_n, i_segment - (tl.load(cu_seqlens + i_n).to(tl.int64) // SPAN + i_n)
    else:
        return i_segment // tl.cdiv(T, SPAN), i_segment % tl.cdiv(T, SPAN)
