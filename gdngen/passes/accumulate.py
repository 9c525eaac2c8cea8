"""Products of a scan are added onto what they are added to: one accumulator instead of two."""

from dataclasses import replace

from gdngen.ir.graph import Graph, Node, Ref


def accumulated(graph: Graph) -> Graph:
    """An equal graph of one kernel in which sums take matrix products as they are.

    Rewrite: c s (sum i: x[i,k] (p y)[i,v])  ->  sum i: x[i,k] (c s p y)[i,v]  for numbers c and s, where the product
    with p is computed for this sum alone.  A term without a factor of its own then starts from the other terms.
    """
    nodes, names = list(graph.nodes), list(graph.names or [""] * len(graph.nodes))
    for i, node in enumerate(graph.nodes):
        if node.op == "add":
            for place, coef in enumerate(node.attrs):
                changed = _take_over(graph, nodes, i, place, float(coef))
                if changed is not None:
                    names[changed] = ""  # it is not what the symbol says any more
    found = Graph(tuple(nodes), graph.outputs, graph.carries, graph.chunked, tuple(names))
    order: dict[int, None] = {}

    def place_after_operands(i: int) -> None:
        if i not in order:
            for ref in found.nodes[i].args:
                place_after_operands(ref.value)
            order[i] = None

    for ref in found.roots():
        place_after_operands(ref.value)
    return found.reordered(list(order))


def _take_over(graph: Graph, nodes: list[Node], total: int, place: int, coef: float) -> int | None:
    """Move the factors of one term of a sum into an operand of the product that it is; returns that operand."""
    term = nodes[total].args[place]
    dot, scalars, factor = _factored(graph, term)
    if dot is None or (factor * coef == 1.0 and not scalars):
        return None
    for operand in graph[dot].args:
        if graph.kind(operand.value) == "product" and _is_read_once(graph, operand.value):
            old = nodes[operand.value]
            attrs = (float(old.attrs[0]) * factor * coef, *old.attrs[1:])
            nodes[operand.value] = replace(old, args=(*scalars, *old.args), attrs=attrs)
            own = nodes[total]
            args = (*own.args[:place], Ref(dot, term.axes), *own.args[place + 1 :])
            nodes[total] = replace(own, args=args, attrs=(*own.attrs[:place], 1.0, *own.attrs[place + 1 :]))
            return operand.value
    return None


def _factored(graph: Graph, term: Ref) -> tuple[int | None, tuple[Ref, ...], float]:
    """(matrix product, scalars, number) that a term is the product of, if it is that and nothing else reads it."""
    node = graph[term]
    if not _is_read_once(graph, term.value):
        return None, (), 1.0
    if graph.kind(term.value) == "dot":
        return term.value, (), 1.0
    wide, scalars = ([ref for ref in node.args if bool(ref.axes) is has_axes] for has_axes in (True, False))
    if graph.kind(term.value) != "product" or len(wide) != 1 or wide[0].axes != node.axes:
        return None, (), 1.0
    alone = graph.kind(wide[0].value) == "dot" and _is_read_once(graph, wide[0].value)
    return (wide[0].value, tuple(scalars), float(node.attrs[0])) if alone else (None, (), 1.0)


def _is_read_once(graph: Graph, value: int) -> bool:
    return graph.dataflow.out_degree(value) == 1 and value not in {ref.value for ref in graph.roots()}
