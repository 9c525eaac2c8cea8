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
    i_nh = pid // tl.cdiv(V, BV)
    #% else
    i_nh = pid
    #% endif
    i_n = i_nh // HV
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
    else:
        i_b = i_n.to(tl.int64)
        first = i_b * 0  # 64 bits wide, as the offsets of packed sequences
        length = first + T
        rows = length
    #% for line in setup
    PUT_line_PUT
    #% endfor

    for o_i in tl.range(0, rows):
        m_i = tl.where(o_i < length, True, False)  # a bare comparison is int64 in the interpreter of Triton 3.9
        #% for line in body
        PUT_line_PUT
        #% endfor

    #% for line in finish
    PUT_line_PUT
    #% endfor
