"""Fusion: cut one graph into kernels.

A cut is the set of values written to memory.  Each kernel computes what it needs by walking back to inputs, stored
values or its own carry, so that recomputation is natural and legality is reachability: ``prepare`` (chunk-parallel,
before), ``scan`` (over chunks, holds the carry), ``output`` (chunk-parallel, after).
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import networkx as nx

from gdngen.errors import PinError
from gdngen.ir.graph import Carry, Graph, Node, Ref
from gdngen.ir.ops import UNARY
from gdngen.ir.text import value_names
from gdngen.passes.plan import Kernel

PREPARE, SCAN, OUTPUT = "prepare", "scan", "output"
ELEMENTWISE = ("add", "clamp", *UNARY)
MOST_STORED = 4


@dataclass(frozen=True)
class Cut:
    """A legal choice of stored values.  ``forms`` are the rewrites under which the values exist."""

    name: str
    forms: tuple[str, ...]
    graph: Graph
    stored: tuple[int, ...]
    rows: tuple[int, ...]  # what goes along where a prepare kernel runs anyway
    kernels: tuple[Kernel, ...]

    def written(self) -> list[tuple[int, str]]:
        """Every stored value with its name."""
        names = value_names(self.graph)
        return [(i, names[i]) for i in (*self.stored, *self.rows)]

    def writer(self, value: int) -> str:
        return SCAN if self.graph.carried[value] else PREPARE


@dataclass(frozen=True)
class Cutter:
    """Enumerates the legal cuts of one graph."""

    graph: Graph
    forms: tuple[str, ...] = ()

    @cached_property
    def names(self) -> list[str]:
        return value_names(self.graph)

    @cached_property
    def heavy(self) -> set[int]:
        """Matrix products and inverses: what is worth storing rather than computing twice."""
        graph = self.graph
        return {i for i in range(len(graph.nodes)) if graph.is_heavy(i)}

    @cached_property
    def candidates(self) -> list[int]:
        """Two-axis values behind heavy work, and the entering state.

        Of a chain of elementwise steps only the last is listed (the smallest representative: P, not Q K^T), and a
        product of such a value with vectors is left out (cheap to redo).
        """
        graph, flow = self.graph, self.graph.dataflow
        leaves = {ref.value for ref in graph.roots()}
        wide = [i for i, node in enumerate(graph.nodes) if len(node.axes) == 2]
        behind = set().union(*({i} | nx.descendants(flow, i) for i in self.heavy)) if self.heavy else set()
        kept = []
        for i in wide:
            node = graph.nodes[i]
            if node.op == "carry_in":
                kept.append(i)
            elif i in behind and i not in leaves and node.op != "input":
                readers = set(flow.successors(i))
                if not (len(readers) == 1 and self._continues(i, next(iter(readers)))):
                    kept.append(i)
        return [i for i in kept if not self._redone_cheaply(i, kept)]

    @cached_property
    def rows(self) -> list[int]:
        """What is dear to redo in every step of a scan and cheap to hand over: decays per token, normalised q and k."""
        graph = self.graph
        return [
            i
            for i, node in enumerate(graph.nodes)
            if (node.op == "decay" and node.axes in ("i", "")) or (node.op == "cast" and not graph.carried[i])
        ]

    def _continues(self, i: int, reader: int) -> bool:
        node = self.graph.nodes[reader]
        elementwise = node.op in ELEMENTWISE or self.graph.kind(reader) == "product"
        same_kernel = self.graph.carried[i] == self.graph.carried[reader]
        return elementwise and same_kernel and node.axes == self.graph.nodes[i].axes

    def _redone_cheaply(self, i: int, kept: list[int]) -> bool:
        if self.graph.kind(i) != "product":
            return False
        wide = [r.value for r in self.graph.nodes[i].args if len(r.axes) == 2 and self.graph[r].op != "tri"]
        return len(wide) == 1 and (wide[0] in kept or self.graph.nodes[wide[0]].op == "input")

    def all(self) -> Iterable[Cut]:
        """Every legal cut with at most four stored values, the one that stores nothing first."""
        for count in range(MOST_STORED + 1):
            for stored in itertools.combinations(self.candidates, count):
                cut = self.cut(stored)
                if cut is not None:
                    yield cut

    def cut(self, stored: tuple[int, ...]) -> Cut | None:
        """The cut that stores exactly these values, or None when a kernel would need a carry it does not hold, or
        when a stored value is not read by another kernel."""
        carried = self.graph.carried
        reads_state = any(self.graph.nodes[i].op == "carry_in" for i in stored)
        after = [name for name, _ in self.graph.outputs] if reads_state else []
        rows = self._rows_of(stored)
        kernels, read = [], set()
        for kernel in (PREPARE, SCAN, OUTPUT):
            writes = [i for i in stored + rows if (SCAN if carried[i] else PREPARE) == kernel]
            outputs = (
                after if kernel == OUTPUT else [n for n, _ in self.graph.outputs if kernel == SCAN and n not in after]
            )
            if not writes and not outputs and kernel != SCAN:
                continue
            found = self._kernel(kernel, writes, outputs, [i for i in stored + rows if i not in writes])
            if found is None:
                return None
            made, used = found
            kernels.append(made)
            read |= used
        if read != set(stored + rows):
            return None
        name = "+".join(self.names[i] for i in stored) or "none"
        return Cut(name, self.forms, self.graph, stored, rows, tuple(kernels))

    def _rows_of(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """What scan or output would have to redo, when a prepare kernel runs anyway."""
        if all(self.graph.carried[i] for i in stored):
            return ()
        targets = [carry.out.value for carry in self.graph.carries] + [ref.value for _, ref in self.graph.outputs]
        targets += [i for i in stored if self.graph.carried[i]]
        needed = self._needed(targets, set(stored) | set(self.rows))
        return tuple(i for i in self.rows if i in needed)

    def _kernel(
        self, name: str, writes: list[int], outputs: list[str], elsewhere: list[int]
    ) -> tuple[Kernel, set[int]] | None:
        """The kernel's own graph and the stored values it reads."""
        graph = self.graph
        roots = [graph_ref for n, graph_ref in graph.outputs if n in outputs]
        roots += [Ref(i, graph.nodes[i].axes) for i in writes]
        carries = [c for c in graph.carries if name == SCAN]
        needed = self._needed([ref.value for ref in roots] + [c.out.value for c in carries], set(elsewhere))
        for i in needed - set(elsewhere):
            if graph.nodes[i].op == "carry_in" and name != SCAN:
                return None
        used = needed & set(elsewhere)
        if any(self.graph.carried[i] for i in used) and name != OUTPUT:
            return None  # a value of this very step's scan cannot be read before it is written
        made = self._extract(needed, used, [*outputs, *(self.names[i] for i in writes)], roots, carries)
        return Kernel(
            name=name,
            loop="scan" if name == SCAN else "chunks",
            text=str(made),
            stores=tuple(self.names[i] for i in writes),
        ), used

    def _needed(self, targets: list[int], elsewhere: set[int]) -> set[int]:
        needed: set[int] = set()
        todo = list(targets)
        while todo:
            i = todo.pop()
            if i not in needed:
                needed.add(i)
                if i not in elsewhere:
                    todo += [ref.value for ref in self.graph.nodes[i].args]
        return needed

    def _extract(
        self, needed: set[int], used: set[int], names: list[str], roots: list[Ref], carries: list[Carry]
    ) -> Graph:
        """The values a kernel computes, and as inputs those it loads; nothing is rewritten on the way."""
        place: dict[int, int] = {}
        nodes: list[Node] = []
        hints: list[str] = []

        def moved(ref: Ref) -> Ref:
            return Ref(place[ref.value], ref.axes)

        inits = {c.init.value for c in carries}
        for i, node in enumerate(self.graph.nodes):
            if i in needed or i in inits:
                place[i] = len(nodes)
                if i in used:
                    nodes.append(Node("input", (), (self.names[i],), node.axes, node.grid))
                else:
                    nodes.append(replace(node, args=tuple(moved(ref) for ref in node.args)))
                hints.append(self.graph.names[i] if self.graph.names and i not in used else "")
        outs = tuple((name, moved(ref)) for name, ref in zip(names, roots, strict=True))
        ends = tuple(Carry(c.name, moved(c.out), moved(c.init), c.final, c.reverse) for c in carries)
        return by_depth(Graph(tuple(nodes), outs, ends, self.graph.chunked, tuple(hints)))


