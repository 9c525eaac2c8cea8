"""Sequences in segments: with few heads the parts of a long sequence are scanned at once, on otherwise idle processors.

A segment does to the state that enters it what a matrix M does, and adds what it writes, w.  Where a scan runs
once over "whole" sequences, it then runs twice: "maps" finds both of all segments at once; kernel ``combine`` makes the
states that enter them; "segments" starts there.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton

from . import tuning
from .dispatch import LAUNCHES
from .machine import cdiv
from .spec import SPEC

PROCESSORS_PER_HEAD = 16 if "key" in SPEC["gate"] else 8  # at least, for each head of each sequence
ROOMY = ("sm_80", "sm_90", "sm_100")  # targets whose shared memory holds the matrices of two segments, 128 x 128
AS_IF = 16  # times as many heads: what launches over segments take their choice for
TILE = 16  # of v, in combine


def segments_of(call: Any, at: Any, span: int) -> int:
    """Segments of ``span`` tokens that the sequences of a call have together; 0: whole sequences.

    Two segments or fewer are not worth it: the pass that finds their maps takes as long as it saves.  Packed sequences
    count together (how long each is, only the GPU knows); number n starts at segment cu_seqlens[n] // span + n.
    """
    if tuning.BATCH_INVARIANT or call.K > 128 or not at.key.startswith(ROOMY):
        return 0
    if not 0 < PROCESSORS_PER_HEAD * call.N * call.HV <= at.processors or cdiv(call.T, span) <= 2:
        return 0
    return call.T // span + call.N if call.cu_seqlens is not None else call.B * cdiv(call.T, span)


def passes(
    combine: Any, call: Any, at: Any, segments: int, span: int, tuned: Any, initial: Any
) -> Iterator[tuple[str, Any, Any, int, int]]:
    """(pass, states that enter, where maps go, programs, pipeline stages) of each launch of a scan.

    Between the two over segments runs ``combine``, which launch.py hands in: there rehearsals look for kernels.
    """
    BV, stages = tuned.BV, tuned.num_stages
    values = cdiv(call.V, BV)
    if not segments:
        yield "whole", initial, None, call.N * call.HV * values, stages
        return
    tiles = values + cdiv(call.K, BV)
    maps = torch.empty((segments, call.HV, tiles * BV, call.K), dtype=torch.float32, device=call.device)
    yield "maps", None, maps, segments * call.HV * tiles, min(2, stages)  # so that several programs fit on a processor
    states = _entering(combine, call, at, span, maps, values * BV, initial)
    yield "segments", states, None, segments * call.HV * values, stages


def _entering(combine: Any, call: Any, at: Any, span: int, maps: Any, M_row: int, initial: Any) -> torch.Tensor:
    """The states that enter the segments; zeros where no sequence has one."""
    K, V, HV, v_first = call.K, call.V, call.HV, SPEC["state_v_first"]
    shape = (len(maps), HV, V, K) if v_first else (len(maps), HV, K, V)
    states = torch.zeros(shape, dtype=torch.float32, device=call.device)
    LAUNCHES["combine"] += 1
    combine[(call.N * HV * cdiv(V, TILE),)](
        maps,
        initial,
        states,
        call.cu_seqlens,
        call.T,
        call.N,
        HV,
        K,
        V,
        span,
        M_ROW=M_row,
        ROWS=maps.shape[2],
        BK=max(16, triton.next_power_of_2(K)),
        BV=TILE,
        V_FIRST=v_first,
        PRECISION="ieee" if at.PRECISION == "ieee" else "tf32x3",  # tf32 drops bits: what decays little would shrink
        num_warps=8,
    )
    return states
