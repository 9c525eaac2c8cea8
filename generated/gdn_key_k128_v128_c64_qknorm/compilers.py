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
    """Faults of Triton's interpreter, by version; once, however many packages ask.

    Until 3.7 it takes a tensor for a number by int() of an array, which numpy 2.4 refuses.  From 3.9 on comparisons of
    numbers are integers, which it refuses as masks.
    """
    from triton.runtime import interpreter

    builder = getattr(interpreter, "InterpreterBuilder", None)
    if builder is None or hasattr(builder, "mended_by_gdngen"):
        return
    builder.mended_by_gdngen = True
    _take_tensors_for_numbers(interpreter)
    for name, place in (("create_masked_load", 1), ("create_masked_store", 2)):
        if hasattr(builder, name):
            setattr(builder, name, _with_truth_values(getattr(builder, name), place))


def _take_tensors_for_numbers(interpreter: Any) -> None:
    patch = getattr(interpreter, "_patch_lang_tensor", None)
    if patch is None:
        return

    def mended(tensor: Any, *rest: Any) -> None:
        patch(tensor, *rest)
        for scope in rest:
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = mended


def _with_truth_values(method: Any, place: int) -> Any:
    """A load or a store whose mask, the argument at ``place``, is made of truth values."""

    def mended(self: Any, *given: Any, **more: Any) -> Any:
        mask = given[place]
        kind = getattr(getattr(mask, "data", None), "dtype", None)  # none: masks of descriptors are arrays themselves
        if kind is not None and kind.kind != "b":
            mask = type(mask)(mask.data.astype(bool), mask.dtype)
        return method(self, *given[:place], mask, *given[place + 1 :], **more)

    return mended
