"""Fusion: cut one graph into kernels.

A cut is the set of values written to memory.  Each kernel computes what it needs by walking back to inputs, stored
values or its own carry, so that recomputation is natural and legality is reachability.  Forward: ``prepare``
(chunk-parallel, before), ``scan`` (over chunks, holds the state), ``output`` (chunk-parallel, after).  Of a joint
gradient graph: ``prepare_backward``, ``states`` (the forward scan without outputs), ``reverse`` (from the last chunk,
holds the state's gradient), ``pairs`` (what has a value for every pair of tokens), ``queries`` (dq), ``gates`` (of
gates per channel) and ``gradients`` (the rest), all chunk-parallel and after the scans.  With a gate per channel the
first kernel, ``decays``, makes the decays and multiplies keys and queries with them, and before ``pairs`` come
``products`` (matrices: those whose products with decays are summed there, and sums over value channels with decays) and
``crossings`` (gradients of gates per value channel between tokens): one kernel would need too many registers.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import networkx as nx

from gdngen.errors import PinError
from gdngen.ir.graph import CHANNELS, GRID, Carry, Graph, Node, Ref, is_virtual
from gdngen.ir.ops import is_elementwise
from gdngen.ir.text import value_names
from gdngen.passes.accumulate import accumulated
from gdngen.passes.order import by_depth, by_need
from gdngen.passes.plan import Kernel, Loop

LATE = ("products", "crossings", "pairs", "queries", "gates", "gradients")  # kernels behind the scans of a joint graph
MOST_STORED = 4
MOST_SETS = 500  # of stored values that are tried one and all; more than any member of the family has
MOST_GROWN = 12  # values that are stored where nothing less can be written
BEAM = 8  # sets of stored values that are grown where there are more
MOST_NAMED = 40  # cuts that an error lists, the best first


class IllegalCut(Exception):
    """Which kernel lacks which value."""


@dataclass(frozen=True)
class Role:
    """A place for a kernel: the carries it holds, and those whose stored values exist when it starts."""

    name: str
    holds: frozenset[str] = frozenset()
    reads: frozenset[str] = frozenset()
    only_decays: bool = False  # makes what is handed over of decays, keys and queries, and nothing else


def roles_of(graph: Graph) -> tuple[Role, ...]:
    """Kernels in launch order, the one that may read everything last."""
    forward, reverse = (frozenset(c.name for c in graph.carries if c.reverse is way) for way in (False, True))
    decays = []
    if any(is_virtual(node.axes) for node in graph.nodes):
        decays = [Role("decays_backward" if reverse else "decays", only_decays=True)]
    if not reverse:
        return *decays, Role("prepare"), Role("scan", forward), Role("output", reads=forward)
    states, scan = Role("states", forward), Role("reverse", reverse, forward)
    late = (Role(name, reads=forward | reverse) for name in LATE)
    return *decays, Role("prepare_backward"), states, scan, *late


@dataclass(frozen=True)
class Cut:
    """A legal choice of stored values.  ``forms`` are the rewrites under which the values exist."""

    name: str
    forms: tuple[str, ...]
    graph: Graph
    stored: tuple[int, ...]
    writers: Mapping[int, str]  # the kernel that writes each of them, and each value that goes along
    kernels: tuple[Kernel, ...]

    def written(self) -> list[tuple[int, str]]:
        """Every stored value with its name."""
        names = stored_names(self.graph)
        return [(i, names[i]) for i in self.writers]


def stored_names(graph: Graph) -> list[str]:
    """What each value is called in memory; an input that is handed on as a vector in fp32 gets a name of its own."""
    return [f"{n}_f" if node.op == "input" else n for n, node in zip(value_names(graph), graph.nodes, strict=True)]


@dataclass(frozen=True)
class Cutter:
    """Enumerates the legal cuts of one graph."""

    graph: Graph
    forms: tuple[str, ...] = ()

    @cached_property
    def names(self) -> list[str]:
        return stored_names(self.graph)

    @cached_property
    def roles(self) -> tuple[Role, ...]:
        return roles_of(self.graph)

    @cached_property
    def candidates(self) -> list[int]:
        """Two-axis values behind heavy work, and the entering state.

        Of a chain of elementwise steps only the last is listed (the smallest representative: P, not Q K^T), and a
        product of such a value with vectors is left out (cheap to redo)."""
        graph, flow = self.graph, self.graph.dataflow
        leaves = {ref.value for ref in graph.roots()}
        wide = [i for i, node in enumerate(graph.nodes) if len(node.axes) == 2]
        heavy = [i for i in range(len(graph.nodes)) if graph.is_heavy(i)]
        behind = set(heavy).union(*(nx.descendants(flow, i) for i in heavy))
        kept = []
        for i in wide:
            node = graph.nodes[i]
            if node.op == "carry_in":
                kept.append(i)
            elif i in behind and i not in leaves and node.op != "input":
                readers = set(flow.successors(i))
                if not (len(readers) == 1 and self._continues(i, next(iter(readers)))):
                    kept.append(i)
        kept = [i for i in kept if not self._redone_cheaply(i, kept)]
        if self.joint:  # what only gradients need is computed once: nothing to store
            own = {i for i in self.scanned if "r" in graph.nodes[i].grid and self._has_symbol(i)}
            made = self.matrices_of_decayed_sums | {i for i in wide if graph.kind(i) == "decayed" and self._is_pair(i)}
            kept = sorted((set(kept) & own) | {i for i in made if not graph.carried[i]})
            kept = [i for i in kept if {graph.nodes[reader].op for reader in flow.successors(i)} != {"uli"}]
        return kept

    @cached_property
    def outputs(self) -> dict[str, str]:
        """Outputs that the last kernel does not give."""
        if not self.joint:
            return {}
        graph = self.graph
        cumulated = [i for i, n in enumerate(graph.nodes) if n.op == "cumsum" and set(n.axes) & set(CHANNELS)]
        gates = set(cumulated).union(*(nx.descendants(graph.dataflow, i) for i in cumulated))
        found = {name: "gates" for name, ref in graph.outputs if ref.value in gates}
        apart = "products" if self.after_decayed_sums else "pairs"  # then pairs go over slices of k
        return {"dq": "queries"} | {n: apart for n, ref in graph.outputs if ref.value in self.matrices} | found

    @cached_property
    def matrices(self) -> set[int]:
        """Values for every pair of tokens that no scan needs, and tiles of v that are computed from them."""
        flow, nodes = self.graph.dataflow, self.graph.nodes
        found = {i for i, node in enumerate(nodes) if node.axes == "ij" and i not in self.scanned}
        return found | {i for i in set().union(*(nx.descendants(flow, i) for i in found)) if nodes[i].axes == "iv"}

    @cached_property
    def scanned(self) -> set[int]:
        """What the next state, or the state's next gradient, is computed from."""
        ends = {carry.out.value for carry in self.graph.carries}
        return ends.union(*(nx.ancestors(self.graph.dataflow, end) for end in ends))

    @cached_property
    def late(self) -> dict[int, str]:
        """What kernels leave to later ones, so that each holds few values in registers."""
        graph, flow = self.graph, self.graph.dataflow
        if not self.joint:
            return {}
        sums = {i for i in self.matrices if "r" in graph.nodes[i].summed}
        results = {name: ref.value for name, ref in graph.outputs}
        dq = results.pop("dq")
        others = set().union(*(nx.ancestors(flow, i) for i in results.values()))
        queries = {i for i in nx.ancestors(flow, dq) if graph.nodes[i].axes == "ik" and graph.carried[i]}
        rows = self._rows_from(self.matrices - sums, others) - self.after_decayed_sums
        tiles = {i for i in self.after_decayed_sums if not self.after_decayed_sums.issuperset(flow.successors(i))}
        found = dict.fromkeys(sums | rows | tiles, "pairs")
        found |= dict.fromkeys(self._apart | self._tiles_of_crossings, "products") | dict.fromkeys(
            self._crossings_of_values, "crossings"
        )
        return found | dict.fromkeys(self._rows_from(queries, others), "queries")

    @cached_property
    def _apart(self) -> set[int]:
        """Of the matrices those that decayed sums read, and those that are sums over channels with decays."""
        graph = self.graph
        grams = {i for i in self.matrices if graph.kind(i) == "decayed" and self._is_pair(i)}
        return {i for i in (self.matrices_of_decayed_sums & self.matrices) | grams if graph.carried[i]}

    @cached_property
    def _tiles_of_crossings(self) -> set[int]:
        """Tiles of v that crossings and sums with decays both read: made once, beside the sums."""
        graph = self.graph
        read = [ref.value for n in graph.nodes if n.op == "crossing" and "v" in n.axes for ref in n.args[1:3]]
        bare = {self._bare(i) for i in read}
        sums = set().union(*(nx.ancestors(graph.dataflow, i) for i in self._apart))
        return {i for i in bare & sums if graph.carried[i] and graph.nodes[i].op != "input"}

    @cached_property
    def _crossings_of_values(self) -> set[int]:
        """Gradients of gates per value channel between tokens: crossings, or sums of nothing but them."""
        graph = self.graph
        found = {i for i, n in enumerate(graph.nodes) if graph.kind(i) == "crossing" and "v" in n.axes}
        sums = {i for i, n in enumerate(graph.nodes) if n.op == "add" and {ref.value for ref in n.args} <= found}
        return sums | {i for i in found if not sums & set(graph.dataflow.successors(i))}

    @cached_property
    def after_decayed_sums(self) -> set[int]:
        """What follows from sums over tokens with a decay per key, which take many registers, and from nothing else."""
        graph, found = self.graph, set[int]()
        pairs = {i for i in self.matrices if self._is_pair(i)}
        given = nx.descendants(graph.dataflow, graph.inputs["do"]) | {graph.inputs["do"]}
        for i, node in enumerate(graph.nodes):
            late = {ref.value for ref in node.args if graph.carried[ref.value] or ref.value in given}
            summed = graph.has_decay(i) and "k" in node.axes
            within = node.axes in ("i", "ik") and not set(node.summed) & set(GRID) and i not in self.scanned
            if late and within and late <= found | pairs and (summed or late & found or node.axes == "i"):
                found.add(i)
        return found if any("k" in graph.nodes[i].axes for i in found) else set()

    def _rows_from(self, wide: set[int], wanted: set[int]) -> set[int]:
        """The sums along a row of wide values that are wanted, and of these what is computed from nothing else."""
        graph = self.graph
        rows = {i for i in wanted if len(graph.nodes[i].axes) < 2 and wide & {ref.value for ref in graph.nodes[i].args}}
        for i in sorted(wanted):
            inner = {ref.value for ref in graph.nodes[i].args if graph[ref].grid}
            if inner and inner <= rows:
                rows = rows - inner | {i}
        return rows & wanted

    @cached_property
    def matrices_of_decayed_sums(self) -> set[int]:
        """Matrices that decayed sums read, perhaps in both orders: only what is loaded may lie either way."""
        graph = self.graph
        decayed = [graph.decayed(i) for i in range(len(graph.nodes)) if graph.kind(i) == "decayed"]
        read = [found.first for found in decayed if not found.is_gram]
        read += [node.args[0] for node in graph.nodes if node.op == "crossing"]
        return {self._bare(matrix.value) for matrix in read} - set(graph.inputs.values())

    def _is_pair(self, value: int) -> bool:
        """A number for every pair of tokens."""
        return self.graph.nodes[value].axes == "ij"

    def _bare(self, value: int) -> int:
        """A matrix without the masks and vectors that it is multiplied with."""
        wide = [r.value for r in self.graph.nodes[value].args if len(r.axes) == 2 and self.graph[r].op != "tri"]
        return self._bare(wide[0]) if self.graph.kind(value) == "product" and len(wide) == 1 else value

    @cached_property
    def joint(self) -> bool:
        return any(carry.reverse for carry in self.graph.carries)

    @cached_property
    def rows(self) -> list[int]:
        """What is dear to redo in every step of a scan and cheap to hand over: decays, normalised q and k, and tiles
        that are the product of both."""
        graph = self.graph
        return [
            i
            for i, node in enumerate(graph.nodes)
            if (node.op == "decay" and not is_virtual(node.axes) and node.axes != "ij")
            or (node.op == "cast" and not graph.carried[i])
            or (graph.kind(i) == "product" and not graph.carried[i] and self._has_decay(node))
        ]

    def _has_decay(self, node: Node) -> bool:
        """A tile times a decay per channel."""
        return len(node.args) > 1 and any(
            self.graph[ref].op == "decay" and any(axis in CHANNELS for axis in ref.axes) for ref in node.args
        )

    def _has_symbol(self, i: int) -> bool:
        return self.graph.nodes[i].op == "carry_in" or bool(self.graph.names and self.graph.names[i])

    def _continues(self, i: int, reader: int) -> bool:
        node = self.graph.nodes[reader]
        elementwise = is_elementwise(node.op) or self.graph.kind(reader) == "product"
        same_kernel = self.graph.carried[i] == self.graph.carried[reader]
        return elementwise and same_kernel and node.axes == self.graph.nodes[i].axes

    def _redone_cheaply(self, i: int, kept: list[int]) -> bool:
        if self.graph.kind(i) != "product":
            return False
        wide = [r.value for r in self.graph.nodes[i].args if len(r.axes) == 2 and self.graph[r].op != "tri"]
        return len(wide) == 1 and (wide[0] in kept or self.graph.nodes[wide[0]].op == "input")

    def all(self, cost: Callable[[Cut], float] | None = None) -> Iterable[Cut]:
        """Every legal cut with at most four stored values (a gradient's: five and the states), the leanest first.

        Where these are too many and cuts have a cost: only those that store one value more than one of the cheapest
        that store one less."""
        states = tuple(self.graph.carry_ids.values()) if self.joint else ()
        rest, most = [i for i in self.candidates if i not in states], MOST_STORED + self.joint
        if cost and sum(math.comb(len(rest), count) for count in range(most + 1)) > MOST_SETS:
            yield from self._cheapest(states, rest, most, cost)
            return
        for count in range(most + 1):
            for stored in itertools.combinations(rest, count):
                cut = self.cut(tuple(sorted(states + stored)))
                if cut is not None:
                    yield cut

    def _cheapest(
        self, states: tuple[int, ...], rest: list[int], most: int, cost: Callable[[Cut], float]
    ) -> Iterable[Cut]:
        """Cuts with one more stored value at a time; a set without a legal cut ranks behind all that have one."""
        level: list[tuple[int, ...]] = [()]
        for _ in range(most + 1):
            costs: dict[tuple[int, ...], float] = {}
            for stored in level:
                cut = self.cut(tuple(sorted(states + stored)))
                costs[stored] = cost(cut) if cut else math.inf
                if cut:
                    yield cut
            cheapest = sorted(level, key=lambda stored: (costs[stored], stored))[:BEAM]
            level = sorted({tuple(sorted((*stored, i))) for stored in cheapest for i in rest if i not in stored})

    def grown(self, blocked: Callable[[Cut], int]) -> Cut | None:
        """Where no cut can be written: one that stores whichever products leave fewest blocked, one after the other.

        Those that are left can be untangled."""
        graph = self.graph
        left = {ref.value for ref in graph.roots()}
        tiles = [i for i, node in enumerate(graph.nodes) if graph.is_heavy(i) and len(node.axes) == 2 and i not in left]
        stored = tuple(graph.carry_ids.values())
        best = self.cut(stored)
        while best and blocked(best) and len(stored) < MOST_GROWN:
            more = (self.cut(tuple(sorted({*stored, i}))) for i in tiles if i not in stored)
            found = min((cut for cut in more if cut), key=blocked, default=None)
            if found is None or blocked(found) >= blocked(best):
                break
            best, stored = found, found.stored
        return best

    def why_not(self) -> str:
        """What stands in the way of the leanest cut, or an empty text."""
        try:
            self._cut(tuple(self.graph.carry_ids.values()) if self.joint else ())
        except IllegalCut as error:
            return str(error)
        return ""

    def cut(self, stored: tuple[int, ...]) -> Cut | None:
        """The cut that stores exactly these values, or None where it is not legal."""
        try:
            return self._cut(stored)
        except IllegalCut:
            return None

    def _cut(self, stored: tuple[int, ...], late: Mapping[int, str] | None = None) -> Cut:
        """IllegalCut when a kernel would need a carry it does not hold, or when a stored value is not read by another
        kernel.  Of ``late`` values only those that are read are stored."""
        graph, roles, late = self.graph, self.roles, self.late if late is None else late
        after = self.joint or any(graph.nodes[i].op == "carry_in" for i in stored)
        last = (roles[-1] if after else roles[-2]).name
        writers = {i: self._first_writer(i) for i in stored} | dict.fromkeys(self._rows_of(stored), roles[0].name)
        writers |= {i: role for i, role in late.items() if i not in writers}
        kernels: list[Kernel] = []
        earlier: list[int] = []
        read: set[int] = set()
        for role in roles:
            writes = [i for i, writer in writers.items() if writer == role.name]
            outputs = [name for name, _ in graph.outputs if role.name == self.outputs.get(name, last)]
            if not writes and not outputs and not role.holds:
                continue
            kernel, used = self._kernel(role, writes, outputs, earlier)
            kernels.append(kernel)
            read |= used
            earlier = earlier + writes
        if unread := writers.keys() - read:
            if not unread <= set(late):
                raise IllegalCut(f"no other kernel reads {self.names[min(unread - set(late))]}")
            return self._cut(stored, {i: role for i, role in late.items() if i not in unread})
        name = "+".join(self.names[i] for i in stored) or "none"
        return Cut(name, self.forms, graph, stored, writers, tuple(kernels))

    def _first_writer(self, value: int) -> str:
        """The first kernel that can compute a value."""
        carried = self.graph.carried[value]
        return next(r.name for r in self.roles if carried <= r.holds | r.reads and not r.only_decays)

    def _rows_of(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """What later kernels would have to redo; before a forward scan only when a kernel runs there anyway."""
        own = self.roles[0].only_decays  # then that kernel makes them for prepare kernels too
        if all(self.graph.carried[i] for i in stored) and not own and not self.joint:
            return ()
        targets = [carry.out.value for carry in self.graph.carries] + [ref.value for _, ref in self.graph.outputs]
        targets += [i for i in stored if self.graph.carried[i]]
        targets += [ref.value for i in stored if own for ref in self.graph.nodes[i].args]
        made = set(self.rows) & self._needed(targets, set(stored) | set(self.rows))
        # Numbers per token: a step of a scan would wait for them, as loads of few bytes are not made ahead.
        numbers = {i for i in self.scanned if self.graph.nodes[i].axes == "i" and not self.graph.carried[i]}
        made |= numbers & self._needed([c.out.value for c in self.graph.carries], set(stored) | made | numbers)
        return tuple(sorted(made))

    def _kernel(
        self, role: Role, writes: list[int], outputs: list[str], elsewhere: list[int]
    ) -> tuple[Kernel, set[int]]:
        """The kernel's own graph and the stored values it reads."""
        graph = self.graph
        ends = [ref for name, ref in graph.outputs if name in outputs]
        roots = [graph[ref].args[0] if "n" in graph[ref].summed else ref for ref in ends]  # of totals a chunk's term
        roots += [Ref(i, graph.nodes[i].axes) for i in writes]
        carries = [c for c in graph.carries if c.name in role.holds]
        needed = self._needed([ref.value for ref in roots] + [c.out.value for c in carries], set(elsewhere))
        carried = {str(graph.nodes[i].attrs[0]) for i in needed - set(elsewhere) if graph.nodes[i].op == "carry_in"}
        if missing := carried - role.holds:
            raise IllegalCut(f"kernel {role.name} would need the carried value {min(missing)}, which it does not hold")
        used = needed & set(elsewhere)
        made = self._extract(needed, used, [*outputs, *(self.names[i] for i in writes)], roots, carries)
        if role.holds:
            made = by_depth(accumulated(made))
        else:
            made = by_need(made) if self.joint and role.reads else by_depth(made)
        loop: Loop = "scan" if role.holds else "chunks"
        return Kernel(name=role.name, loop=loop, text=str(made), stores=tuple(self.names[i] for i in writes)), used

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
        graph = self.graph
        nodes, hints = list(graph.nodes), list(graph.names)
        for name, ref in zip(names, roots, strict=True):
            hints[ref.value] = hints[ref.value] or name  # what is handed over has one name in all kernels
        for i in used:
            nodes[i] = Node("input", (), (self.names[i],), nodes[i].axes, nodes[i].grid)
            hints[i] = ""
        whole = Graph(tuple(nodes), tuple(zip(names, roots, strict=True)), tuple(carries), graph.chunked, tuple(hints))
        return whole.reordered(sorted(needed | {carry.init.value for carry in carries}))


def pinned(cuts: Iterable[Cut], name: str, pin: str = "cut") -> Cut:
    """The cut of that name (stored values joined by +, in any order); PinError lists what can be pinned."""
    cuts = list(cuts)
    wanted = set() if name == "none" else set(name.split("+"))
    for cut in cuts:
        if {n for n in cut.name.split("+") if n != "none"} == wanted:
            return cut
    known = list(dict.fromkeys(cut.name for cut in cuts))
    more = f" and {len(known) - MOST_NAMED} more" if len(known) > MOST_NAMED else ""
    raise PinError(f"pin {pin}={name}: no such cut of this graph; the cuts are {', '.join(known[:MOST_NAMED])}{more}")
