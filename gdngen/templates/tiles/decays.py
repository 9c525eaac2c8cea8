#% macro cumulative(gate)
PUT_gate_PUT_c, PUT_gate_PUT_f = cumulative_gate(PUT_gate_PUT)
#% endmacro
#% macro total(gate)
PUT_gate_PUT_tc, PUT_gate_PUT_tf = total_gate(PUT_gate_PUT)
#% endmacro
#% macro between(out, gate, turned)
#% if turned
PUT_out_PUT = decay_between_turned(PUT_gate_PUT_c, PUT_gate_PUT_f, C)
#% else
PUT_out_PUT = decay_between(PUT_gate_PUT_c, PUT_gate_PUT_f, C)
#% endif
#% endmacro
#% macro from_start(out, gate)
PUT_out_PUT = decay_of(PUT_gate_PUT_c + PUT_gate_PUT_f)
#% endmacro
#% macro to_end(out, gate)
PUT_out_PUT = decay_of((PUT_gate_PUT_tc - PUT_gate_PUT_c) + (PUT_gate_PUT_tf - PUT_gate_PUT_f))
#% endmacro
#% macro of_channels(out, gate, over)
#% if over == "i0"
PUT_out_PUT = decay_from_start(PUT_gate_PUT, C, PRECISION)
#% elif over == "10"
PUT_out_PUT = decay_over_chunk(PUT_gate_PUT, C, PRECISION)
#% else
PUT_out_PUT = decay_to_end(PUT_gate_PUT, C, PRECISION)
#% endif
#% endmacro
#% macro whole(out, gate)
PUT_out_PUT = decay_of(PUT_gate_PUT_tc + PUT_gate_PUT_tf)
#% endmacro
#% macro cumsum(out, x, axis, reverse)
#% if reverse
PUT_out_PUT = tl.cumsum(PUT_x_PUT, PUT_axis_PUT, reverse=True)
#% else
PUT_out_PUT = tl.cumsum(PUT_x_PUT, PUT_axis_PUT)
#% endif
#% endmacro
#% macro exclusive(out, x, before)
PUT_out_PUT = tl.sum(tl.where(PUT_before_PUT, PUT_x_PUT[:, None], 0.0), 0)
#% endmacro
#% macro exclusive_tile(out, x, before, turned)
#% if turned
PUT_out_PUT = tl.dot(PUT_x_PUT, tl.where(PUT_before_PUT, 1.0, 0.0), input_precision=PRECISION)
#% else
PUT_out_PUT = tl.dot(tl.where(PUT_before_PUT, 1.0, 0.0), PUT_x_PUT, input_precision=PRECISION)
#% endif
#% endmacro
