"""Tiling: register axis orders, whether v is split over programs, and launch choices that fit the target.

Axis order.  A matrix product (x,c) x (c,y) -> (x,y) may also be written transposed, so the order of every two-axis
value is free; values tied by elementwise ops share theirs.  The search takes the orders with the fewest trips through
shared memory and never transposes a value that came out of a matrix product into another product: Triton 3.4 - 3.7.0
miscompiles that on Hopper (rule NO_TRANSPOSED_ACCUMULATOR).
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from gdngen.errors import PinError, PlanError
from gdngen.ir.graph import CHANNELS, Graph, Node, Ref
from gdngen.ir.text import parse, value_names
from gdngen.passes.plan import Kernel, Operator, Plan, Tuning
from gdngen.passes.price import extents
from gdngen.spec import Spec
from gdngen.target import TARGETS, Target

FORBIDDEN = 1e6  # a transposed accumulator as an operand
TRIP = 1.0  # a computed value as the second operand travels through shared memory
TURN = 0.25  # an elementwise value transposed in registers
MOST_CLASSES = 16
SHORTEST = 16  # tokens of a chunk: what a matrix product takes
STRAIGHT = -1  # stands for a value that lies as its axes are named
# Bytes of the rows of a tile in shared memory that every asynchronous matrix instruction of a chunk kernel reads: the
# widest swizzle.  Where tiles with other swizzles share a place there, ptxas 12.8 loses the address of one of them.
ROW_BYTES = 128
NARROWEST = ROW_BYTES // 2  # channels, for 16-bit operands
# Channels of products with decays at a time: with 32, rows of a block of 16 tokens meet in one bank of shared memory.
SLICE = 16
# What layout conversions need on top of the tiles that are counted, by bytes per element; fp32 products that are not
# formed on matrix units stage both operands.
MARGIN = {2: 1.1, 4: 1.4}


@dataclass(frozen=True)
class Tile:
    """Requires fused kernels; ensures axis orders and tuning for every target and element size.

    Rewrite: t[i,v] = sum k: k[i,k] * S[k,v]  ->  t[v,i] = S[v,k] . k^T[k,i]  where that saves trips.
    """

    block_v: int | None = None
    name: str = "tile"

    def run(self, plan: Plan, target: Target) -> Plan:
        operators = tuple(self._operator(operator, plan) for operator in plan.operators)
        return plan.model_copy(update={"operators": operators})

    def _operator(self, operator: Operator, plan: Plan) -> Operator:
        operator = operator.model_copy(update={"chunks": tuple(chunk_lengths(operator, plan).items())})
        kernels = []
        wide = {stored.name for stored in operator.stored if stored.format == "f32"}
        for kernel in operator.kernels:
            split = may_split_v(kernel)
            orders = tuple(sorted(axis_orders(kernel.graph).items()))
            tuned = kernel.model_copy(update={"orders": orders, "split_v": split})
            choices = tuple(_choices(tuned, plan, wide, self.block_v, dict(operator.chunks)))
            kernels.append(tuned.model_copy(update={"tuning": choices}))
        return operator.model_copy(update={"kernels": tuple(kernels)})


# ------------------------------------------------------------------------------------------------ splitting v


def may_split_v(kernel: Kernel) -> bool:
    """Programs may share out v iff no value sums over v and every result has a v axis."""
    graph = kernel.graph
    if any("v" in node.summed for node in graph.nodes):
        return False
    results = [graph[ref] for _, ref in graph.outputs] + [graph[carry.out] for carry in graph.carries]
    return all("v" in node.axes for node in results)


# ------------------------------------------------------------------------------------------------ axis orders


def axis_orders(graph: Graph) -> dict[str, str]:
    """Value name -> register axis order, for every value with two axes."""
    search = _Orders(graph)
    names = value_names(graph)
    best = search.best()
    return {names[i]: search.order(i, best) for i, node in enumerate(graph.nodes) if len(node.axes) == 2}


@lru_cache(maxsize=4096)
def unordered(text: str) -> str:
    """The first value of a kernel's graph without a legal axis order, and why; an empty text where all have one."""
    graph = parse(text)
    search = _Orders(graph)
    if search.blocked:
        first = search.blocked[0]
        value = f"{value_names(graph)[first]}[{','.join(graph.nodes[first].axes)}]"
        return f"value {value}: every axis order feeds a transposed accumulator into this product"
    try:
        search.best()
    except PlanError as error:
        return str(error)
    return ""


