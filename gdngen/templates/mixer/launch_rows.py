"""PUT_package_PUT on a GPU: allocates and starts the kernels.

No host synchronisation, safe under graph capture.
"""

import torch

from .kernels.backward import backward as backward_kernel
from .kernels.forward import forward as forward_kernel
from .machine import PUT_shared_PUT

BLOCK = 4096  # elements of a tile
WAVES = 8  # programs of each processor, where each has a part of a weight's gradient


def rows_of(x):
    """[rows, channels], a view where the strides allow one."""
    return None if x is None else readable(x.reshape(-1, x.shape[-1]))


def prepared(call):
    named = call.inputs.items()
    return {name: readable(y) if y is None or y.ndim == 1 else rows_of(y) for name, y in named}


def sizes(x):
    """Rows, channels, rows and channels of a tile, warps."""
    D = x.shape[-1]
    BD = power_of_2(D)
    return x.numel() // D if D else 0, D, max(1, min(64, BLOCK // BD)), BD, 4 if BD <= 4096 else 8


def forward(call):
    """The outputs of a Call."""
    given, x = call.inputs["x"], prepared(call)
    R, D, BR, BD, warps = sizes(given)
    dtypes = [PUT_dtypes_PUT]
    PUT_outputs_PUT = (made(given, (R, D), dtype) for dtype in dtypes)
    with on_device(given):
        start(
            forward_kernel,
            "PUT_label_PUT_forward",
            cdiv(R, BR),
            #% for name, value in forward_arguments
            PUT_name_PUT=PUT_value_PUT,
            #% endfor
            R=R,
            blocks=1,
            D=D,
            BR=BR,
            BD=BD,
            STAGES=1,
            num_warps=warps,
        )
    found = [PUT_found_PUT]
    return tuple(y.reshape(given.shape).to(dtype) for y, dtype in zip(found, dtypes))


def backward(call, cotangents):
    """Gradients by the names of the inputs."""
    given, x = call.inputs["x"], prepared(call)
    R, D, BR, BD, warps = sizes(given)
    BR = max(1, BR // 2)
    PUT_cotangents_PUT = (rows_of(torch.zeros_like(given) if d is None else d) for d in cotangents.values())
    #% if summed
    blocks = max(1, cdiv(cdiv(R, BR), WAVES * processors(given.device)))
    stages = 3 if BD <= 2048 and given.element_size() == 2 else 1  # tiles loaded ahead have room
    #% else
    blocks = stages = 1
    #% endif
    programs = cdiv(R, BR * blocks)
    #% for name in row_gradients
    PUT_name_PUT = made(given, (R, D), call.inputs["PUT_name_PUT"[1:]].dtype)
    #% endfor
    #% for name in summed
    PUT_name_PUT = torch.empty((programs, D), dtype=torch.float32, device=given.device)
    #% endfor
    with on_device(given):
        start(
            backward_kernel,
            "PUT_label_PUT_backward",
            programs,
            #% for name, value in backward_arguments
            PUT_name_PUT=PUT_value_PUT,
            #% endfor
            R=R,
            blocks=blocks,
            D=D,
            BR=BR,
            BD=BD,
            STAGES=stages,
            num_warps=warps,
        )
    return PUT_gradients_PUT
