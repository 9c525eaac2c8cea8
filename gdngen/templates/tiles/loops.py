#% macro over_heads(lines)
for i_r in tl.range(0, R, disable_licm=True):
    i_hv = i_h * R + i_r
    #% for line in lines
    PUT_line_PUT
    #% endfor
#% endmacro
#% macro over_values(lines)
for i_v in tl.range(0, tl.cdiv(V, BV)):
    #% for line in lines
    PUT_line_PUT
    #% endfor
#% endmacro
#% macro over_keys(indices, masked, taken, fetched, lines)
o_next = tl.arange(0, BK)
#% if masked
m_next = o_next < K
#% endif
#% for line in fetched
PUT_line_PUT
#% endfor
for i_k in tl.range(0, tl.cdiv(K, BK)):
    #% for line in indices + taken
    PUT_line_PUT
    #% endfor
    # the next slice, loaded while this one is worked on
    o_next = tl.minimum(i_k + 1, tl.cdiv(K, BK) - 1) * BK + tl.arange(0, BK)
    #% if masked
    m_next = o_next < K
    #% endif
    #% for line in fetched + lines
    PUT_line_PUT
    #% endfor
#% endmacro
#% macro over_levels(lines, first, end)
for level in tl.range(PUT_first_PUT, PUT_end_PUT):
    #% for line in lines
    PUT_line_PUT
    #% endfor
#% endmacro
#% macro past_sequences(lines)
if cu_seqlens is not None:  # rows past the last sequence
    for i_t in tl.range(tl.maximum(length // C, i_from), i_to):
        start = i_t * C
        m_past = (o_c >= length - start) & (o_c < rows - start)
        #% for line in lines
        PUT_line_PUT
        #% endfor
#% endmacro
#% macro at_end_of_sequence()
if PASS == "segments":  # the final state is that of the last segment
    if i_segment != tl.maximum(tl.cdiv(length, SPAN), 1) - 1:
        return
    i_nh = i_n * HV + i_hv  # by sequence again
#% endmacro
