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
def batch_start(i_b, stride, ROW: tl.constexpr):
    """Elements before a batch.

    Its stride varies with the length and is not compiled in.  Wide loads need to know that it is a multiple of 16, or
    8, where the token stride ROW is: machine.py sees to that.
    """
    return tl.multiple_of(i_b * stride, 16 if ROW % 16 == 0 else 8 if ROW % 8 == 0 else 1)


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
def gates_summed(b_g, AFTER: tl.constexpr, C: tl.constexpr):
    """[token,channel]: sum of the gates up to each token, or AFTER it.  16 bits of each gate: two exact products."""
    o_c = tl.arange(0, C)
    m_summed = (o_c[None, :] > o_c[:, None]) if AFTER else (o_c[None, :] <= o_c[:, None])
    b_summed = tl.where(m_summed, 1.0, 0.0).to(tl.bfloat16)
    b_g = tl.where(b_g < LOWEST_GATE, LOWEST_GATE, b_g)
    b_high = b_g.to(tl.bfloat16)
    b_low = (b_g - b_high.to(tl.float32)).to(tl.bfloat16)
    return tl.dot(b_summed, b_low, tl.dot(b_summed, b_high))


@triton.jit
def decay_from_start(b_g, C: tl.constexpr, PRECISION: tl.constexpr):
    """[token,channel]: exp of the log decay from the start of the chunk to each token, the token's own included."""
    if PRECISION == "tf32":
        return tl.exp(gates_summed(b_g, False, C))
    else:
        b_c, b_f = cumulative_gate(b_g, 0)
        return tl.exp(b_c + b_f)


@triton.jit
def decay_to_end(b_g, C: tl.constexpr, PRECISION: tl.constexpr):
    """[token,channel]: exp of the log decay from behind each token to the end of the chunk."""
    if PRECISION == "tf32":
        return tl.exp(gates_summed(b_g, True, C))
    else:
        b_c, b_f = cumulative_gate(b_g, 0)
        b_tc, b_tf = total_gate(b_g, 0)
        return tl.exp((b_tc[None, :] - b_c) + (b_tf[None, :] - b_f))


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
def beside_middle(level, OUTWARDS: tl.constexpr, TURNED: tl.constexpr, S: tl.constexpr):
    """[token,other] of S tokens: which tokens of a token's half of a block of 2 << level lie between it and the middle.

    With the token itself in the second half, without it in the first; OUTWARDS: between it and the half's outer end,
    with and without it in the same way.  TURNED: as [other,token].
    """
    o_c = tl.arange(0, S)  # what depends on the level is made of rows and columns: matrices would stay in registers
    o_half = (o_c >> level) << level
    m_second = ((o_c >> level) & 1) == 1
    if OUTWARDS:
        o_from = tl.where(m_second, o_c, o_half)
        o_to = tl.where(m_second, o_half + (1 << level), o_c)
    else:
        o_from = tl.where(m_second, o_half, o_c + 1)
        o_to = tl.where(m_second, o_c + 1, o_half + (1 << level))
    if TURNED:
        return (o_c[:, None] >= o_from[None, :]) & (o_c[:, None] < o_to[None, :])
    else:
        return (o_c[None, :] >= o_from[:, None]) & (o_c[None, :] < o_to[:, None])


@triton.jit
def meeting(level, LATE: tl.constexpr, S: tl.constexpr):
    """[row,column] of S tokens: pairs in the two halves of a block of 2 << level; LATE: the row's is the later one."""
    i_half = tl.arange(0, S) >> level
    i_partner = tl.where((i_half & 1) == 0, i_half + 1, -1)
    return i_half[:, None] == i_partner[None, :] if LATE else i_partner[:, None] == i_half[None, :]


