"""Where kernels are tuned and which choices are tried: shapes, calls, candidates."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from gdngen.autotune.handle import Choice
from gdngen.calls import Case
from gdngen.errors import ArgumentError
from gdngen.passes.plan import Kernel, Plan
from gdngen.passes.tile import block, most_warps
from gdngen.spec import Spec

Effort = Literal["none", "quick", "full"]
Outcome = Literal["ok", "wrong", "racy", "hung", "crashed", "unfit"]
QUICK = 10  # candidates of a kernel, the cost model's own choice among them
SHORT = 256  # tokens
WARPS, STAGES = (1, 2, 4, 8, 16), (1, 2, 3, 4)
LOOP = re.compile(r"^\s+for .* in (?:tl\.)?range\(", re.MULTILINE)


class Shape(NamedTuple):
    """``length``x``sequences``:``q_heads``/``v_heads``, as in 8192x1:16/32; length 1 is decode."""

    length: int
    sequences: int
    q_heads: int
    v_heads: int

    @classmethod
    def parse(cls, text: str, spec: Spec) -> "Shape":
        """ArgumentError for a text that is no shape of the Spec."""
        found = re.fullmatch(r"(\d+)x(\d+):(\d+)/(\d+)", text)
        shape = cls(*map(int, found.groups())) if found else None
        if shape is None or min(shape) < 1:
            raise ArgumentError(
                f"shapes: got {text!r}, expected LENGTHxSEQUENCES:Q_HEADS/V_HEADS, such as 8192x1:16/32"
            )
        ratio = max(shape.v_heads // shape.q_heads, 1) if spec.head_ratio == "any" else spec.head_ratio
        if shape.v_heads != ratio * shape.q_heads:
            wanted = "a multiple of" if spec.head_ratio == "any" else f"{ratio} times"
            raise ArgumentError(f"shapes: got {text!r}, but value heads must be {wanted} the query/key heads")
        return shape

    def __str__(self) -> str:
        return f"{self.length}x{self.sequences}:{self.q_heads}/{self.v_heads}"

    @property
    def heads(self) -> tuple[int, int]:
        return self.q_heads, self.v_heads

    @property
    def short(self) -> "Shape":
        """What launches the same kernels with the same choices: neither depends on the length."""
        return self._replace(length=min(self.length, SHORT))

    @property
    def bucket(self) -> int:
        """Sequences times value heads: what decisions are kept by."""
        return self.sequences * self.v_heads


class Point(NamedTuple):
    """A shape and the dtype of q, k, v."""

    shape: Shape
    dtype: str

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}"


class Device(NamedTuple):
    """What runs the candidates.  ``identity`` tells two GPUs of one kind apart; ``keys``: dtype -> row of the table."""

    name: str
    slug: str
    identity: str
    interpreted: bool
    backend: str
    arch: int | str
    warp_size: int
    processors: int
    keys: dict[str, str]
    versions: dict[str, str]


@dataclass(frozen=True)
class Candidate:
    """A kernel of an operator with a launch choice."""

    operator: str
    kernel: str
    fields: tuple[tuple[str, int], ...]

    @property
    def choice(self) -> Choice:
        return dict(self.fields)

    def __str__(self) -> str:
        return f"{self.kernel} {spelled(self.choice)}"


def spelled(choice: Mapping[str, int]) -> str:
    """BV=64 num_warps=4 num_stages=3."""
    return " ".join(f"{name}={value}" for name, value in choice.items())


# ------------------------------------------------------------------------------------------------ calls


def timed_case(spec: Spec, shape: Shape) -> Case:
    """The call at which kernels are timed: decode in a batch, prefill packed."""
    if shape.length == 1 or not spec.varlen:
        return Case(f"tune {shape}", shape.length, shape.sequences)
    ends = tuple(shape.length * n for n in range(shape.sequences + 1))
    return Case(f"tune {shape}", ends[-1], offsets=ends)


def gate_cases(spec: Spec, chunk: int, small: bool, span: int = 0) -> list[Case]:
    """Ragged calls: sequences of one length with strong decays, packed ones with an empty one and rows past the end;
    one in segments of ``span`` tokens.

    Packed tokens are a multiple of 16 in all, so that strides are as those of long calls: the gated code is the timed.
    """
    marks = (1, 4, -20.0) if spec.gate and spec.fused_gate == "none" and spec.beta != "dt" else None
    dense = Case("gate, ragged", chunk + 5 if small else 2 * chunk + 9, 1 if small else 2, marks=marks)
    ends = (0, 3, 3, chunk + 5) if small else (0, 5, 5, chunk + 20, 3 * chunk + 29)
    packed = Case("gate, packed", -(-(ends[-1] + 1) // 16) * 16, offsets=ends)
    long = Case("gate, segments", 2 * span + chunk + 5, segmented=True)
    return [dense, *([packed] if spec.varlen else []), *([long] if span and not small else [])]


def operators_at(plan: Plan, shape: Shape) -> list[str]:
    """The operators that are tuned at a shape: at length 1 decode, else prefill and its backward."""
    names = ("recurrent",) if shape.length == 1 else ("chunk", "chunk_backward")
    return [operator.name for operator in plan.operators if operator.name in names]


# ------------------------------------------------------------------------------------------------ candidates


def candidates(kernel: Kernel, source: str, plan: Plan, own: Choice, effort: Effort) -> list[Choice]:
    """Choices to try, the cost model's ``own`` first; ``quick``: few, its neighbours, the likely ones first.

    Fields of a choice that are not known here stay as the cost model has them.
    """
    ranges = {name: values for name, values in _ranges(kernel, source, plan, own).items() if name in own}
    if effort == "full":
        names = list(ranges)
        found = [own | dict(zip(names, values)) for values in itertools.product(*ranges.values())]
        return [own, *(choice for choice in found if choice != own)]
    return list(itertools.islice(_neighbours(own, ranges), QUICK))


def _ranges(kernel: Kernel, source: str, plan: Plan, own: Choice) -> dict[str, list[int]]:
    """Field -> values in order, the cost model's among them."""
    widest = max(block(plan.spec.value_dim), own["BV"])
    tiles = [own["BV"]]
    if own["BV"] and (kernel.split_v or kernel.is_tiled):
        least = 8 if kernel.loop == "tokens" else 16  # what a matrix product takes
        tiles = [1 << n for n in range(int(math.log2(least)), int(math.log2(widest)) + 1)]
    # Products with decays need a warp for each block of 16 tokens; without a loop there is nothing to load ahead.
    warps = [own["num_warps"]]
    if not kernel.has_decayed_products:
        most = max(most_warps(kernel, plan.chunk), own["num_warps"])
        warps = [w for w in WARPS if own["num_warps"] / 4 <= w <= most]
    stages = list(STAGES) if LOOP.search(source) and kernel.loop != "tokens" else [own["num_stages"]]
    ranges = {"BV": tiles, "num_warps": warps, "num_stages": stages}
    if own.get("descriptors"):  # the cost model has them where the target has
        ranges["descriptors"] = [0, 1]
    return {name: sorted({*values, own[name]}) for name, values in ranges.items()}


def _neighbours(own: Choice, ranges: Mapping[str, list[int]]) -> Iterator[Choice]:
    """The own choice, then as much work for each thread in wider or narrower tiles, then with one field moved by one
    step, then with two moved."""
    steps = [(name, step) for step in (1, -1) for name in ("BV", "num_warps", "num_stages", "descriptors")]
    steps = [(name, step) for name, step in steps if name in ranges]
    pairs = [pair for pair in itertools.combinations(steps, 2) if pair[0][0] != pair[1][0]]
    alike = [pair for pair in pairs if {name for name, _ in pair} == {"BV", "num_warps"} and pair[0][1] == pair[1][1]]
    seen: list[Choice] = []
    for moves in [(), *alike, *((step,) for step in steps), *pairs]:
        choice = dict(own)
        for name, step in moves:
            values = ranges[name]
            place = values.index(own[name]) + step
            choice[name] = values[place] if 0 <= place < len(values) else own[name]
        if choice not in seen:
            seen.append(choice)
            yield choice
