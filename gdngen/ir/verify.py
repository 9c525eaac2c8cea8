"""Structural check of a graph: known ops, types as their rules say, operands before use, names declared once."""

from gdngen.errors import GraphError
from gdngen.ir.graph import AXES, GRID, TOKENS, Graph, Node, Ref, is_virtual
from gdngen.ir.ops import OPS
from gdngen.ir.text import value_names


def verify(graph: Graph) -> Graph:
    """The graph itself, or GraphError naming the value and what is wrong with it."""
    names = value_names(graph)
    for i, node in enumerate(graph.nodes):
        try:
            _check_node(graph, i, node)
        except GraphError as error:
            raise GraphError(f"value {names[i]}: {error}") from None
    for ref in graph.roots():
        _check_ref(graph, ref, len(graph.nodes))
    for carry in graph.carries:
        _check_carry(graph, carry.name, carry.out, carry.init)
    declared = [str(node.attrs[0]) for node in graph.nodes if node.op in ("input", "carry_in")]
    if twice := {name for name in declared if declared.count(name) > 1}:
        raise GraphError(f"declared twice: {', '.join(sorted(twice))}")
    return graph


def _check_node(graph: Graph, i: int, node: Node) -> None:
    if node.op not in OPS:
        raise GraphError(f"unknown op {node.op!r}; ops are {', '.join(OPS)}")
    for ref in node.args:
        _check_ref(graph, ref, i)
    if not graph.chunked and set(node.axes) & set(TOKENS):
        raise GraphError(f"axes {node.axes!r} hold a token axis, but the chunk length is 1")
    if list(node.axes) != sorted(set(node.axes), key=AXES.index) or list(node.grid) != sorted(
        set(node.grid), key=GRID.index
    ):
        raise GraphError(f"axes {node.axes!r} @{node.grid!r} are not in standard order")
    infer = OPS[node.op].infer
    if infer and infer(graph, node) != (node.axes, node.grid):
        raise GraphError(f"declared {node.axes!r} @{node.grid!r}, its operands give {infer(graph, node)}")
    if node.op == "uli" and node.axes != "ij":
        raise GraphError(
            f"its matrix has axes {node.axes!r}: a write strength per value channel under the delta rule has no chunk "
            "form (the inverse would differ per channel); use the recurrent operator"
        )
    if is_virtual(node.axes) and node.op not in ("decay", "ein"):
        raise GraphError(f"axes {node.axes!r}: two token axes and a channel exist only as an operand of a contraction")


def _check_ref(graph: Graph, ref: Ref, before: int) -> None:
    if not 0 <= ref.value < before:
        raise GraphError(f"operand {ref.value} is not defined before its use")
    if len(ref.axes) != len(graph[ref].axes) or len(set(ref.axes)) != len(ref.axes):
        raise GraphError(f"operand read under {ref.axes!r}, but the value has axes {graph[ref].axes!r}")


def _check_carry(graph: Graph, name: str, out: Ref, init: Ref) -> None:
    if name not in graph.carry_ids:
        raise GraphError(f"carry {name} is never read")
    carried = graph.nodes[graph.carry_ids[name]]
    for what, ref in (("out", out), ("init", init)):
        if graph[ref].axes != carried.axes or ref.axes != carried.axes:
            raise GraphError(f"carry {name}: {what} has axes {ref.axes!r}, the carried value {carried.axes!r}")
