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
FEW = 16 if "key" in SPEC["gate"] else 8  # times sequences and value heads: at most the number of processors
ROOMY = ("sm_80", "sm_90", "sm_100")  # targets whose shared memory holds the matrices of two segments, 128 x 128
MANY = 16  # launches for segments take the choice for this many times as many heads


def segments_of(call: Any, at: Any, span: int) -> int:
    """Segments of ``span`` tokens that the sequences of a call have together; 0: whole sequences.

    One or two segments of a sequence are not worth it: the pass that finds their maps takes as long as it saves.
    Packed sequence n starts at segment cu_seqlens[n] // span + n.
    """
    few = 0 < FEW * call.N * call.HV <= at.processors and not tuning.BATCH_INVARIANT and not tuning.forced
    if not few or triton.cdiv(call.T, span) <= 2 or call.K > 128 or not at.key.startswith(ROOMY):
        return 0
    return call.T // span + call.N if call.cu_seqlens is not None else call.B * triton.cdiv(call.T, span)


def passes(
    combine: Any, call: Any, at: Any, segments: int, span: int, tuned: Any, start: Any
) -> Iterator[tuple[int, Any, Any, int, int]]:
    """(pass, states that enter, where maps go, programs, pipeline stages) of each launch of a scan."""
    K, V, HV, device, BV, stages = call.K, call.V, call.HV, call.device, tuned.BV, tuned.num_stages
    values = triton.cdiv(V, BV)
    if not segments:
        yield WHOLE, start, None, call.N * HV * values, stages
        return
    tiles = values + triton.cdiv(K, BV)
    maps = torch.empty((segments, HV, tiles * BV, K), dtype=torch.float32, device=device)
    yield MAPS, None, maps, segments * HV * tiles, min(2, stages)  # that several programs share a processor
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
        PRECISION=at.PRECISION,
        num_warps=4,
    )
    yield SEGMENTS, states, None, segments * HV * values, stages
