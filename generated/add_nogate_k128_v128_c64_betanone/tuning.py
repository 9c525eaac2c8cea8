"""Launch choices: tile of v, warps, pipeline stages of every kernel.

Decisions measured on this GPU come first: tuned/<gpu>.json beside this file, which ``gdngen tune`` writes.  A GPU
without decisions gets those of the cost model, TUNING: kernel -> "target/bytes per element" -> choice.  A key that ends
in /few has narrower tiles, for launches so small that all of its programs run at once.
"""

import hashlib
import json
import math
import os
import re
import threading
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parent
FORMAT = 1  # of tuned/<gpu>.json


class Tuning(NamedTuple):
    """BV: value channels per program (0: v is not tiled); descriptors: 1 where tiles are loaded through such."""

    BV: int
    num_warps: int
    num_stages: int
    descriptors: int = 0


C = 64  # tokens of a chunk; rows of TUNING for another length end in /c and that length
V = 128
FP32_PRODUCTS = "tf32x3"  # of fp32 inputs: three tf32 products each, or without matrix units
TUNING = {
    "prepare": {
        "sm_80/2": Tuning(BV=0, num_warps=4, num_stages=1),
        "sm_80/4": Tuning(BV=0, num_warps=4, num_stages=1),
        "sm_90/2": Tuning(BV=0, num_warps=4, num_stages=1),
        "sm_90/4": Tuning(BV=0, num_warps=4, num_stages=1),
        "sm_100/2": Tuning(BV=0, num_warps=4, num_stages=1),
        "sm_100/4": Tuning(BV=0, num_warps=4, num_stages=1),
        "sm_120/2": Tuning(BV=0, num_warps=4, num_stages=1),
        "sm_120/4": Tuning(BV=0, num_warps=4, num_stages=1),
        "gfx942/2": Tuning(BV=0, num_warps=4, num_stages=1),
        "gfx942/4": Tuning(BV=0, num_warps=4, num_stages=1),
    },
    "scan": {
        "sm_80/2": Tuning(BV=32, num_warps=8, num_stages=2),
        "sm_80/2/few": Tuning(BV=16, num_warps=8, num_stages=3),
        "sm_80/4": Tuning(BV=32, num_warps=8, num_stages=2),
        "sm_80/4/few": Tuning(BV=16, num_warps=8, num_stages=2),
        "sm_90/2": Tuning(BV=64, num_warps=8, num_stages=3, descriptors=1),
        "sm_90/2/few": Tuning(BV=16, num_warps=8, num_stages=4, descriptors=1),
        "sm_90/4": Tuning(BV=32, num_warps=8, num_stages=2),
        "sm_90/4/few": Tuning(BV=16, num_warps=8, num_stages=2),
        "sm_100/2": Tuning(BV=64, num_warps=8, num_stages=3, descriptors=1),
        "sm_100/2/few": Tuning(BV=16, num_warps=8, num_stages=4, descriptors=1),
        "sm_100/4": Tuning(BV=32, num_warps=8, num_stages=2),
        "sm_100/4/few": Tuning(BV=16, num_warps=8, num_stages=2),
        "sm_120/2": Tuning(BV=32, num_warps=8, num_stages=2),
        "sm_120/2/few": Tuning(BV=16, num_warps=8, num_stages=3),
        "sm_120/4": Tuning(BV=16, num_warps=8, num_stages=1),
        "sm_120/4/few": Tuning(BV=16, num_warps=8, num_stages=1),
        "gfx942/2": Tuning(BV=32, num_warps=8, num_stages=1),
        "gfx942/2/few": Tuning(BV=16, num_warps=8, num_stages=1),
        "gfx942/4": Tuning(BV=16, num_warps=8, num_stages=1),
        "gfx942/4/few": Tuning(BV=16, num_warps=8, num_stages=1),
    },
    "states": {
        "sm_80/2": Tuning(BV=64, num_warps=4, num_stages=3),
        "sm_80/2/few": Tuning(BV=16, num_warps=4, num_stages=3),
        "sm_80/4": Tuning(BV=32, num_warps=8, num_stages=2),
        "sm_80/4/few": Tuning(BV=16, num_warps=8, num_stages=2),
        "sm_90/2": Tuning(BV=64, num_warps=4, num_stages=3, descriptors=1),
        "sm_90/2/few": Tuning(BV=16, num_warps=4, num_stages=4, descriptors=1),
        "sm_90/4": Tuning(BV=32, num_warps=8, num_stages=2),
        "sm_90/4/few": Tuning(BV=16, num_warps=8, num_stages=2),
        "sm_100/2": Tuning(BV=64, num_warps=4, num_stages=3, descriptors=1),
        "sm_100/2/few": Tuning(BV=16, num_warps=4, num_stages=4, descriptors=1),
        "sm_100/4": Tuning(BV=32, num_warps=8, num_stages=2),
        "sm_100/4/few": Tuning(BV=16, num_warps=8, num_stages=2),
        "sm_120/2": Tuning(BV=64, num_warps=4, num_stages=3),
        "sm_120/2/few": Tuning(BV=16, num_warps=4, num_stages=3),
        "sm_120/4": Tuning(BV=32, num_warps=8, num_stages=2),
        "sm_120/4/few": Tuning(BV=16, num_warps=8, num_stages=2),
        "gfx942/2": Tuning(BV=64, num_warps=4, num_stages=2),
        "gfx942/2/few": Tuning(BV=16, num_warps=4, num_stages=3),
        "gfx942/4": Tuning(BV=32, num_warps=8, num_stages=1),
        "gfx942/4/few": Tuning(BV=16, num_warps=8, num_stages=1),
    },
    "reverse": {
        "sm_80/2": Tuning(BV=64, num_warps=4, num_stages=3),
        "sm_80/2/few": Tuning(BV=16, num_warps=4, num_stages=3),
        "sm_80/4": Tuning(BV=32, num_warps=8, num_stages=2),
        "sm_80/4/few": Tuning(BV=16, num_warps=8, num_stages=2),
        "sm_90/2": Tuning(BV=64, num_warps=4, num_stages=3, descriptors=1),
        "sm_90/2/few": Tuning(BV=16, num_warps=4, num_stages=4, descriptors=1),
        "sm_90/4": Tuning(BV=32, num_warps=8, num_stages=2),
        "sm_90/4/few": Tuning(BV=16, num_warps=8, num_stages=2),
        "sm_100/2": Tuning(BV=64, num_warps=4, num_stages=3, descriptors=1),
        "sm_100/2/few": Tuning(BV=16, num_warps=4, num_stages=4, descriptors=1),
        "sm_100/4": Tuning(BV=32, num_warps=8, num_stages=2),
        "sm_100/4/few": Tuning(BV=16, num_warps=8, num_stages=2),
        "sm_120/2": Tuning(BV=64, num_warps=4, num_stages=3),
        "sm_120/2/few": Tuning(BV=16, num_warps=4, num_stages=3),
        "sm_120/4": Tuning(BV=32, num_warps=8, num_stages=2),
        "sm_120/4/few": Tuning(BV=16, num_warps=8, num_stages=2),
        "gfx942/2": Tuning(BV=64, num_warps=4, num_stages=2),
        "gfx942/2/few": Tuning(BV=16, num_warps=4, num_stages=3),
        "gfx942/4": Tuning(BV=32, num_warps=8, num_stages=1),
        "gfx942/4/few": Tuning(BV=16, num_warps=8, num_stages=1),
    },
    "pairs": {
        "sm_80/2": Tuning(BV=128, num_warps=8, num_stages=1),
        "sm_80/4": Tuning(BV=32, num_warps=8, num_stages=1),
        "sm_90/2": Tuning(BV=128, num_warps=8, num_stages=1),
        "sm_90/4": Tuning(BV=64, num_warps=8, num_stages=1),
        "sm_100/2": Tuning(BV=128, num_warps=8, num_stages=1),
        "sm_100/4": Tuning(BV=64, num_warps=8, num_stages=1),
        "sm_120/2": Tuning(BV=64, num_warps=8, num_stages=1),
        "sm_120/4": Tuning(BV=16, num_warps=8, num_stages=1),
        "gfx942/2": Tuning(BV=32, num_warps=8, num_stages=1),
        "gfx942/4": Tuning(BV=16, num_warps=8, num_stages=1),
    },
    "queries": {
        "sm_80/2": Tuning(BV=64, num_warps=4, num_stages=2),
        "sm_80/4": Tuning(BV=64, num_warps=8, num_stages=1),
        "sm_90/2": Tuning(BV=64, num_warps=4, num_stages=2),
        "sm_90/4": Tuning(BV=128, num_warps=8, num_stages=1),
        "sm_100/2": Tuning(BV=64, num_warps=4, num_stages=2),
        "sm_100/4": Tuning(BV=128, num_warps=8, num_stages=1),
        "sm_120/2": Tuning(BV=64, num_warps=4, num_stages=2),
        "sm_120/4": Tuning(BV=16, num_warps=8, num_stages=1),
        "gfx942/2": Tuning(BV=16, num_warps=4, num_stages=2),
        "gfx942/4": Tuning(BV=16, num_warps=8, num_stages=1),
    },
    "gradients": {
        "sm_80/2": Tuning(BV=64, num_warps=4, num_stages=2),
        "sm_80/4": Tuning(BV=64, num_warps=8, num_stages=1),
        "sm_90/2": Tuning(BV=64, num_warps=4, num_stages=2),
        "sm_90/4": Tuning(BV=128, num_warps=8, num_stages=1),
        "sm_100/2": Tuning(BV=64, num_warps=4, num_stages=2),
        "sm_100/4": Tuning(BV=128, num_warps=8, num_stages=1),
        "sm_120/2": Tuning(BV=64, num_warps=4, num_stages=2),
        "sm_120/4": Tuning(BV=16, num_warps=8, num_stages=1),
        "gfx942/2": Tuning(BV=16, num_warps=4, num_stages=2),
        "gfx942/4": Tuning(BV=16, num_warps=8, num_stages=1),
    },
    "recurrence": {
        "sm_80/2": Tuning(BV=64, num_warps=4, num_stages=1),
        "sm_80/4": Tuning(BV=64, num_warps=4, num_stages=1),
        "sm_90/2": Tuning(BV=64, num_warps=4, num_stages=1),
        "sm_90/4": Tuning(BV=64, num_warps=4, num_stages=1),
        "sm_100/2": Tuning(BV=64, num_warps=4, num_stages=1),
        "sm_100/4": Tuning(BV=64, num_warps=4, num_stages=1),
        "sm_120/2": Tuning(BV=64, num_warps=4, num_stages=1),
        "sm_120/4": Tuning(BV=64, num_warps=4, num_stages=1),
        "gfx942/2": Tuning(BV=64, num_warps=4, num_stages=1),
        "gfx942/4": Tuning(BV=64, num_warps=4, num_stages=1),
    },
}
# Kernels whose tiles of v may be narrowed -> bytes of the narrowest row that matrix instructions of sm_90 should read.
NARROWEST = {
    "scan": 32,
    "states": 32,
    "reverse": 32,
    "pairs": 128,
    "queries": 128,
    "gradients": 128,
    "recurrence": 32,
}
# Operator -> target/bytes per element -> chunk lengths, of which the first that all kernels fit in is taken; C if none.
CHUNKS: dict[str, dict[str, tuple[int, ...]]] = {}
# Kernels of chunk_backward.
BACKWARD = (
    "states",
    "reverse",
    "pairs",
    "queries",
    "gradients",
)


