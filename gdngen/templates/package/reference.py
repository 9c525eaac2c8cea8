"""PUT_package_PUT in plain PyTorch.

Made from the same graph as the kernels; what CPU tensors run, differentiable by autograd.
Inside a step q and k are [b, h, token, channel], values per value head [b, h, r, token, channel], states
[b, h, r, K, V].
"""

import torch

from .sequences import (
    Step,
    #% for helper in helpers
    PUT_helper_PUT,
    #% endfor
)
#% for function, unit, parameters, lines, results, fields in steps


def PUT_function_PUT_step(PUT_parameters_PUT):
    """One PUT_unit_PUT; returns PUT_results_PUT."""
    #% for line in lines
    PUT_line_PUT
    #% endfor
    return PUT_results_PUT


PUT_function_PUT_fields = Step(
    #% for line in fields
    PUT_line_PUT
    #% endfor
)


def PUT_function_PUT(call):
    """(o, final state) of a Call."""
    return run(PUT_function_PUT_fields, call)
#% endfor
