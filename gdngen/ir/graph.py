"""Values, operands and graphs.

A value has *tile axes*: tokens ``i j l`` and channels ``k v``; and *grid axes*: ``b`` sequence, ``n`` chunk, ``h``
query/key head, ``r`` value head within its group.  An operand is a reference: a value and the axis names it is read
under, so ``X[j,i]`` is a transpose and ``g[j]`` a relabel; missing axes broadcast.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import networkx as nx

TOKENS = "ijl"
CHANNELS = "kv"
AXES = TOKENS + CHANNELS
GRID = "bnhr"


def ordered(axes: Iterable[str]) -> str:
    """Tile axes in their standard order, each once."""
    return "".join(sorted(set(axes), key=AXES.index))


def ordered_grid(axes: Iterable[str]) -> str:
    return "".join(sorted(set(axes), key=GRID.index))


def is_virtual(axes: str) -> bool:
    """Two token axes and a channel: never a value of its own, only an operand of a contraction."""
    return sum(axis in TOKENS for axis in axes) >= 2 and any(axis in CHANNELS for axis in axes)


@dataclass(frozen=True, order=True)
class Ref:
    """Operand: the value's id and the names its axes are read under, in the value's axis order."""

    value: int
    axes: str

    def renamed(self, names: dict[str, str]) -> "Ref":
        return Ref(self.value, "".join(names.get(axis, axis) for axis in self.axes))


@dataclass(frozen=True)
class Node:
    """One value: an op of the table in ops.py applied to operands.  ``attrs`` are the op's compile-time arguments."""

    op: str
    args: tuple[Ref, ...]
    attrs: tuple[str | float, ...]
    axes: str
    grid: str

    @property
    def summed(self) -> str:
        """Axes (tile or grid) that an ``ein`` sums over."""
        return str(self.attrs[1]) if self.op == "ein" else ""

    @property
    def tokens(self) -> str:
        return "".join(axis for axis in self.axes if axis in TOKENS)


@dataclass(frozen=True)
class Carry:
    """A value handed from chunk to chunk: ``init`` is the declared input that seeds it, ``final`` what it leaves."""

    name: str
    out: Ref
    init: Ref
    final: str
    reverse: bool = False


@dataclass(frozen=True)
class Decayed:
    """A contraction with a decay E[i,j,c] per channel, over (j, i] and 0 for j > i.

    Result [i,j] = sum c: first[i,c] * second[j,c] * E[i,j,c], or [i,c] = sum j: first[i,j] * second[j,c] * E[i,j,c],
    or, ``later``, the same with E[j,i,c].  ``axes`` are the result's, row before column.
    """

    gate: int
    axes: str
    first: Ref
    second: Ref
    later: bool

    @property
    def is_gram(self) -> bool:
        return all(axis in TOKENS for axis in self.axes)


