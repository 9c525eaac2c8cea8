"""PUT_package_PUT in plain PyTorch.

Made from the same graph as the kernels, differentiable by autograd.
"""

import torch


def step(PUT_parameters_PUT):
    """PUT_results_PUT of one sequence [b, i, v]."""
    #% for line in lines
    PUT_line_PUT
    #% endfor
    return PUT_results_PUT


def forward(call):
    """The outputs of a Call."""
    x = call.inputs["x"]
    given = {name: None if tensor is None else tensor.float() for name, tensor in call.inputs.items()}
    rows = {name: y if y is None or y.ndim < 2 else y.reshape(1, -1, y.shape[-1]) for name, y in given.items()}
    numbers = {"eps": call.number, "lower_bound": call.number, "inverse_dim": 1.0 / max(x.shape[-1], 1)}
    found = step(*({**rows, **numbers}[name] for name in PUT_names_PUT))
    dtypes = [PUT_dtypes_PUT]
    return tuple(y.reshape(x.shape).to(dtype) for y, dtype in zip(found, dtypes))
