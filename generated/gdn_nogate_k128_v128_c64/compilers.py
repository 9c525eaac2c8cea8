"""Faults of compilers that show in what they made of a kernel, and one of Triton's interpreter that can be mended."""

import re
from typing import Any

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


def mend_interpreter() -> None:
    """Make it take a tensor for a number: until Triton 3.7 it asks int() of an array, which numpy 2.4 refuses."""
    import triton
    from triton.runtime import interpreter

    patch = getattr(interpreter, "_patch_lang_tensor", None)
    version = [int(part) for part in triton.__version__.split(".")[:2]]
    if version >= [3, 7] or patch is None or hasattr(patch, "mended"):
        return

    def mended(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    mended.mended = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = mended
