"""The operators as torch.library ops, with fake registrations and, where there are gradients, those of autograd.

torch.compile sees one op and no graph break; eager calls that need no gradient go to launch.py without this detour.
Under torch.func's transforms the ops are functions of autograd that can be mapped over further dimensions.
"""

from dataclasses import replace

import torch

from .arguments import ArgumentError, Call, is_transformed
from .dispatch import are_kernels_for, module_named

INPUTS = ("q", "k", "v", "gk", "beta", "h0")
FINALS = ("ht",)
KEPT = ("X", "P")  # what a chunk forward hands over to backward, beside the inputs
STATE_V_FIRST = False
ARGUMENTS = ", ".join(
    [
        *(f"Tensor? {name}" for name in INPUTS),
        "Tensor? cu_seqlens, str operator, float scale, float dt_min, float dt_max, bool output_final_state",
    ]
)
COTANGENTS = ", ".join(["Tensor? do", *(f"Tensor? d{name}" for name in FINALS)])
COUNT = len(INPUTS)
PARAMETERS = {"A_log", "dt_bias"}  # of heads: the inputs without a batch
LOADED_AGAIN = 1000  # times that one process may load this module


def run(call):
    """(o, final state) of a Call, by an op that torch knows."""
    tensors = [call.inputs.get(name) for name in INPUTS]
    rest = (call.cu_seqlens, call.operator, call.scale, *call.dt_limit, call.output_final_state)
    o, *finals = compute_forward(*tensors, *rest)[: 1 + len(FINALS)]
    if not call.output_final_state:
        return o, None
    return o, finals[0] if len(finals) == 1 else tuple(finals)


def compute_forward(*args):
    return Forward.apply(*args) if needs_function() else forward_op(*args)


def needs_function():
    """Whether a transform of torch.func is at work that an op is not enough for; functionalize takes nothing else."""
    if not is_transformed():
        return False
    return torch._C._functorch.peek_interpreter_stack().key() != torch._C._functorch.TransformType.Functionalize


def call_of(args):
    """The Call that an op's arguments stand for."""
    cu_seqlens, operator, scale, dt_min, dt_max, output_final_state = args[COUNT : COUNT + 6]
    inputs = dict(zip(INPUTS, args))
    q, v = inputs["q"], inputs["v"]
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    sizes = (B, T, H, HV, K, V, N)
    return Call(operator, inputs, scale, cu_seqlens, output_final_state, *sizes, q.device, (dt_min, dt_max))


def forward(*args):
    call, kept = call_of(args), []
    if KEPT and hands_over(call):
        o, state = module_named("launch").chunk(call, kept)
    else:
        o, state = getattr(module_named("launch" if are_kernels_for(call) else "reference"), call.operator)(call)
    finals = state if isinstance(state, tuple) else (state,)
    if not call.output_final_state:
        finals = [nothing(o) for _ in FINALS]
    return o, *finals, *(kept or [nothing(o) for _ in KEPT])


def hands_over(call):
    """Whether the forward call computes something that backward would compute again."""
    return call.operator == "chunk" and are_kernels_for(call)


def nothing(like):
    """In place of a result that is not asked for: an op returns tensors only."""
    return like.new_empty(0, dtype=torch.float32)


def forward_fake(*args):
    call = call_of(args)
    v = call.inputs["v"]
    shapes = [(0,)] * len(FINALS)
    if call.output_final_state:
        tile = (call.V, call.K) if STATE_V_FIRST else (call.K, call.V)
        shapes = [(call.N, call.HV, *(tile if name == "ht" else (call.K,))) for name in FINALS]
    kept = module_named("launch").kept_tensors(call) if KEPT and hands_over(call) else [nothing(v) for _ in KEPT]
    return v.new_empty(v.shape), *(v.new_empty(shape, dtype=torch.float32) for shape in shapes), *kept


def backward(*args):
    *given, needs = args[COUNT + 6 :]
    call = call_of(args)
    cotangents, kept = given[: 1 + len(FINALS)], given[1 + len(FINALS) :]
    wanted = [name for name, need in zip(INPUTS, needs) if need]
    if not are_kernels_for(call):
        return pulled_back(call, wanted, cotangents)
    if KEPT and hands_over(call):
        cotangents.append(kept)
    found = module_named("launch").chunk_backward(call, wanted, *cotangents)
    return [found[name] for name in wanted]


def pulled_back(call, wanted, cotangents):
    """The gradients of the PyTorch version, which is computed again."""
    reached = [n for n, cotangent in enumerate(cotangents) if cotangent is not None]

    def results(*values):
        inputs = {**call.inputs, **dict(zip(wanted, values))}
        o, state = getattr(module_named("reference"), call.operator)(replace(call, inputs=inputs))
        found = [o, *(state if isinstance(state, tuple) else (state,))]
        return tuple(found[n] for n in reached)

    values = [call.inputs[name] for name in wanted]
    if not reached:
        return [torch.zeros_like(x) for x in values]
    _, pull = torch.func.vjp(results, *values)
    return [x.contiguous() for x in pull(tuple(cotangents[n].to(results_dtype(n, call)) for n in reached))]


def results_dtype(number, call):
    return call.inputs["v"].dtype if number == 0 else torch.float32


