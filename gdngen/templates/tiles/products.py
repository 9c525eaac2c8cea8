#% macro elementwise(out, expression)
PUT_out_PUT = PUT_expression_PUT
#% endmacro
#% macro reduce(out, expression, axis)
PUT_out_PUT = tl.sum(PUT_expression_PUT, PUT_axis_PUT)
#% endmacro
#% macro dot(out, first, second)
PUT_out_PUT = tl.dot(PUT_first_PUT, PUT_second_PUT, input_precision=PRECISION)
#% endmacro
#% macro uli(out, matrix, turned)
PUT_out_PUT = unit_lower_inverse(PUT_matrix_PUT, PUT_turned_PUT, C, PRECISION)
#% endmacro
