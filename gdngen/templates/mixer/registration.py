"""The member as torch.library ops, with fake registrations and gradients: torch.compile sees one op, no graph break."""

from dataclasses import replace

import torch

from .arguments import ArgumentError, is_transformed
from .dispatch import Call, are_kernels_for
from .spec import INPUTS, OUTPUTS, SPEC

ARGUMENTS = ", ".join([*(f"Tensor? {name}" for name in INPUTS), "Tensor? cu_seqlens, float number, ScalarType? dtype"])
ARGUMENTS += ", bool final"
COUNT = len(INPUTS)
LOADED_AGAIN = 1000  # times that one process may load this module


def run(call):
    tensors = [call.inputs.get(name) for name in INPUTS]
    compute = Forward.apply if is_transformed() else forward_op
    found = list(compute(*tensors, call.cu_seqlens, call.number, call.dtype, call.final))
    return tuple(None if name == "ht" and not call.final else x for name, x in zip(OUTPUTS, found))


def call_of(args):
    cu_seqlens, number, dtype, final = args[COUNT : COUNT + 4]
    return Call(dict(zip(INPUTS, args)), number, cu_seqlens, dtype, final)


def forward(*args):
    call = call_of(args)
    if are_kernels_for(call.inputs["x"]):
        from .launch import forward as compute
    else:
        from .reference import forward as compute
    found = compute(call)
    given = [x for x in args[:COUNT] if x is not None]
    return tuple(nothing(given[0]) if x is None else fresh(x, given) for x in found)


def fresh(x, given):
    """An op returns tensors of its own, contiguous as its fake says."""
    return x.clone() if any(x is y for y in given) else x.contiguous()


def nothing(like):
    return like.new_empty(0)


def shapes(call):
    """Shape and dtype of each output."""
    x = call.inputs["x"]
    dtype = call.dtype or x.dtype
    found = {"o": (x.shape, dtype), "s": (x.shape, dtype_of_sum(call))}
    if "ht" in OUTPUTS:
        N = x.shape[0] if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1
        found["ht"] = ((N, x.shape[2], SPEC["columns"]) if call.final else (0,), x.dtype)
    return [found[name] for name in OUTPUTS]


def dtype_of_sum(call):
    """x + residual is kept in the residual's dtype."""
    residual = call.inputs.get("residual")
    return call.inputs["x"].dtype if residual is None else residual.dtype


def forward_fake(*args):
    call = call_of(args)
    found = tuple(call.inputs["x"].new_empty(shape, dtype=dtype) for shape, dtype in shapes(call))
    return found if len(found) > 1 else found[0]


def backward(*args):
    *cotangents, needs = args[COUNT + 4 :]
    call = call_of(args)
    given = dict(zip(OUTPUTS, cotangents))
    wanted = [name for name, need in zip(INPUTS, needs) if need]
    if not are_kernels_for(call.inputs["x"]):
        return pulled_back(call, wanted, given)
    from . import launch

    found = launch.backward(call, given)
    return [found[name].to(call.inputs[name].dtype).reshape(call.inputs[name].shape) for name in wanted]


def pulled_back(call, wanted, given):
    """The gradients of the PyTorch version, which is computed again."""
    from . import reference

    reached = [n for n, name in enumerate(OUTPUTS) if given[name] is not None]

    def results(*values):
        found = reference.forward(replace(call, inputs={**call.inputs, **dict(zip(wanted, values))}))
        return tuple(found[n] for n in reached)

    _, pull = torch.func.vjp(results, *(call.inputs[name] for name in wanted))
    return [x.contiguous() for x in pull(tuple(given[OUTPUTS[n]] for n in reached))]


def backward_fake(*args):
    return [x.new_empty(x.shape) for x, need in zip(args, args[-1]) if need]


def setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[: COUNT + 1])
    ctx.rest = inputs[COUNT + 1 :]
    ctx.set_materialize_grads(False)


