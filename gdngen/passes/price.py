"""What a cut costs on a target: bytes, FLOPs, and the dependent chain of the sequential steps.

Bytes and FLOPs alone rank wrongly when programs are few: a scan takes (chunks) x (chain of dependent products) steps
however fast memory and matrix units are.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gdngen.ir.graph import Graph, Ref
from gdngen.ir.ops import flops
from gdngen.ir.text import value_names
from gdngen.passes.fuse import Cut
from gdngen.passes.plan import Kernel
from gdngen.passes.precision import keeps_inverse
from gdngen.spec import Spec
from gdngen.target import Target

LAUNCH_SECONDS = 4e-6
MEMORY_EFFICIENCY = 0.7  # tiles are small and do not overlap with products of the same program
MATRIX_EFFICIENCY = 0.35  # share of the matrix rate that chains of small products reach
INVERSE_CHAIN = 8  # an inverse in a scan is as long as this many dependent products
DECAYED_CHAIN = 12  # a product with decays per channel likewise: two for every doubling of blocks of tokens
PARALLEL_IN_SCAN = 12  # a product in a scan that does not read the state and feeds another: its way to shared memory
INVERSE_WITH_TILES = 2.2  # how much longer a kernel with an inverse takes when it also holds tiles of v
CAST_IN_SCAN = 4  # a tile that is loaded, computed on and brought to shared memory again
SPLIT_TILE = 64


@dataclass(frozen=True)
class Workload:
    """A shape to price at: sequences of equal length, query/key heads, value heads."""

    sequences: int
    length: int
    q_heads: int
    v_heads: int

    def __str__(self) -> str:
        return f"{self.sequences} x {self.length} tokens, heads {self.q_heads}/{self.v_heads}"


WORKLOADS = (
    Workload(1, 32768, 16, 64),
    Workload(4, 8192, 16, 64),
    Workload(1, 8192, 16, 64),
    Workload(1, 32768, 16, 32),
    Workload(8, 1024, 16, 32),
    Workload(1, 32768, 2, 8),
)


class Price(NamedTuple):
    """Per token and value head: bytes and FLOPs; per chunk: products in the scan and the longest chain of them."""

    bytes: float
    flops: float
    scan_flops: float
    scan_products: int
    chain: int
    seconds: float

    @property
    def key(self) -> tuple[float, ...]:
        return (self.bytes, self.scan_flops, float(self.chain), self.flops)


def extents(spec: Spec, chunk: int) -> dict[str, int]:
    return {"i": chunk, "j": chunk, "l": chunk, "k": spec.key_dim, "v": spec.value_dim}


def price(cut: Cut, spec: Spec, chunk: int, target: Target, workload: Workload) -> Price:
    """The price of a cut at one shape, 16-bit inputs: the sum over its kernels."""
    wide = wide_values(cut)
    prices = [kernel_price(kernel, spec, chunk, target, workload, wide) for kernel in cut.kernels]
    return Price(*map(sum, zip(*prices)))


def kernel_price(
    kernel: Kernel, spec: Spec, chunk: int, target: Target, workload: Workload, wide: Collection[str]
) -> Price:
    """The price of one kernel; ``wide``: stored values that take four bytes per element."""
    graph, sizes = kernel.graph, extents(spec, chunk)
    heads = workload.sequences * workload.length * workload.v_heads
    moved = kernel_bytes(graph, sizes, workload.v_heads / workload.q_heads, wide) / chunk
    work = sum(flops(graph, i, sizes) for i in range(len(graph.nodes))) / chunk
    time = moved * heads / (target.bandwidth * MEMORY_EFFICIENCY)
    time += work * heads / (target.matrix_flops * MATRIX_EFFICIENCY)
    if any(node.op == "uli" for node in graph.nodes) and any("v" in node.axes for node in graph.nodes):
        time *= INVERSE_WITH_TILES
    if kernel.loop != "scan":
        return Price(moved, work, 0.0, 0, 0, time + LAUNCH_SECONDS)
    own, longest = sum(map(graph.is_product, range(len(graph.nodes)))), longest_chain(graph)
    programs = workload.sequences * workload.v_heads * math.ceil(spec.value_dim / SPLIT_TILE)
    waves = math.ceil(programs / target.processors)
    extra = PARALLEL_IN_SCAN * _parallel(graph) + CAST_IN_SCAN * sum(node.op == "cast" for node in graph.nodes)
    step = (own + longest + extra) * target.dot_seconds + target.load_seconds
    time = max(time, waves * math.ceil(workload.length / chunk) * step)
    return Price(moved, work, work, own, longest, time + LAUNCH_SECONDS)


def wide_values(cut: Cut) -> set[str]:
    """Stored tiles that will be kept in fp32: inverses and what they made."""
    graph, names = cut.graph, value_names(cut.graph)
    return {name for i, name in cut.written() if keeps_inverse(graph, Ref(i, graph.nodes[i].axes), names, set())}


def kernel_bytes(graph: Graph, sizes: dict[str, int], ratio: float, wide: Collection[str]) -> float:
    """Bytes one chunk of one value head moves: per-chunk inputs and outputs; q and k are shared by a group of heads."""
    total = 0.0
    nodes = [(str(node.attrs[0]), node) for node in graph.nodes if node.op == "input"]
    nodes += [(name, graph[ref]) for name, ref in graph.outputs]
    for name, node in nodes:
        if "n" in node.grid:
            width = 2 if len(node.axes) > 1 and name not in wide else 4
            share = 1.0 if "r" in node.grid else 1.0 / ratio
            total += width * share * math.prod(sizes[axis] for axis in node.axes)
    return total


def _parallel(graph: Graph) -> int:
    """Matrix products and inverses without the state that, perhaps after elementwise steps, are operands of others."""
    feeding: set[int] = set()
    for i in reversed(range(len(graph.nodes))):
        readers = graph.dataflow.successors(i)
        if any(graph.is_heavy(r) or (r in feeding and not graph.carried[r]) for r in readers):
            feeding.add(i)
    return sum(1 for i in feeding if graph.is_heavy(i) and not graph.carried[i])


def longest_chain(graph: Graph) -> int:
    """Matrix products in the longest dependent chain of one step; an inverse counts as several."""
    length: list[int] = []
    for i, node in enumerate(graph.nodes):
        own = {"uli": INVERSE_CHAIN, "decayed": DECAYED_CHAIN}.get(graph.kind(i), int(graph.is_product(i)))
        length.append(max((length[ref.value] for ref in node.args), default=0) + own)
    return max(length, default=0)


def pareto(priced: list[tuple[Cut, Price]]) -> list[tuple[Cut, Price]]:
    """Those that no other beats in every respect, each name once, cheapest first."""
    kept: dict[tuple[float, ...], tuple[Cut, Price]] = {}
    for cut, cost in sorted(priced, key=lambda pair: (pair[1].seconds, pair[0].name, pair[0].forms)):
        beaten = any(
            all(a <= b for a, b in zip(other.key, cost.key, strict=True)) and other.key != cost.key
            for _, other in priced
        )
        if not beaten:
            kept.setdefault(cost.key, (cut, cost))
    return list(kept.values())


def seconds_overall(prices: Sequence[Price]) -> float:
    """Geometric mean of the predicted times."""
    return math.exp(sum(math.log(price.seconds) for price in prices) / len(prices))