def _is_set(switch: str) -> bool:
    return os.environ.get(switch, "0") not in ("", "0")


# GDNGEN_BATCH_INVARIANT=1: every launch takes the choice for many heads.  A sequence's bits then do not depend on how
# many others are in the batch or packed beside it.
BATCH_INVARIANT = _is_set("GDNGEN_BATCH_INVARIANT")
MANY = 1 << 20

# (kernel, bytes per element) -> sequences times value heads of the measured launch -> choice
Decisions = dict[tuple[str, int], dict[int, Tuning]]

forced: dict[str, Tuning] = {}  # kernel -> the choice that wins over every other; empty but while tuning
_chosen: dict[tuple[Any, ...], Tuning] = {}  # what choice() found: launches do one look-up
_refused: dict[tuple[Any, ...], Tuning | None] = {}  # what did not fit when it was compiled -> what is taken instead
_shortened: Counter[tuple[str, ...]] = Counter()  # operator and machine -> the place in CHUNKS
_decisions: dict[str, Decisions] = {}  # by GPU
_reading = threading.Lock()


def choice(kernel: str, at: Any, heads: int, scans: int = 1) -> Tuning:
    """The launch choice on a machine; ``heads``: sequences times value heads, ``scans``: launches that run at once."""
    if kernel in forced:
        return forced[kernel]
    heads = MANY if BATCH_INVARIANT else heads
    key = (kernel, heads, at.key, at.gpu, at.processors)
    found = _chosen.get(key)
    if found is None:
        found = _chosen[key] = _fitting(kernel, at, _decided(kernel, at, heads) or _modelled(kernel, at, scans * heads))
    return found


