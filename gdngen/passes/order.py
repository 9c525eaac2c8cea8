"""Order of values inside one kernel: the same graph, so that few values are held in registers at a time."""

from collections.abc import Collection, Iterable

import networkx as nx

from gdngen.ir.graph import Graph


def by_depth(graph: Graph) -> Graph:
    """The same graph in the order that keeps few values in registers.

    Matrix products by how many products they wait for, so that those reading the same operand stand side by side, and
    what the next chunk waits for before what leaves; everything else, loads and what does not depend on the carry
    included, just before what needs it (loads are moved up when a chunk kernel is written).  Without a carry, what
    leaves does so as soon as its products are there, or its loads where it has none.
    """
    depth: list[int] = []
    heavy = [graph.is_heavy(i) for i in range(len(graph.nodes))]
    for i, node in enumerate(graph.nodes):
        depth.append(max((depth[ref.value] for ref in node.args), default=0) + heavy[i])
    results = [ref.value for _, ref in graph.outputs] if not graph.carries else []
    leaving = sorted(results, key=lambda i: len(graph.nodes[i].axes))  # vectors first
    feeding = {i for carry in graph.carries for i in nx.ancestors(graph.dataflow, carry.out.value)}
    products = [i for i in range(len(graph.nodes)) if heavy[i] and (graph.carried[i] or not graph.carries)]
    return _in_order_of(graph, sorted(products, key=lambda i: (depth[i], i not in feeding, i)), leaving=leaving)


def by_need(graph: Graph) -> Graph:
    """The same graph, each result right after what it needs: for kernels that end in many sums.

    What follows from a decayed sum comes right behind it; codegen puts the sums of one gate together."""
    sums = [i for i, node in enumerate(graph.nodes) if set(node.summed) & set("rv")]
    return _in_order_of(graph, sums, filter(graph.has_decay, range(len(graph.nodes))))


def _in_order_of(graph: Graph, first: list[int], eager: Iterable[int] = (), leaving: Collection[int] = ()) -> Graph:
    """The given values in turn, each after its operands and with those ``leaving`` that wait for no product any more;
    ``eager`` ones with all that they make ready; the rest."""
    order: list[int] = []
    placed: set[int] = set()

    def place_after_operands(i: int) -> None:
        if i not in placed:
            placed.add(i)
            for ref in graph.nodes[i].args:
                place_after_operands(ref.value)
            order.append(i)

    def place_readers(i: int) -> None:
        for reader in sorted(set(graph.dataflow.successors(i)) - placed):
            if all(
                before in placed for before in nx.ancestors(graph.dataflow, reader) | {reader} if graph.is_heavy(before)
            ):
                place_after_operands(reader)
                place_readers(reader)

    inner = {i: nx.ancestors(graph.dataflow, i) | {i} for i in leaving}
    waiting = {
        i: set(filter(graph.is_heavy, found)) or found & set(graph.inputs.values()) for i, found in inner.items()
    }

    def place_leaving(every: bool = False) -> None:
        """Those that wait for nothing, or every one; first what takes the fewest steps from what is there."""
        while ready := [i for i in leaving if i not in placed and (every or waiting[i] <= placed)]:
            place_after_operands(min(ready, key=lambda i: len(inner[i] - placed)))

    for i in first:
        place_after_operands(i)
        place_leaving()
    place_leaving(True)
    for i in eager:
        place_after_operands(i)
        place_readers(i)
    for i in range(len(graph.nodes)):
        place_after_operands(i)
    return graph.reordered(order)
