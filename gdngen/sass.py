"""Machine code of NVIDIA GPUs as cuobjdump lists it: whether matrix instructions find their operands.

A matrix instruction of a warp group (HGMMA) reads shared memory by descriptors, whose lower word holds an address.
All addresses in shared memory are made from one base, which the code gets from the special register SR_CgaCtaId.
ptxas 12.8 (in Triton 3.6) sometimes computes a descriptor from a register that holds something else: where it spills,
from the stack pointer; where two tiles with different swizzles lie at one place, from a zero.  Such an instruction
reads another place, or beyond shared memory.  So registers that derive from the base are followed through the code,
along every path.
"""

import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", re.MULTILINE)
REGISTER = re.compile(r"\bU?R\d+\b")
DESCRIPTOR = re.compile(r"gdesc\[UR(\d+)\]")
# What writes no register that is followed: stores, barriers, jumps, comparisons, matrix instructions.
WITHOUT_RESULT = (
    "ST", "RED", "BAR", "BRA", "EXIT", "RET", "CALL", "BSSY", "BSYNC", "NOP", "WARP", "DEPBAR", "LDGSTS", "LDGDEPBAR",
    "MEMBAR", "FENCE", "SYNCS", "ARRIVES", "UTMA", "UBLKCP", "HGMMA", "ISETP", "UISETP", "FSETP", "DSETP", "PLOP",
    "UPLOP", "R2P", "VOTE", "ERRBAR", "CCTL", "YIELD", "BPT",
)  # fmt: skip
Based = frozenset[str]  # registers, and places on the stack, that derive from the base on every path


class Instruction(NamedTuple):
    address: int
    predicate: str
    name: str
    operands: tuple[str, ...]


def lost_descriptors(code: str) -> list[Instruction]:
    """The matrix instructions with a descriptor that does not derive from the base of shared memory."""
    instructions = list(_parsed(code))
    if not any(one.name.startswith("HGMMA") for one in instructions):
        return []
    blocks = _blocks(instructions)
    entered: dict[int, Based] = {0: frozenset()}
    waiting = [0]
    while waiting:
        start = waiting.pop()
        left = _through(instructions[start : blocks[start]], entered[start])
        for successor in _successors(instructions, blocks[start]):
            known = entered.get(successor)
            both = left if known is None else left & known
            if both != known:
                entered[successor] = both
                waiting.append(successor)
    return [one for start, based in entered.items() for one in _lost(instructions[start : blocks[start]], based)]


def _parsed(code: str) -> Iterator[Instruction]:
    for address, predicate, name, operands in LINE.findall(code):
        yield Instruction(int(address, 16), predicate, name, tuple(part.strip() for part in operands.split(",")))


def _blocks(instructions: list[Instruction]) -> dict[int, int]:
    """Start -> end of each run of instructions that no jump leads into or out of."""
    places = {one.address: place for place, one in enumerate(instructions)}
    starts = {0, len(instructions)}
    for place, one in enumerate(instructions):
        if one.name.startswith(("BRA", "EXIT", "RET")):
            starts |= {place + 1, places.get(_target(one), place + 1)}
    ordered = sorted(starts)
    return dict(itertools.pairwise(ordered))


def _successors(instructions: list[Instruction], end: int) -> list[int]:
    last = instructions[end - 1]
    following = [end] if end < len(instructions) else []
    if last.name.startswith("BRA"):
        target = [place for place, one in enumerate(instructions) if one.address == _target(last)]
        may_pass = bool(last.predicate) or re.match(r"!?U?P\d", last.operands[0]) is not None
        return target + (following if may_pass else [])
    if last.name.startswith(("EXIT", "RET")) and not last.predicate:
        return []
    return following


def _target(jump: Instruction) -> int:
    found = [re.fullmatch(r"`?\(?0x([0-9a-f]+)\)?", operand) for operand in jump.operands]
    return next((int(match.group(1), 16) for match in found if match), -1)


def _through(block: list[Instruction], based: Based) -> Based:
    for one in block:
        based = _after(one, based)
    return based


def _after(one: Instruction, based: Based) -> Based:
    """What derives from the base after an instruction: its result, where any of its operands does."""
    if one.name.startswith("STL"):  # to the stack
        written, derives = {one.operands[0]}, any(name in based for name in REGISTER.findall(one.operands[1]))
    elif one.name.startswith(WITHOUT_RESULT) or not (result := REGISTER.match(one.operands[0])):
        return based
    else:
        written, derives = {result.group()}, _derives(one, based)
        if one.name.endswith(".64") or ".WIDE" in one.name:
            kind, number = re.match(r"(U?R)(\d+)", result.group()).groups()  # type: ignore[union-attr]
            written.add(f"{kind}{int(number) + 1}")
    if derives:
        return based | written
    return based if one.predicate else based - written


def _derives(one: Instruction, based: Based) -> bool:
    if one.name.startswith("LDL"):
        return one.operands[1] in based
    if one.name.startswith(("LD", "ULDC", "ATOM")):
        return False
    if one.name.startswith(("S2UR", "S2R")):
        return "SR_CgaCtaId" in one.operands[1]
    return any(name in based for operand in one.operands[1:] for name in REGISTER.findall(operand))


def _lost(block: list[Instruction], based: Based) -> Iterator[Instruction]:
    for one in block:
        if one.name.startswith("HGMMA") and not all(f"UR{n}" in based for n in _lower_words(one)):
            yield one
        based = _after(one, based)


def _lower_words(one: Instruction) -> list[int]:
    """Registers with addresses: of both operands where the first is in shared memory too, else of the second alone."""
    found = [int(match.group(1)) for operand in one.operands if (match := DESCRIPTOR.match(operand))]
    both = len(one.operands) > 1 and DESCRIPTOR.match(one.operands[1]) is not None
    return [n for first in found for n in ((first, first + 2) if both else (first + 2,))]
