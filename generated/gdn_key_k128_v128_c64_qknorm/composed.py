"""Options that no kernel has, made of calls that kernels do: tokens in reverse order, the states between chunks."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .arguments import ArgumentError, Call, Options, check_offsets, is_traced
from .dispatch import run

NOT_OF_TOKENS = ("A_log", "dt_bias", "h0", "z0")  # every other input is [B, T, ...]


def run_reversed(options: Options, call: Call) -> Any:
    """(o, final_state) of a call that goes through every sequence from its last token to its first."""
    turned = _turning(call)
    call.inputs = {name: x if x is None or name in NOT_OF_TOKENS else turned(x) for name, x in call.inputs.items()}
    o, final_state = run(options, call)
    return turned(o), final_state


def _turning(call: Call) -> Callable[[Tensor], Tensor]:
    """What reverses the tokens of each sequence; tokens behind the last one stay where they are."""
    if (offsets := call.cu_seqlens) is None:
        return lambda x: x.flip(1)
    token = torch.arange(call.T, device=call.device)
    following = torch.searchsorted(offsets, token, right=True)
    bounds = torch.cat([offsets, offsets[-1:]])  # for those tokens: behind the last offset there is none
    mirrored = bounds[following - 1] + bounds[following] - 1 - token
    order = torch.where(token < offsets[-1], mirrored, token)
    return lambda x: x.index_select(1, order)


def run_with_states(options: Options, call: Call, chunk_size: int, cu_seqlens_cpu: Tensor | None) -> tuple[Any, ...]:
    """(o, final_state, states): the state that enters each chunk too, in the dtype of q.  One call a chunk.

    states: [B, NT, HV, K, V], with state_v_first [B, NT, HV, V, K]; of packed sequences all their chunks, B = 1.
    """
    if torch.is_grad_enabled() or is_traced():
        raise ArgumentError(
            "return_intermediate_states: got True with gradients enabled or under a tracer, expected an eager call "
            "without gradients. Call it under torch.inference_mode() or torch.no_grad()."
        )
    q, v = call.inputs["q"], call.inputs["v"]
    assert q is not None and v is not None
    initial = _initial_state(options, call)
    o, entering, finals = torch.zeros_like(v, memory_format=torch.contiguous_format), [], []
    for state, first, last in _sequences(call, initial, cu_seqlens_cpu):
        for start in range(first, last, chunk_size):
            entering.append(state)
            stop = min(start + chunk_size, last)
            o[:, start:stop], state = run(options, _part(call, start, stop, state))
        finals.append(state)
    states = torch.stack(entering, 1) if entering else initial.new_empty(call.B, 0, *initial.shape[1:])
    final_state = torch.cat(finals) if finals else initial
    return o, final_state if call.output_final_state else None, states.to(q.dtype)


def _initial_state(options: Options, call: Call) -> Tensor:
    if (given := call.inputs["h0"]) is not None:
        return given.float()
    tile = (call.V, call.K) if options.state_v_first else (call.K, call.V)
    return torch.zeros(call.N, call.HV, *tile, device=call.device)


def _sequences(call: Call, initial: Tensor, cu_seqlens_cpu: Tensor | None) -> Iterator[tuple[Tensor, int, int]]:
    """The state before each sequence and the tokens from where to where; the rows of a batch are one."""
    if call.cu_seqlens is None:
        yield initial, 0, call.T
        return
    offsets = call.cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    if offsets.shape != call.cu_seqlens.shape:
        raise ArgumentError(
            f"cu_seqlens_cpu: got {list(offsets.shape)}, expected {list(call.cu_seqlens.shape)}, as cu_seqlens. Pass a "
            "copy of cu_seqlens on the host, or leave it out."
        )
    check_offsets(offsets, call.T)
    for n, (first, last) in enumerate(pairwise(offsets.tolist())):
        yield initial[n : n + 1], first, last


def _part(call: Call, start: int, stop: int, state: Tensor) -> Call:
    """The call on some tokens of one sequence, or of every row of a batch, from a given state."""
    inputs = {
        name: x if x is None or name in NOT_OF_TOKENS else x[:, start:stop] for name, x in call.inputs.items()
    } | {"h0": state}
    return replace(call, inputs=inputs, cu_seqlens=None, output_final_state=True, T=stop - start, N=call.B)