def by_depth(graph: Graph) -> Graph:
    """The same graph in the order that keeps few values in registers.

    Matrix products by how many products they wait for, so that those reading the same operand stand side by side, and
    what the next chunk waits for before what leaves; everything else, loads included, just before what needs it.
    """
    depth: list[int] = []
    heavy = [graph.is_heavy(i) for i in range(len(graph.nodes))]
    for i, node in enumerate(graph.nodes):
        depth.append(max((depth[ref.value] for ref in node.args), default=0) + heavy[i])
    order: list[int] = []
    placed: set[int] = set()

    def place_after_operands(i: int) -> None:
        if i not in placed:
            placed.add(i)
            for ref in graph.nodes[i].args:
                place_after_operands(ref.value)
            order.append(i)

    feeding = {i for carry in graph.carries for i in nx.ancestors(graph.dataflow, carry.out.value)}
    products = [i for i in range(len(graph.nodes)) if heavy[i]]
    for i in sorted(products, key=lambda i: (depth[i], i not in feeding, i)):
        place_after_operands(i)
    for i in range(len(graph.nodes)):
        place_after_operands(i)
    place = {old: new for new, old in enumerate(order)}

    def moved(ref: Ref) -> Ref:
        return Ref(place[ref.value], ref.axes)

    nodes = tuple(replace(graph.nodes[i], args=tuple(moved(ref) for ref in graph.nodes[i].args)) for i in order)
    outputs = tuple((name, moved(ref)) for name, ref in graph.outputs)
    carries = tuple(replace(c, out=moved(c.out), init=moved(c.init)) for c in graph.carries)
    names = tuple(graph.names[i] for i in order) if graph.names else ()
    return Graph(nodes, outputs, carries, graph.chunked, names)


def pinned(cuts: Iterable[Cut], name: str) -> Cut:
    """The cut of that name (stored values joined by +, in any order); PinError lists what can be pinned."""
    cuts = list(cuts)
    wanted = set() if name == "none" else set(name.split("+"))
    for cut in cuts:
        if {n for n in cut.name.split("+") if n != "none"} == wanted:
            return cut
    known = ", ".join(sorted({cut.name for cut in cuts}))
    raise PinError(f"pin cut={name}: no such cut of this graph; the cuts are {known}")