def chunk_of(at: Any, operator: str) -> int:
    """Tokens of a chunk: fewer where the kernels do not fit a machine otherwise.  Results do not depend on it."""
    return _lengths(at, operator)[_shortened[(operator, *_machine(at))]]


def _lengths(at: Any, operator: str) -> tuple[int, ...]:
    return CHUNKS.get(operator, {}).get(at.key, (C,))


def _machine(at: Any) -> tuple[str, ...]:
    return at.key, getattr(at, "PRECISION", ""), at.gpu


def _operator(kernel: str) -> str:
    return "chunk_backward" if kernel in BACKWARD else "recurrent" if kernel == "recurrence" else "chunk"


def refuse(kernel: str, at: Any, tuned: Tuning, too_many_warps: bool = False) -> bool:
    """What was compiled does not fit the machine: from now on something smaller is chosen.  False if nothing is."""
    operator = _operator(kernel)
    fewer = tuned._replace(num_warps=4) if too_many_warps and tuned.num_warps > 4 else None
    instead = fewer or narrower(kernel, at, tuned)
    _refused[(kernel, *_machine(at), chunk_of(at, operator), tuned)] = instead
    _chosen.clear()
    if instead is not None:
        return True
    place = (operator, *_machine(at))
    _shortened[place] += _shortened[place] + 1 < len(_lengths(at, operator))
    return (kernel, *_machine(at), chunk_of(at, operator), tuned) not in _refused


