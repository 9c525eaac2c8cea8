#% macro load(out, pointer, mask, dtype)
#% if mask and dtype
PUT_out_PUT = tl.load(PUT_pointer_PUT, mask=PUT_mask_PUT, other=0.0).to(PUT_dtype_PUT)
#% elif mask
PUT_out_PUT = tl.load(PUT_pointer_PUT, mask=PUT_mask_PUT, other=0.0)
#% elif dtype
PUT_out_PUT = tl.load(PUT_pointer_PUT).to(PUT_dtype_PUT)
#% else
PUT_out_PUT = tl.load(PUT_pointer_PUT)
#% endif
#% endmacro
#% macro load_if_given(out, tensor, pointer, mask, otherwise)
if PUT_tensor_PUT is not None:
#% if mask
    PUT_out_PUT = tl.load(PUT_pointer_PUT, mask=PUT_mask_PUT, other=0.0).to(tl.float32)
#% else
    PUT_out_PUT = tl.load(PUT_pointer_PUT).to(tl.float32)
#% endif
else:
    PUT_out_PUT = PUT_otherwise_PUT
#% endmacro
#% macro store(pointer, value, mask)
#% if mask
tl.store(PUT_pointer_PUT, PUT_value_PUT, mask=PUT_mask_PUT)
#% else
tl.store(PUT_pointer_PUT, PUT_value_PUT)
#% endif
#% endmacro
#% macro under(condition, lines)
if PUT_condition_PUT:
    #% for line in lines
    PUT_line_PUT
    #% endfor
#% endmacro