@dataclass(frozen=True)
class Graph:
    """What one chunk computes.  ``names`` are hints (the paper's symbols) and not part of the graph's identity."""

    nodes: tuple[Node, ...]
    outputs: tuple[tuple[str, Ref], ...]
    carries: tuple[Carry, ...]
    chunked: bool = True
    names: tuple[str, ...] = field(default=(), compare=False)

    def __getitem__(self, ref: Ref | int) -> Node:
        return self.nodes[ref.value if isinstance(ref, Ref) else ref]

    def __str__(self) -> str:
        from gdngen.ir.text import render

        return render(self)

    @cached_property
    def digest(self) -> str:
        """Hash of the text without name hints."""
        from gdngen.ir.text import render

        return hashlib.sha256(render(self, hints=False).encode()).hexdigest()[:16]

    @cached_property
    def inputs(self) -> dict[str, int]:
        """Declared inputs by name, in order."""
        return {str(node.attrs[0]): i for i, node in enumerate(self.nodes) if node.op == "input"}

    @cached_property
    def scalars(self) -> list[str]:
        """Inputs that are one number for the whole call."""
        return [name for name, i in self.inputs.items() if not self.nodes[i].axes and not self.nodes[i].grid]

    @cached_property
    def carry_ids(self) -> dict[str, int]:
        """Carried values by name."""
        return {str(node.attrs[0]): i for i, node in enumerate(self.nodes) if node.op == "carry_in"}

    @cached_property
    def dataflow(self) -> nx.MultiDiGraph:
        """The same DAG for networkx: an edge per operand, from producer to consumer."""
        flow = nx.MultiDiGraph()
        flow.add_nodes_from(range(len(self.nodes)))
        for i, node in enumerate(self.nodes):
            flow.add_edges_from((ref.value, i) for ref in node.args)
        return flow

    @cached_property
    def carried(self) -> dict[int, frozenset[str]]:
        """For each value, the carries it depends on: what has none is chunk-parallel, the rest is sequential."""
        reach: dict[int, set[str]] = {i: set() for i in range(len(self.nodes))}
        for name, source in self.carry_ids.items():
            for i in {source} | nx.descendants(self.dataflow, source):
                reach[i].add(name)
        return {i: frozenset(names) for i, names in reach.items()}

    def reordered(self, order: Sequence[int]) -> "Graph":
        """The values of ``order``, operands before their uses, renumbered in that order."""
        place = {old: new for new, old in enumerate(order)}

        def moved(ref: Ref) -> Ref:
            return Ref(place[ref.value], ref.axes)

        nodes = tuple(replace(self.nodes[i], args=tuple(moved(ref) for ref in self.nodes[i].args)) for i in order)
        outputs = tuple((name, moved(ref)) for name, ref in self.outputs)
        carries = tuple(replace(c, out=moved(c.out), init=moved(c.init)) for c in self.carries)
        names = tuple(self.names[i] for i in order) if self.names else ()
        return Graph(nodes, outputs, carries, self.chunked, names)

    def roots(self) -> list[Ref]:
        """Every reference that leaves the graph."""
        return [ref for _, ref in self.outputs] + [ref for carry in self.carries for ref in (carry.out, carry.init)]

    def kind(self, value: int) -> str:
        """How an ``ein`` computes: product, group_sum, reduce, dot (a matrix product) or decayed (one with a decay per
        channel between tokens)."""
        node = self.nodes[value]
        if node.op != "ein":
            return node.op
        if not node.summed:
            return "product"
        if set(node.summed) <= set(GRID):
            return "group_sum"
        if any(is_virtual(ref.axes) for ref in node.args):
            return "decayed"
        names = set().union(*(ref.axes for ref in node.args))
        return "reduce" if len(node.args) == 1 or any(set(ref.axes) == names for ref in node.args) else "dot"

    def decayed(self, value: int) -> "Decayed":
        """The operands of a decayed contraction."""
        node = self.nodes[value]
        (decay,) = (ref for ref in node.args if is_virtual(ref.axes))
        others = [ref for ref in node.args if ref != decay]
        row, column = decay.axes[0], decay.axes[1]
        gate = self[decay].args[0].value
        if node.tokens == node.axes:
            first, second = sorted(others, key=lambda ref: row not in ref.axes)
            return Decayed(gate, row + column, first, second, False)
        matrix, tile = sorted(others, key=lambda ref: -len([axis for axis in ref.axes if axis in TOKENS]))
        return Decayed(gate, node.axes, matrix, tile, node.axes[0] == column)

    def is_product(self, value: int) -> bool:
        """A matrix product."""
        return self.kind(value) == "dot" or self.has_decay(value)

    def has_decay(self, value: int) -> bool:
        """A matrix product with a decay per channel between its tokens."""
        return self.kind(value) in ("decayed", "crossing")

    def is_heavy(self, value: int) -> bool:
        """A matrix product or an inverse: what takes the time."""
        return self.nodes[value].op == "uli" or self.is_product(value)

    def is_symmetric(self, value: int) -> bool:
        """A matrix plus its own transpose: it may be read either way round."""
        node = self.nodes[value]
        if node.op != "add" or len(node.args) != 2 or node.attrs[0] != node.attrs[1]:
            return False
        one, two = node.args
        return one.value == two.value and one.axes == two.axes[::-1]
