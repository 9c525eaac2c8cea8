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
    #% if split_v
    i_v = pid % tl.cdiv(V, BV)
    i_ch = pid // tl.cdiv(V, BV)
    #% else
    i_ch = pid
    #% endif
    #% if by_group
    i_h = (i_ch % (HV // R)).to(tl.int64)
    i_slot = (i_ch // (HV // R)).to(tl.int64)
    #% else
    i_hv = (i_ch % HV).to(tl.int64)
    #% if grouped
    i_h = i_hv // R
    #% endif
    i_slot = (i_ch // HV).to(tl.int64)
    #% endif

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
    #% for line in setup
    PUT_line_PUT
    #% endfor
    #% for line in rows_of_chunk
    PUT_line_PUT
    #% endfor
    #% for line in body
    PUT_line_PUT
    #% endfor
