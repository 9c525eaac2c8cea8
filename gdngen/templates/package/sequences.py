"""Runs a PyTorch step over the chunks of every sequence, and the primitives over tokens that steps use."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

LOWEST_GATE = -800.0  # exp of it is 0 in float64, where decays are formed


def decay_between(g, dim):
    """exp of the log decay over (j, i], [..., i, j, ...] for j <= i, else 0.  g has its tokens at ``dim``."""
    total = g.double().clamp(min=LOWEST_GATE).cumsum(dim)
    difference = total.unsqueeze(dim + 1) - total.unsqueeze(dim)
    causal = torch.ones(g.shape[dim], g.shape[dim], dtype=torch.bool, device=g.device).tril()
    causal = causal.reshape([g.shape[dim], g.shape[dim]] + [1] * (g.ndim - dim - 1))
    return torch.where(causal, difference, float("-inf")).exp().to(g.dtype)


def decay_from_start(g, dim):
    """exp of the log decay from the start of the chunk to each token."""
    return g.double().clamp(min=LOWEST_GATE).cumsum(dim).exp().to(g.dtype)


def decay_to_end(g, dim):
    """exp of the log decay from each token to the end of the chunk."""
    total = g.double().clamp(min=LOWEST_GATE).cumsum(dim)
    return (total.narrow(dim, g.shape[dim] - 1, 1) - total).exp().to(g.dtype)


def decay_of_chunk(g, dim):
    """exp of the log decay over the whole chunk."""
    return g.double().clamp(min=LOWEST_GATE).sum(dim).exp().to(g.dtype)


def unit_lower_inverse(A):
    """(I + strictly_lower(A))^-1 by forward substitution."""
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    return torch.linalg.solve_triangular(eye + A.tril(-1), eye.expand_as(A), upper=False, unitriangular=True)


def where_valid(valid, x, dim):
    """x, and 0 for tokens past the end of the sequence."""
    return torch.where(valid.reshape([-1] + [1] * (x.ndim - dim - 1)), x, 0.0)


@dataclass(frozen=True)
class Step:
    """A step function and what it reads: per-token inputs (``grouped``: per query/key head), parameters, carries."""

    function: Any
    chunk: int  # tokens per step; 0: one token, without a token dimension
    inputs: tuple[str, ...]
    tokens: tuple[str, ...]
    grouped: tuple[str, ...]
    inits: tuple[str, ...]
    scalars: tuple[str, ...]
    state_v_first: bool


def run(step: Step, call: Any) -> Any:
    """(o, final state) of a Call; the state is a pair with a normaliser.  Computes in fp32, under autocast too."""
    with torch.autocast(call.device.type, enabled=False):
        return _run(step, call)


def _run(step: Step, call: Any) -> Any:
    v = call.inputs["v"]
    heads = {name: _by_head(step, call, name) for name in step.inputs}
    states = [_initial(step, call, name) for name in step.inits]
    anchor = _anchor(call)
    rows = torch.zeros(call.B, call.HV, 0, call.V, device=v.device)
    finals: list[list[torch.Tensor]] = [[] for _ in states]
    for n, (first, last) in enumerate(_bounds(call)):
        part = slice(n, n + 1) if call.cu_seqlens is not None else slice(None)
        out, ends = _sequence(step, call, heads, [state[part] for state in states], first, last)
        rows = torch.cat([rows, out], 2)
        for final, end in zip(finals, ends):
            final.append(end)
    tail = rows.new_zeros(call.B, call.HV, call.T - rows.shape[2], call.V)
    o = (torch.cat([rows, tail], 2) + anchor).transpose(1, 2).to(v.dtype).contiguous()
    if not call.output_final_state:
        return o, None
    results = [_final(step, state, torch.cat(ends or [state]) + anchor) for state, ends in zip(states, finals)]
    return o, results[0] if len(results) == 1 else tuple(results)


def _anchor(call: Any) -> Any:
    """0, made of all inputs that want a gradient: with it every result depends on each of them, as with kernels."""
    if not torch.is_grad_enabled():
        return 0.0
    return sum(x.narrow(0, 0, 0).float().sum() for x in call.inputs.values() if x is not None and x.requires_grad)


def _bounds(call: Any) -> list[tuple[int, int]]:
    if call.cu_seqlens is None:
        return [(0, call.T)]
    offsets = call.cu_seqlens.tolist()
    return list(pairwise(offsets))


def _by_head(step: Step, call: Any, name: str) -> Any:
    """Per-token inputs as [b, h(, r), T, ...], parameters as [h, r, ...]; an absent bias is 0."""
    x = call.inputs[name]
    if x is None:  # an absent bias, shaped like one token of what it is added to
        raw = call.inputs["a"] if "a" in call.inputs else call.inputs["dt"]
        return raw.new_zeros((call.H, call.HV // call.H, *raw.shape[3:]), dtype=torch.float32)
    x = x.float()
    if name in step.grouped:
        return x.transpose(1, 2)
    if name in step.tokens:
        return x.transpose(1, 2).unflatten(1, (call.H, -1))
    return x.unflatten(0, (call.H, -1))


def _initial(step: Step, call: Any, name: str) -> torch.Tensor:
    """[n, h, r, K, V] or [n, h, r, K]."""
    x = call.inputs[name]
    if x is None:
        shape = (call.N, call.HV, call.K, call.V)[: 3 if name == "z0" else 4]
        x = torch.zeros(shape, device=call.device)
    elif step.state_v_first and x.ndim == 4:
        x = x.transpose(2, 3)
    return x.float().unflatten(1, (call.H, -1))


def _final(step: Step, like: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    state = state.expand_as(like).flatten(1, 2)
    return state.transpose(2, 3).contiguous() if step.state_v_first and state.ndim == 4 else state.contiguous()


def _sequence(step: Step, call: Any, heads: Any, states: Any, first: int, last: int) -> Any:
    """o [b, HV, T, V] and the final states of tokens first .. last - 1."""
    length = step.chunk or 1
    numbers = {"scale": call.scale, "dt_min": call.dt_limit[0], "dt_max": call.dt_limit[1]}
    scalars = [numbers[name] for name in step.scalars]
    rows = [states[0].new_zeros(call.B, call.HV, 0, call.V)]
    for start in range(first, last, length):
        count = min(length, last - start)
        valid = torch.arange(length, device=call.device) < count
        tiles = [_tile(step, heads[name], name, start, count, length) for name in step.inputs]
        o, *states = step.function(*tiles, *states, *scalars, valid)
        o = (o if step.chunk else o.unsqueeze(-2)).flatten(1, 2)
        rows.append(o[:, :, :count])
    return torch.cat(rows, 2), states


def _tile(step: Step, x: Any, name: str, start: int, count: int, length: int) -> Any:
    """The tokens of one step, zero past the end; without a token dimension when the step takes single tokens."""
    if name not in step.tokens:
        return x
    dim = 2 if name in step.grouped else 3
    x = x.narrow(dim, start, count)
    if not step.chunk:
        return x.squeeze(dim)
    if count == length:
        return x
    padding = list(x.shape)
    padding[dim] = length - count
    return torch.cat([x, x.new_zeros(padding)], dim)
