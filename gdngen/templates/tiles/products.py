#% macro elementwise(out, expression)
PUT_out_PUT = PUT_expression_PUT
#% endmacro
#% macro add_onto(out, sign, expression)
#% if sign == "-"
PUT_out_PUT -= PUT_expression_PUT
#% else
PUT_out_PUT += PUT_expression_PUT
#% endif
#% endmacro
#% macro reduced(expression, axis)
#% if axis is none
tl.sum(PUT_expression_PUT)
#% else
tl.sum(PUT_expression_PUT, PUT_axis_PUT)
#% endif
#% endmacro
#% macro dot(out, first, second)
PUT_out_PUT = tl.dot(PUT_first_PUT, PUT_second_PUT, input_precision=PRECISION)
#% endmacro
#% macro dot_onto(out, first, second)
PUT_out_PUT = tl.dot(PUT_first_PUT, PUT_second_PUT, PUT_out_PUT, input_precision=PRECISION)
#% endmacro
#% macro synchronous(first, second)
synchronous_product(PUT_first_PUT, PUT_second_PUT, PRECISION)
#% endmacro
#% macro uli(out, matrix, decays, turned, narrow)
PUT_out_PUT = unit_lower_inverse(PUT_matrix_PUT, PUT_decays_PUT, PUT_turned_PUT, PUT_narrow_PUT, C, PRECISION)
#% endmacro
