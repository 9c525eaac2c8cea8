"""The operators as torch.library ops, with fake registrations and, where there are gradients, those of autograd.

torch.compile sees one op and no graph break; eager calls that need no gradient go to launch.py without this detour.
"""

import torch

from . import launch
#% if differentiable
from .arguments import ArgumentError, Call

#% else
from .arguments import Call

#% endif
INPUTS = PUT_inputs_PUT
FINALS = PUT_finals_PUT
KEPT = PUT_kept_PUT  # what a chunk forward hands over to backward, beside the inputs
STATE_V_FIRST = PUT_state_v_first_PUT
ARGUMENTS = ", ".join(
    [
        *(f"Tensor? {name}" for name in INPUTS),
        "Tensor? cu_seqlens, str operator, float scale, float dt_min, float dt_max, bool output_final_state",
    ]
)
#% if differentiable
COTANGENTS = ", ".join(["Tensor? do", *(f"Tensor? d{name}" for name in FINALS)])
#% endif
COUNT = len(INPUTS)
LOADED_AGAIN = 1000  # times that one process may load this module


def run(call):
    """(o, final state) of a Call, by an op that torch knows."""
    tensors = [call.inputs.get(name) for name in INPUTS]
    rest = (call.cu_seqlens, call.operator, call.scale, *call.dt_limit, call.output_final_state)
    o, *finals = forward_op(*tensors, *rest)[: 1 + len(FINALS)]
    if not call.output_final_state:
        return o, None
    return o, finals[0] if len(finals) == 1 else tuple(finals)


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
    if KEPT and call.operator == "chunk":
        o, state = launch.chunk(call, kept)
    else:
        o, state = getattr(launch, call.operator)(call)
    finals = state if isinstance(state, tuple) else (state,)
    if not call.output_final_state:
        finals = [nothing(o) for _ in FINALS]
    return o, *finals, *(kept or [nothing(o) for _ in KEPT])


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
    kept = launch.kept_tensors(call) if KEPT and call.operator == "chunk" else [nothing(v) for _ in KEPT]
    return v.new_empty(v.shape), *(v.new_empty(shape, dtype=torch.float32) for shape in shapes), *kept


#% if differentiable


def backward(*args):
    *given, needs = args[COUNT + 6 :]
    call = call_of(args)
    cotangents, kept = given[: 1 + len(FINALS)], given[1 + len(FINALS) :]
    wanted = [name for name, need in zip(INPUTS, needs) if need]
    if KEPT and call.operator == "chunk":
        cotangents.append(kept)
    found = launch.chunk_backward(call, wanted, *cotangents)
    return [found[name] for name in wanted]


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
    found = iter(backward_op(*inputs, *ctx.rest, do, *dfinals, *kept, needs))
    return *(next(found) if need else None for need in needs), *[None] * 6


def no_second_derivative(ctx, *gradients):
    raise ArgumentError(
        f"{__package__}: got a second derivative (create_graph=True), expected first ones only: the backward of these "
        "kernels is not differentiable. Compute it with CPU tensors, whose PyTorch version is."
    )


#% endif


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
    #% if differentiable
    more = "".join(f", Tensor {name}" for name in KEPT)
    library.define(f"backward({ARGUMENTS}, {COTANGENTS}{more}, bool[] needs) -> Tensor[]")
    library.impl("backward", untraced(backward), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{space}::backward", backward_fake, lib=library)
    torch.library.register_autograd(f"{space}::forward", derive, setup_context=setup_context, lib=library)
    torch.library.register_autograd(f"{space}::backward", no_second_derivative, lib=library)
    return ops.forward.default, ops.backward.default, library
    #% else
    return ops.forward.default, library
    #% endif


#% if differentiable
forward_op, backward_op, _library = define()
#% else
forward_op, _library = define()
#% endif