def narrower(kernel: str, at: Any, tuned: Tuning) -> Tuning | None:
    """The next smaller choice: fewer tiles loaded ahead, then narrower ones, None behind the smallest."""
    arch, _, width = at.key.partition("/")
    least = max(16, NARROWEST.get(kernel, 0) // int(width) if arch == "sm_90" else 0)
    if tuned.num_stages > 2:
        return tuned._replace(num_stages=tuned.num_stages - 1)
    if kernel in NARROWEST and least < tuned.BV:
        return tuned._replace(BV=tuned.BV // 2)
    if tuned.num_stages > 1:
        return tuned._replace(num_stages=1, descriptors=0)
    return None


def _fitting(kernel: str, at: Any, tuned: Tuning) -> Tuning:
    chunk = chunk_of(at, _operator(kernel))
    while smaller := _refused.get((kernel, *_machine(at), chunk, tuned)):
        tuned = smaller
    return tuned


def _decided(kernel: str, at: Any, heads: int) -> Tuning | None:
    """The decision for the nearest number of heads; None without one, or an error where decisions are insisted on."""
    if not at.gpu:  # Triton's interpreter
        return None
    width = int(at.key.rpartition("/")[2])
    measured = decisions(at.gpu).get((kernel, width))
    if measured:
        return measured[min(measured, key=lambda bucket: (abs(math.log2(max(heads, 1) / bucket)), bucket))]
    if _is_set("GDNGEN_ASSERT_TUNED"):
        raise RuntimeError(
            f"GDNGEN_ASSERT_TUNED is set, and kernel {kernel} has no decision for operands of {width} bytes in "
            f"{decisions_file(at.gpu)}. {_advice()}"
        )
    return None


def _modelled(kernel: str, at: Any, heads: int) -> Tuning:
    table, row, operator = TUNING[kernel], at.key, _operator(kernel)
    longer = sorted(length for length in _lengths(at, operator) if chunk_of(at, operator) <= length < C)
    row = next((found for length in longer if (found := f"{row}/c{length}") in table), row)
    tuned, few = table[row], table.get(f"{row}/few")
    return few if few and heads * -(-V // few.BV) <= at.processors else tuned


def slug(device_name: str) -> str:
    """A GPU's name as a file name: NVIDIA H200 -> nvidia_h200."""
    return re.sub(r"[^a-z0-9]+", "_", device_name.lower()).strip("_")


def decisions_file(gpu: str) -> Path:
    return FOLDER / "tuned" / f"{slug(gpu)}.json"


def decisions(gpu: str) -> Decisions:
    """The decisions for a GPU, read once per process; one warning where there are none or they cannot be used."""
    with _reading:
        if gpu not in _decisions:
            _decisions[gpu] = _read(gpu)
        return _decisions[gpu]


def _read(gpu: str) -> Decisions:
    path = decisions_file(gpu)
    try:
        found, stale = _usable(json.loads(path.read_text()))
    except FileNotFoundError:
        _warn(f"{FOLDER.name} has no launch choices measured on {gpu}; the cost model's are used")
        return {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        _warn(f"{path} cannot be used ({reason}); the cost model's launch choices are")
        return {}
    if stale:
        _warn(f"{path} was measured with other kernels ({', '.join(stale)}); the cost model's choices are used there")
    return found


def _usable(record: Any) -> tuple[Decisions, list[str]]:
    """(decisions, kernels whose own are of another state of the kernel); an error for a record of another format."""
    if record["format"] != FORMAT:
        raise ValueError(f"format {record['format']!r}, this package reads {FORMAT}")
    current = {kernel for kernel, digest in record["kernels"].items() if digest == digest_of(kernel)}
    found: Decisions = {}
    for one in record["decisions"]:
        tuned = Tuning(**one["choice"])  # a field that this package does not know is a TypeError
        numbers = (one["bytes"], one["heads"], *tuned)
        if not all(type(number) is int for number in numbers) or one["heads"] < 1:
            raise ValueError(f"not a decision: {one}")
        if one["kernel"] in current:
            found.setdefault((one["kernel"], one["bytes"]), {})[one["heads"]] = tuned
    return found, sorted({one["kernel"] for one in record["decisions"]} - current)


def digest_of(kernel: str) -> str:
    """A digest of what a kernel is compiled from: its file and device.py."""
    files = [FOLDER / "kernels" / f"{kernel}.py", FOLDER / "device.py"]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files if file.exists())).hexdigest()[:16]


def _warn(text: str) -> None:
    warnings.warn(f"{text}. {_advice()}", RuntimeWarning, stacklevel=2)


def _advice() -> str:
    return f"Measure them once: gdngen tune {FOLDER}"