def backward_fake(*args):
    return [x.new_empty(x.shape) for x, need in zip(args, args[-1]) if need]


def setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[: COUNT + 1], *output[1 + len(FINALS) :])
    ctx.rest = inputs[COUNT + 1 :]
    ctx.set_materialize_grads(False)


def derive(ctx, do, *others):
    needs = list(ctx.needs_input_grad[:COUNT])
    dfinals = [None if d is None or not ctx.rest[-1] else d.contiguous() for d in others[: len(FINALS)]]
    saved = ctx.saved_tensors  # once: activation checkpointing computes them at this very access
    inputs, kept = saved[: COUNT + 1], saved[COUNT + 1 :]
    refuse_legacy_batches(do, *dfinals)
    found = iter(compute_backward(*inputs, *ctx.rest, do, *dfinals, *kept, needs))
    return *(next(found) if need else None for need in needs), *[None] * 6


def compute_backward(*args):
    return Backward.apply(*args) if needs_function() else backward_op(*args)


def refuse_legacy_batches(*cotangents):
    if any(d is not None and torch._C._functorch.is_legacy_batchedtensor(d) for d in cotangents):
        raise ArgumentError(
            f"{__package__}: got a batch of gradients (is_grads_batched=True, vectorize=True), expected one: these "
            "kernels can be mapped by torch.func alone. Use torch.func.jacrev, or vmap over torch.func.vjp."
        )


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


def mapped(function, info, in_dims, args):
    """``function`` over one more dimension: as more sequences of the batch, or else one after the other."""
    dims = [dim if isinstance(dim, int) else None for dim in in_dims]
    alone = {n for n, name in enumerate(INPUTS) if name in PARAMETERS}
    inputs, offsets, rest = args[:COUNT], args[COUNT], args[COUNT + 1 :]
    needs = rest[-1] if isinstance(rest[-1], (list, tuple)) else ()
    if offsets is not None or any(dims[n] is not None or (n < len(needs) and needs[n]) for n in alone):
        return one_by_one(function, info.batch_size, dims, args)
    size, rows = info.batch_size, args[0].shape[1 if dims[0] == 0 else 0]
    inputs = [x if n in alone else folded(x, dim, size) for n, (x, dim) in enumerate(zip(inputs, dims))]
    rest = [folded(x, dim, size) if isinstance(x, torch.Tensor) else x for x, dim in zip(rest, dims[COUNT + 1 :])]
    found = function(*inputs, offsets, *rest)
    results = tuple(x if is_nothing(x) else unfolded(x, size, rows) for x in found)
    return results, tuple(None if is_nothing(x) else 0 for x in found)


def folded(x, dim, size):
    """The mapped dimension as the outer part of the first one."""
    if x is None or (is_nothing(x) and dim is None):
        return x
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


def unfolded(x, size, rows):
    """The mapped dimension by itself again; ``rows``: how many there would be of each, where nothing is mapped."""
    return x.unflatten(0, (size, x.shape[0] // size if size else rows))


def is_nothing(x):
    return x.ndim == 1


def one_by_one(function, size, dims, args):
    found = []
    for n in range(size):
        found.append(function(*(x if dim is None else x.select(dim, n) for x, dim in zip(args, dims))))
    return tuple(map(torch.stack, zip(*found))), tuple(0 for _ in found[0])


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
        return mapped(compute_forward, info, in_dims, args)


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
        return mapped(compute_backward, info, in_dims, args)


def own_library():
    """A namespace of this module's own; a module loaded again, which cannot define its ops twice, gets another."""
    for number in range(LOADED_AGAIN):
        space = __name__.replace(".", "_") + (f"_{number}" if number else "")
        try:
            return space, torch.library.Library(space, "DEF")
        except RuntimeError:
            if number == LOADED_AGAIN - 1:
                raise


def untraced(function):
    """After a graph break torch.compile would trace into the op instead of calling it.

    torch.compiler.disable prevents that as well, but imports the compiler, a second for those who never compile.
    """
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

        skip = _FrameAction.SKIP
        set_code_exec_strategy(function.__code__, _FrameExecStrategy(skip, skip))
    except (ImportError, AttributeError, TypeError):  # another torch
        return torch.compiler.disable(function)
    return function


def define():
    """The ops, and the library that keeps them defined."""
    space, library = own_library()
    results = ", ".join(["Tensor"] * (1 + len(FINALS) + len(KEPT)))
    library.define(f"forward({ARGUMENTS}) -> ({results})")
    library.impl("forward", untraced(forward), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{space}::forward", forward_fake, lib=library)
    ops = getattr(torch.ops, space)
    more = "".join(f", Tensor {name}" for name in KEPT)
    library.define(f"backward({ARGUMENTS}, {COTANGENTS}{more}, bool[] needs) -> Tensor[]")
    library.impl("backward", untraced(backward), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{space}::backward", backward_fake, lib=library)
    torch.library.register_autograd(f"{space}::forward", derive, setup_context=setup_context, lib=library)
    torch.library.register_autograd(f"{space}::backward", no_second_derivative, lib=library)
    return ops.forward.default, ops.backward.default, library


forward_op, backward_op, _library = define()
