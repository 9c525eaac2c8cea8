"""Sequences in segments: with few heads the parts of a long sequence are scanned at once, on otherwise idle processors.

A segment does to the state that enters it what a matrix does, and adds what it writes.  A scan then runs twice: MAPS
finds both, for all segments at once; kernel ``combine`` makes the states that enter them; SEGMENTS starts from those.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton

from . import tuning
from .dispatch import LAUNCHES
from .spec import SPEC

WHOLE, MAPS, SEGMENTS = 0, 1, 2  # passes, as in device.py
FEW = 8  # sequences times value heads times this are few where there are as many processors
MANY = 16  # launches for segments take the choice for this many times as many heads


def segments_of(call: Any, at: Any, span: int) -> int:
    """Segments of ``span`` tokens that the sequences of a call have together; 0: they are not split.

    Packed sequence n starts at segment cu_seqlens[n] // span + n.
    """
    few = FEW * call.N * call.HV <= at.processors
    if not few or call.T <= span or call.N == 0 or tuning.BATCH_INVARIANT or tuning.forced:
        return 0
    return call.T // span + call.N if call.cu_seqlens is not None else call.B * triton.cdiv(call.T, span)


def passes(
    combine: Any, call: Any, at: Any, segments: int, span: int, BV: int, start: Any, reverse: bool = False
) -> Iterator[tuple[int, Any, Any, int]]:
    """(pass, states that enter, where maps go, programs) of each launch of a scan with tiles of BV value channels."""
    K, V, HV, device = call.K, call.V, call.HV, call.device
    values = triton.cdiv(V, BV)
    if not segments:
        yield WHOLE, start, None, call.N * HV * values
        return
    tiles = values + triton.cdiv(K, BV)
    maps = torch.empty((segments, HV, tiles * BV, K), dtype=torch.float32, device=device)
    yield MAPS, None, maps, segments * HV * tiles
    v_first = SPEC["state_v_first"]
    shape = (segments, HV, V, K) if v_first else (segments, HV, K, V)
    states = torch.zeros(shape, dtype=torch.float32, device=device)  # zeros where no sequence has a segment
    LAUNCHES["combine"] += 1
    combine[(call.N * HV * triton.cdiv(V, 16),)](
        maps,
        start,
        states,
        call.cu_seqlens,
        call.T,
        call.N,
        HV,
        K,
        V,
        span,
        FIRST=values * BV,
        ROWS=tiles * BV,
        BK=max(16, triton.next_power_of_2(K)),
        BV=16,
        V_FIRST=v_first,
        REVERSE=reverse,
        PRECISION=at.PRECISION,
        num_warps=4,
    )
    yield SEGMENTS, states, None, segments * HV * values
