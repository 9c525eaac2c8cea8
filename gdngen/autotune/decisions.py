"""Decisions: tuned/<gpu>.json of a package, reviewed and committed; a new tuning replaces only what it measured."""

import contextlib
import json
import os
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdngen import kept
from gdngen.autotune.store import Record
from gdngen.errors import naming

Choice = dict[str, int]


@dataclass(frozen=True)
class Decision:
    """The launch choice of a kernel for operands of ``bytes`` and about ``heads`` (sequences times value heads)."""

    kernel: str
    bytes: int
    heads: int
    choice: Choice
    microseconds: float

    @property
    def place(self) -> tuple[str, int, int]:
        return self.kernel, self.bytes, self.heads

    def record(self) -> dict[str, Any]:
        values = {"kernel": self.kernel, "bytes": self.bytes, "heads": self.heads, "choice": dict(self.choice)}
        return values | {"microseconds": float(f"{self.microseconds:.4g}")}


def winner(found: Iterable[tuple[Choice, Sequence[Record]]]) -> tuple[Choice, float, float] | None:
    """(choice, microseconds, spread) of the fastest that passed the gate at every shape; geometric mean over shapes."""
    times: list[tuple[float, int, Choice, float]] = []
    for choice, records in found:
        good = [r for r in records if r.outcome == "ok" and r.microseconds is not None and r.microseconds > 0]
        if good and len(good) == len(records):
            mean = statistics.geometric_mean([r.microseconds for r in good if r.microseconds])
            times.append((mean, len(times), choice, max(r.spread or 0.0 for r in good)))
    if not times:
        return None
    mean, _, choice, spread = min(times, key=lambda entry: entry[:2])
    return choice, mean, spread


def read(file: Path, digests: Mapping[str, str]) -> list[Decision]:
    """The decisions of a file that were measured with these kernels; none from a file that cannot be read."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        record = json.loads(file.read_text())
        if record["format"] == kept.FORMAT:
            found = [Decision(**one) for one in record["decisions"]]
            return [one for one in found if record["kernels"].get(one.kernel) == digests.get(one.kernel, "")]
    return []


def merged(old: Iterable[Decision], new: Iterable[Decision]) -> list[Decision]:
    """All of ``new``, and what ``old`` has for other kernels, heads or bytes; in order."""
    found = {one.place: one for one in [*old, *new]}
    return [found[place] for place in sorted(found)]


def text(gpu: str, versions: Mapping[str, str], digests: Mapping[str, str], decisions: Iterable[Decision]) -> str:
    """A decisions file: a line for each decision, so that differences can be reviewed."""
    decisions = list(decisions)
    kernels = {kernel: digests[kernel] for kernel in sorted({one.kernel for one in decisions})}
    head = json.dumps({"format": kept.FORMAT, "gpu": gpu, "versions": dict(versions), "kernels": kernels}, indent=2)
    rows = ",\n".join(f"    {json.dumps(one.record())}" for one in decisions)
    return head.removesuffix("\n}") + ',\n  "decisions": [\n' + rows + "\n  ]\n}\n"


def write(file: Path, content: str) -> None:
    """Readers see the old file or the new one, never a part; OSError where it cannot be written."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with naming(file), os.fdopen(handle, "w") as stream:
            stream.write(content)
        os.chmod(name, 0o644)
        os.replace(name, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
