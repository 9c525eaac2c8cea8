"""Faults of compilers that show in what they made of a kernel, and are seen before it runs."""

import re

LEAST_LEAK = 1 << 25  # times a thread's number, which has eight bits
WIDENED = re.compile(r"mul\.wide\.u32\s+(%rd\d+), %r\d+, (\d+);")
UPPER_HALF = re.compile(r"shl\.b64\s+(%rd\d+), %rd\d+, (?:3[2-9]|[45]\d|6[0-3]);")
PACKED = re.compile(r"or\.b64\s+%rd\d+, (%rd\d+), (%rd\d+);")


def leaks_a_lane(ptx: str) -> bool:
    """Whether an unused half of a packed pair of integers overflows into the other half: a wrong address.

    LLVM pairs ``x & 31`` with ``y << n`` by computing ``x << 31`` beside it, which nobody reads, and packs both results
    into 64 bits as if that one fitted into its 32 (Triton 3.6).  With 31 that is eight warps which read four rows each.
    """
    lower = {name for name, factor in WIDENED.findall(ptx) if int(factor) >= LEAST_LEAK}
    if not lower:
        return False
    upper = set(UPPER_HALF.findall(ptx))
    return any((a in lower and b in upper) or (b in lower and a in upper) for a, b in PACKED.findall(ptx))
