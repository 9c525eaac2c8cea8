"""Untangle: a product whose operands lie the wrong way round reads copies of them, computed the other way round.

A matrix product gives its result in either order of axes, but what came out of one may not be turned as the operand of
the next (rule NO_TRANSPOSED_ACCUMULATOR).  Where one value is wanted both ways it is computed twice.  Members with
several inverses a token need that in backward; no member of the family does.
"""

from collections.abc import Iterator
from dataclasses import replace

from gdngen.ir.graph import Graph, Node, Ref
from gdngen.passes.plan import Kernel
from gdngen.passes.tile import blocked_products, tangled

MOST_COPIES = 32  # of chains of values, each from one product's operand back to the products before it


def untangled(kernel: Kernel) -> Kernel:
    """The kernel with as few products as can be that have no legal axis order beside those before them."""
    if not blocked_products(kernel.text):
        return kernel
    graph = kernel.graph
    for _ in range(MOST_COPIES):
        blocked, accumulators = tangled(graph)
        if not blocked:
            break
        found = min(_ways(graph, blocked[0], accumulators), key=lambda copy: blocked_products(str(copy)), default=None)
        if found is None or blocked_products(str(found)) >= len(blocked):
            break
        graph = found
    return kernel.model_copy(update={"text": str(graph)})


def _ways(graph: Graph, reader: int, accumulators: set[int]) -> Iterator[Graph]:
    """The graph with a copy of one operand of a product, or of both, each made near or far behind."""
    places = [n for n, ref in enumerate(graph.nodes[reader].args) if ref.value in accumulators]
    for far in (0, 1):
        alone = [_with_copy(graph, reader, place, far) for place in places]
        yield from filter(None, alone)
        if len(alone) == 2 and alone[0]:
            later = reader + len(alone[0].nodes) - len(graph.nodes)
            if both := _with_copy(alone[0], later, places[1], far):
                yield both


def _with_copy(graph: Graph, reader: int, operand: int, far: int) -> Graph | None:
    """The graph where one operand of a product is a value of its own; None where it is carried, and so there once.

    Made anew is what the operand's order is tied to, back to the products that it comes from, or ``far`` beyond them to
    those whose operands are loaded.  Each use has its own: two of one value would tie their orders again.
    """
    made: list[Node] = []

    def copied(ref: Ref, is_free: bool) -> Ref:
        node = graph[ref]
        if not is_free or node.op == "input" or len(node.axes) < 2:
            return ref
        if node.op == "carry_in":
            raise LookupError
        args = tuple(copied(arg, far == 1 or not graph.is_product(ref.value)) for arg in node.args)
        made.append(replace(node, args=args))
        return Ref(reader + len(made) - 1, ref.axes)

    try:
        own = copied(graph.nodes[reader].args[operand], True)
    except LookupError:
        return None

    def moved(ref: Ref) -> Ref:
        return ref if ref.value < reader else Ref(ref.value + len(made), ref.axes)

    nodes = [replace(node, args=tuple(map(moved, node.args))) for node in graph.nodes]
    args = [moved(arg) for arg in graph.nodes[reader].args]
    args[operand] = own
    nodes[reader] = replace(nodes[reader], args=tuple(args))
    hints = graph.names or ("",) * len(nodes)
    return Graph(
        (*nodes[:reader], *made, *nodes[reader:]),
        tuple((name, moved(end)) for name, end in graph.outputs),
        tuple(replace(c, out=moved(c.out), init=moved(c.init)) for c in graph.carries),
        graph.chunked,
        (*hints[:reader], *("",) * len(made), *hints[reader:]),
    )