@lru_cache(maxsize=4096)
def blocked_products(text: str) -> int:
    """How many products of a kernel's graph have no legal axis order beside those before them."""
    return len(_Orders(parse(text)).blocked)


def tangled(graph: Graph) -> tuple[list[int], set[int]]:
    """Products without a legal axis order beside those before them, and all values that came out of products."""
    search = _Orders(graph)
    return search.blocked, search.accumulators


class _Orders:
    """Union-find with parity over elementwise ties and over products, whose accumulators may not be turned; then
    branch and bound over the classes.  ``blocked`` are the products that contradict those before them.

    Loaded tiles keep the order they have in memory and are turned where they are used: as operands that is free.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.stored = Counter(ref.value for _, ref in graph.outputs if len(ref.axes) == 2)
        made = {i for i, node in enumerate(graph.nodes) if len(node.axes) == 2 and node.op != "input"}
        self.parent: dict[int, tuple[int, int]] = {i: (i, 0) for i in made}
        self.accumulators = self._from_products()
        for i in sorted(made):
            node = graph.nodes[i]
            if graph.kind(i) == "crossing" or (graph.kind(i) == "decayed" and not graph.decayed(i).is_gram):
                self.parent.setdefault(STRAIGHT, (STRAIGHT, 0))
                self._tie(STRAIGHT, i, 0)
            elif node.op != "tri" and not graph.is_product(i):
                for ref in node.args:
                    if ref.value in made:
                        self._tie(i, ref.value, int(ref.axes != node.axes))
        for carry in graph.carries:
            if carry.out.value in made:
                self._tie(carry.out.value, graph.carry_ids[carry.name], 0)
        self.parent.setdefault(STRAIGHT, (STRAIGHT, 0))
        self.blocked = [i for i in sorted(made) if graph.is_product(i) and not self._bind_operands(i)]

    def _bind_operands(self, i: int) -> bool:
        """Fix the orders of a product and its accumulators to each other; False where none are left."""
        legal: dict[int, set[tuple[int, int]]] = {}
        axes = self.graph.nodes[i].axes
        is_gram = self.graph.kind(i) == "decayed" and self.graph.decayed(i).is_gram
        for flip, order in enumerate((axes, axes[::-1])):
            for position, (ref, wanted) in enumerate(operands_of(self.graph, i, order)):
                if ref.value in self.accumulators:
                    own = self.graph[ref].axes
                    turned = [is_turned(self.graph, ref, lies, wanted) for lies in (own, own[::-1])]
                    wrong = {(flip, at) for at in (0, 1) if turned[at] or (is_gram and position)}
                    left = legal.setdefault(ref.value, {(0, 0), (0, 1), (1, 0), (1, 1)})
                    legal[ref.value] = left - wrong
        return all(self._bind(i, operand, ways) for operand, ways in legal.items())

    def _bind(self, i: int, operand: int, ways: set[tuple[int, int]]) -> bool:
        """Keep to pairs of flips of two values; each set of pairs is one parity, or fixes one of the values."""
        if ways == {(0, 0), (1, 1)} or ways == {(0, 1), (1, 0)}:
            return self._join(i, operand, int((0, 1) in ways))
        fixed = [{way[at] for way in ways} for at in (0, 1)]
        bound = [self._join(STRAIGHT, v, min(f)) for v, f in zip((i, operand), fixed, strict=True) if len(f) == 1]
        return bool(ways) and all(bound)

    def _join(self, a: int, b: int, parity: int) -> bool:
        """Tie two values, the class with the first value keeping its root; False where they are tied otherwise."""
        (root_a, parity_a), (root_b, parity_b) = self.find(a), self.find(b)
        if root_a == root_b:
            return parity_a ^ parity_b == parity
        self.parent[max(root_a, root_b)] = (min(root_a, root_b), parity_a ^ parity_b ^ parity)
        return True

    def _from_products(self) -> set[int]:
        """Values in the accumulator layout: matrix products, inverses and what is computed from them."""
        found: set[int] = set()
        for i, node in enumerate(self.graph.nodes):
            made = self.graph.is_heavy(i) or node.op == "carry_in"
            if made or any(ref.value in found for ref in node.args):
                found.add(i)
        return found

    def find(self, i: int) -> tuple[int, int]:
        parent, parity = self.parent[i]
        if parent == i:
            return i, 0
        root, more = self.find(parent)
        return root, parity ^ more

    def _tie(self, a: int, b: int, parity: int) -> None:
        (root_a, parity_a), (root_b, parity_b) = self.find(a), self.find(b)
        if root_a != root_b:
            self.parent[root_b] = (root_a, parity_a ^ parity_b ^ parity)

    def order(self, i: int, flips: dict[int, int]) -> str:
        axes = self.graph.nodes[i].axes
        if i not in self.parent:
            return axes
        root, parity = self.find(i)
        return axes[::-1] if flips[root] ^ parity else axes

    def best(self) -> dict[int, int]:
        """The cheapest orders; of equal ones the first.  Depth first, each cost counted once its orders are chosen."""
        if self.blocked:
            raise PlanError("tile: every axis order of a kernel feeds a transposed accumulator into a product")
        roots = sorted({self.find(i)[0] for i in self.parent})
        if len(roots) > MOST_CLASSES:
            raise PlanError(f"tile: {len(roots)} classes of axis orders are too many to search; split the kernel")
        ready: list[list[int]] = [[] for _ in range(len(roots) + 1)]
        for i, node in enumerate(self.graph.nodes):
            read = {self.find(v)[0] for v in [i, *(ref.value for ref in node.args)] if v in self.parent}
            ready[max((roots.index(root) + 1 for root in read), default=0)].append(i)
        found, least = dict.fromkeys(roots, 0), FORBIDDEN
        straight, parity = self.find(STRAIGHT)
        flips: dict[int, int] = {}

        def search(count: int, spent: float) -> None:
            nonlocal found, least
            spent += sum(cost for i in ready[count] for cost in self._costs(i, flips))
            if spent >= least:
                return
            if count == len(roots):
                found, least = dict(flips), spent
                return
            for flip in (parity,) if roots[count] == straight else (0, 1):
                flips[roots[count]] = flip
                search(count + 1, spent)

        search(0, 0.0)
        if least >= FORBIDDEN:
            raise PlanError("tile: every axis order of a kernel feeds a transposed accumulator into a product")
        return found

    def _costs(self, i: int, flips: dict[int, int]) -> Iterator[float]:
        """Of computing one value, and of storing it."""
        graph, node = self.graph, self.graph.nodes[i]
        if graph.is_product(i):
            is_gram = graph.kind(i) == "decayed" and graph.decayed(i).is_gram  # the second operand is read both ways
            for position, (ref, wanted) in enumerate(operands_of(graph, i, self.order(i, flips))):
                turned = is_turned(graph, ref, self.order(ref.value, flips), wanted) or (is_gram and position)
                if ref.value in self.accumulators:
                    yield FORBIDDEN * bool(turned) + TRIP * min(position, 1)
        else:
            for ref in node.args:
                if len(ref.axes) == 2 and len(node.axes) == 2 and graph[ref].op not in ("decay", "tri"):
                    turned = read_order(graph, ref, self.order(ref.value, flips)) != self.order(i, flips)
                    yield TURN * turned
        for _ in range(self.stored.get(i, 0)):
            yield TURN / 2 * (self.order(i, flips) != node.axes)


def read_order(graph: Graph, ref: Ref, order: str) -> str:
    """The register order of an operand, in the names under which it is read."""
    names = dict(zip(graph[ref].axes, ref.axes, strict=True))
    return "".join(names[axis] for axis in order)


def is_turned(graph: Graph, ref: Ref, order: str, wanted: str) -> bool:
    """Whether an operand lies the other way round in registers than it is wanted."""
    return read_order(graph, ref, order) != wanted and not graph.is_symmetric(ref.value)


def operands_of(graph: Graph, i: int, order: str) -> tuple[tuple[Ref, str], ...]:
    """The operands of a plain or decayed product, each with the order in which it is wanted."""
    node = graph.nodes[i]
    if graph.kind(i) == "dot":
        return dot_operands(node, order)
    if node.op == "crossing":  # the matrix is summed along both axes
        pairs, late, early, _ = node.args
        return (pairs, "ij"), (early, early.axes), (pairs, "ji"), (late, late.axes)
    found = graph.decayed(i)
    token, other, inner = found.axes[0], found.axes[1], node.summed
    if found.is_gram:
        if order == found.axes:
            return (found.first, token + inner), (found.second, inner + other)
        return (found.second, other + inner), (found.first, inner + token)
    return (found.first, token + inner), (found.second, inner + other)


def dot_operands(node: Node, order: str) -> tuple[tuple[Ref, str], tuple[Ref, str]]:
    """(first, its order), (second, its order) of the matrix product that gives the node in this order."""
    row, column = order[0], order[1]
    inner = node.summed
    first = next(ref for ref in node.args if row in ref.axes and set(ref.axes) == {row, inner})
    second = node.args[1] if node.args[0] is first else node.args[0]
    return (first, row + inner), (second, inner + column)


# ------------------------------------------------------------------------------------------------ launch choices


def block(size: int) -> int:
    """Tile extent of a dimension: the next power of two, at least 16 (what a matrix product takes)."""
    return max(16, 1 << (size - 1).bit_length())


def channels(kernel: Kernel, size: int) -> int:
    """Tile extent of a channel dimension that a kernel holds whole; rows in shared memory are as wide as swizzles."""
    by_swizzle = kernel.loop != "tokens" and not kernel.has_decayed_products
    return max(block(size), NARROWEST if by_swizzle else 0)


def block_k(kernel: Kernel, size: int) -> int:
    """Key channels that a kernel holds at a time."""
    return min(block(size), SLICE) if kernel.is_sliced else channels(kernel, size)


def extents_of(kernel: Kernel, spec: Spec, chunk: int) -> dict[str, int]:
    """Tile extent of every axis, held whole."""
    found = {axis: block(size) for axis, size in extents(spec, chunk).items()}
    return found | {"k": channels(kernel, spec.key_dim), "v": channels(kernel, spec.value_dim)}


def narrowest(kernel: Kernel, width: int, target: Target) -> int:
    """The narrowest tile of v, by bytes per element: 16 channels are what a matrix product takes."""
    by_swizzle = target.reads_by_descriptor and kernel.loop == "chunks" and not kernel.has_decayed_products
    return ROW_BYTES // width if by_swizzle else 16


def most_warps(kernel: Kernel, chunk: int) -> int:
    """Warps worth trying; with 8 on tiles of 32 rows addresses came out wrong (runtime.compilers.leaks_a_lane)."""
    return 4 if kernel.loop != "tokens" and chunk <= 32 else 8


def chunk_lengths(operator: Operator, plan: Plan) -> dict[str, tuple[int, ...]]:
    """(target/bytes per element) -> chunk lengths to try in turn; none where the plan's own fits every target.

    What an operator computes does not depend on them; shared memory does.
    """
    if shortest(plan.spec, plan.chunk) == plan.chunk or operator.name == "recurrent":
        return {}
    kernels = [kernel for kernel in operator.kernels if kernel.loop == "chunks"]
    shorter = [plan.chunk >> n for n in range(plan.chunk.bit_length()) if plan.chunk >> n >= SHORTEST]
    found = {}
    for target, width in itertools.product(TARGETS.values(), (2, 4)):
        kept = tuple(c for c in shorter if all(_holds(kernel, plan, c, target, width) for kernel in kernels))
        found[f"{target.name}/{width}"] = kept or (SHORTEST,)
    return found


def shortest(spec: Spec, chunk: int) -> int:
    """The shortest chunk that kernels are written for: they take others than the plan's where much is held."""
    return SHORTEST if chunk > 64 or spec.key_dim > 128 or "value" in spec.gate else chunk