@triton.jit
def block_rows(b_m, C: tl.constexpr):
    """[S,S] as rows of blocks of 16 tokens: [block,16,C] of a whole matrix; [16,16] is the same for every block."""
    if b_m.shape[0] == C:
        return tl.reshape(b_m, [C // 16, 16, C])
    else:
        return tl.broadcast_to(b_m[None, :, :], [C // 16, 16, 16])


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
def on_diagonal(b_blocks, C: tl.constexpr):
    """[C,C] with the given [block,16,16] on its diagonal."""
    i_b = tl.arange(0, C // 16)
    m_same = i_b[:, None, None, None] == i_b[None, None, :, None]
    return tl.reshape(tl.where(m_same, b_blocks[:, :, None, :], 0.0), [C, C])


@triton.jit
def decay_to_middle(b_g, level, S: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr):
    """[block,token,channel]: exp of the log decay between a token and the middle of its block of 2 << level tokens.

    Over (middle, i] for i in the second half, over (j, middle] for j in the first.  Sums of gates and no differences:
    no exponent is positive, and nothing cancels.  S: 16 for levels inside blocks of 16 tokens, else C.
    """
    b_between = block_rows(tl.where(beside_middle(level, False, False, S), 1.0, 0.0), C)
    b_g = tl.where(b_g < LOWEST_GATE, LOWEST_GATE, b_g)
    if PRECISION == "tf32":  # 16 bits of each gate: two exact products, as b_between is 0 and 1
        b_high = b_g.to(tl.bfloat16)
        b_low = (b_g - b_high.to(tl.float32)).to(tl.bfloat16)
        b_between = b_between.to(tl.bfloat16)
        b_sum = block_product(b_between, b_high, C, PRECISION) + block_product(b_between, b_low, C, PRECISION)
    else:
        b_sum = block_product(b_between, b_g, C, PRECISION)
    return tl.exp(b_sum)


@triton.jit
def decay_to_middle_turned(b_g, level, S: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr):
    """The same as [block,channel,token], or of all tokens as [channel,token] where S is more than 16."""
    b_between = tl.where(beside_middle(level, False, True, S), 1.0, 0.0)
    b_g = tl.where(b_g < LOWEST_GATE, LOWEST_GATE, b_g)
    if S == 16:
        b_g = tl.trans(b_g, (0, 2, 1))
        b_between = tl.broadcast_to(b_between[None, :, :], [C // 16, 16, 16])
    else:
        b_g = tl.trans(tl.reshape(b_g, [C, b_g.shape[2]]))
    if PRECISION == "tf32":
        b_high = b_g.to(tl.bfloat16)
        b_low = (b_g - b_high.to(tl.float32)).to(tl.bfloat16)
        b_between = b_between.to(tl.bfloat16)
        b_sum = synchronous_product(b_high, b_between, PRECISION) + synchronous_product(b_low, b_between, PRECISION)
    else:
        b_sum = synchronous_product(b_g, b_between, PRECISION)
    return tl.exp(b_sum)


@triton.jit
def running_sum(b_x, level, S: tl.constexpr, C: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """[block,token,channel]: sums inside the halves of blocks of 2 << level tokens, away from the block's middle.

    In the second half from the token on, in the first half before the token.
    """
    b_summed = block_rows(tl.where(beside_middle(level, True, False, S), 1.0, 0.0), C).to(DOT)
    return block_product(b_summed, b_x.to(DOT), C, PRECISION)


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
    b_D = diagonal_blocks(b_A, C)
    if PRECISION == "tf32":
        b_Y = merged_blocks(b_D, TURNED)
    else:
        b_Y = substituted_blocks(b_D, TURNED, C // 16)
    b_X = on_diagonal(b_Y, C)
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
def load_vector(x, i_tile, first, BLOCK: tl.constexpr, SIZE: tl.constexpr):
    """[BLOCK] of a vector [SIZE] that another kernel stored, from ``first`` on; zeros outside of it."""
    if isinstance(x, tl.tensor_descriptor):
        return tl.reshape(x.load([i_tile.to(tl.int32), first]), [BLOCK])
    else:
        o_x = first + tl.arange(0, BLOCK)
        if SIZE % BLOCK == 0:
            return tl.load(x + i_tile * SIZE + o_x)
        else:
            return tl.load(x + i_tile * SIZE + o_x, mask=o_x < SIZE, other=0.0)


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