def derive(ctx, *cotangents):
    needs = list(ctx.needs_input_grad[:COUNT])
    if "ht" in OUTPUTS and not ctx.rest[-1]:
        cotangents = (*cotangents[:-1], None)
    if all(x is None for x in cotangents):
        return *[None] * COUNT, *[None] * 4
    compute = Backward.apply if is_transformed() else backward_op
    found = iter(compute(*ctx.saved_tensors, *ctx.rest, *cotangents, needs))
    return *(next(found) if need else None for need in needs), *[None] * 4


def no_second_derivative(ctx, *gradients):
    raise ArgumentError(
        f"{__package__}: got a second derivative (create_graph=True), expected first ones only: the backward of these "
        "kernels is not differentiable. Compute it with CPU tensors, whose PyTorch version is."
    )


def forward_mode(ctx, *tangents):
    raise ArgumentError(
        f"{__package__}: got a tangent (forward-mode differentiation), expected none: these kernels have gradients in "
        "reverse mode alone. Use torch.func.vjp or jacrev, or CPU tensors, whose PyTorch version has both."
    )


def one_by_one(function, size, dims, args):
    """``function`` over one more dimension."""
    found = []
    for n in range(size):
        found.append(function(*(x if dim is None else x.select(dim, n) for x, dim in zip(args, dims))))
    return tuple(map(torch.stack, zip(*found))), tuple(0 for _ in found[0])


def mapped(function, info, in_dims, args):
    return one_by_one(function, info.batch_size, [dim if isinstance(dim, int) else None for dim in in_dims], args)


class Forward(torch.autograd.Function):
    """The forward op for torch.func, whose transforms need more than an op can say."""

    @staticmethod
    def forward(*args):
        return forward_op(*args)

    setup_context = staticmethod(setup_context)
    backward = staticmethod(derive)
    jvp = staticmethod(forward_mode)

    @staticmethod
    def vmap(info, in_dims, *args):
        return mapped(Forward.apply, info, in_dims, args)


class Backward(torch.autograd.Function):
    """The backward op, likewise."""

    @staticmethod
    def forward(*args):
        return tuple(backward_op(*args[:-1], list(args[-1])))

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    backward = staticmethod(no_second_derivative)
    jvp = staticmethod(forward_mode)

    @staticmethod
    def vmap(info, in_dims, *args):
        return mapped(Backward.apply, info, in_dims, args)


def own_library(name=__name__):
    """A namespace of a module's own; a module loaded again, which cannot define its ops twice, gets another."""
    for number in range(LOADED_AGAIN):
        space = name.replace(".", "_") + (f"_{number}" if number else "")
        try:
            return space, torch.library.Library(space, "DEF")
        except RuntimeError:
            if number == LOADED_AGAIN - 1:
                raise


def define():
    """The ops, and the library that keeps them defined."""
    space, library = own_library()
    cotangents = ", ".join(f"Tensor? d{name}" for name in OUTPUTS)
    library.define(f"forward({ARGUMENTS}) -> ({', '.join(['Tensor'] * len(OUTPUTS))})")
    library.define(f"backward({ARGUMENTS}, {cotangents}, bool[] needs) -> Tensor[]")
    ops = getattr(torch.ops, space)
    for name, function, fake in (("forward", tupled, forward_fake), ("backward", backward, backward_fake)):
        library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{space}::{name}", fake, lib=library)
    torch.library.register_autograd(f"{space}::forward", derive, setup_context=setup_context, lib=library)
    torch.library.register_autograd(f"{space}::backward", no_second_derivative, lib=library)
    return listed(ops.forward.default), ops.backward.default, library


def tupled(*args):
    """One output alone is no tuple to torch."""
    found = forward(*args)
    return found if len(found) > 1 else found[0]


def listed(op):
    return op if len(OUTPUTS) > 1 else (lambda *args: (op(*args),))


forward_op, backward_op, _library = define()