def _holds(kernel: Kernel, plan: Plan, chunk: int, target: Target, width: int) -> bool:
    """Whether a chunk kernel's largest product and inverse surely need no more shared memory than there is.

    Products of fp32 in three parts hold the parts of both operands, an inverse in fp32 four matrices.
    """
    graph, names = kernel.graph, value_names(kernel.graph)
    sizes = extents_of(kernel, plan.spec, chunk) | {"k": block_k(kernel, plan.spec.key_dim)}
    sizes["v"] = narrowest(kernel, width, target)
    parts = 2 if width == 4 and target.exact_products and not kernel.has_channel_gate else 1
    needed = 0
    for i, node in enumerate(graph.nodes):
        if graph.kind(i) == "dot":
            wide = parts * width if names[i] not in kernel.wide_dots else max(4, parts * width)
            needed = max(needed, sum(math.prod(sizes.get(a, 1) for a in ref.axes) * wide for ref in node.args))
        if node.op == "uli" and (width == 4 or kernel.has_channel_gate):
            needed = max(needed, 4 * sizes["i"] ** 2 * 4)
    return needed <= target.shared_bytes and may_fit(kernel, extents(plan.spec, chunk), target)


def chunk_key(key: str, chunk: int, plan: Plan) -> str:
    """The row of a launch choice: the plan's own chunk length goes without saying."""
    return key if chunk == plan.chunk else f"{key}/c{chunk}"


