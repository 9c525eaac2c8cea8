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
#% macro store_once(pointer, value, mask)
if i_hv % R == 0:
#% if mask
    tl.store(PUT_pointer_PUT, PUT_value_PUT, mask=PUT_mask_PUT)
#% else
    tl.store(PUT_pointer_PUT, PUT_value_PUT)
#% endif
#% endmacro
#% macro store_if_given(tensor, pointer, value, mask)
if PUT_tensor_PUT is not None:
#% if mask
    tl.store(PUT_pointer_PUT, PUT_value_PUT, mask=PUT_mask_PUT)
#% else
    tl.store(PUT_pointer_PUT, PUT_value_PUT)
#% endif
#% endmacro
#% macro store_gradient(tensor, base, pointer, value, mask)
if PUT_tensor_PUT is not None:
    p_PUT_tensor_PUT = PUT_base_PUT
#% if mask
    tl.store(PUT_pointer_PUT, PUT_value_PUT, mask=PUT_mask_PUT)
#% else
    tl.store(PUT_pointer_PUT, PUT_value_PUT)
#% endif
#% endmacro
