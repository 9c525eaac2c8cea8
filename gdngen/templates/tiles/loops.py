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
#% macro over_keys(lines)
for i_k in tl.range(0, tl.cdiv(K, BK)):
    #% for line in lines
    PUT_line_PUT
    #% endfor
#% endmacro
#% macro over_levels(lines, first, end)
for level in tl.range(PUT_first_PUT, PUT_end_PUT):
    #% for line in lines
    PUT_line_PUT
    #% endfor
#% endmacro
#% macro at_end_of_sequence()
if PASS == SEGMENTS:  # the final state is that of the last segment
    if i_segment != tl.maximum(tl.cdiv(length, SPAN), 1) - 1:
        return
    i_nh = i_n * HV + i_hv  # by sequence again
#% endmacro
