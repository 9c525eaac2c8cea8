@triton.jit(do_not_specialize=PUT_unspecialized_PUT)
def PUT_name_PUT(
    #% for line in parameters
    PUT_line_PUT
    #% endfor
):
    #% for line in head
    PUT_line_PUT
    #% endfor
    pid = tl.program_id(0)
    #% if segmented
    # A program: one tile of v of a sequence, or of a segment.  Pass "maps" has more of them: after those of w (from 0,
    # with what is written) tiles of M (from the unit matrix, without).
    tiles = tl.cdiv(V, BV) + (tl.cdiv(K, BV) if PASS == "maps" else 0)
    i_tile = pid % tiles
    is_w = i_tile < tl.cdiv(V, BV)
    i_v = i_tile % tl.cdiv(V, BV)  # of M any will do: what is read of v is left out
    i_nh = pid // tiles
    i_n, i_segment = i_nh // HV, 0
    if PASS != "whole":  # i_nh counts the segments of all sequences
        i_n, i_segment = segment_of(i_nh // HV, cu_seqlens, T, N, SPAN)
    #% else
    #% if split_v
    i_v = pid % tl.cdiv(V, BV)
    i_nh = pid // tl.cdiv(V, BV)
    #% else
    i_nh = pid
    #% endif
    i_n = i_nh // HV
    #% endif
    i_hv = (i_nh % HV).to(tl.int64)
    #% if grouped
    i_h = i_hv // R
    #% endif

    # Tokens first .. first + length of the sequence; the last packed one also clears the rows past the offsets.
    if cu_seqlens is not None:
        i_b = 0
        first = tl.load(cu_seqlens + i_n).to(tl.int64)
        length = tl.load(cu_seqlens + i_n + 1).to(tl.int64) - first
        rows = tl.where(i_n == N - 1, T - first, length)
        #% if slotted
        i_slot = first // C + i_n
        #% endif
    else:
        i_b = i_n.to(tl.int64)
        first = i_b * 0  # 64 bits wide, as the offsets of packed sequences
        length = first + T
        rows = length
        #% if slotted
        i_slot = i_b * tl.cdiv(T, C)
        #% endif
    i_from, i_to = 0, tl.cdiv(rows, C)
    #% if segmented
    if PASS != "whole":
        i_from, i_to = i_segment * (SPAN // C), tl.minimum((i_segment + 1) * (SPAN // C), i_to)
    if PASS == "maps":
        if (i_segment + 1) * SPAN >= length:  # no state goes on from here
            return
    #% endif
    #% for line in setup
    PUT_line_PUT
    #% endfor

    #% if reverse
    for i_s in tl.range(i_from, i_to, num_stages=STAGES):
        i_t = i_from + i_to - 1 - i_s
    #% else
    for i_t in tl.range(i_from, i_to, num_stages=STAGES):
    #% endif
        #% for line in rows_of_chunk
        PUT_line_PUT
        #% endfor
        #% for line in body
        PUT_line_PUT
        #% endfor

    #% for line in finish
    PUT_line_PUT
    #% endfor