def _choices(
    kernel: Kernel, plan: Plan, wide: set[str], block_v: int | None, lengths: dict[str, tuple[int, ...]]
) -> Iterator[tuple[str, Tuning]]:
    """(target/bytes per element, tuning) for every target: one package runs everywhere.

    ``wide`` names the stored values kept in fp32.  Keys that end in /few are for launches whose programs run all at
    once even with narrow tiles of v: time is the length of a step there."""
    for target, width in itertools.product(TARGETS.values(), (2, 4)):
        key, last = f"{target.name}/{width}", None
        for chunk in dict.fromkeys([plan.chunk, *lengths.get(key, ())]):
            choose = _Choice(kernel, plan, wide, target, width, chunk)
            found = {"": choose.tuning(block_v)}
            if kernel.split_v and kernel.loop == "scan":
                found["/few"] = choose.tuning(block_v, few=True)
            if found != last:  # a row holds for shorter chunks, too
                yield from ((chunk_key(key, chunk, plan) + suffix, tuning) for suffix, tuning in found.items())
            last = found


@dataclass(frozen=True)
class _Choice:
    """Launch choices of one kernel on one target; the numbers were measured on an H200."""

    kernel: Kernel
    plan: Plan
    wide: set[str]
    target: Target
    width: int
    chunk: int

    def tuning(self, block_v: int | None, few: bool = False) -> Tuning:
        found = self._tuning(block_v, few)
        each, most = max(4, self.chunk // 16), most_warps(self.kernel, self.chunk)  # each block of 16 tokens
        warps = each if self.kernel.has_decayed_products else min(found.num_warps, most)
        return found.model_copy(update={"num_warps": warps})

    def _tuning(self, block_v: int | None, few: bool) -> Tuning:
        sizes = extents_of(self.kernel, self.plan.spec, self.chunk)
        sizes["k"] = block_k(self.kernel, self.plan.spec.key_dim)
        if self.kernel.loop != "chunks" and not self.kernel.split_v:  # its programs hold all of v
            if block_v not in (None, sizes["v"]):
                raise PinError(
                    f"pin BV={block_v}: kernel {self.kernel.name} sums over v, it takes all {sizes['v']} columns"
                )
            block_v = sizes["v"]
        if self.kernel.loop == "tokens":
            return self._tokens(sizes, block_v)
        if not any("v" in node.axes for node in self.kernel.graph.nodes):
            small = max(sizes["i"], sizes["k"] // 2) <= 64
            return Tuning(BV=0, num_warps=4 if small else 8, num_stages=1)
        if self.kernel.loop == "chunks":
            return self._chunks(sizes, block_v)
        graph, names = self.kernel.graph, value_names(self.kernel.graph)
        products = sum(map(graph.is_product, range(len(graph.nodes))))
        heavy = products > 2 or self.width == 4 or sizes["k"] > 128 or sizes["i"] > 64
        ways = [(by, n, block_v or min(sizes["v"], columns)) for by, n, columns in self._scans(heavy, few)]
        fitting = (way for way in ways if self._fits(sizes, way[2], way[1], way[0]))
        described, stages, columns = next(fitting, ways[-1])
        gated = any(
            node.op == "decay" or names[i] in self.wide for i, node in enumerate(graph.nodes) if node.axes == "i"
        )
        warps = 4 if gated or not heavy else 8  # without a gate both sums stay in accumulators: too much for 4 warps
        columns = self._fitting(sizes, columns, stages, block_v)
        return Tuning(BV=columns, num_warps=warps, num_stages=stages, descriptors=described)

    def _scans(self, heavy: bool, few: bool) -> list[tuple[int, int, int]]:
        """(by descriptors, pipeline stages, tile of v) of a scan, the best first."""
        if self.kernel.has_decayed_products:
            return [(0, 2, 16), (0, 1, 16)]
        ahead: list[tuple[int, int, int]] = []
        if self.target.descriptors and self.width == 2:  # tiles loaded ahead cost no registers: stages before columns
            widths, depths = ([16], (4, 3, 2)) if few else ([64, 32], (3, 2))
            ahead = [(1, n, columns) for n in depths for columns in widths]
        deep = (few and self.width == 2) or not heavy
        return ahead + [(0, n, 16 if few else 32 if heavy else 64) for n in ((3, 2, 1) if deep else (2, 1))]

    def _chunks(self, sizes: dict[str, int], block_v: int | None) -> Tuning:
        """As many columns as fit; warps by how many sums over v are held, loads ahead where one has a k axis."""
        sums = ["k" in node.axes for node in self.kernel.graph.nodes if "v" in node.summed]
        lean = sums == [True] and self.width == 2  # one sum, nothing beside it
        stages = 2 if any(sums) and self.width == 2 else 1
        gated = self.kernel.has_channel_gate
        widest = SLICE if self.kernel.has_decayed_products else 64 if lean or (gated and not any(sums)) else 128
        columns = self._fitting(sizes, block_v or min(sizes["v"], widest), stages, block_v)
        return Tuning(BV=columns, num_warps=4 if lean else 8, num_stages=stages)

    def _tokens(self, sizes: dict[str, int], block_v: int | None) -> Tuning:
        """State tiles as wide as memory likes: whole rows of k where k is contiguous, else many columns of v."""
        if self.plan.spec.state_v_first:
            return Tuning(BV=min(sizes["v"], block_v or 8), num_warps=max(1, sizes["k"] // 128), num_stages=1)
        columns = block_v or max(16, 8192 // max(sizes["k"], 128))
        return Tuning(BV=min(sizes["v"], columns), num_warps=4, num_stages=1)

    def _fitting(self, sizes: dict[str, int], columns: int, stages: int, block_v: int | None) -> int:
        """The widest tile up to ``columns`` that fits the target's shared memory; a pinned tile is kept."""
        may_narrow = self.kernel.split_v or self.kernel.is_tiled
        least = narrowest(self.kernel, self.width, self.target)
        while columns > least and not block_v and may_narrow and not self._fits(sizes, columns, stages):
            columns //= 2
        return max(columns, least) if self.kernel.loop == "chunks" else columns

    def _fits(self, sizes: dict[str, int], columns: int, stages: int, described: int = 0) -> bool:
        # Asynchronous products read a buffer while the next ones fill, AMD's pipeline keeps one more too.
        kept = (described == 1 and columns >= 64) or self.target.backend != "cuda"
        needed = shared_bytes(self.kernel, {**sizes, "v": columns}, self.width, max(1, stages - (not kept)), self.wide)
        margin = 1.0 if described and kept else MARGIN[self.width]
        return margin * needed <= self.target.shared_bytes


def shared_bytes(kernel: Kernel, sizes: dict[str, int], width: int, buffers: int, wide: set[str]) -> int:
    """An estimate: tiles loaded ahead once per buffer, computed ones that a product reads second once.

    Products in blocks read their first operands from registers: without loads ahead they keep no loaded tile.
    """
    graph = kernel.graph
    orders = dict(kernel.orders)
    names = value_names(graph)

    def tile(i: int) -> int:
        node = graph.nodes[i]
        return (4 if names[i] in wide else width) * sizes[node.axes[0]] * sizes[node.axes[1]]

    loaded = sum(tile(i) for i, n in enumerate(graph.nodes) if n.op == "input" and len(n.axes) == 2 and "n" in n.grid)
    computed = 0
    for i, node in enumerate(graph.nodes):
        if graph.kind(i) == "dot" and not kernel.has_decayed_products:
            second, _ = operands_of(graph, i, orders.get(names[i], node.axes))[1]
            computed += tile(second.value) if graph[second].op != "input" else 0
        if node.op == "cumsum" and node.attrs[0] in ("fwdexcl", "revexcl") and len(node.axes) == 2:
            computed += 4 * sizes["i"] * (sizes[node.axes[1]] + sizes["i"])  # a product with a mask
        if node.op == "uli":
            computed += 2 * sizes["i"] * sizes["j"] * 4
    loaded = 0 if kernel.has_decayed_products and buffers == 1 else buffers * loaded
    return loaded + computed + in_blocks(kernel, sizes, width)


def may_fit(kernel: Kernel, sizes: dict[str, int], target: Target) -> bool:
    """Whether products with decays that hold all key channels fit; the estimate is up to twice what they take."""
    narrow = {axis: block(size) for axis, size in sizes.items()} | {"v": 16}
    return kernel.is_sliced or in_blocks(kernel, narrow, 2) <= 2 * target.shared_bytes


def in_blocks(kernel: Kernel, sizes: dict[str, int], width: int) -> int:
    """What products in blocks of 16 rows need: the gate (in two parts for 16-bit inputs), the largest second operand
    once for every block, the matrix."""
    if not kernel.has_decayed_products:
        return 0
    largest = 0
    for i, node in enumerate(kernel.graph.nodes):
        if kernel.graph.kind(i) == "dot":
            inner = math.prod(sizes[axis] for axis in node.summed)
            largest = max(largest, math.prod(sizes[axis] for axis in node.axes) // 16 * inner * width)
        if kernel.graph.has_decay(i):
            channel = next(sizes[axis] for axis in node.axes + node.summed if axis in CHANNELS)
            wide = 4 if value_names(kernel.graph)[i] in kernel.wide_dots else width
            largest = max(largest, sizes["i"] ** 2 // 16 * channel * (4 + wide) + sizes["i"] ** 2 * wide)
    return largest
