"""The update of a window in place, as an op that torch.compile knows to change its argument."""

import torch

from .dispatch import are_kernels_for
from .registration import own_library

ARGUMENTS = "Tensor x, Tensor(a!) state, Tensor weight, Tensor? bias, Tensor? residual, Tensor? indices"


def update(x, state, weight, bias, residual, indices):
    """o [B, T, D] of the next tokens; state [.., D, columns] is moved on."""
    if are_kernels_for(x):
        from .launch import update as compute
    else:
        from .reference import update as compute
    return compute(x, state, weight, bias, residual, indices)


def update_fake(x, state, weight, bias, residual, indices):
    return x.new_empty(x.shape)


def define():
    """The op, and the library that keeps it defined."""
    space, library = own_library(f"{__name__}.update")
    library.define(f"update({ARGUMENTS}) -> Tensor")
    library.impl("update", update, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{space}::update", update_fake, lib=library)
    return getattr(torch.ops, space).update.default, library


update_op, _library = define()
