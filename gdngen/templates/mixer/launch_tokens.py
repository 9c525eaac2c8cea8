"""PUT_package_PUT on a GPU: allocates and starts the kernels.

No host synchronisation, safe under graph capture.
"""

import torch

from .kernels.backward import backward as backward_kernel
from .kernels.final import final as final_kernel
from .kernels.forward import forward as forward_kernel
from .kernels.update import update as update_kernel
from .machine import INTERPRETING, cdiv, made, on_device, power_of_2, processors, readable, start
from .spec import SPEC

W, S = SPEC["width"], SPEC["columns"]
LENGTHS = (128, 64, 32, 16)  # tokens of a block: as many as leave every processor WAVES programs
WAVES = 24


def tiles(x, cu_seqlens, channels):
    """(blocks, tokens of a block, channels of a program) of a call."""
    B, T, D = x.shape
    BV = min(channels, max(power_of_2(D), 32))
    for BT in LENGTHS:
        slots = B * max(cdiv(T, BT), 1) if cu_seqlens is None else T // BT + cu_seqlens.shape[0] - 1
        if slots * cdiv(D, BV) >= WAVES * processors(x.device):
            break
    return slots, BT, BV


def strides(h0):
    return dict(zip(("h0_sn", "h0_sv", "h0_sw"), (0, 0, 0) if h0 is None else h0.stride()))


def prepared(call):
    """The inputs as kernels take them; weights as rows of W taps."""
    x = {name: readable(tensor) for name, tensor in call.inputs.items() if name not in ("h0", "weight")}
    h0, weight = call.inputs.get("h0"), call.inputs["weight"].contiguous()
    x["h0"] = h0.float() if h0 is not None and INTERPRETING and h0.dtype == torch.bfloat16 else h0
    x["weight"] = weight.float() if INTERPRETING and weight.dtype == torch.bfloat16 else weight
    return x


def sequences(call):
    return call.inputs["x"].shape[0] if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1


def forward(call):
    """(o, ht or None) of a Call."""
    given, x, cu_seqlens = call.inputs["x"], prepared(call), call.cu_seqlens
    (B, T, D), N = given.shape, sequences(call)
    o = made(given, (B, T, D), given.dtype)
    ht = made(given, (N, D, S), given.dtype) if call.final else None
    if N == 0:
        o.zero_()
    elif D > 0:
        with on_device(given):
            slots, BT, BV = tiles(given, cu_seqlens, 256 // given.element_size())
            if T > 0:
                start(
                    forward_kernel,
                    "conv_forward",
                    slots * cdiv(D, BV),
                    #% for name, value in forward_arguments
                    PUT_name_PUT=PUT_value_PUT,
                    #% endfor
                    cu_seqlens=cu_seqlens,
                    T=T,
                    N=N,
                    D=D,
                    BT=BT,
                    BV=BV,
                    num_warps=1,
                )
            if call.final:
                start(
                    final_kernel,
                    "conv_final",
                    N * cdiv(D, BV),
                    x=x["x"],
                    h0=x["h0"],
                    ht=ht,
                    x_sb=x["x"].stride(0),
                    x_st=x["x"].stride(1),
                    **strides(x["h0"]),
                    cu_seqlens=cu_seqlens,
                    T=T,
                    D=D,
                    BV=BV,
                    num_warps=1,
                )
    return o.to(given.dtype), None if ht is None else ht.to(given.dtype)


def backward(call, cotangents):
    """Gradients by the names of the inputs; cotangents of o and ht, None for zeros."""
    given, x, cu_seqlens = call.inputs["x"], prepared(call), call.cu_seqlens
    (B, T, D), N = given.shape, sequences(call)
    do, dht = cotangents["o"], cotangents["ht"]
    do = readable(torch.zeros_like(given) if do is None else do)
    dht = None if dht is None else dht.float().contiguous()
    dx = made(given, (B, T, D), given.dtype)
    dh0 = None if x["h0"] is None else torch.empty((N, D, S), dtype=torch.float32, device=given.device)
    slots, BT, BV = tiles(given, cu_seqlens, 256 // given.element_size())
    slots = slots if N > 0 else 0
    dweight = torch.empty((slots, W, D), dtype=torch.float32, device=given.device)
    dbias = torch.empty((slots, D), dtype=torch.float32, device=given.device) if SPEC["bias"] else None
    if N == 0:
        dx.zero_()
    elif D > 0:
        with on_device(given):
            start(
                backward_kernel,
                "conv_backward",
                slots * cdiv(D, BV),
                #% for name, value in backward_arguments
                PUT_name_PUT=PUT_value_PUT,
                #% endfor
                cu_seqlens=cu_seqlens,
                T=T,
                N=N,
                D=D,
                BT=BT,
                BV=BV,
                num_warps=1,
            )
    found = {"x": dx, "weight": dweight.sum(0).flip(0).t(), "h0": dh0}
    if SPEC["bias"]:
        found["bias"] = dbias.sum(0)
    if SPEC["residual"]:
        found["residual"] = valid_rows(do, cu_seqlens)
    return found


def valid_rows(do, cu_seqlens):
    """The gradient of what is added to o: 0 for rows past the offsets."""
    if cu_seqlens is None:
        return do.clone()
    return torch.where((torch.arange(do.shape[1], device=do.device) < cu_seqlens[-1])[None, :, None], do, 0.0)


def update(x, state, weight, bias, residual, indices):
    """o [B, T, D] of the next tokens; state [.., D, columns] is moved on in place."""
    given, original = x, state
    if INTERPRETING and state.dtype == torch.bfloat16:
        state = state.float()
    x, residual, bias = readable(x), readable(residual), readable(bias)
    weight = weight.contiguous().float() if INTERPRETING else weight.contiguous()
    B, T, D = x.shape
    o = made(given, (B, T, D), given.dtype)
    if T > 0 and D > 0:
        BV = min(128, max(power_of_2(D), 32))
        with on_device(x):
            start(
                update_kernel,
                "conv_update",
                B * cdiv(D, BV),
                x=x,
                weight=weight,
                bias=bias,
                residual=residual,
                h0=state,
                indices=indices,
                o=o,
                x_sb=x.stride(0),
                x_st=x.stride(1),
                residual_sb=0 if residual is None else residual.stride(0),
                residual_st=0 if residual is None else residual.stride(1),
                h0_sn=state.stride(0),
                h0_sv=state.stride(1),
                h0_sw=state.stride(2),
                T=T,
                D=D,
                S=state.shape[2],
                BS=power_of_2(state.shape[2]),
                BV=BV,
                num_warps=1,
            )
    if state is not original:
        original.copy_(state)
    return o.to(given.dtype)
