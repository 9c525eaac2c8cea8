"""PUT_package_PUT in plain PyTorch.

Made from the same graph as the kernels, differentiable by autograd.
"""

from itertools import pairwise

import torch


def step(PUT_parameters_PUT):
    """PUT_results_PUT of one sequence [b, i, v]."""
    #% for line in lines
    PUT_line_PUT
    #% endfor
    return PUT_results_PUT


def lag(offset, x, *past):
    """x[i - offset], the tokens before the sequence in ``past``, the latest first."""
    return joined(x, past)[:, : x.shape[1]]


def ending(place, x, *past):
    """The token that is ``place``-th from the end of the sequence and its past."""
    return joined(x, past)[:, -place]


def joined(x, past):
    return torch.cat([*(h.expand(x.shape[0], x.shape[2]).unsqueeze(1) for h in reversed(past)), x], 1)


def forward(call):
    """(o, ht or None) of a Call, sequence after sequence where they are packed."""
    x = {name: None if tensor is None else tensor.float() for name, tensor in call.inputs.items()}
    dtype, (B, T, D) = call.inputs["x"].dtype, x["x"].shape
    if call.cu_seqlens is None:
        parts = [(x["x"], x.get("residual"), x["h0"])]
    else:
        ends = call.cu_seqlens.tolist()
        parts = [
            tuple(None if y is None else y[:, a:b] for y in (x["x"], x.get("residual")))
            + (None if x["h0"] is None else x["h0"][n : n + 1],)
            for n, (a, b) in enumerate(pairwise(ends))
        ]
    found = [one(x, *part) for part in parts]
    o = [y for y, _ in found]
    if call.cu_seqlens is not None:
        o.append(x["x"].new_zeros(B, T - sum(y.shape[1] for y in o), D))
    o = o[0] if len(o) == 1 else torch.cat(o, 1)
    if not call.final:
        return o.to(dtype), None
    ht = torch.cat([h for _, h in found]) if found else x["x"].new_zeros(0, D, PUT_columns_PUT)
    return o.to(dtype), ht.to(dtype)


def one(shared, x, residual, h0):
    """(o, ht) of sequences of one length."""
    past = [x.new_zeros(x.shape[0], x.shape[2])] * PUT_columns_PUT if h0 is None else h0.flip(2).unbind(2)
    return over(shared, x, residual, past)


def over(shared, x, residual, past):
    taps = shared["weight"].flip(1).unbind(1)
    o, *ht = step(PUT_arguments_PUT)
    return o, torch.stack(ht[::-1], 2)


def update(x, state, weight, bias, residual, indices):
    """o of the next tokens; state [.., D, columns] is moved on in place, but for sequences of index < 0."""
    (B, T, _), L = x.shape, state.shape[2]
    rows = torch.arange(B, device=x.device) if indices is None else indices.long()
    live = (rows >= 0)[:, None, None]
    rows = rows.clamp(min=0)
    window = state[rows]
    past = window.float().flip(2).unbind(2)
    past = [*past, *[torch.zeros_like(past[0])] * (PUT_columns_PUT - L)]
    shared = {name: None if y is None else y.float() for name, y in (("weight", weight), ("bias", bias))}
    residual = None if residual is None else residual.float()
    o, _ = over(shared, x.float(), residual, past)
    moved = torch.cat([window, x.transpose(1, 2).to(state.dtype)], 2)[:, :, T : T + L].detach()
    if indices is None:
        state.copy_(moved)
    else:
        state[rows[live[:, 0, 0]]] = moved[live[:, 0, 0]]
    return torch.where(live, o, 0.0).to(x.dtype)
